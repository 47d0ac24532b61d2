"""Who runs in the next step: static, dynamic and continuous batching behind one interface.

`schedule` turns queue, running sequences and free blocks into a Plan; `update` takes the tokens
that came of it. No clock, no model: times and tokens are handed in.
"""

from __future__ import annotations

import itertools
import math
from bisect import insort
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

from decodelab.predict.checks import positive_int, positive_number

from .allocator import BlockAllocator
from .request import Sequence


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """`count` tokens of a sequence from position `start` on, fed in one step; then `sample` one?

    `kind` is "prefill", "decode", or "padding": done, and waiting for the rest of its batch.
    `padding` tokens more are computed and thrown away.
    """

    sequence: Sequence
    start: int
    count: int
    sample: bool
    kind: str
    padding: int = 0


@dataclass(frozen=True, kw_only=True)
class Plan:
    """One step: who computes what, and who was preempted or refused on the way."""

    chunks: tuple[Chunk, ...] = ()
    preempted: tuple[Sequence, ...] = ()
    refused: tuple[Sequence, ...] = ()


class Scheduler:
    """What all policies share: a queue, a batch of at most `max_batch` sequences, and blocks.

    `waiting` and `running` are in order of arrival; nobody overtakes. A policy adds `schedule`.
    """

    def __init__(self, allocator: BlockAllocator, max_batch: int = 8) -> None:
        self.allocator = allocator
        self.max_batch = positive_int("max_batch", max_batch)
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self._numbers = itertools.count()

    def schedule(self, now: float, more_to_come: bool = False) -> Plan:
        """Decide the step that starts `now`; `more_to_come`: requests are known to arrive later."""
        raise NotImplementedError

    def wake(self) -> float:
        """After a plan without chunks: when to ask again, though nobody arrives."""
        return math.inf

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence that has arrived."""
        sequence.number = next(self._numbers)
        insort(self.waiting, sequence, key=_order)

    def cancel(self, sequence: Sequence) -> None:
        """Drop a sequence, waiting or running, between two steps."""
        if sequence.status == "waiting":
            self.waiting.remove(sequence)
        sequence.status = "cancelled"
        self.retire()

    def update(self, plan: Plan, tokens: SequenceOf[int | None], now: float) -> list[Sequence]:
        """Take the token of each chunk, made by time `now`; returns the sequences that finished."""
        sampled = [chunk.sequence for chunk in plan.chunks if chunk.sample]
        for chunk, token in zip(plan.chunks, tokens, strict=True):
            sequence = chunk.sequence
            sequence.computed += chunk.count
            self.allocator.publish(sequence.id, sequence.tokens, sequence.computed)
            if chunk.sample:
                sequence.append(token, now)
        self.retire()
        return [sequence for sequence in sampled if sequence.status == "finished"]

    def retire(self) -> None:
        """Take those that are done out of the batch, and free their blocks."""
        for sequence in [s for s in self.running if s.status != "running"]:
            self._remove(sequence)

    def admit(self, sequence: Sequence, reserve: bool = False) -> bool:
        """Move a waiting sequence into the batch, where it has a place and blocks for its tokens.

        With `reserve`, blocks for all that it may come to hold.
        """
        if len(self.running) == self.max_batch:
            return False
        blocks = self.allocator
        computed = blocks.admit(sequence.id, sequence.tokens, sequence.max_length)
        if computed is None:
            return False
        if reserve and not blocks.grow(sequence.id, sequence.max_length):
            blocks.free(sequence.id)
            return False
        taken = {other.slot for other in self.running}
        sequence.slot = next(row for row in range(self.max_batch) if row not in taken)
        sequence.status, sequence.computed = "running", computed
        self.waiting.remove(sequence)
        insort(self.running, sequence, key=_order)
        return True

    def refuse(self, sequence: Sequence) -> None:
        """Give up on a sequence that finds no room although it has the pool to itself."""
        pool = self.allocator
        sequence.reason = (
            f"Request {sequence.id!r} holds {len(sequence.tokens)} tokens, and a pool of "
            f"{pool.num_blocks} blocks of {pool.block_size} has no room for it even when empty: "
            "take a larger pool or a shorter request."
        )
        if sequence.status == "waiting":
            self.waiting.remove(sequence)
        sequence.status = "refused"
        self.retire()

    def _remove(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self.allocator.free(sequence.id)
        sequence.slot = None


def _order(sequence: Sequence) -> tuple[float, int]:
    return sequence.arrival, sequence.number


def last_come(running: list[Sequence]) -> Sequence:
    """Last come, first preempted: the oldest always goes on, so nobody starves."""
    return running[-1]


class ContinuousScheduler(Scheduler):
    """Iteration level: every step is a batch of its own, of at most `token_budget` tokens.

    All that decode get their token; prompts are prefilled in chunks of what is left. `victim`
    chooses among the running whom to preempt when blocks run out.
    """

    def __init__(
        self,
        allocator: BlockAllocator,
        max_batch: int = 8,
        token_budget: int = 256,
        victim: Callable[[list[Sequence]], Sequence] = last_come,
    ) -> None:
        # A sequence needs a token a step, so there are never more of them than tokens.
        super().__init__(allocator, min(max_batch, positive_int("token_budget", token_budget)))
        self.token_budget = token_budget
        self.victim = victim

    def schedule(self, now: float, more_to_come: bool = False) -> Plan:
        """Decodes first, then prefills, oldest first; then newcomers, unless blocks ran out."""
        counts: dict[Sequence, int] = {}
        out: list[Sequence] = []  # preempted or refused

        def budget() -> int:
            return self.token_budget - sum(counts.values())

        for sequence in sorted(self.running, key=lambda s: not s.decoding):
            if sequence.status == "running":  # and not preempted for an earlier one
                count = min(sequence.remaining, budget())
                counts[sequence] = count
                out += self._make_room(sequence, sequence.computed + count)
                for victim in out:
                    counts.pop(victim, None)
        while self.waiting and not out and budget() and self.admit(newcomer := self.waiting[0]):
            counts[newcomer] = min(newcomer.remaining, budget())
        if self.waiting and not out and not counts:
            out = [self.waiting[0]]
            self.refuse(self.waiting[0])
        return Plan(
            chunks=tuple(_chunk(s, count) for s, count in counts.items() if count),
            preempted=tuple(s for s in out if s.status == "waiting"),
            refused=tuple(s for s in out if s.status == "refused"),
        )

    def _make_room(self, sequence: Sequence, length: int) -> list[Sequence]:
        """Grow to `length` tokens; returns who had to leave for it, perhaps itself."""
        out: list[Sequence] = []
        while sequence not in out and not self.allocator.grow(sequence.id, length):
            if len(self.running) == 1:
                self.refuse(sequence)
                out.append(sequence)
            else:
                out.append(self.preempt(self.victim(self.running)))
        return out

    def preempt(self, sequence: Sequence) -> Sequence:
        """Back to the queue: KV is dropped, to be recomputed; the tokens emitted are kept."""
        self._remove(sequence)
        sequence.status, sequence.computed = "waiting", 0
        sequence.preemptions += 1
        insort(self.waiting, sequence, key=_order)
        return sequence


class BatchScheduler(Scheduler):
    """Request level: a batch is formed, padded to its longest, and kept until its last is done.

    All that a request may come to hold is reserved when its batch forms: none is preempted. The
    prompts are prefilled in one step.
    """

    def ready(self, now: float, more_to_come: bool) -> bool:
        """Whether the queue, not empty, may now become a batch."""
        raise NotImplementedError

    def schedule(self, now: float, more_to_come: bool = False) -> Plan:
        """The whole batch, done or not; a new one only when there is none."""
        if not self.running and self.waiting and self.ready(now, more_to_come):
            while self.waiting and self.admit(self.waiting[0], reserve=True):
                pass
            if not self.running:
                self.refuse(refused := self.waiting[0])
                return Plan(refused=(refused,))
        counts = [s.remaining if s.status == "running" else 0 for s in self.running]
        longest = max(counts, default=0)
        return Plan(
            chunks=tuple(
                _chunk(s, count, longest - count)
                for s, count in zip(self.running, counts, strict=True)
            )
        )

    def retire(self) -> None:
        """Nobody leaves before the last is done."""
        if all(sequence.status != "running" for sequence in self.running):
            super().retire()


class StaticScheduler(BatchScheduler):
    """A batch forms when it's full, or when no more requests are to come."""

    def ready(self, now: float, more_to_come: bool) -> bool:
        """Full, or nothing to wait for."""
        return len(self.waiting) >= self.max_batch or not more_to_come


