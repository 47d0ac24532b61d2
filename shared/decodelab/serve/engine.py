"""Schedule, run, record: one forward a step for all that run, on any runner, by any policy.

The trace of steps is the only source of figures.
"""

from __future__ import annotations

import heapq
import itertools
import math
import time
import warnings
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import replace

from .allocator import BlockAllocator
from .clock import VirtualClock, WallClock
from .request import RefusedError, Request, Sequence
from .runner import Runner, Work
from .scheduler import Chunk, Plan, Scheduler, make_scheduler
from .trace import WAITING_SHOWN, Row, StepRecord


class Engine:
    """Serve requests on `runner` by `policy`: "static", "dynamic" or "continuous".

    `token_budget` bounds a continuous step, `window` (seconds) is the dynamic one's wait, and
    `allocator` is called with the runner's num_blocks and block_size; a Scheduler in place of a
    name brings its own of all these. `trace` has a record of every step, `sequences` every request
    by id: metrics come from these two.
    """

    def __init__(
        self,
        runner: Runner,
        policy: str | Scheduler = "continuous",
        max_batch: int = 8,
        token_budget: int = 256,
        *,
        window: float = 0.05,
        allocator: Callable[[int, int], BlockAllocator] = BlockAllocator,
    ) -> None:
        self.runner = runner
        if isinstance(policy, Scheduler):
            self.scheduler = policy
            _check_pool(policy.allocator, runner)
        else:
            blocks = allocator(runner.num_blocks, runner.block_size)
            self.scheduler = make_scheduler(policy, blocks, max_batch, token_budget, window)
        self.clock = WallClock() if runner.real_time else VirtualClock()
        self.trace: list[StepRecord] = []
        self.sequences: dict[Hashable, Sequence] = {}
        self.closed = False
        self._future: list[tuple[float, int, Sequence]] = []  # a heap: not yet arrived
        self._numbers, self._ids = itertools.count(), itertools.count()

    @property
    def now(self) -> float:
        """Seconds on the engine's clock."""
        return self.clock.now

    @property
    def unfinished(self) -> bool:
        """Whether any request is in flight."""
        return bool(self._future or self.scheduler.waiting or self.scheduler.running)

    def run(self, requests: Iterable[Request]) -> dict[Hashable, list[int]]:
        """Serve all to the end: new token ids by request id, none for a request that is refused.

        A refusal is a warning, and the others go on; `sequences[id].reason` repeats it.
        """
        ids = self._take(requests)
        while self.step():
            pass
        return {id: self.sequences[id].output for id in ids}

    def stream(self, requests: Iterable[Request]) -> Iterator[tuple[Hashable, int]]:
        """Serve all, yielding (id, token) as tokens are made; whoever stops listening cancels."""
        ids = set(self._take(requests))
        try:
            while record := self.step():
                yield from (pair for pair in record.emitted if pair[0] in ids)
        finally:
            for id in ids:
                self.cancel(id)

    def add(self, request: Request) -> Hashable:
        """Hand in one request, and get its id; RefusedError says why it can't be served."""
        sequence = self._enter(request, self.now)
        if sequence.status == "refused":
            raise RefusedError(sequence.reason)
        return sequence.id

    def refusal(self, request: Request) -> str:
        """Why this request can never be served, or nothing."""
        pool = self.scheduler.allocator
        name = "The request" if request.id is None else f"Request {request.id!r}"
        new = f"{len(request.prompt)} tokens and asks for {request.max_tokens} new ones"
        if self.closed:
            return f"{name} came after shutdown: make a new engine."
        for token in request.prompt:
            if not 0 <= token < self.runner.vocab:
                return (
                    f"{name} has token id {token}, outside 0 .. "
                    f"{self.runner.vocab - 1}: was it made by another model's tokenizer?"
                )
        limit = self.runner.max_context
        if limit is not None and len(request.prompt) + request.max_tokens > limit:
            return f"{name} has {new}: more than the {limit} of the model's context."
        needed = pool.blocks_for(Sequence(request).max_length)
        if needed > pool.num_blocks:
            return f"{name} has {new}: {needed} blocks of KV, and the pool has {pool.num_blocks}."
        return ""

    def cancel(self, id: Hashable) -> bool:
        """Stop a request and free its blocks; False if it isn't in flight."""
        sequence = self.sequences.get(id)
        if sequence is None or sequence.status not in ("waiting", "running"):
            return False
        future = [entry for entry in self._future if entry[-1] is not sequence]
        if len(future) < len(self._future):
            heapq.heapify(future)
            self._future, sequence.status = future, "cancelled"
        else:
            self.scheduler.cancel(sequence)
        return True

    def shutdown(self) -> None:
        """Cancel what is in flight, and refuse what comes later."""
        self.closed = True
        for id in self.sequences:
            self.cancel(id)

    def step(self) -> StepRecord | None:
        """Run the next step, passing over idle time before it; None when nothing is left."""
        while self.unfinished:
            self._receive()
            began, start = time.perf_counter(), self.now
            plan = self.scheduler.schedule(start, more_to_come=bool(self._future))
            for sequence in plan.refused:
                warnings.warn(sequence.reason, stacklevel=2)
            if plan.chunks:
                return self._execute(plan, began, start)
            if not plan.refused:
                self._wait()
        return None

    def _execute(self, plan: Plan, began: float, start: float) -> StepRecord:
        scheduler, pool = self.scheduler, self.scheduler.allocator
        rows = [
            Row(c.sequence.id, c.sequence.slot, c.kind, c.count, c.padding) for c in plan.chunks
        ]
        work = [self._work(chunk) for chunk in plan.chunks]
        blocks_used = pool.num_blocks - pool.free_blocks  # before those that finish free theirs
        called = time.perf_counter()
        result = self.runner.run(work)
        returned = time.perf_counter()
        self.clock.advance(result.seconds)
        now = self.now
        finished = scheduler.update(plan, result.tokens, now)
        emitted = [
            (chunk.sequence.id, token)
            for chunk, token in zip(plan.chunks, result.tokens, strict=True)
            if chunk.sample
        ]
        record = StepRecord(
            start=start,
            seconds=now - start,
            rows=tuple(rows),
            emitted=tuple(emitted),
            waiting=tuple(s.id for s in scheduler.waiting[:WAITING_SHOWN]),
            num_waiting=len(scheduler.waiting),
            preempted=tuple(s.id for s in plan.preempted),
            finished=tuple(s.id for s in finished),
            blocks_used=blocks_used,
            blocks_total=pool.num_blocks,
            scheduler_seconds=time.perf_counter() - began - (returned - called),
        )
        self.trace.append(record)
        return record

    def _wait(self) -> None:
        """Pass over the time until somebody arrives or a window ends."""
        arrival = self._future[0][0] if self._future else math.inf
        moment = min(arrival, self.scheduler.wake())
        if moment == math.inf:
            raise RuntimeError(
                "The scheduler plans no step, and nothing is to come that it awaits."
            )
        self.clock.skip_to(moment)

    def _work(self, chunk: Chunk) -> Work:
        sequence = chunk.sequence
        return Work(
            id=sequence.id,
            tokens=sequence.tokens[chunk.start : chunk.start + chunk.count],
            start=chunk.start,
            table=self.scheduler.allocator.table(sequence.id),
            sample=chunk.sample,
            sampling=sequence.request.sampling,
            output_index=len(sequence.token_times),
            padding=chunk.padding,
        )

    def _receive(self) -> None:
        """Queue what has arrived by now."""
        now = self.now
        while self._future and self._future[0][0] <= now:
            self.scheduler.add(heapq.heappop(self._future)[-1])

    def _take(self, requests: Iterable[Request]) -> list[Hashable]:
        """Hand in all at one moment; refusals become warnings."""
        now, ids = self.now, []
        for request in list(requests):  # all of them made, or none handed in
            sequence = self._enter(request, now)
            if sequence.status == "refused":
                warnings.warn(sequence.reason, stacklevel=3)
            if self.sequences[sequence.id] is sequence:  # not another's id
                ids.append(sequence.id)
        return ids

    def _enter(self, request: Request, now: float) -> Sequence:
        if request.id is None:
            request = replace(request, id=next(n for n in self._ids if n not in self.sequences))
        sequence = Sequence(request, now + request.arrival)
        known = self.sequences.get(sequence.id)
        if known and known.status in ("waiting", "running"):
            sequence.reason = f"Request id {sequence.id!r} is already in flight: choose another."
        else:
            self.sequences[sequence.id] = sequence
            sequence.reason = self.refusal(request)
        if sequence.reason:
            sequence.status = "refused"
        else:
            heapq.heappush(self._future, (sequence.arrival, next(self._numbers), sequence))
        return sequence


def _check_pool(pool: BlockAllocator, runner: Runner) -> None:
    if pool.num_blocks > runner.num_blocks or pool.block_size != runner.block_size:
        raise ValueError(
            f"The scheduler hands out {pool.num_blocks} blocks of {pool.block_size} tokens, and "
            f"the runner has {runner.num_blocks} of {runner.block_size}: make both alike."
        )
