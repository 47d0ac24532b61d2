"""A Llama-like decoder: RMSNorm, RoPE, grouped-query attention, SwiGLU.

One forward serves prefill and decode: S new tokens a row at given positions, columns up to them
visible. Written for inference: no dropout, no training. GPT-2 and other families are refused.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

from decodelab.predict import ModelShape

from .device import element_bytes
from .kv_cache import CacheView
from .linear import Linear, packs
from .memory import require_bytes
from .weights import Checkpoint, open_gguf, open_pretrained, tensor_sizes

# B rows, S new tokens a row, C context columns, H query heads, K KV heads, G = H/K, D head_dim.


class Decoder(nn.Module):
    """The network that a ModelShape describes; make one with `random` or a `from_` method.

    `forwards` counts the forward passes so far, of any batch size.
    """

    def __init__(
        self,
        shape: ModelShape,
        tensor: Callable[[str], torch.Tensor],
        *,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        pack: bool = True,
    ) -> None:
        """Build from `tensor(name)`, Hugging Face's names; `pack` is about `Linear`'s layout."""
        super().__init__()
        refuse_unserved(shape)
        # A packed head is a second copy of a tied embedding: rows can't be looked up in it.
        copies = shape.vocab * shape.hidden if shape.tied and pack and packs(device, dtype) else 0
        num_bytes = (shape.parameters + copies) * element_bytes(dtype)
        advice = "Take a smaller model or a dtype of fewer bytes."
        require_bytes(num_bytes, device, f"Weights of {shape.parameters:,} parameters", advice)

        def get(*names: str) -> torch.Tensor:
            parts = [tensor(name).to(device=device, dtype=dtype) for name in names]
            return parts[0] if len(parts) == 1 else torch.cat(parts)

        self.shape, self.forwards = shape, 0
        self.embedding = _constant(get("model.embed_tokens.weight"))
        self.layers = nn.ModuleList(Layer(shape, i, get, pack) for i in range(shape.layers))
        self.norm = _constant(get("model.norm.weight"))
        head = self.embedding if shape.tied else get("lm_head.weight")
        self.head = Linear(head.detach(), pack=pack)
        self.register_buffer("inv_freq", rope_frequencies(shape).to(device), persistent=False)

    @classmethod
    def random(
        cls,
        shape: ModelShape,
        seed: int = 0,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        pack: bool = True,
    ) -> Decoder:
        """Weights from N(0, 1/d_in), the same for the same seed: speed doesn't depend on values."""
        generator = torch.Generator(device).manual_seed(seed)
        sizes = tensor_sizes(shape)

        def draw(name: str) -> torch.Tensor:
            if name.endswith("norm.weight"):
                return torch.ones(sizes[name], device=device, dtype=dtype)
            values = torch.randn(sizes[name], generator=generator, device=device, dtype=dtype)
            return values.mul_(sizes[name][-1] ** -0.5)

        return cls(shape, draw, device=device, dtype=dtype, pack=pack)

    @classmethod
    def from_pretrained(
        cls,
        source: str | Path,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        pack: bool = True,
    ) -> Decoder:
        """A Hugging Face folder (config.json, *.safetensors) or hub id; ValueError says why not."""
        return cls._load(open_pretrained(source), device, dtype, pack)

    @classmethod
    def from_gguf(
        cls,
        path: str | Path,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        pack: bool = True,
    ) -> Decoder:
        """A GGUF file, dequantized to `dtype`; ValueError says why not."""
        return cls._load(open_gguf(path), device, dtype, pack)

    @classmethod
    def _load(cls, checkpoint: Checkpoint, *how: object) -> Decoder:
        device, dtype, pack = how
        return cls(checkpoint.shape(), checkpoint.read, device=device, dtype=dtype, pack=pack)

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.embedding.device

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of weights, activations and KV cache."""
        return self.embedding.dtype

    @property
    def weight_bytes(self) -> int:
        """Bytes of all parameters; a tied embedding counts once."""
        return self.shape.parameters * element_bytes(self.dtype)

    @property
    def streamed_bytes(self) -> int:
        """Bytes of weights that each decode step reads, whatever the batch."""
        return self.shape.streamed_parameters * element_bytes(self.dtype)

    def forward(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        cache: CacheView,
        last: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Logits [B, vocab] after each row's last token.

        tokens and positions [B, S]; `last` [B] is the index in S of each row's last real token
        where rows are padded on the right. What padding writes lies above every real position.
        """
        if not torch.compiler.is_compiling():
            self.forwards += 1
        x = F.embedding(tokens, self.embedding)
        rope = self._rope(positions, x.dtype)
        windows = self.shape.windows or (None,) * self.shape.layers
        masks = {window: self._mask(positions, cache.context, window) for window in set(windows)}
        for index, (layer, window) in enumerate(zip(self.layers, windows, strict=True)):
            x = layer(x, rope, masks[window], cache, index)
        x = x[:, -1] if last is None else x[torch.arange(len(last), device=x.device), last]
        return self.head(rms_norm(x, self.norm, self.shape.norm_eps))

    def _rope(self, positions: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
        """cos and signed sin of each position's angles, [B, S, 1, D]; angles in fp32."""
        angles = positions[..., None, None].float() * self.inv_freq
        cos, sin = angles.cos(), angles.sin()
        return torch.cat((cos, cos), -1).to(dtype), torch.cat((-sin, sin), -1).to(dtype)

    def _mask(self, positions: torch.Tensor, context: int, window: int | None) -> torch.Tensor:
        """0 where a query sees a column, -inf elsewhere: [B, 1, G S, C], the rows of `attend`."""
        columns = torch.arange(context, device=positions.device)
        hidden = columns > positions[..., None]  # [B, S, C]
        if window is not None:
            hidden = hidden | (columns <= positions[..., None] - window)
        mask = torch.zeros(hidden.shape, dtype=self.dtype, device=hidden.device)
        mask = mask.masked_fill_(hidden, -math.inf)[:, None]
        return mask.expand(-1, self.shape.heads // self.shape.kv_heads, -1, -1).flatten(1, 2)[
            :, None
        ]


class Layer(nn.Module):
    """Attention and SwiGLU, each behind its norm; Q, K, V are one matrix, gate and up another."""

    def __init__(
        self, shape: ModelShape, index: int, get: Callable[..., torch.Tensor], pack: bool
    ) -> None:
        super().__init__()
        self.shape = shape
        block = f"model.layers.{index}."

        def linear(*names: str, bias: bool) -> Linear:
            weight, shift = ([f"{block}{n}_proj.{kind}" for n in names] for kind in WEIGHT_BIAS)
            return Linear(get(*weight), get(*shift) if bias else None, pack=pack)

        self.qkv = linear("self_attn.q", "self_attn.k", "self_attn.v", bias=shape.qkv_bias)
        self.out = linear("self_attn.o", bias=shape.o_bias)
        self.gate_up = linear("mlp.gate", "mlp.up", bias=shape.mlp_bias)
        self.down = linear("mlp.down", bias=shape.mlp_bias)
        self.norm1 = _constant(get(f"{block}input_layernorm.weight"))
        self.norm2 = _constant(get(f"{block}post_attention_layernorm.weight"))
        self.qk_norm = None
        if shape.qk_norm:  # one row a head, so that Q and K are normed in one call
            q, k = (get(f"{block}self_attn.{name}_norm.weight") for name in "qk")
            rows = [q.expand(shape.heads, -1), k.expand(shape.kv_heads, -1)]
            self.qk_norm = _constant(torch.cat(rows))

    def forward(
        self,
        x: torch.Tensor,
        rope: tuple[torch.Tensor, torch.Tensor],
        mask: torch.Tensor,
        cache: CacheView,
        index: int,
    ) -> torch.Tensor:
        heads, eps = self.shape.heads, self.shape.norm_eps
        qkv = self.qkv(rms_norm(x, self.norm1, eps)).unflatten(-1, (-1, self.shape.head_dim))
        qk = qkv[:, :, : heads + self.shape.kv_heads]
        if self.qk_norm is not None:
            qk.copy_(rms_norm(qk, None, eps) * self.qk_norm)
        rotate_(qk, *rope)
        cache.write(index, qkv[:, :, heads:])
        x = x + self.out(attend(qkv[:, :, :heads], *cache.read(index), mask))
        gate, up = self.gate_up(rms_norm(x, self.norm2, eps)).chunk(2, dim=-1)
        return x + self.down(F.silu(gate) * up)


WEIGHT_BIAS = ("weight", "bias")


def rms_norm(x: torch.Tensor, scale: torch.Tensor | None, eps: float) -> torch.Tensor:
    """x / sqrt(mean(x^2) + eps) * scale, over the last dimension."""
    return F.rms_norm(x, x.shape[-1:], scale, eps)


def rotate_(qk: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    """Apply RoPE in place: element i pairs with i + D/2; `sin` is negative in the first half."""
    swapped = qk.roll(qk.shape[-1] // 2, dims=-1)
    qk.mul_(cos).addcmul_(swapped, sin)


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Attention of q [B, S, H, D] over k, v [B, K, C, D]: [B, S, H D].

    The G query heads of one KV head become rows of one product, so K and V are read once a group
    and never repeated.
    """
    S, kv_heads = q.shape[1], k.shape[1]
    rows = q.unflatten(2, (kv_heads, -1)).permute(0, 2, 3, 1, 4).flatten(2, 3)  # [B, K, G S, D]
    out = F.scaled_dot_product_attention(rows, k, v, attn_mask=mask)
    return out.unflatten(2, (-1, S)).permute(0, 3, 1, 2, 4).flatten(2)


def rope_frequencies(shape: ModelShape) -> torch.Tensor:
    """Radians per position of each pair, [D/2] in fp32, with Llama 3's stretch where it is set.

    Llama 3 divides by `factor` every frequency that turns less than `low_freq_factor` times over
    the original context, leaves those above `high_freq_factor` turns, and blends in between.
    """
    exponent = torch.arange(0, shape.head_dim, 2).float() / shape.head_dim
    frequency = 1.0 / shape.rope_theta**exponent
    if shape.rope_scaling is None:
        return frequency
    low, high, factor, original = (float(shape.rope_scaling[name]) for name in LLAMA3)
    turns = original * frequency / (2 * math.pi)
    keep = ((turns - low) / (high - low)).clamp(0, 1)
    return frequency * (keep + (1 - keep) / factor)


LLAMA3 = ("low_freq_factor", "high_freq_factor", "factor", "original_max_position_embeddings")


def refuse_unserved(shape: ModelShape) -> None:
    """ValueError naming the part of a shape that this decoder does not have."""
    served = {"positions": "rope", "norm": "rmsnorm", "gated_mlp": True, "activation": "silu"}
    for name, value in served.items():
        if getattr(shape, name) != value:
            raise ValueError(
                f"The decoder cannot run model_type {shape.model_type!r}: its {name} is "
                f"{getattr(shape, name)!r}, and only {value!r} is served."
            )
    if shape.rope_scaling is not None:
        kind = shape.rope_scaling.get("rope_type")
        if kind != "llama3":
            raise ValueError(
                f"The decoder has no rope type {kind!r}; it has the default and llama3."
            )
        missing = [name for name in LLAMA3 if name not in shape.rope_scaling]
        if missing:
            raise ValueError(f"rope_scaling of type llama3 lacks {', '.join(missing)}.")


def _constant(values: torch.Tensor) -> nn.Parameter:
    return nn.Parameter(values, requires_grad=False)
