"""Between engine and event loop: what a call is given token by token, and what may go wrong."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from typing import NamedTuple

from .request import Request, Sequence


class QueueFullError(RuntimeError):
    """As many requests are in flight as the server takes: try again later."""


class ShutdownError(RuntimeError):
    """The server is shutting down, and takes or finishes no more requests."""


class EngineFailedError(RuntimeError):
    """A step failed, and with it the requests in flight."""


class Delta(NamedTuple):
    """New tokens of request number `index`; with its last, `finish` is "eos" or "length"."""

    index: int
    tokens: list[int]
    finish: str


@dataclass(eq=False, kw_only=True)
class Ticket:
    """One request's way through the server; times in seconds of time.perf_counter.

    `submitted` is when it was handed in, `started` when its first step began, `first` and `last`
    when its first and its latest token were there. `cached` prompt tokens weren't computed, since
    another request had. `finish` becomes "eos", "length", "stop", "abort" or "error".
    """

    request: Request
    index: int
    stream: TokenStream = field(repr=False)
    sequence: Sequence | None = field(default=None, repr=False)
    submitted: float
    started: float | None = None
    first: float | None = None
    last: float | None = None
    cached: int = 0
    finish: str = ""


class News(NamedTuple):
    """A token of a request, or its end, on the way from the engine's thread to the event loop."""

    ticket: Ticket
    token: int | None = None
    finish: str = ""
    error: Exception | None = None


class TokenStream:
    """What requests handed in together are given: `async for index, tokens, finish in stream`.

    A reader who is late gets all tokens that were made meanwhile in one piece. Raises RefusedError,
    EngineFailedError or ShutdownError where it can't go on. Whoever stops reading must `cancel`.
    """

    def __init__(
        self, requests: SequenceOf[Request], cancel: Callable[[Ticket, str], None]
    ) -> None:
        now = time.perf_counter()
        self.tickets = [
            Ticket(request=request, index=index, stream=self, submitted=now)
            for index, request in enumerate(requests)
        ]
        self._cancel = cancel
        self._open = set(self.tickets)  # whose last token hasn't been read
        self._tokens: dict[Ticket, list[int]] = {}
        self._finish: dict[Ticket, str] = {}
        self._error: Exception | None = None
        self._news = asyncio.Event()

    def __aiter__(self) -> TokenStream:
        return self

    async def __anext__(self) -> Delta:
        while self._open:
            if self._error:
                raise self._error
            if self._tokens:
                ticket = next(iter(self._tokens))
                finish = self._finish.get(ticket, "")
                if finish:
                    self._open.remove(ticket)
                return Delta(ticket.index, self._tokens.pop(ticket), finish)
            self._news.clear()
            await self._news.wait()
        raise StopAsyncIteration

    def cancel(self, index: int | None = None, finish: str = "abort") -> None:
        """Stop request number `index`, or all, and free their blocks; the ended are left alone.

        `finish` is what the metrics call it: "abort", or "stop" at a stop string.
        """
        for ticket in self.tickets if index is None else [self.tickets[index]]:
            if ticket in self._open:
                self._open.remove(ticket)
                self._tokens.pop(ticket, None)
                self._cancel(ticket, finish)

    def put(self, news: News) -> None:
        """Hear from the engine; on the event loop."""
        if news.ticket in self._open:
            tokens = self._tokens.setdefault(news.ticket, [])
            if news.token is not None:
                tokens.append(news.token)
            if news.finish:
                self._finish[news.ticket] = news.finish
            self._error = self._error or news.error
            self._news.set()
