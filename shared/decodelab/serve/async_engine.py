"""The engine for many clients at once: one thread steps it, an event loop hands in and reads.

The loop never touches the engine, and the thread never waits for the loop: commands go one way
between two steps, tokens the other way after each. Standard library only.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable
from collections.abc import Sequence as SequenceOf
from contextlib import suppress
from typing import Protocol

from .engine import Engine
from .request import RefusedError, Request
from .token_stream import (
    EngineFailedError,
    News,
    QueueFullError,
    ShutdownError,
    Ticket,
    TokenStream,
)
from .trace import StepRecord

LOG = logging.getLogger(__name__)
STEPS_KEPT = 1000  # of the engine's trace, lest a server that runs for months fill the memory
STUCK_SECONDS = 60.0  # a step that takes longer isn't awaited at shutdown


class Observer(Protocol):
    """Who wants to hear what happens; called on the engine's thread."""

    def step(self, record: StepRecord) -> None:
        """A step is done."""

    def token(self, ticket: Ticket, now: float) -> None:
        """A token is there; `ticket.last` is still the one before."""

    def end(self, ticket: Ticket) -> None:
        """A request has ended, as `ticket.finish` says."""


class AsyncEngine:
    """Serve concurrent clients from `engine`, which nobody else may touch from `start` on.

    At most `capacity`, the engine's max_batch and `max_waiting` more, are in flight. `failure` is
    what went wrong in the latest step, or None: it ends the requests in flight, not the engine.
    """

    def __init__(
        self, engine: Engine, *, max_waiting: int = 256, observer: Observer | None = None
    ) -> None:
        self.engine, self.observer = engine, observer
        self.capacity = engine.scheduler.max_batch + max_waiting
        self.closing = False
        self.failure: Exception | None = None
        self.over: Exception | None = None  # why nothing is served any more
        self._loop: asyncio.AbstractEventLoop | None = None
        self._flying: set[Ticket] = set()  # the loop's
        self._idle = asyncio.Event()  # nobody is in flight
        self._idle.set()
        self._tickets: dict[Hashable, Ticket] = {}  # the thread's, by the engine's ids
        self._inbox: deque[Callable[[], None]] = deque()
        self._condition = threading.Condition()  # the inbox has something, or there is to stop
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    @property
    def context(self) -> int:
        """Tokens that a prompt and its output may have together: by the model and by the pool."""
        pool = self.engine.scheduler.allocator
        slots = pool.num_blocks * pool.block_size + 1  # the last token needs no KV
        return min(slots, self.engine.runner.max_context or slots)

    @property
    def in_flight(self) -> int:
        """Requests that have been handed in and haven't ended."""
        return len(self._flying)

    @property
    def waiting(self) -> int:
        """Requests in flight that aren't in the batch: not yet, or preempted."""
        return max(0, self.in_flight - len(self.engine.scheduler.running))

    @property
    def healthy(self) -> bool:
        """Whether requests are taken, and the latest step went well."""
        return not (self.closing or self.over or self.failure)

    async def start(self) -> None:
        """Start the thread; tokens are delivered to the loop that calls this."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    def submit(self, requests: SequenceOf[Request]) -> TokenStream:
        """Hand in all or none, on the event loop; the engine chooses their ids.

        Raises RefusedError on one that can never be served, and what `check_room` raises.
        """
        self.check_room(len(requests))
        for request in requests:
            if reason := self.engine.refusal(request):
                raise RefusedError(reason)
        stream = TokenStream(requests, self._cancel)
        self._flying.update(stream.tickets)
        self._idle.clear()
        self._post(lambda: self._enter(stream.tickets))
        return stream

    async def shutdown(self, drain_seconds: float = 0.0) -> None:
        """Refuse newcomers, give those in flight so long to finish, then end them and the thread.

        May be called again, also while another call waits.
        """
        self.closing = True
        if not self._thread.is_alive():
            return
        with suppress(TimeoutError):
            await asyncio.wait_for(self._idle.wait(), drain_seconds)
        self._post(self._stop)
        await asyncio.to_thread(self._thread.join, STUCK_SECONDS)

    def check_room(self, count: int) -> None:
        """Whether `count` more requests would be taken now.

        Raises QueueFullError, RefusedError where they are too many even for an empty queue,
        ShutdownError, or EngineFailedError when the engine is beyond repair.
        """
        if self.closing:
            raise ShutdownError("The server is shutting down: send the request elsewhere.")
        if self.over:
            raise EngineFailedError(str(self.over))  # a new one: a traceback only grows
        if count > self.capacity:
            raise RefusedError(
                f"{count} prompts at once are more than the {self.capacity} that this server "
                "takes: send them in several requests."
            )
        if self.in_flight + count > self.capacity:
            raise QueueFullError(
                f"{self.in_flight} requests are in flight, and this server takes {self.capacity}: "
                "try again later."
            )

    def _post(self, command: Callable[[], None]) -> None:
        with self._condition:
            self._inbox.append(command)
            self._condition.notify()

    def _cancel(self, ticket: Ticket, finish: str) -> None:
        self._post(lambda: self._drop(ticket, finish))

    def _deliver(self, news: list[News]) -> None:
        for item in news:
            item.ticket.stream.put(item)
            if item.finish:
                self._flying.discard(item.ticket)
        if not self._flying:
            self._idle.set()

    def _end_all(self, error: Exception) -> None:
        self.over = error
        self._deliver([News(ticket, finish="error", error=error) for ticket in self._flying])

    # From here on, on the engine's thread.

    def _run(self) -> None:
        error: Exception = ShutdownError("The server is shutting down: send the request again.")
        try:
            while not self._stopping:
                self._turn()
            self._abandon(error)
        except Exception as failure:  # not a step, which may fail, but the accounts of it
            LOG.exception("The engine is beyond repair.")
            self.failure, error = failure, EngineFailedError(f"The engine failed: {failure!r}.")
        with suppress(RuntimeError):  # the loop is gone, and so are those who listened
            self._loop.call_soon_threadsafe(self._end_all, error)

    def _turn(self) -> None:
        """Obey what has been asked, and step if there is work; sleep until there is either."""
        with self._condition:
            self._condition.wait_for(lambda: self._inbox or self.engine.unfinished)
        while self._inbox:
            self._inbox.popleft()()
        if not self.engine.unfinished:
            return
        began = time.perf_counter()
        try:
            record = self.engine.step()
        except Exception as failure:
            LOG.exception("A step failed.")
            self.failure = failure
            self._abandon(EngineFailedError(f"The engine failed: {failure!r}."))
        else:
            self.failure = None
            self._report(record, began, time.perf_counter())

    def _report(self, record: StepRecord | None, began: float, now: float) -> None:
        """Tell the streams what a step made; `record` is None where it only refused."""
        news = []
        for row in record.rows if record else ():
            ticket = self._tickets.get(row.id)  # None: done, and padding for its batch
            if ticket and ticket.started is None:
                ticket.started, ticket.cached = began, ticket.sequence.computed - row.tokens
        for id, token in record.emitted if record else ():
            ticket = self._tickets[id]
            if self.observer:
                self.observer.token(ticket, now)
            ticket.first, ticket.last = now if ticket.first is None else ticket.first, now
            news.append(News(ticket, token))
        if self.observer and record:
            self.observer.step(record)
        for id, ticket in list(self._tickets.items()):
            sequence = ticket.sequence
            if sequence.status == "finished":
                news.append(self._end(id, sequence.reason))
            elif sequence.status == "refused":
                news.append(self._end(id, "error", RefusedError(sequence.reason)))
        del self.engine.trace[:-STEPS_KEPT]
        self._send(news)

    def _enter(self, tickets: list[Ticket]) -> None:
        for ticket in tickets:
            id = self.engine.add(ticket.request)
            ticket.sequence = self.engine.sequences[id]
            self._tickets[id] = ticket

    def _drop(self, ticket: Ticket, finish: str) -> None:
        if ticket.sequence and not ticket.finish:
            self.engine.cancel(ticket.sequence.id)
            self._send([self._end(ticket.sequence.id, finish)])

    def _stop(self) -> None:
        self._stopping = True

    def _abandon(self, error: Exception) -> None:
        """End all that are in flight with an error, their blocks freed."""
        for id in self._tickets:
            self.engine.cancel(id)
        self._send([self._end(id, "error", error) for id in list(self._tickets)])

    def _end(self, id: Hashable, finish: str, error: Exception | None = None) -> News:
        """Forget a request that has ended, here and in the engine."""
        ticket = self._tickets.pop(id)
        self.engine.sequences.pop(id)
        ticket.finish = finish
        if self.observer:
            self.observer.end(ticket)
        return News(ticket, finish=finish, error=error)

    def _send(self, news: list[News]) -> None:
        try:
            self._loop.call_soon_threadsafe(self._deliver, news)
        except RuntimeError:  # the loop is closed, and nobody listens any more
            self._stopping = True
