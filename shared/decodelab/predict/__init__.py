"""Arithmetic on paper: what a device and a model's shape say about decoding, before any run.

Standard library only. Bytes, seconds, FLOP/s and tokens throughout; GB = 10^9, GiB = 2^30.
"""

from .architecture import SHAPES, SMOLLM2_135M, ModelShape
from .blocks import MLA, Experts, Linear, Norm
from .capacity import (
    KVBlocks,
    NoRoomError,
    kv_blocks,
    kv_pool,
    kv_pool_free,
    kv_pool_static,
    kv_tokens,
    max_context,
    max_sequences,
)
from .daily_load import Day, day
from .deployment import LEVERS, Deployment, Lever, pull
from .economics import (
    BatchChoice,
    BreakEven,
    CostPoint,
    Curve,
    break_even,
    cheapest_batch,
    experts_read,
    largest_batch,
    mixed_tokens_per_second,
    smallest_batch,
    token_price,
    usd_per_million_tokens,
)
from .hardware import HARDWARE, Hardware, UnknownDeviceError, find_hardware
from .mixed_step import MixedStep, prefill_seconds
from .prices import (
    API_PRICES,
    GPU_PRICES,
    APIPrice,
    GPUPrice,
    TokenPrice,
    api_price,
    gpu_prices,
)
from .quantization import FORMATS, KV_FORMATS, WeightFormat, weight_bytes
from .roofline import (
    DecodeStep,
    DoesNotFitError,
    Term,
    crossover_batch,
    decode_step,
    linear_intensity,
    ridge_point,
)

__all__ = [
    "API_PRICES",
    "FORMATS",
    "GPU_PRICES",
    "HARDWARE",
    "KV_FORMATS",
    "LEVERS",
    "MLA",
    "SHAPES",
    "SMOLLM2_135M",
    "APIPrice",
    "BatchChoice",
    "BreakEven",
    "CostPoint",
    "Curve",
    "Day",
    "DecodeStep",
    "Deployment",
    "DoesNotFitError",
    "Experts",
    "GPUPrice",
    "Hardware",
    "KVBlocks",
    "Lever",
    "Linear",
    "MixedStep",
    "ModelShape",
    "NoRoomError",
    "Norm",
    "Term",
    "TokenPrice",
    "UnknownDeviceError",
    "WeightFormat",
    "api_price",
    "break_even",
    "cheapest_batch",
    "crossover_batch",
    "day",
    "decode_step",
    "experts_read",
    "find_hardware",
    "gpu_prices",
    "kv_blocks",
    "kv_pool",
    "kv_pool_free",
    "kv_pool_static",
    "kv_tokens",
    "largest_batch",
    "linear_intensity",
    "max_context",
    "max_sequences",
    "mixed_tokens_per_second",
    "prefill_seconds",
    "pull",
    "ridge_point",
    "smallest_batch",
    "token_price",
    "usd_per_million_tokens",
    "weight_bytes",
]
