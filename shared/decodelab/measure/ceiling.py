"""The memory ceiling, met for real: raise the batch, or let sequences grow, until one is refused.

An engine takes its KV pool whole, before the first request, and hands it out in blocks: a bounded
pool does the same here, so that a CPU has a ceiling too. What a cache holds is scrambled from one
batch to the next; a decode step reads as many bytes whatever they are. Nothing is scheduled here.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch

from decodelab.predict.checks import positive_int, positive_number

from .device import element_bytes
from .forward import EagerForward
from .kv_cache import KVCache
from .memory import NotEnoughMemoryError, attempt, available_bytes, release_memory
from .model import Decoder
from .steps import StepTiming, check_cell
from .timing import timed


class PoolExhaustedError(NotEnoughMemoryError):
    """A batch asks for more blocks than the pool has."""

    def __init__(self, batch: int, context: int, asked_tokens: int, pool: KVPool) -> None:
        self.needed_bytes = asked_tokens * pool.cache.bytes_per_token
        self.available_bytes = pool.cache.bytes
        most = pool.tokens // pool.slots(context)
        ValueError.__init__(
            self,
            f"{batch} sequences of {context:,} tokens ask for {asked_tokens:,} tokens of KV cache "
            f"in blocks of {pool.block_size} ({self.needed_bytes / 1e6:,.1f} MB), and the pool "
            f"holds {pool.tokens:,} ({self.available_bytes / 1e6:,.1f} MB): {most} such sequences "
            "at most.",
        )


class KVPool:
    """All the KV memory that there is: the whole blocks that fit in `pool_bytes`, allocated once.

    A layer with a sliding window keeps every token here too, as in KVCache.
    """

    def __init__(self, model: Decoder, pool_bytes: float, block_size: int = 16) -> None:
        token_bytes = model.shape.kv_bytes_per_token(element_bytes(model.dtype))
        self.block_size = positive_int("block_size", block_size)
        blocks = int(positive_number("pool_bytes", pool_bytes) // (block_size * token_bytes))
        if not blocks:
            raise ValueError(
                f"A pool of {pool_bytes:,.0f} bytes holds no block: {block_size} tokens of this "
                f"model take {block_size * token_bytes:,} bytes."
            )
        self.tokens = blocks * block_size
        self.cache = KVCache(model.shape, 1, self.tokens, model.dtype, model.device)

    def slots(self, context: int) -> int:
        """Tokens that a sequence of `context` tokens occupies: whole blocks."""
        return -(-context // self.block_size) * self.block_size

    def take(self, batch: int, context: int) -> KVCache:
        """The pool as a cache of `batch` rows; PoolExhaustedError beyond what it holds."""
        asked = batch * self.slots(context)
        if asked > self.tokens:
            raise PoolExhaustedError(batch, context, asked, self)
        return self.cache.reshaped(batch, self.slots(context))


@dataclass(frozen=True, kw_only=True)
class Ceiling:
    """The largest `batch` of sequences of `context` tokens that ran a decode step.

    `message` is the error at `refused_at`. `pool_bytes` is what there was to take: the pool, or
    all that the device had free; `pool_tokens` is that in whole blocks.
    """

    context: int
    block_size: int
    batch: int
    refused_at: int
    pool_tokens: int
    pool_bytes: float
    message: str

    def as_dict(self) -> dict:
        """The fields as plain JSON values."""
        return asdict(self)


@dataclass(frozen=True, kw_only=True)
class Exhaustion:
    """`batch` sequences grew together until the pool refused their `refused_at`-th token.

    `tokens` is what each had by then, `steps` a timed decode step at the end of each block.
    """

    batch: int
    prompt_tokens: int
    tokens: int
    refused_at: int
    pool_tokens: int
    steps: tuple[StepTiming, ...]
    message: str

    def as_dict(self) -> dict:
        """The fields as plain JSON values."""
        return asdict(self)


def find_ceiling(
    model: Decoder, context: int, pool_bytes: float | None = None, block_size: int = 16
) -> Ceiling:
    """Run one real decode step at batch 1, 2, 4, ... until one is refused, then bisect.

    Without `pool_bytes` a GPU allocates until torch.OutOfMemoryError, and each batch gives its
    memory back. A CPU would swap instead of refusing: there `pool_bytes` is needed, or ValueError.
    """
    check_cell(model, 1, context)
    block_size = positive_int("block_size", block_size)
    if pool_bytes is None:
        take, pool_bytes = _unbounded(model, block_size)
        block_bytes = block_size * model.shape.kv_bytes_per_token(element_bytes(model.dtype))
        pool_tokens = pool_bytes // block_bytes * block_size
    else:
        pool = KVPool(model, pool_bytes, block_size)
        take, pool_tokens = pool.take, pool.tokens
    best, refused, message = 0, None, ""
    while refused is None or refused - best > 1:
        batch = max(1, 2 * best) if refused is None else (best + refused) // 2
        outcome = attempt(lambda batch=batch: _step(model, take(batch, context), context))
        if outcome.error is None:
            best = batch
        else:
            refused, message = batch, outcome.error
    return Ceiling(
        context=context,
        block_size=block_size,
        batch=best,
        refused_at=refused,
        pool_tokens=pool_tokens,
        pool_bytes=pool_bytes,
        message=message,
    )


def run_to_exhaustion(
    model: Decoder, batch: int, prompt_tokens: int, pool_bytes: float, block_size: int = 16
) -> Exhaustion:
    """Let `batch` sequences grow, a real decode step at the end of each block, until refused.

    Raises PoolExhaustedError where not even the prompts fit, and ValueError where the pool would
    outlast the model's context.
    """
    check_cell(model, batch, prompt_tokens)
    pool = KVPool(model, pool_bytes, block_size)
    check_cell(model, batch, max(prompt_tokens, pool.tokens // batch))
    steps: list[StepTiming] = []
    # The first token of a block asks for all of it; the step runs at its last.
    for token in itertools.count((prompt_tokens - 1) // block_size * block_size + 1, block_size):
        try:
            cache = pool.take(batch, token)
        except PoolExhaustedError as error:
            if not steps:
                raise
            return Exhaustion(
                batch=batch,
                prompt_tokens=prompt_tokens,
                tokens=token - 1,
                refused_at=token,
                pool_tokens=pool.tokens,
                steps=tuple(steps),
                message=str(error),
            )
        steps.append(_timed_step(model, cache))


def _unbounded(model: Decoder, block_size: int) -> tuple[Callable[[int, int], KVCache], int]:
    """Take what the device gives, and the bytes that it has free now."""
    if model.device.type != "cuda":
        raise ValueError(
            "Name pool_bytes: without a bound a CPU does not refuse, it swaps until it stands "
            "still or the kernel dies."
        )

    def take(batch: int, context: int) -> KVCache:
        length = -(-context // block_size) * block_size
        return KVCache(model.shape, batch, length, model.dtype, model.device, check_memory=False)

    release_memory()
    return take, available_bytes(model.device)


def _step(model: Decoder, cache: KVCache, context: int) -> None:
    """One decode step of every row; eager, since a CUDA graph would take memory of its own."""
    with torch.inference_mode():
        EagerForward(model, cache)([1] * cache.rows, [context - 1] * cache.rows, context)


def _timed_step(model: Decoder, cache: KVCache) -> StepTiming:
    run = lambda: _step(model, cache, cache.length)  # noqa: E731
    timing = timed(run, repeats=1, device=model.device)
    return StepTiming(
        batch=cache.rows, context=cache.length, seconds=timing.seconds, spread=timing.spread
    )
