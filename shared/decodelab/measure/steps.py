"""Time real decode steps and prefills of a model, at any batch and context that fit.

The KV cache is filled with random values instead of a prefill: a step reads the same bytes and does
the same arithmetic whatever they are. Each cell is a median of several after a warm-up.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass

import torch

from .decode import prefill
from .device import element_bytes
from .forward import decode_forward, length_for, rows_for
from .kv_cache import KVCache
from .memory import available_bytes
from .model import Decoder
from .timing import timed


@dataclass(frozen=True, kw_only=True)
class StepTiming:
    """One decode step of `batch` sequences at `context` tokens each, the new one included.

    `seconds` is the median, `spread` the slowest repeat minus the fastest.
    """

    batch: int
    context: int
    seconds: float
    spread: float

    @property
    def tokens_per_second(self) -> float:
        """Aggregate tokens/s; each sequence gets 1 / seconds."""
        return self.batch / self.seconds

    def as_dict(self) -> dict:
        """The fields as plain JSON values."""
        return asdict(self)


def measure_step(model: Decoder, batch: int, context: int, repeats: int = 5) -> StepTiming:
    """Time one decode step. Raises NotEnoughMemoryError before anything is allocated."""
    return next(measure_steps(model, [(batch, context)], repeats))


def measure_steps(
    model: Decoder, cells: Sequence[tuple[int, int]], repeats: int = 5
) -> Iterator[StepTiming]:
    """Time each (batch, context) in turn, in one cache that all of them share.

    A generator, so that a progress bar can follow. Cells that do not fit in memory are left out;
    NotEnoughMemoryError if none fits, ValueError if a context is beyond the model's.
    """
    slots = [rows_for(model, batch) * length_for(model, context) for batch, context in cells]
    for batch, context in cells:
        check_cell(model, batch, context)
    token_bytes = model.shape.kv_bytes_per_token(element_bytes(model.dtype))
    free = available_bytes(model.device) // token_bytes
    fitting = [size for size in slots if size <= free]
    # Where none fits, ask for the smallest: the error then names bytes worth knowing.
    wanted = max(fitting) if fitting else min(slots)
    shared = KVCache(model.shape, 1, wanted, model.dtype, model.device)
    shared.pool.uniform_(-1, 1)
    with torch.inference_mode():
        for (batch, context), size in zip(cells, slots, strict=True):
            if size <= wanted:
                yield _time_step(model, shared, batch, context, repeats)


def contradiction(timings: Sequence[StepTiming], tolerance: float = 1.5) -> str:
    """Say which two times can't both be true, as more work took far less time; "" if none.

    A step of more sequences, each at least as long, reads more: `tolerance` is for the noise.
    """
    for less in timings:
        for more in timings:
            grows = less.batch <= more.batch and less.context <= more.context
            if grows and less.seconds > tolerance * more.seconds:
                return (
                    f"These times contradict each other: {_said(less)}, {_said(more)}. Something "
                    "else was using this machine: close it, and run this cell again."
                )
    return ""


def _said(timing: StepTiming) -> str:
    where = f"batch {timing.batch} at context {timing.context:,}"
    return f"{where} took {timing.seconds * 1e3:,.0f} ms"


def measure_prefill(model: Decoder, batch: int, length: int, repeats: int = 3) -> float:
    """Seconds to prefill `batch` prompts of `length` tokens: one forward, median of several."""
    check_cell(model, batch, length)
    cache = KVCache(model.shape, batch, length, model.dtype, model.device)
    prompts = [[1] * length] * batch
    with torch.inference_mode():
        run = lambda: prefill(model, prompts, cache)  # noqa: E731
        return timed(run, repeats=repeats, device=model.device).seconds


def _time_step(
    model: Decoder, shared: KVCache, batch: int, context: int, repeats: int
) -> StepTiming:
    cache = shared.reshaped(rows_for(model, batch), length_for(model, context))
    forward = decode_forward(model, cache)
    tokens, positions = [1] * batch, [context - 1] * batch
    run = lambda: forward(tokens, positions, context).argmax(-1).tolist()  # noqa: E731
    timing = timed(run, repeats=repeats, warmup=2, device=model.device)
    return StepTiming(batch=batch, context=context, seconds=timing.seconds, spread=timing.spread)


def check_cell(model: Decoder, batch: int, context: int) -> None:
    """ValueError unless the model can decode `batch` sequences of `context` tokens."""
    if batch < 1 or context < 1:
        raise ValueError(f"Batch {batch} and context {context} must both be at least 1.")
    limit = model.shape.max_context
    if limit is not None and context > limit:
        raise ValueError(f"Context {context} is beyond the model's {limit} tokens.")
