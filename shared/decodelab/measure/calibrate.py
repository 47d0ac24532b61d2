"""What this machine can stream and multiply: the measured ceilings of its roofline.

Buffers lie well beyond the caches; each ceiling is the best of several after a warm-up. This is
what torch reaches here and now, not a data sheet; a busy neighbour lowers it.
"""

from __future__ import annotations

import itertools
import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass

import torch

from decodelab.predict import Hardware

from .device import DTYPE_NAMES, element_bytes, pick_device, pick_dtype
from .linear import Linear
from .memory import require_bytes, total_bytes
from .timing import timed

BUFFER_BYTES = {"cpu": 512 * 2**20, "cuda": 2 * 2**30}  # the largest CPU caches hold 100s of MB
MATRIX = {"cpu": 2048, "cuda": 8192}
TINY, TINY_CALLS = 64, 200


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """Measured: bandwidth in bytes/s (reading), flops in FLOP/s at `dtype`, seconds_per_call.

    seconds_per_call is the cost of calling a linear layer too small to take any time itself.
    """

    device: str
    dtype: str
    bandwidth: float
    flops: float
    seconds_per_call: float
    memory_bytes: int

    @property
    def ridge_point(self) -> float:
        """FLOP/byte at which arithmetic takes as long as memory."""
        return self.flops / self.bandwidth

    def to_hardware(self) -> Hardware:
        """This machine as `decodelab.predict` sees a device."""
        return Hardware(
            name=self.device,
            memory_bytes=self.memory_bytes,
            bandwidth=self.bandwidth,
            flops={self.dtype: self.flops},
            source="measured by decodelab.measure.calibrate",
        )

    def as_dict(self) -> dict:
        """The fields as plain JSON values."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping) -> Calibration:
        """The inverse of as_dict."""
        return cls(**data)


def calibrate(
    device: torch.device | str | None = None, dtype: torch.dtype | None = None
) -> Calibration:
    """Measure bandwidth, FLOP/s and seconds per call; under 5 s on two cores.

    Raises NotEnoughMemoryError where the buffer of the bandwidth test does not fit.
    """
    device = torch.device(device) if device is not None else pick_device()
    dtype = dtype if dtype is not None else pick_dtype(device)
    if dtype not in DTYPE_NAMES or dtype is torch.float64:
        raise ValueError(f"calibrate() knows fp32, bf16 and fp16, not {dtype}.")
    with torch.inference_mode():
        return Calibration(
            device=_device_name(device),
            dtype=DTYPE_NAMES[dtype],
            bandwidth=_bandwidth(device),
            flops=_flops(device, dtype),
            seconds_per_call=_seconds_per_call(device, dtype),
            memory_bytes=total_bytes(device),
        )


def measure_linear(
    batch: int,
    d_in: int,
    d_out: int,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> float:
    """Seconds of one linear layer [batch, d_in] x [d_in, d_out], median, weights out of cache.

    Several layers take turns, together larger than the caches: else a GPU or a large CPU would
    read the second call's weights from cache and beat its own memory.
    """
    device = torch.device(device) if device is not None else pick_device()
    dtype = dtype if dtype is not None else pick_dtype(device)
    matrix_bytes = d_in * d_out * element_bytes(dtype)
    copies = max(2, -(-BUFFER_BYTES["cpu"] // (2 * matrix_bytes)))
    advice = "Take a smaller layer."
    require_bytes(copies * matrix_bytes, device, f"{copies} layers of {d_in} x {d_out}", advice)
    with torch.inference_mode():
        weight = torch.full((d_out, d_in), 0.01, dtype=dtype, device=device)
        layers = [Linear(weight.clone()) for _ in range(copies)]
        turn = itertools.cycle(layers)
        x = torch.full((batch, d_in), 0.01, dtype=dtype, device=device)
        return timed(lambda: next(turn)(x), repeats=7, warmup=2, device=device).seconds


def _bandwidth(device: torch.device) -> float:
    """Bytes/s of summing a buffer: it reads everything and writes next to nothing."""
    size = BUFFER_BYTES[device.type]
    require_bytes(size, device, "The buffer of the bandwidth test", "Free some memory first.")
    buffer = torch.ones(size // 4, device=device)
    return size / timed(buffer.sum, repeats=9, warmup=2, device=device).fastest


def _flops(device: torch.device, dtype: torch.dtype) -> float:
    """FLOP/s of the model's own linear layer, on a square too large to be bound by memory."""
    n = MATRIX[device.type]
    x = torch.full((n, n), 0.01, dtype=dtype, device=device)
    layer = Linear(x.clone())
    return 2 * n**3 / timed(lambda: layer(x), repeats=9, device=device).fastest


def _seconds_per_call(device: torch.device, dtype: torch.dtype) -> float:
    x = torch.full((1, TINY), 0.01, dtype=dtype, device=device)
    layer = Linear(torch.full((TINY, TINY), 0.01, dtype=dtype, device=device))

    def calls() -> None:
        for _ in range(TINY_CALLS):
            layer(x)

    return timed(calls, repeats=5, device=device).seconds / TINY_CALLS


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{platform.machine()} CPU, {torch.get_num_threads()} threads"
