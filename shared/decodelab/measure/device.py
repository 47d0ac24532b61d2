"""Which device to run on, and in which dtype."""

from __future__ import annotations

import contextlib
import platform
from pathlib import Path

import torch

DTYPE_NAMES = {
    torch.float64: "fp64",
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
}


def pick_device() -> torch.device:
    """The first CUDA GPU, else the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def pick_dtype(device: torch.device | str | None = None) -> torch.dtype:
    """The dtype that the device multiplies fastest: fp32 on a CPU, bf16 or fp16 on a GPU.

    bf16 units came with compute capability 8.0. `torch.cuda.is_bf16_supported()` says True below
    it as well, because PyTorch emulates bf16 there, slowly.
    """
    device = torch.device(device) if device is not None else pick_device()
    if device.type != "cuda":
        return torch.float32
    capability = torch.cuda.get_device_capability(device)
    return torch.bfloat16 if capability >= (8, 0) else torch.float16


def element_bytes(dtype: torch.dtype) -> int:
    """Bytes that one element takes."""
    return torch.empty(0, dtype=dtype).element_size()


def cpu_name() -> str:
    """What the processor calls itself, where the system tells."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name":
                return f"CPU {value.strip()}"
    return f"CPU {platform.processor() or platform.machine()}"
