"""One way to time anything: warm up, synchronise, take the median."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import NamedTuple

import torch


class Timing(NamedTuple):
    """Seconds of one call: the median of several, and how far the slowest is from the fastest.

    `fastest` is for ceilings alone: a neighbour can only slow a machine down, so what it can do is
    the best that it did, as STREAM reports it. What a program takes is the median.
    """

    seconds: float
    spread: float
    fastest: float


def timed(
    call: Callable[[], object],
    *,
    repeats: int = 5,
    warmup: int = 1,
    device: torch.device | str = "cpu",
) -> Timing:
    """Time `call()`; a GPU is waited for before the clock starts and before it stops."""
    wait = _wait_for(torch.device(device))
    for _ in range(warmup):
        call()
    samples = []
    for _ in range(repeats):
        wait()
        start = time.perf_counter()
        call()
        wait()
        samples.append(time.perf_counter() - start)
    return Timing(statistics.median(samples), max(samples) - min(samples), min(samples))


def _wait_for(device: torch.device) -> Callable[[], None]:
    if device.type == "cuda":
        return lambda: torch.cuda.synchronize(device)
    return lambda: None
