"""How much memory a device has left, asked before anything is allocated.

A tensor that does not fit ends a notebook's kernel or makes the machine swap; a sentence does not.
"""

from __future__ import annotations

import os
from pathlib import Path

import torch

MEMINFO = Path("/proc/meminfo")
CGROUP = Path("/sys/fs/cgroup")  # a container's own limit, which /proc/meminfo does not show


class NotEnoughMemoryError(ValueError):
    """`what` needs more bytes than the device has free."""

    def __init__(self, what: str, needed_bytes: int, available_bytes: int, advice: str) -> None:
        self.needed_bytes, self.available_bytes = needed_bytes, available_bytes
        super().__init__(
            f"{what}: {needed_bytes / 1e9:.2f} GB are needed and {available_bytes / 1e9:.2f} GB "
            f"are free. {advice}"
        )


def available_bytes(device: torch.device | str = "cpu") -> int:
    """Bytes that can still be allocated on the device; the cache of torch's allocator counts."""
    device = torch.device(device)
    if device.type == "cuda":
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + cached
    limits = [_meminfo("MemAvailable"), _sysconf("SC_AVPHYS_PAGES"), total_bytes("cpu")]
    free = next(limit for limit in limits if limit)
    limit, used = _cgroup("memory.max"), _cgroup("memory.current")
    return min(free, limit - used) if limit and used else free


def total_bytes(device: torch.device | str = "cpu") -> int:
    """Bytes of memory that the device has."""
    device = torch.device(device)
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    # Where no one says, assume what the smallest machine of this course has.
    return _meminfo("MemTotal") or _sysconf("SC_PHYS_PAGES") or 8 * 2**30


def require_bytes(num_bytes: int, device: torch.device | str, what: str, advice: str) -> None:
    """Raise NotEnoughMemoryError, naming both sizes, unless `num_bytes` can be allocated."""
    free = available_bytes(device)
    if num_bytes > free:
        raise NotEnoughMemoryError(f"{what} on {device}", num_bytes, free, advice)


def _meminfo(name: str) -> int | None:
    if not MEMINFO.exists():
        return None
    lines = dict(line.split(":", 1) for line in MEMINFO.read_text().splitlines() if ":" in line)
    return int(lines[name].split()[0]) * 1024 if name in lines else None


def _sysconf(pages: str) -> int | None:
    known = getattr(os, "sysconf_names", {})
    return os.sysconf(pages) * os.sysconf("SC_PAGE_SIZE") if pages in known else None


def _cgroup(name: str) -> int | None:
    path = CGROUP / name
    text = path.read_text().strip() if path.exists() else ""
    return int(text) if text.isdigit() else None