class DynamicScheduler(BatchScheduler):
    """A batch forms when it's full, or `window` seconds after its first request arrived."""

    def __init__(self, allocator: BlockAllocator, max_batch: int = 8, window: float = 0.05) -> None:
        super().__init__(allocator, max_batch)
        self.window = window if window == 0 else positive_number("window", window)

    def ready(self, now: float, more_to_come: bool) -> bool:
        """Full, or the first has waited long enough; what is to come isn't known."""
        return len(self.waiting) >= self.max_batch or now >= self.wake()

    def wake(self) -> float:
        """The end of the window."""
        return self.waiting[0].arrival + self.window if self.waiting else math.inf


def _chunk(sequence: Sequence, count: int, padding: int = 0) -> Chunk:
    kind = "decode" if sequence.decoding else "prefill"
    return Chunk(
        sequence=sequence,
        start=sequence.computed,
        count=count,
        sample=count > 0 and count == sequence.remaining,
        kind=kind if count else "padding",
        padding=padding,
    )


POLICIES = ("static", "dynamic", "continuous")


def make_scheduler(
    policy: str, allocator: BlockAllocator, max_batch: int, token_budget: int, window: float
) -> Scheduler:
    """The scheduler of a policy's name; ValueError lists the names."""
    if policy == "static":
        return StaticScheduler(allocator, max_batch)
    if policy == "dynamic":
        return DynamicScheduler(allocator, max_batch, window)
    if policy == "continuous":
        return ContinuousScheduler(allocator, max_batch, token_budget)
    raise ValueError(f"No policy {policy!r}. Policies: {', '.join(POLICIES)}, or a Scheduler.")
