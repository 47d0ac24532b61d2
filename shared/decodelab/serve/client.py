"""The wire to an OpenAI-compatible endpoint: what to send each engine, and what came back when.

Answers are kept as raw pieces with their times and read after the test, lest reading delay it.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Coroutine, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import aiohttp

from .launch import find
from .load_result import Record
from .request import Request

T = TypeVar("T")
REFUSED = (429, 503)  # the server is full, or on its way down
PROBE = Request([1, 2, 3, 4], 2)
POLL = 0.2  # seconds
USAGE = {"stream_options": {"include_usage": True}}
# What an engine needs to hear beside the plain request, the richest first: a prompt of token ids,
# tokens for which no EOS counts, and the ids of the answer, by which tokens are counted.
DIALECTS: dict[str, dict[str, object]] = {
    "token ids": {"ignore_eos": True, "return_token_ids": True, **USAGE},
    "plain token ids": USAGE,
    "text, transformers": {"generation_config": '{"eos_token_id": -1, "pad_token_id": 0}'},
    "text": USAGE,
}


def spell(ids: Iterable[int]) -> str:
    """A text of as many tokens as `ids` in nearly any vocabulary: a letter for each."""
    return "".join(f" {chr(97 + id % 26)}" for id in ids)


@dataclass(frozen=True, kw_only=True)
class Client:
    """One model at one URL, and how to talk to it; `connect` finds out."""

    url: str
    model: str
    engine: str = "unknown"
    version: str = ""
    dialect: str = "token ids"
    api_key: str | None = field(default=None, repr=False)
    timeout: float = 600.0
    text: Callable[[list[int]], str] = spell

    def body(self, request: Request) -> bytes:
        """The JSON of one streamed completion."""
        ids, sampling = list(request.prompt), request.sampling
        body = {
            "model": self.model,
            "prompt": self.text(ids) if self.dialect.startswith("text") else ids,
            "max_tokens": request.max_tokens,
            "temperature": sampling.temperature,
            "stream": True,
            **DIALECTS[self.dialect],
        }
        if sampling.temperature:
            body |= {"top_p": sampling.top_p, "seed": sampling.seed}
        return json.dumps(body).encode()

    def session(self) -> aiohttp.ClientSession:
        """As many connections as there are requests in flight."""
        headers = {"Content-Type": "application/json"}
        if self.api_key:
            headers["Authorization"] = f"Bearer {self.api_key}"
        return aiohttp.ClientSession(
            # Servers drop idle connections after 5 s or more: ours are gone before that.
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=2),
            timeout=aiohttp.ClientTimeout(total=self.timeout),
            headers=headers,
        )


@dataclass(kw_only=True)
class Exchange:
    """One request on the wire: pieces of its answer as they came, each with its time."""

    sent: float
    end: float = 0.0
    status: int = 0
    pieces: list[tuple[float, bytes]] = field(default_factory=list)
    error: str = ""


async def ask(session: aiohttp.ClientSession, client: Client, body: bytes) -> Exchange:
    """Send `body`, and note what comes back; whatever goes wrong is noted too."""
    exchange = Exchange(sent=time.perf_counter())
    try:
        async with session.post(f"{client.url}/v1/completions", data=body) as answer:
            exchange.status = answer.status
            async for data in answer.content.iter_any():
                exchange.pieces.append((time.perf_counter(), data))
    except TimeoutError:
        exchange.error = f"It took longer than {client.timeout:g} s."
    except (aiohttp.ClientError, OSError) as error:
        exchange.error = f"{type(error).__name__}: {error}"
    exchange.end = time.perf_counter()
    return exchange


def events(pieces: Iterable[tuple[float, bytes]]) -> Iterator[tuple[float, bytes]]:
    """The data of each server-sent event, with the time at which its last byte was there."""
    rest = b""
    for moment, data in pieces:
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                yield moment, line.removeprefix(b"data:").strip()


def read(exchange: Exchange) -> tuple[list[float], int, str]:
    """Times of tokens, tokens of the prompt as the server counts them, and what went wrong.

    Token ids say how many tokens an event brought. Without them it's taken for one token, and the
    server's count at the end, where it has one, spreads over the same events: the first and the
    last token keep their times.
    """
    times: list[float] = []
    usage: dict[str, int] = {}
    counted, ended = False, False
    for moment, data in events(exchange.pieces):
        if data == b"[DONE]":
            ended = True
            continue
        try:
            chunk = json.loads(data)
        except ValueError:
            return times, 0, f"The stream holds something else than JSON: {data[:80]!r}."
        if chunk.get("error"):
            return times, 0, f"The server broke off: {message(chunk)}"
        usage = chunk.get("usage") or usage
        for choice in chunk.get("choices", ()):
            ids = choice.get("token_ids")
            counted = counted or ids is not None
            times += [moment] * (bool(choice.get("text")) if ids is None else len(ids))
            ended = ended or choice.get("finish_reason") is not None
    if not counted and "completion_tokens" in usage:
        times = spread(times, usage["completion_tokens"])
    if not ended:
        return times, 0, f"The stream broke off after {len(times)} tokens."
    return times, usage.get("prompt_tokens", 0), "" if times else "The answer holds no token."


def spread(times: list[float], count: int) -> list[float]:
    """`count` tokens evenly over the events at `times`."""
    last = len(times) - 1
    return [times[round(i * last / max(1, count - 1))] for i in range(count)] if times else []


def message(body: object) -> str:
    """What an error's JSON says, as OpenAI or FastAPI shape it."""
    for key in ("error", "message", "detail"):
        if isinstance(body, dict) and body.get(key):
            body = body[key]
    return str(body)[:300]


