"""How much memory a device has left, what was taken of it, and how to survive its end.

A tensor that does not fit ends a notebook's kernel or makes the machine swap; a sentence does not.
Hence `require_bytes` before anything is allocated, and `attempt` for what is meant to fail.
"""

from __future__ import annotations

import gc
import os
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

MEMINFO = Path("/proc/meminfo")
CGROUP = Path("/sys/fs/cgroup")  # a container's own limit, which /proc/meminfo does not show
# Errors without a class of their own: torch's CPU allocator, a GPU's driver, its libraries, C++.
SIGNS = ("can't allocate memory", "out of memory", "ALLOC_FAILED", "bad_alloc")


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


def allocated_bytes(make: Callable[[], object], device: torch.device | str = "cpu") -> int:
    """Bytes that torch's allocator still holds for what `make()` returned, temporaries gone.

    It is asked, not the tensors: on a GPU it rounds up, by 512 bytes or, beyond 1 MB, by up to 1 MB
    for each tensor.
    """
    device = torch.device(device)
    gc.collect()  # else garbage from before would count as given back
    if device.type == "cuda":
        before = torch.cuda.memory_allocated(device)
        made = make()  # noqa: F841  (held, so that it counts)
        gc.collect()
        return torch.cuda.memory_allocated(device) - before
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else the profiler greets on stderr
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as run:
        made = make()  # noqa: F841
        gc.collect()
    return sum(event.self_cpu_memory_usage for event in run.events())


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What `attempt` brought home: the value, or the message of the error."""

    value: object = None
    error: str | None = None


def attempt(run: Callable[[], object]) -> Outcome:
    """Call `run()`; running out of memory becomes an Outcome whose `error` is the message.

    The exception does not get out, since its traceback holds the failed frames and these hold
    their tensors: the frames are emptied, and the memory is free again. Other errors pass.
    """
    try:
        return Outcome(value=run())
    except (RuntimeError, MemoryError, NotEnoughMemoryError) as error:
        if not out_of_memory(error):
            raise
        sentence = str(error).strip() or "Python has no memory left."
        _empty_frames(error)
    release_memory()
    return Outcome(error=sentence)


def out_of_memory(error: BaseException) -> bool:
    """Whether an error says that a device ran out of memory."""
    known = (torch.OutOfMemoryError, MemoryError, NotEnoughMemoryError)
    return isinstance(error, known) or any(sign in str(error) for sign in SIGNS)


def release_memory() -> None:
    """Give back what nobody uses, and what the last error that ended a cell still holds.

    A notebook keeps that error for %tb and %debug, with every tensor of its frames. After this,
    %tb works as before and %debug finds no variables.
    """
    _empty_frames(getattr(sys, "last_value", None))
    gc.collect()
    torch.cuda.empty_cache()  # does nothing where CUDA was never used


def _empty_frames(error: BaseException | None) -> None:
    """Forget the local variables of all frames that an error, and those behind it, went through."""
    while error is not None:
        for frame, _ in traceback.walk_tb(error.__traceback__):
            try:
                frame.clear()
            except RuntimeError:  # it still runs
                continue
            # Whoever printed the traceback may have left a snapshot of the variables on the frame
            # (Python up to 3.12): taken anew, it is empty.
            _ = frame.f_locals
        error = error.__context__


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
