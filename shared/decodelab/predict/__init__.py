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
from .deployment import LEVERS, Deployment, Lever, pull
from .economics import usd_per_million_tokens
from .hardware import HARDWARE, Hardware, UnknownDeviceError, find_hardware
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
    "FORMATS",
    "HARDWARE",
    "KV_FORMATS",
    "LEVERS",
    "MLA",
    "SHAPES",
    "SMOLLM2_135M",
    "DecodeStep",
    "Deployment",
    "DoesNotFitError",
    "Experts",
    "Hardware",
    "KVBlocks",
    "Lever",
    "Linear",
    "ModelShape",
    "NoRoomError",
    "Norm",
    "Term",
    "UnknownDeviceError",
    "WeightFormat",
    "crossover_batch",
    "decode_step",
    "find_hardware",
    "kv_blocks",
    "kv_pool",
    "kv_pool_free",
    "kv_pool_static",
    "kv_tokens",
    "linear_intensity",
    "max_context",
    "max_sequences",
    "pull",
    "ridge_point",
    "usd_per_million_tokens",
    "weight_bytes",
]
