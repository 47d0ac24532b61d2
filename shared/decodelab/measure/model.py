"""A Llama-like decoder: RMSNorm, RoPE, grouped-query attention, SwiGLU.

One forward serves prefill and decode: S new tokens a row at given positions, columns up to them
visible. Written for inference: no dropout, no training. GPT-2 and other families are refused.
"""

from __future__ import annotations

import math
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

from decodelab.predict import ModelShape

from .device import element_bytes
from .kv_cache import CacheView
from .layer import Layer, constant, rms_norm
from .linear import Linear, packs
from .memory import require_bytes
from .weights import Checkpoint, open_gguf, open_pretrained, tensor_sizes

# B rows, S new tokens a row, C context columns, H query heads, K KV heads, G = H/K, D head_dim.


class Decoder(nn.Module):
    """The network that a ModelShape describes; make one with `random` or a `from_` method.

    `forwards` counts the forward passes so far, of any batch size: each begins with `embed`.
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
        self.embedding = constant(get("model.embed_tokens.weight"))
        self.layers = nn.ModuleList(Layer(shape, i, get, pack) for i in range(shape.layers))
        self.norm = constant(get("model.norm.weight"))
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
        tensor = random_tensors(shape, seed, device, dtype)
        return cls(shape, tensor, device=device, dtype=dtype, pack=pack)

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
        x, rope = self.embed(tokens), self.rope(positions)
        masks = self.masks(positions, cache)
        for index, (layer, mask) in enumerate(zip(self.layers, masks, strict=True)):
            x = layer(x, rope, mask, cache, index)
        return self.logits(x, last)

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        """The input of the first layer, [B, S, hidden], for tokens [B, S]; counts one forward."""
        if not torch.compiler.is_compiling():
            self.forwards += 1
        return F.embedding(tokens, self.embedding)

    def rope(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and signed sin of each position's angles, [B, S, 1, D]; angles in fp32."""
        angles = positions[..., None, None].float() * self.inv_freq
        cos, sin = angles.cos(), angles.sin()
        return torch.cat((cos, cos), -1).to(self.dtype), torch.cat((-sin, sin), -1).to(self.dtype)

    def logits(self, x: torch.Tensor, last: torch.Tensor | None = None) -> torch.Tensor:
        """Logits [B, vocab] of the last layer's x [B, S, hidden], at `last` as in `forward`."""
        x = x[:, -1] if last is None else x[torch.arange(len(last), device=x.device), last]
        return self.head(rms_norm(x, self.norm, self.shape.norm_eps))

    def masks(self, positions: torch.Tensor, cache: CacheView) -> list[torch.Tensor]:
        """The mask of each layer for queries at `positions` [B, S]; one tensor a kind of window."""
        windows = self.shape.windows or (None,) * self.shape.layers
        masks = {w: self._mask(positions, cache.columns(w), w) for w in set(windows)}
        return [masks[window] for window in windows]

    def _mask(
        self, positions: torch.Tensor, columns: torch.Tensor, window: int | None
    ) -> torch.Tensor:
        """0 where a query sees a column, -inf elsewhere: [B, 1, G S, C], the rows of `attend`.

        positions [B, S]; columns [C] or [B, C] hold positions, or -1 where they hold none.
        """
        queries, columns = positions[..., None], columns[..., None, :]
        first = 0 if window is None else (queries - window + 1).clamp_(min=0)
        hidden = (columns > queries) | (columns < first)  # [B, S, C]
        mask = torch.zeros(hidden.shape, dtype=self.dtype, device=hidden.device)
        mask = mask.masked_fill_(hidden, -math.inf)[:, None]
        return mask.expand(-1, self.shape.heads // self.shape.kv_heads, -1, -1).flatten(1, 2)[
            :, None
        ]


def random_tensors(
    shape: ModelShape,
    seed: int = 0,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> Callable[[str], torch.Tensor]:
    """What `Decoder.random` is built from: a tensor by name, the same at each call.

    Wrap it to change weights on their way in: Decoder(shape, lambda name: f(tensor(name))).
    """
    sizes = tensor_sizes(shape)

    def draw(name: str) -> torch.Tensor:
        if name.endswith("norm.weight"):
            return torch.ones(sizes[name], device=device, dtype=dtype)
        # A seed of the name's own, so that no tensor depends on which were asked for before it.
        generator = torch.Generator(device).manual_seed(zlib.crc32(f"{seed} {name}".encode()))
        values = torch.randn(sizes[name], generator=generator, device=device, dtype=dtype)
        return values.mul_(sizes[name][-1] ** -0.5)

    return draw


@contextmanager
def weight_reads(model: Decoder) -> Iterator[Counter[str]]:
    """Count how often each matrix is multiplied inside the block, by name such as "layers.0.qkv".

    However a step is written: a batched one reads each matrix once, and a loop over B sequences
    B times. Replays of a CUDA graph run no Python and aren't seen.
    """
    reads: Counter[str] = Counter()

    def count(name: str) -> Callable[..., None]:
        return lambda *_: reads.update([name])

    linears = [
        (name, module) for name, module in model.named_modules() if isinstance(module, Linear)
    ]
    handles = [module.register_forward_hook(count(name)) for name, module in linears]
    try:
        yield reads
    finally:
        for handle in handles:
            handle.remove()


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


# Beside what the fields of a shape say, other families scale embeddings, cap logits or leave out
# rotations: so the family is asked for too.
SERVED = {
    "positions": ("rope",),
    "norm": ("rmsnorm",),
    "layer_norms": (("input_norm", "post_attention_norm"),),
    "qk_norm": (None, "head"),
    "gated_mlp": (True,),
    "activation": ("silu",),
    "parallel": (False,),
    "head_bias": (False,),
    "sinks": (False,),
    "experts": (None,),
    "mla": (None,),
    "model_type": ("llama", "mistral", "qwen2", "qwen3"),
}
LLAMA3 = ("low_freq_factor", "high_freq_factor", "factor", "original_max_position_embeddings")


def refuse_unserved(shape: ModelShape) -> None:
    """ValueError naming the part of a shape that this decoder does not have."""
    for name, served in SERVED.items():
        if getattr(shape, name) not in served:
            raise ValueError(
                f"The decoder cannot run model_type {shape.model_type!r}: its {name} is "
                f"{getattr(shape, name)!r}, and only {' or '.join(map(repr, served))} is served."
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
