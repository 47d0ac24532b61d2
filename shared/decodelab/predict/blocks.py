"""What a shape is made of: its matrices and norms, routed experts, latent attention.

Each block declares the matrices that it has; `ModelShape` adds them up. No tensor is made here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from .checks import positive_int


class Linear(NamedTuple):
    """`count` matrices of d_in x d_out in the whole model, of which one token meets `used`.

    `used` None: all of them, once each. Otherwise a router picks.
    """

    name: str
    d_in: int
    d_out: int
    count: int = 1
    bias: bool = False
    used: int | None = None

    @property
    def weights(self) -> int:
        """Elements of all `count` matrices, biases left out."""
        return self.count * self.d_in * self.d_out

    @property
    def parameters(self) -> int:
        """Elements of all `count` matrices and their biases."""
        return self.weights + self.bias * self.count * self.d_out

    @property
    def active(self) -> Linear:
        """The same, holding only the matrices that one token meets."""
        return self if self.used is None else self._replace(count=self.used, used=None)

    def touched(self, batch: int) -> float:
        """The expected share of the matrices that at least one of `batch` tokens meets.

        1 - (1 - used/count)^batch: each token picks evenly and on its own. Real routers are less
        even, so they touch fewer.
        """
        return 1 if self.used is None else 1 - (1 - self.used / self.count) ** batch


class Norm(NamedTuple):
    """`count` norms over `width` elements, each with that many scales, shifts, both or neither."""

    name: str
    width: int
    count: int
    vectors: int = 1

    @property
    def parameters(self) -> int:
        """Elements of all `count` norms."""
        return self.count * self.width * self.vectors


@dataclass(frozen=True, kw_only=True)
class Experts:
    """An MLP in many copies, of which a router picks `used` for each token.

    `ffn` is the width of one routed expert. `shared_ffn` is that of what every token passes beside
    them (0: nothing), through a gate of its own where `shared_gate` is set. `dense_layers` lists
    the layers, from 0, that have a plain MLP of the shape's own `ffn` instead.
    """

    routed: int
    used: int
    ffn: int
    shared_ffn: int = 0
    shared_gate: bool = False
    bias: bool = False
    router_bias: bool = False
    dense_layers: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name in ("routed", "used", "ffn"):
            positive_int(name, getattr(self, name))
        if self.shared_ffn != 0:
            positive_int("shared_ffn", self.shared_ffn)
        if self.used > self.routed:
            raise ValueError(f"A token can't use {self.used} of {self.routed} experts.")

    def check_layers(self, layers: int) -> None:
        """ValueError unless `dense_layers` fits a model of so many layers."""
        for layer in self.dense_layers:
            if layer not in range(layers):
                raise ValueError(f"dense_layers has {layer!r}; layers are 0 to {layers - 1}.")
        if len(set(self.dense_layers)) < len(self.dense_layers):
            raise ValueError(f"dense_layers names a layer twice: {self.dense_layers}.")
        if len(self.dense_layers) == layers:
            raise ValueError("With dense_layers as they are, every layer is dense: drop experts.")

    def linears(
        self, hidden: int, layers: int, inward: tuple[str, ...], shared_bias: bool
    ) -> tuple[Linear, ...]:
        """Router and experts of the layers that have them; `inward` names the way in."""
        layers -= len(self.dense_layers)

        def mlp(prefix: str, ffn: int, **how: object) -> list[Linear]:
            names = [f"{prefix}_{name}" for name in inward]
            linears = [Linear(name, hidden, ffn, **how) for name in names]
            return [*linears, Linear(f"{prefix}_down_proj", ffn, hidden, **how)]

        count, used = layers * self.routed, layers * self.used
        linears = [Linear("router", hidden, self.routed, layers, self.router_bias)]
        linears += mlp("expert", self.ffn, count=count, bias=self.bias, used=used)
        if self.shared_ffn:
            linears += mlp("shared", self.shared_ffn, count=layers, bias=shared_bias)
        if self.shared_gate:
            linears.append(Linear("shared_router", hidden, 1, layers))
        return tuple(linears)


@dataclass(frozen=True, kw_only=True)
class MLA:
    """Multi-head latent attention (DeepSeek-V2, 2024): the cache keeps one latent for all heads.

    `kv_lora` elements from which each head's K and V are made, and `qk_rope` elements of rotated K
    that all heads share. `q_lora` None: Q comes straight from the hidden state.
    """

    kv_lora: int
    qk_nope: int
    qk_rope: int
    v: int
    q_lora: int | None = None

    def __post_init__(self) -> None:
        for name in ("kv_lora", "qk_nope", "qk_rope", "v"):
            positive_int(name, getattr(self, name))
        if self.q_lora is not None:
            positive_int("q_lora", self.q_lora)

    @property
    def cached(self) -> int:
        """Elements that one token adds to the cache of one layer: no K and V, no heads."""
        return self.kv_lora + self.qk_rope

    @property
    def flops_per_position(self) -> int:
        """FLOPs of one head and layer for each cached token, on the latents themselves.

        Scores over kv_lora + qk_rope elements, their sum over kv_lora: kv_b_proj is folded into Q
        and into the output, at its usual 2 FLOPs per weight.
        """
        return 2 * self.cached + 2 * self.kv_lora

    def linears(self, hidden: int, heads: int, layers: int, bias: bool) -> tuple[Linear, ...]:
        """The matrices of attention but o_proj; `bias` is on those that read the hidden state."""
        q, kv = heads * (self.qk_nope + self.qk_rope), heads * (self.qk_nope + self.v)
        to_q = (
            (Linear("q_proj", hidden, q, layers),)
            if self.q_lora is None
            else (
                Linear("q_a_proj", hidden, self.q_lora, layers, bias),
                Linear("q_b_proj", self.q_lora, q, layers),
            )
        )
        return (
            *to_q,
            Linear("kv_a_proj", hidden, self.cached, layers, bias),
            Linear("kv_b_proj", self.kv_lora, kv, layers),
        )

    def norms(self, layers: int) -> tuple[Norm, ...]:
        """One on each latent."""
        kv = Norm("kv_a_norm", self.kv_lora, layers)
        return (kv,) if self.q_lora is None else (Norm("q_a_norm", self.q_lora, layers), kv)