def record(request: Request, due: float, exchange: Exchange, start: float) -> Record:
    """What a result keeps of one request, in seconds after `start`."""
    times: list[float] = []
    prompt_tokens, error, status = 0, exchange.error, "finished"
    if exchange.status == 200:
        times, prompt_tokens, unread = read(exchange)
        error = error or unread
    elif not error:
        text = b"".join(data for _, data in exchange.pieces)
        try:
            text = message(json.loads(text))
        except ValueError:
            text = text[:300].decode(errors="replace")
        error = f"{exchange.status}: {text}"
    if error:
        status = "refused" if exchange.status in REFUSED else "failed"
    return Record(
        id=request.id if isinstance(request.id, int) else str(request.id),
        due=round(due - start, 6),
        sent=round(exchange.sent - start, 6),
        token_times=tuple(round(moment - start, 6) for moment in times),
        prompt_tokens=prompt_tokens or len(request.prompt),
        output_tokens=len(times),
        status=status,
        error=error,
    )


def apart(main: Coroutine[Any, Any, T], meanwhile: Callable[[], object] = bool) -> T:
    """`asyncio.run` in a thread of its own, as a notebook's own loop runs in this one.

    This thread calls `meanwhile` some times a second. An interrupt cancels `main` and waits until
    its connections are closed.
    """
    task: list[tuple[asyncio.AbstractEventLoop, asyncio.Task]] = []

    async def noted() -> T:
        task.append((asyncio.get_running_loop(), asyncio.current_task()))
        return await main

    with ThreadPoolExecutor(1, "loadtest") as pool:
        future = pool.submit(asyncio.run, noted())
        try:
            while wait([future], timeout=POLL).not_done:
                meanwhile()
            return future.result()
        except KeyboardInterrupt:
            with suppress(RuntimeError):  # over already
                for loop, current in task:
                    loop.call_soon_threadsafe(current.cancel)
            raise


def connect(
    url: str,
    *,
    model: str | None = None,
    api_key: str | None = None,
    timeout: float = 600.0,
    text: Callable[[list[int]], str] = spell,
) -> Client:
    """What answers at `url`, with the first of the DIALECTS that it takes.

    `model`: by default the first that it serves; `timeout`: seconds for one whole answer. `text`
    makes a prompt of ids, such as a tokenizer's decode, where an engine takes no ids.
    ConnectionError says who doesn't answer, or refuses a request of four tokens.
    """
    url = url.rstrip("/").removesuffix("/v1")
    found = find(url, timeout=10, api_key=api_key)
    if found is None and model is None:
        raise ConnectionError(
            f"No OpenAI-compatible server answers at {url}. Start one, or correct the address; "
            "if it asks for an API key, pass api_key."
        )
    client = Client(
        url=url,
        model=model or found.model,
        engine=found.kind if found else "unknown",
        version=found.version if found else "",
        api_key=api_key,
        timeout=timeout,
        text=text,
    )

    async def probe() -> Client:
        answers = []
        async with client.session() as session:
            for dialect in DIALECTS:
                trial = replace(client, dialect=dialect)
                exchange = await ask(session, trial, trial.body(PROBE))
                answer = record(PROBE, exchange.sent, exchange, exchange.sent)
                if answer.status == "finished":
                    return trial
                answers.append(answer.error)
                if exchange.status not in (400, 422):
                    break
        raise ConnectionError(f"{url}/v1/completions takes no request: {answers[-1]}")

    return apart(probe())
