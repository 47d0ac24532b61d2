"""What computes a step: the interface, and a runner whose clock is the roofline.

`measure.ModelRunner` is the other one: real forwards, a real clock. The engine can't tell.
"""

from __future__ import annotations

import zlib
from array import array
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from decodelab.predict import Deployment, Hardware, MixedStep, ModelShape
from decodelab.predict.checks import positive_int

from .allocator import slot_mapping
from .request import GREEDY, Sampling


@dataclass(frozen=True, kw_only=True)
class Work:
    """One row of a forward: `tokens` at positions start, start + 1, ... of the sequence `id`.

    `table` is its block table (read-only), long enough for them. `sample` asks for the token after
    the last one, which is number `output_index` of its output. `padding` more tokens, of any id,
    are computed behind the real ones and kept nowhere; a row without `tokens` is padding alone.
    """

    id: Hashable
    tokens: Sequence[int]
    start: int
    table: Sequence[int]
    sample: bool
    sampling: Sampling = GREEDY
    output_index: int = 0
    padding: int = 0


class Result(NamedTuple):
    """A token per row, None where none was to be sampled, and the seconds that the step took."""

    tokens: list[int | None]
    seconds: float


class Runner(Protocol):
    """Keeps KV in `num_blocks` blocks of `block_size` slots, and runs one forward for all rows.

    `max_context` is None where there is no limit. With `real_time` the engine reads a wall clock;
    without, its clock is the sum of `seconds`.
    """

    num_blocks: int
    block_size: int
    max_context: int | None
    vocab: int
    real_time: bool

    def run(self, work: Sequence[Work]) -> Result:
        """One step: write KV of every row's tokens, then read each row's past through its table."""
        ...


class RooflineRunner:
    """A virtual clock: a step takes what the roofline says it must, plus `overhead_seconds`.

    Its "KV" of a token is the token's id, and the next token a hash of all ids that it reads
    through the block table: a wrong slot or a lost token changes what comes out. Without
    `num_blocks`, the pool is what vLLM's 0.9 of the device leaves beside the weights.
    """

    real_time = False

    def __init__(
        self,
        shape: ModelShape,
        hardware: Hardware,
        num_blocks: int | None = None,
        block_size: int = 16,
        *,
        weight_format: str = "bf16",
        kv_format: str = "bf16",
        dtype: str = "bf16",
        overhead_seconds: float = 0.0,
    ) -> None:
        self.deployment = Deployment(
            shape=shape,
            hardware=hardware,
            weight_format=weight_format,
            kv_format=kv_format,
            block_size=block_size,
            dtype=dtype,
        )
        self._step = MixedStep(self.deployment)
        self.block_size = block_size
        if num_blocks is None:
            num_blocks = self.deployment.tokens // block_size
        self.num_blocks = positive_int("num_blocks", num_blocks)
        self.max_context, self.vocab = shape.max_context, shape.vocab
        self.overhead_seconds = overhead_seconds
        self._ids = array("i", [-1]) * (self.num_blocks * block_size)  # slot -> token id

    def run(self, work: Sequence[Work]) -> Result:
        """Tokens at once, seconds from `step_seconds`."""
        for row in work:
            stop = row.start + len(row.tokens)
            slots = slot_mapping(row.table, self.block_size, row.start, stop)
            for slot, token in zip(slots, row.tokens, strict=True):
                self._ids[slot] = token
        tokens = [self._next_token(row) if row.sample else None for row in work]
        return Result(tokens, self.step_seconds(work))

    def step_seconds(self, work: Sequence[Work]) -> float:
        """The roofline of any mix of prefill and decode; padding costs what real tokens cost."""
        rows = ((row.start, len(row.tokens) + row.padding) for row in work)
        return self._step.seconds(rows) + self.overhead_seconds

    def _next_token(self, row: Work) -> int:
        """A CRC of the ids that the row's context holds; sampled ones depend on the seed too."""
        greedy = row.sampling.temperature == 0
        code = 0 if greedy else zlib.crc32(f"{row.sampling.seed} {row.output_index}".encode())
        context, ids = row.start + len(row.tokens), memoryview(self._ids)
        for index, start in enumerate(range(0, context, self.block_size)):
            first = row.table[index] * self.block_size
            code = zlib.crc32(ids[first : first + min(self.block_size, context - start)], code)
        return code % self.vocab
