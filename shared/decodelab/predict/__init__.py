"""Arithmetic on paper: what a device and a model's shape say about decoding, before any run.

Standard library only. Bytes, seconds, FLOP/s and tokens throughout; GB = 10^9, GiB = 2^30.
"""

from .architecture import SHAPES, SMOLLM2_135M, Linear, ModelShape, Norm
from .economics import usd_per_million_tokens
from .hardware import HARDWARE, Hardware, UnknownDeviceError, find_hardware
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
    "HARDWARE",
    "SHAPES",
    "SMOLLM2_135M",
    "DecodeStep",
    "DoesNotFitError",
    "Hardware",
    "Linear",
    "ModelShape",
    "Norm",
    "Term",
    "UnknownDeviceError",
    "crossover_batch",
    "decode_step",
    "find_hardware",
    "linear_intensity",
    "ridge_point",
    "usd_per_million_tokens",
]
