"""Load any OpenAI-compatible endpoint as its users would, and note when each token came.

Needs the extra `serve`; works in a notebook too. In an open loop users come when they come; in a
closed loop each waits for the last answer, and so hides the queue that he would have met.
"""

from __future__ import annotations

import asyncio
import time
import warnings
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import date
from statistics import fmean

from tqdm.auto import tqdm

from decodelab.predict.checks import positive_int

from . import scrape
from .client import Client, Exchange, apart, ask, connect, record
from .load_result import LoadResult, Record, knee
from .metrics import SLO
from .request import Request

__all__ = [
    "SLO",
    "Client",
    "LoadResult",
    "Record",
    "closed_loop",
    "connect",
    "knee",
    "open_loop",
    "sweep",
]

Send = Callable[[Request, float], Awaitable[None]]  # a request, and when it's due
Answer = tuple[Request, float, Exchange]
WARM_TOKENS = 4
BUSY, LATE = 0.7, 0.05  # of a core; seconds at p99: beyond, the client shapes what it measures
SETTLE = 1.0  # seconds for the server's counters to follow


def open_loop(
    to: str | Client,
    requests: Iterable[Request],
    *,
    warmup: int = 2,
    progress: bool | Callable[[int], object] = True,
    about: Mapping[str, str] | None = None,
) -> LoadResult:
    """Send each request when it's due, its `arrival` after the start, whatever became of others.

    `to`: an URL, or what `connect` returns. `warmup` short requests go before, and don't count.
    `progress` may be a function of the number of answers, to be called some times a second.
    What fails is a record with its error; a server that takes no request at all is a
    ConnectionError before the test.
    """
    requests = sorted(requests, key=lambda request: request.arrival)

    async def arrive(send: Send) -> None:
        start = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            for request in requests:
                due = start + request.arrival
                await asyncio.sleep(max(0.0, due - time.perf_counter()))
                group.create_task(send(request, due))

    span = requests[-1].arrival - requests[0].arrival if requests else 0.0
    found = _load(to, requests, arrive, "open loop", warmup, progress, about)
    return replace(found, rate=(len(requests) - 1) / span if span else None)


def closed_loop(
    to: str | Client,
    requests: Iterable[Request],
    concurrency: int,
    *,
    warmup: int = 2,
    progress: bool | Callable[[int], object] = True,
    about: Mapping[str, str] | None = None,
) -> LoadResult:
    """`concurrency` users share `requests`: each sends the next when the last is answered.

    A request is due when its user is free; its `arrival` doesn't matter. The rest is as in
    `open_loop`.
    """
    requests = list(requests)
    users = positive_int("concurrency", concurrency)
    found = _load(to, requests, _users(requests, users), "closed loop", warmup, progress, about)
    return replace(found, concurrency=users)


def sweep(
    to: str | Client,
    workload: Callable[[float], Iterable[Request]],
    rates: Iterable[float],
    **options: object,
) -> list[LoadResult]:
    """An open loop at each of `rates`, requests per second, one after the other.

    `workload` makes the requests of a rate: `lambda rate: poisson(rate, lengths, 60)`. `options`
    are those of `open_loop`.
    """
    client = connect(to) if isinstance(to, str) else to
    return [open_loop(client, workload(rate), **options) for rate in rates]


def _users(requests: Iterable[Request], concurrency: int) -> Callable[[Send], Awaitable[None]]:
    async def arrive(send: Send) -> None:
        queue = iter(requests)

        async def user() -> None:
            for request in queue:  # all users take from one
                await send(request, time.perf_counter())

        async with asyncio.TaskGroup() as group:
            for _ in range(concurrency):
                group.create_task(user())

    return arrive


