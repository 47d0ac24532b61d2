"""The shape of a decoder, and what follows from it: parameters, FLOPs, KV bytes.

A shape declares its matrices (`linears`) and norms; every count is a sum over them. No tensor is
made here: `decodelab.measure.Decoder` builds the network that a shape describes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from .checks import positive_int, positive_number
from .families import shape_fields

CHOICES = {
    "qk_norm": (None, "head"),  # "head": one norm over head_dim for Q, one for K
    "norm": ("rmsnorm", "layernorm"),  # layernorm has a shift beside its scale
    "positions": ("rope", "learned"),  # "learned": a table of max_context rows
}


class Linear(NamedTuple):
    """`count` matrices of d_in x d_out in the whole model, each multiplied once per token."""

    name: str
    d_in: int
    d_out: int
    count: int = 1
    bias: bool = False

    @property
    def weights(self) -> int:
        """Elements of all `count` matrices, biases left out."""
        return self.count * self.d_in * self.d_out


class Norm(NamedTuple):
    """`count` norms over `width` elements: a scale each, and a shift where `bias` is set."""

    name: str
    width: int
    count: int
    bias: bool = False


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """A decoder-only transformer; the defaults are Llama's.

    `windows` holds each layer's sliding window in tokens (None: it sees everything), or is None
    where no layer has one. `rope_scaling` is the config's table, with its `rope_type`.
    """

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    tied: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: str | None = None
    gated_mlp: bool = True
    activation: str = "silu"
    norm: str = "rmsnorm"
    norm_eps: float = 1e-6
    positions: str = "rope"
    max_context: int | None = None
    rope_theta: float = 10000.0
    rope_scaling: Mapping | None = field(default=None, hash=False)
    windows: tuple[int | None, ...] | None = None
    model_type: str = "llama"

    def __post_init__(self) -> None:
        for name in ("layers", "hidden", "heads", "kv_heads", "head_dim", "ffn", "vocab"):
            positive_int(name, getattr(self, name))
        positive_number("norm_eps", self.norm_eps)
        positive_number("rope_theta", self.rope_theta)
        if self.heads % self.kv_heads:
            raise ValueError(f"kv_heads {self.kv_heads} does not divide heads {self.heads}.")
        if self.max_context is not None or self.positions == "learned":
            positive_int("max_context", self.max_context)
        if self.windows is not None and len(self.windows) != self.layers:
            raise ValueError(f"windows has {len(self.windows)} entries for {self.layers} layers.")
        for window in self.windows or ():
            if window is not None:
                positive_int("windows", window)
        for name, allowed in CHOICES.items():
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name} {getattr(self, name)!r} is not one of {allowed}.")

    @classmethod
    def from_config(cls, config: Mapping) -> ModelShape:
        """Read the dict of a Hugging Face config.json.

        Raises ValueError on an unserved model_type, a missing field, or a field in use that would
        change the shape and is not served.
        """
        return cls(**shape_fields(config))

    def linears(self) -> tuple[Linear, ...]:
        """Every matrix that a token is multiplied by, the LM head included."""
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        inward = ("gate_proj", "up_proj") if self.gated_mlp else ("up_proj",)
        return (
            Linear("q_proj", self.hidden, q, self.layers, self.qkv_bias),
            Linear("k_proj", self.hidden, kv, self.layers, self.qkv_bias),
            Linear("v_proj", self.hidden, kv, self.layers, self.qkv_bias),
            Linear("o_proj", q, self.hidden, self.layers, self.o_bias),
            *(Linear(name, self.hidden, self.ffn, self.layers, self.mlp_bias) for name in inward),
            Linear("down_proj", self.ffn, self.hidden, self.layers, self.mlp_bias),
            Linear("lm_head", self.hidden, self.vocab),
        )

    def norms(self) -> tuple[Norm, ...]:
        """Every norm: two a layer, a last one, and those on Q and K where the family has them."""
        shift = self.norm == "layernorm"
        norms = (
            Norm("input_norm", self.hidden, self.layers, shift),
            Norm("post_attention_norm", self.hidden, self.layers, shift),
            Norm("final_norm", self.hidden, 1, shift),
        )
        if self.qk_norm is None:
            return norms
        q_norm = Norm("q_norm", self.head_dim, self.layers)
        return (*norms, q_norm, q_norm._replace(name="k_norm"))

    @property
    def matmul_parameters(self) -> int:
        """Weights multiplied per token: 2 FLOPs each. No input embedding, norm or bias."""
        return sum(linear.weights for linear in self.linears())

    @property
    def streamed_parameters(self) -> int:
        """What a decode step reads whole: the matrices, biases and norms.

        Of the input embedding and of learned positions it reads a row per sequence: left out. A
        tied embedding is read whole all the same, as the LM head.
        """
        biases = sum(linear.count * linear.d_out for linear in self.linears() if linear.bias)
        norms = sum(norm.count * norm.width * (1 + norm.bias) for norm in self.norms())
        return self.matmul_parameters + biases + norms

    @property
    def parameters(self) -> int:
        """All that a checkpoint must store; a tied embedding counts once."""
        embedding = 0 if self.tied else self.vocab * self.hidden
        positions = self.max_context * self.hidden if self.positions == "learned" else 0
        return self.streamed_parameters + embedding + positions

    @property
    def active_parameters(self) -> int:
        """Parameters that one token uses: all of them in a dense model."""
        return self.parameters

    def kv_bytes_per_token(
        self, bytes_per_element: float = 2, tensor_parallel: int = 1
    ) -> int | float:
        """Bytes of K and V that one token adds, over all layers, on each GPU.

        layers x 2 x kv_heads x head_dim x bytes: the KV heads, not the query heads. Beyond one KV
        head per GPU, tensor parallelism replicates heads and saves nothing more.
        """
        return self.layers * self._layer_kv_bytes(bytes_per_element, tensor_parallel)

    def kv_bytes(self, context: int, bytes_per_element: float = 2) -> int | float:
        """Bytes of KV of one sequence of `context` tokens; a layer keeps its window at most."""
        return self._visible(context) * self._layer_kv_bytes(bytes_per_element)

    def attention_flops(self, context: int) -> int:
        """FLOPs of QK^T and of its product with V, for one new token after `context` tokens."""
        return 4 * self.heads * self.head_dim * self._visible(context)

    def _layer_kv_bytes(self, bytes_per_element: float, tensor_parallel: int = 1) -> int | float:
        positive_number("bytes_per_element", bytes_per_element)
        positive_int("tensor_parallel", tensor_parallel)
        heads = max(1, self.kv_heads // tensor_parallel)
        if self.heads % tensor_parallel or (heads * tensor_parallel) % self.kv_heads:
            raise ValueError(
                f"tensor_parallel {tensor_parallel} does not split {self.heads} heads and "
                f"{self.kv_heads} KV heads evenly."
            )
        return 2 * heads * self.head_dim * bytes_per_element

    def _visible(self, context: int) -> int:
        """Tokens that one new token attends to, summed over the layers."""
        positive_int("context", context)
        windows = self.windows or (None,) * self.layers
        return sum(context if window is None else min(context, window) for window in windows)


def _llama(
    layers: int, hidden: int, heads: int, kv_heads: int, ffn: int, vocab: int, **rest: object
) -> ModelShape:
    fixed = {"head_dim": hidden // heads, "norm_eps": 1e-5}
    sizes = {"layers": layers, "hidden": hidden, "heads": heads, "kv_heads": kv_heads}
    return ModelShape(**sizes, ffn=ffn, vocab=vocab, **fixed, **rest)


def _llama3(factor: float, *sizes: int, **rest: object) -> ModelShape:
    scaling = {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    scaling |= {"factor": factor, "original_max_position_embeddings": 8192}
    return _llama(*sizes, rope_theta=500000.0, rope_scaling=scaling, max_context=131072, **rest)


SHAPES: dict[str, ModelShape] = {
    # Small enough to sweep on a laptop, and 101 MB in fp32: beyond any laptop's CPU cache.
    "25M": _llama(8, 384, 6, 2, 1024, 32768, tied=True),
    "SmolLM2-135M": _llama(
        30, 576, 9, 3, 1536, 49152, tied=True, rope_theta=100000.0, max_context=8192
    ),
    "Llama-3.2-1B": _llama3(32.0, 16, 2048, 32, 8, 8192, 128256, tied=True),
    "Llama-2-7B": _llama(32, 4096, 32, 32, 11008, 32000, max_context=4096),
    "Llama-3.1-8B": _llama3(8.0, 32, 4096, 32, 8, 14336, 128256),
    "Llama-2-13B": _llama(40, 5120, 40, 40, 13824, 32000, max_context=4096),
}
SMOLLM2_135M = SHAPES["SmolLM2-135M"]
