"""What the engine records of each step: the only source of figures and of metrics."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import NamedTuple

WAITING_SHOWN = 32  # ids of the queue that a record holds, lest a long queue fill the memory


class Row(NamedTuple):
    """One row of a step: `kind` is "prefill", "decode" or "padding" (done, waits for its batch).

    `tokens` are real ones, `padding` were computed beside them and thrown away.
    """

    id: Hashable
    slot: int
    kind: str
    tokens: int
    padding: int


@dataclass(frozen=True, kw_only=True, slots=True)
class StepRecord:
    """One step: who ran and how much, who waited, what the pool held. Times in seconds.

    `waiting` shows the head of the queue, WAITING_SHOWN ids at most; `num_waiting` counts all.
    `blocks_used` is while the step ran; `emitted` holds (id, token).
    """

    start: float
    seconds: float
    rows: tuple[Row, ...]
    emitted: tuple[tuple[Hashable, int], ...]
    waiting: tuple[Hashable, ...]
    num_waiting: int
    preempted: tuple[Hashable, ...]
    finished: tuple[Hashable, ...]
    blocks_used: int
    blocks_total: int
    scheduler_seconds: float

    @property
    def end(self) -> float:
        """When the step's tokens were there."""
        return self.start + self.seconds

    @property
    def prompt_tokens(self) -> int:
        """Tokens prefilled, recomputed ones included."""
        return sum(row.tokens for row in self.rows if row.kind == "prefill")

    @property
    def decode_tokens(self) -> int:
        """Tokens decoded, one a row."""
        return sum(row.tokens for row in self.rows if row.kind == "decode")

    @property
    def padded_tokens(self) -> int:
        """Tokens computed and thrown away."""
        return sum(row.padding for row in self.rows)
