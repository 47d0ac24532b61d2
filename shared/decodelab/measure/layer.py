"""One decoder layer: grouped-query attention and SwiGLU, each behind its RMSNorm.

What meets the KV cache lies between `project` and `finish`, so that a step can be written anew
around them. Which keys a query sees is the mask's business, and positions are RoPE's.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

from decodelab.predict import ModelShape

from .kv_cache import CacheView
from .linear import Linear

# B rows, S new tokens a row, C context columns, H query heads, K KV heads, G = H/K, D head_dim.

WEIGHT_BIAS = ("weight", "bias")


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
        self.norm1 = constant(get(f"{block}input_layernorm.weight"))
        self.norm2 = constant(get(f"{block}post_attention_layernorm.weight"))
        self.qk_norm = None
        if shape.qk_norm:  # one row a head, so that Q and K are normed in one call
            q, k = (get(f"{block}self_attn.{name}_norm.weight") for name in "qk")
            rows = [q.expand(shape.heads, -1), k.expand(shape.kv_heads, -1)]
            self.qk_norm = constant(torch.cat(rows))

    def forward(
        self,
        x: torch.Tensor,
        rope: tuple[torch.Tensor, torch.Tensor],
        mask: torch.Tensor,
        cache: CacheView,
        index: int,
    ) -> torch.Tensor:
        q, kv = self.project(x, rope)
        cache.write(index, kv)
        return self.finish(x, attend(q, *cache.read(index), mask))

    def project(
        self, x: torch.Tensor, rope: tuple[torch.Tensor, torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Q [B, S, H, D] and the cache's K and V [B, S, 2K, D] of x [B, S, hidden], after RoPE."""
        heads, eps = self.shape.heads, self.shape.norm_eps
        qkv = self.qkv(rms_norm(x, self.norm1, eps)).unflatten(-1, (-1, self.shape.head_dim))
        qk = qkv[:, :, : heads + self.shape.kv_heads]
        if self.qk_norm is not None:
            qk.copy_(rms_norm(qk, None, eps) * self.qk_norm)
        rotate_(qk, *rope)
        return qkv[:, :, :heads], qkv[:, :, heads:]

    def finish(self, x: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        """The layer's output [B, S, hidden]: x plus attention's [B, S, H D], plus the MLP."""
        x = x + self.out(attended)
        gate, up = self.gate_up(rms_norm(x, self.norm2, self.shape.norm_eps)).chunk(2, dim=-1)
        return x + self.down(F.silu(gate) * up)


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
    and never repeated. A query whose columns are all hidden gets zeros, not NaN.
    """
    S, kv_heads = q.shape[1], k.shape[1]
    rows = q.unflatten(2, (kv_heads, -1)).permute(0, 2, 3, 1, 4).flatten(2, 3)  # [B, K, G S, D]
    out = F.scaled_dot_product_attention(rows, k, v, attn_mask=mask)
    return out.unflatten(2, (-1, S)).permute(0, 3, 1, 2, 4).flatten(2)


def constant(values: torch.Tensor) -> nn.Parameter:
    """A parameter that no gradient changes."""
    return nn.Parameter(values, requires_grad=False)
