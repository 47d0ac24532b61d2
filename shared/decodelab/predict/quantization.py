"""What a number format costs in bytes, scales and zero points included, and what it covers.

Facts as data: shipped checkpoints quantize the layers' matrices and keep embedding, LM head,
router and norms at 16 bits; GGUF files quantize embedding and head too. Nothing is quantized here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from .architecture import ModelShape
from .blocks import Linear
from .checks import positive_int

# Matrices of which every GPU keeps a whole copy under tensor parallelism (vLLM).
REPLICATED = {"router", "shared_router", "q_a_proj", "kv_a_proj"}


@dataclass(frozen=True, kw_only=True)
class WeightFormat:
    """Bytes per element of each part of a model; what `parts` doesn't name takes `rest`.

    Parts: "layer", "expert", "router", "head", "embedding". `channel` is bytes beside each output
    channel of a covered matrix (its scale).
    """

    parts: Mapping[str, float] = field(default_factory=dict, hash=False)
    channel: float = 0
    rest: float = 2
    source: str = ""

    def matrix_bytes(self, linear: Linear) -> float:
        """Bytes of all `count` matrices of `linear` with scales and biases."""
        part = part_of(linear)
        num_bytes = linear.weights * self.parts.get(part, self.rest)
        if part in self.parts:
            num_bytes += self.channel * linear.count * linear.d_out
        return num_bytes + (linear.parameters - linear.weights) * self.rest


def _layers(num_bytes: float, **rest: object) -> WeightFormat:
    """A format of the layers' matrices, routed experts included, and of nothing else."""
    return WeightFormat(parts={"layer": num_bytes, "expert": num_bytes}, **rest)


def _gguf(num_bytes: float, head: float, source: str) -> WeightFormat:
    """A format of every matrix; norms and router stay at 32 bits."""
    parts = {"layer": num_bytes, "expert": num_bytes, "embedding": num_bytes, "head": head}
    return WeightFormat(parts=parts, rest=4, source=source)


FORMATS: dict[str, WeightFormat] = {
    "fp32": WeightFormat(rest=4, source="IEEE 754"),
    "bf16": WeightFormat(source="bfloat16"),
    "fp16": WeightFormat(source="IEEE 754"),
    "fp8": _layers(1, channel=4, source="compressed-tensors: fp32 scale per output channel"),
    "int8": _layers(1, channel=4, source="compressed-tensors w8a8: fp32 scale per output channel"),
    # 4 bits, and for each 128 weights of a channel a 16-bit scale and a 4-bit zero point.
    "int4": _layers((4 + 20 / 128) / 8, source="AWQ and GPTQ, group size 128"),
    # 32 weights share an 8-bit exponent; gpt-oss quantizes its experts alone.
    "mxfp4": WeightFormat(parts={"expert": (4 + 8 / 32) / 8}, source="OCP MX 1.0; gpt-oss"),
    # 16 weights share an fp8 scale.
    "nvfp4": _layers((4 + 8 / 16) / 8, source="NVIDIA NVFP4"),
    # Blocks of 32 with a 16-bit scale; llama.cpp stores the head beside q4_0 as q6_K.
    "q8_0": _gguf(34 / 32, 34 / 32, "ggml block_q8_0"),
    "q4_0": _gguf(18 / 32, 210 / 256, "ggml block_q4_0, block_q6_K"),
}

# Bytes per cached element. fp8 and int8 scales are one per tensor: nothing per element.
KV_FORMATS: dict[str, float] = {
    "fp32": 4,
    "bf16": 2,
    "fp16": 2,
    "fp8": 1,
    "int8": 1,
    "q8_0": 34 / 32,
    "q4_0": 18 / 32,
}


def part_of(linear: Linear) -> str:
    """The part of a model that a matrix belongs to: "layer", "expert", "router" or "head"."""
    if linear.name == "lm_head":
        return "head"
    if linear.name in ("router", "shared_router"):
        return "router"
    return "expert" if linear.name.startswith("expert") else "layer"


def weight_format(name: str) -> WeightFormat:
    """The format called `name`; ValueError naming those there are."""
    if name not in FORMATS:
        raise ValueError(f"Weight format {name!r} is not one of {', '.join(FORMATS)}.")
    return FORMATS[name]


def kv_element_bytes(name: str) -> float:
    """Bytes per cached element of the format called `name`; ValueError naming those there are."""
    if name not in KV_FORMATS:
        raise ValueError(f"KV format {name!r} is not one of {', '.join(KV_FORMATS)}.")
    return KV_FORMATS[name]


def layers_of_stages(layers: int, pipeline_parallel: int) -> tuple[int, ...]:
    """Layers of each pipeline stage; odd ones go to those before the last (vLLM's rule)."""
    if positive_int("pipeline_parallel", pipeline_parallel) > layers:
        raise ValueError(f"pipeline_parallel {pipeline_parallel} is more than {layers} layers.")
    each, odd = divmod(layers, pipeline_parallel)
    first = pipeline_parallel - 1 - odd
    return tuple(each + (first <= stage < first + odd) for stage in range(pipeline_parallel))


def stage_weight_bytes(
    shape: ModelShape, name: str = "bf16", tensor_parallel: int = 1, pipeline_parallel: int = 1
) -> tuple[float, ...]:
    """Bytes of weights on one GPU of each pipeline stage, all layers taken as alike.

    Tensor parallelism divides the matrices and the vocabulary; norms, routers, the way into a
    latent and KV heads beyond one per GPU are copied. The first stage holds the embedding, the
    last the LM head; a tied matrix is on both.
    """
    layout = weight_format(name)
    shape.layer_kv_bytes(2, tensor_parallel)  # refuses heads that don't split
    *matrices, head = (
        layout.matrix_bytes(linear) * _share(shape, linear, tensor_parallel)
        for linear in shape.linears()
    )
    table = shape.vocab * shape.hidden * layout.parts.get("embedding", layout.rest)
    embedding = head if shape.tied else table / tensor_parallel
    if shape.positions == "learned":
        embedding += shape.max_context * shape.hidden * layout.rest
    layers = sum(matrices) + _vectors(shape) * layout.rest
    stages = layers_of_stages(shape.layers, pipeline_parallel)
    held = [layers * count / shape.layers for count in stages]
    held[0] += embedding
    if pipeline_parallel > 1 or not shape.tied:
        held[-1] += head
    return tuple(held)


def weight_bytes(
    shape: ModelShape, name: str = "bf16", tensor_parallel: int = 1, pipeline_parallel: int = 1
) -> float:
    """Bytes of weights on the fullest GPU: see `stage_weight_bytes`."""
    return max(stage_weight_bytes(shape, name, tensor_parallel, pipeline_parallel))


def streamed_bytes(shape: ModelShape, name: str, batch: int) -> float:
    """Bytes of weights that a decode step of `batch` sequences reads: see `ModelShape.streamed`."""
    layout = weight_format(name)
    read = (layout.matrix_bytes(linear) * linear.touched(batch) for linear in shape.linears())
    return sum(read) + _vectors(shape) * layout.rest


def _vectors(shape: ModelShape) -> int:
    """Parameters outside the matrices that every step reads: norms and sinks."""
    return shape.streamed_parameters - sum(linear.parameters for linear in shape.linears())


def _share(shape: ModelShape, linear: Linear, tensor_parallel: int) -> float:
    """The part of a matrix that one GPU holds."""
    if linear.name in REPLICATED:
        return 1
    if linear.name in ("k_proj", "v_proj"):
        return max(1, shape.kv_heads // tensor_parallel) / shape.kv_heads
    return 1 / tensor_parallel
