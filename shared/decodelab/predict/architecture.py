"""The shape of a decoder, and what follows from it: parameters, FLOPs, KV bytes.

A shape declares its matrices (`linears`) and norms; every count is a sum over them. No tensor is
made here: `decodelab.measure.Decoder` builds the network that a shape describes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from .blocks import MLA, Experts, Linear, Norm
from .checks import positive_int, positive_number
from .families import shape_fields

# Parameters of each kind of norm, in vectors of its width: a scale, a shift, both, neither.
NORM_VECTORS = {"rmsnorm": 1, "layernorm": 2, "layernorm_scale": 1, "layernorm_plain": 0}
CHOICES = {
    "qk_norm": (None, "head", "full"),  # on Q and on K: over head_dim, or over all heads at once
    "norm": tuple(NORM_VECTORS),
    "positions": ("rope", "learned", "alibi"),  # "learned": a table of max_context rows
}


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """A decoder-only transformer; the defaults are Llama's.

    `windows` holds each layer's sliding window in tokens (None: it sees everything; 0: it keeps no
    KV cache, as linear attention doesn't), or is None where every layer sees everything.
    `layer_norms` names the norms of each layer. `parallel`: attention and MLP read the same input.
    `sinks`: one learned logit per head and layer. `rope_scaling` is the config's table, with its
    `rope_type`. `notes` say what was assumed or left out when a config was read.
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
    head_bias: bool = False
    sinks: bool = False
    qk_norm: str | None = None
    gated_mlp: bool = True
    activation: str = "silu"
    norm: str = "rmsnorm"
    norm_eps: float = 1e-6
    layer_norms: tuple[str, ...] = ("input_norm", "post_attention_norm")
    parallel: bool = False
    positions: str = "rope"
    max_context: int | None = None
    rope_theta: float = 10000.0
    rope_scaling: Mapping | None = field(default=None, hash=False)
    windows: tuple[int | None, ...] | None = None
    experts: Experts | None = None
    mla: MLA | None = None
    model_type: str = "llama"
    notes: tuple[str, ...] = field(default=(), compare=False)

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
            if window not in (None, 0):
                positive_int("windows", window)
        if not self.kv_layers:
            raise ValueError("windows has 0 for every layer: at least one must keep a KV cache.")
        if self.experts is not None:
            self.experts.check_layers(self.layers)
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
        """Every matrix that a token may be multiplied by, the LM head included.

        Raises ValueError where a layer keeps no KV cache: what it has instead is not served.
        """
        if self.kv_layers < self.layers:
            raise ValueError(
                f"{self.layers - self.kv_layers} of {self.layers} layers keep no KV cache "
                f"(model_type {self.model_type!r}). Their matrices are not served: only what "
                f"concerns the KV cache is known of this shape."
            )
        return (
            *self._attention(),
            *self._mlp(),
            Linear("lm_head", self.hidden, self.vocab, bias=self.head_bias),
        )

    def norms(self) -> tuple[Norm, ...]:
        """Every norm: those of each layer, a last one, and those on Q and K or on the latents."""
        vectors = NORM_VECTORS[self.norm]
        norms = [Norm(name, self.hidden, self.layers, vectors) for name in self.layer_norms]
        norms.append(Norm("final_norm", self.hidden, 1, vectors))
        if self.qk_norm is not None:
            q, k = (self.heads, self.kv_heads) if self.qk_norm == "full" else (1, 1)
            norms.append(Norm("q_norm", q * self.head_dim, self.layers, vectors))
            norms.append(Norm("k_norm", k * self.head_dim, self.layers, vectors))
        return (*norms, *(self.mla.norms(self.layers) if self.mla else ()))

    @property
    def matmul_parameters(self) -> int:
        """Weights multiplied per token: 2 FLOPs each. No input embedding, norm or bias."""
        return sum(linear.active.weights for linear in self.linears())

    @property
    def streamed_parameters(self) -> int:
        """What a decode step reads once every expert is in use: matrices, biases, norms, sinks.

        Of the input embedding and of learned positions it reads a row per sequence: left out. A
        tied embedding is read whole all the same, as the LM head.
        """
        return sum(linear.parameters for linear in self.linears()) + self._vectors

    def streamed(self, batch: int) -> int | float:
        """What a decode step of `batch` sequences is expected to read: only the experts it meets.

        All of `streamed_parameters` at any batch in a dense model; `Linear.touched` otherwise.
        """
        positive_int("batch", batch)
        read = (linear.parameters * linear.touched(batch) for linear in self.linears())
        return sum(read) + self._vectors

    @property
    def parameters(self) -> int:
        """All that a checkpoint must store; a tied embedding counts once."""
        embedding = 0 if self.tied else self.vocab * self.hidden
        positions = self.max_context * self.hidden if self.positions == "learned" else 0
        return self.streamed_parameters + embedding + positions

    @property
    def active_parameters(self) -> int:
        """Parameters that one token uses, the embedding whole: all of them in a dense model."""
        idle = (linear.parameters - linear.active.parameters for linear in self.linears())
        return self.parameters - sum(idle)

    @property
    def kv_layers(self) -> int:
        """Layers that keep a KV cache."""
        return self.layers - (self.windows or ()).count(0)

    def layer_kv_bytes(self, bytes_per_element: float = 2, tensor_parallel: int = 1) -> int | float:
        """Bytes of K and V that one token takes in one layer that keeps them, on each GPU.

        2 x kv_heads x head_dim x bytes: the KV heads, not the query heads. Beyond one KV head per
        GPU, tensor parallelism replicates heads and saves nothing more. A latent (MLA) is no pair
        and has no heads: every GPU keeps all of it.
        """
        positive_number("bytes_per_element", bytes_per_element)
        positive_int("tensor_parallel", tensor_parallel)
        heads = max(1, self.kv_heads // tensor_parallel)
        uneven = (heads * tensor_parallel) % self.kv_heads and self.mla is None
        if self.heads % tensor_parallel or uneven:
            raise ValueError(
                f"tensor_parallel {tensor_parallel} does not split {self.heads} heads and "
                f"{self.kv_heads} KV heads evenly."
            )
        if self.mla is not None:
            return self.mla.cached * bytes_per_element
        return 2 * heads * self.head_dim * bytes_per_element

    def kv_bytes_per_token(
        self, bytes_per_element: float = 2, tensor_parallel: int = 1
    ) -> int | float:
        """Bytes of KV cache that one token adds, over all layers, on each GPU."""
        return self.kv_layers * self.layer_kv_bytes(bytes_per_element, tensor_parallel)

    def kv_bytes(self, context: int, bytes_per_element: float = 2) -> int | float:
        """Bytes of KV of one sequence of `context` tokens; a layer keeps its window at most."""
        return self._visible(context) * self.layer_kv_bytes(bytes_per_element)

    def attention_flops(self, context: int) -> int:
        """FLOPs of QK^T and of its product with V, for one new token after `context` tokens."""
        per_head = 4 * self.head_dim if self.mla is None else self.mla.flops_per_position
        return self.heads * per_head * self._visible(context)

    @property
    def _vectors(self) -> int:
        """Parameters outside matrices that every step reads: norms and sinks."""
        sinks = self.heads * self.layers if self.sinks else 0
        return sum(norm.parameters for norm in self.norms()) + sinks

    def _attention(self) -> tuple[Linear, ...]:
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        if self.mla is None:
            inward = tuple(
                Linear(name, self.hidden, width, self.layers, self.qkv_bias)
                for name, width in (("q_proj", q), ("k_proj", kv), ("v_proj", kv))
            )
        else:
            inward = self.mla.linears(self.hidden, self.heads, self.layers, self.qkv_bias)
            q = self.heads * self.mla.v
        return (*inward, Linear("o_proj", q, self.hidden, self.layers, self.o_bias))

    def _mlp(self) -> tuple[Linear, ...]:
        inward = ("gate_proj", "up_proj") if self.gated_mlp else ("up_proj",)
        layers = self.layers if self.experts is None else len(self.experts.dense_layers)
        size = {"count": layers, "bias": self.mlp_bias}
        dense = (
            *(Linear(name, self.hidden, self.ffn, **size) for name in inward),
            Linear("down_proj", self.ffn, self.hidden, **size),
        )
        routed = ()
        if self.experts is not None:
            routed = self.experts.linears(self.hidden, self.layers, inward, self.mlp_bias)
        return (*(dense if layers else ()), *routed)

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