def _load(
    to: str | Client,
    requests: Sequence[Request],
    arrive: Callable[[Send], Awaitable[None]],
    kind: str,
    warmup: int,
    progress: bool | Callable[[int], object],
    about: Mapping[str, str] | None,
) -> LoadResult:
    """Connect, warm up, read the server's counters, run, and read them again."""
    if not requests:
        raise ValueError("There are no requests to send.")
    client = connect(to) if isinstance(to, str) else to
    warm = [
        Request(request.prompt[::-1], min(WARM_TOKENS, request.max_tokens))  # not in a prefix cache
        for request in requests[:warmup]
    ]
    apart(_run(client, warm, _users(warm, max(1, warmup)), []))
    before = _scrape(client)
    answers: list[Answer] = []
    bar = tqdm(total=len(requests), unit="request", leave=False, disable=progress is not True)
    with bar:
        tell = progress if callable(progress) else lambda count: bar.update(count - bar.n)
        test = _run(client, requests, arrive, answers)
        seconds, cpu = apart(test, lambda: tell(len(answers)))
    start = min(due for _, due, _ in answers)
    records = tuple(
        record(request, due, exchange, start)
        for request, due, exchange in sorted(answers, key=lambda answer: answer[1])
    )
    found = LoadResult(
        kind=kind,
        records=records,
        seconds=max(exchange.end for _, _, exchange in answers) - start,
        cpu_share=cpu / seconds,
        server=_growth(client, before, records),
        about=_about(client, requests) | dict(about or {}),
    )
    _doubt(found)
    return found


async def _run(
    client: Client,
    requests: Sequence[Request],
    arrive: Callable[[Send], Awaitable[None]],
    answers: list[Answer],
) -> tuple[float, float]:
    """Fill `answers`; wall seconds, and CPU seconds of this thread, which does nothing else."""
    bodies = {id(request): client.body(request) for request in requests}
    async with client.session() as session:

        async def send(request: Request, due: float) -> None:
            exchange = await ask(session, client, bodies[id(request)])
            answers.append((request, due, exchange))

        wall, cpu = time.perf_counter(), time.thread_time()
        await arrive(send)
        return time.perf_counter() - wall, time.thread_time() - cpu


def _scrape(client: Client) -> scrape.Scrape:
    try:
        return scrape.parse(scrape.fetch(client.url))
    except ValueError:  # a page of that name which isn't Prometheus text
        return scrape.parse("")


def _growth(client: Client, before: scrape.Scrape, records: Iterable[Record]) -> dict[str, float]:
    """How the server's counters grew, once they have caught up with the last answer."""
    finished = sum(record.status == "finished" for record in records)
    deadline = time.monotonic() + SETTLE
    while True:
        growth = scrape.difference(before, _scrape(client))
        counted = growth.get(f"{scrape.E2E}_count", finished)
        if counted >= finished or time.monotonic() > deadline:
            break
        time.sleep(0.05)
    if counted != finished:
        warnings.warn(
            f"{client.url} counts {counted:.0f} finished requests and this client {finished}: "
            "someone else uses it too, or some were given up. Its means are over all of them.",
            stacklevel=4,
        )
    return {name: value for name, value in growth.items() if "_bucket" not in name and value}


def _about(client: Client, requests: Sequence[Request]) -> dict[str, str]:
    prompts = fmean(len(request.prompt) for request in requests)
    outputs = fmean(request.max_tokens for request in requests)
    return {
        "engine": client.engine,
        "version": client.version,
        "model": client.model,
        "url": client.url,
        "prompts": client.dialect,
        "date": date.today().isoformat(),
        "workload": f"{len(requests)} requests, means {prompts:.0f} in, {outputs:.0f} out",
    }


def _doubt(found: LoadResult) -> None:
    """Say so when the client, not the server, may be what was measured."""
    if found.cpu_share > BUSY or found.lag.percentile(99) > LATE:
        warnings.warn(
            f"The client used {found.cpu_share:.0%} of a core and sent requests up to "
            f"{found.lag.percentile(100) * 1e3:.0f} ms late: it may be the bottleneck. Give it a "
            "core of its own, or a lower rate.",
            stacklevel=4,
        )
