"""One call's way through the server: prompts to token ids, tokens to text, text to an answer."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any, NamedTuple, Protocol

from .async_engine import AsyncEngine
from .protocol import CHAT, COMPLETION, Answer, ChatCall, CompletionCall, error_body
from .request import RefusedError, Request
from .text_stream import TextStream
from .token_stream import EngineFailedError, QueueFullError, ShutdownError

SHORT_COMPLETION = 16  # OpenAI's max_tokens where a completion doesn't say; a chat has no default
FINISH_REASONS = {"": None, "eos": "stop", "stop": "stop", "length": "length"}
STATUS = {RefusedError: 400, QueueFullError: 429, EngineFailedError: 500, ShutdownError: 503}


class Tokenizer(Protocol):
    """What the server needs of a tokenizer; `encode` and `chat` raise ValueError on what's bad."""

    eos: frozenset[int]

    def encode(self, text: str) -> list[int]:
        """Token ids of a text."""

    def decode(self, ids: list[int]) -> str:
        """The text of token ids, special ones left out."""

    def chat(self, messages: list[dict[str, str]]) -> list[int]:
        """A conversation by the model's template, up to where the assistant is to speak."""


class Piece(NamedTuple):
    """What has come of choice number `index`: text, the tokens it's made of, why it ends."""

    index: int
    text: str
    tokens: list[int]
    finish_reason: str | None


class Reply:
    """A call that the engine has taken; `whole` or `events` is its answer. End with `close`."""

    def __init__(
        self,
        call: CompletionCall | ChatCall,
        prompts: list[list[int]],
        engine: AsyncEngine,
        tokenizer: Tokenizer,
        model: str,
        max_tokens: int,
    ) -> None:
        self.call = call
        eos = frozenset() if call.ignore_eos else tokenizer.eos
        sampling = call.sampling()
        requests = []
        for prompt in prompts:
            wanted = wanted_tokens(call, min(max_tokens, engine.context - len(prompt)), max_tokens)
            requests.append(checked_request(prompt, wanted, sampling=sampling, eos=eos))
        self.stream = engine.submit(requests)
        self.texts = [TextStream(tokenizer.decode, call.stops) for _ in prompts]
        self.answer = Answer(
            shape=CHAT if isinstance(call, ChatCall) else COMPLETION,
            model=model,
            prompt_tokens=sum(map(len, prompts)),
        )

    def close(self) -> None:
        """Whatever isn't finished is cancelled."""
        self.stream.cancel()

    async def pieces(self) -> AsyncIterator[Piece]:
        """Text as it's made, a piece for all that is ready at once."""
        async for index, tokens, finish in self.stream:
            text, new = self.texts[index], ""
            for count, token in enumerate(tokens, 1):
                if not (finish == "eos" and count == len(tokens)):
                    new += text.push(token)
                if text.stopped:
                    tokens = tokens[:count]
                    break
            if finish:
                new += text.finish()
            if text.stopped:
                finish = "stop"
                self.stream.cancel(index, finish)
            self.answer.completion_tokens += len(tokens)
            yield Piece(index, new, tokens, FINISH_REASONS[finish])

    async def whole(self) -> dict[str, Any]:
        """The answer in one body, once all choices are finished."""
        choices = [Piece(index, "", [], None) for index in range(len(self.texts))]
        async for index, text, tokens, finish in self.pieces():
            before = choices[index]
            choices[index] = Piece(index, before.text + text, before.tokens + tokens, finish)
        say = self.answer.shape.say
        bodies = [self._choice(piece, say(piece.text)) for piece in choices]
        return self.answer.body(bodies, chunk=False, usage=self._usage())

    async def events(self) -> AsyncIterator[bytes]:
        """The answer as server-sent events; what goes wrong on the way is one of them."""
        options, begun = self.call.stream_options, set()
        with_usage = options and options.include_usage
        with_each = options and options.continuous_usage_stats
        say = self.answer.shape.say_more
        try:
            async for piece in self.pieces():
                choice = self._choice(piece, say(piece.text, piece.index not in begun))
                begun.add(piece.index)
                more = {"usage": self._usage() if with_each else None} if with_usage else {}
                yield event(self.answer.body([choice], chunk=True, **more))
            if with_usage:
                yield event(self.answer.body([], chunk=True, usage=self._usage()))
        except tuple(STATUS) as error:
            yield event(error_body(STATUS[type(error)], str(error)))
        yield b"data: [DONE]\n\n"

    def _choice(self, piece: Piece, said: dict[str, Any]) -> dict[str, Any]:
        choice = {"index": piece.index, **said, "logprobs": None}
        choice["finish_reason"] = piece.finish_reason
        return choice | ({"token_ids": piece.tokens} if self.call.return_token_ids else {})

    def _usage(self) -> dict[str, Any]:
        self.answer.cached_tokens = sum(ticket.cached for ticket in self.stream.tickets)
        return self.answer.usage()


async def encode(call: CompletionCall | ChatCall, tokenizer: Tokenizer) -> list[list[int]]:
    """The token ids of every prompt; RefusedError says what is wrong with one.

    In a thread: a long text must not make the others wait.
    """
    to_ids = tokenizer.chat if isinstance(call, ChatCall) else tokenizer.encode
    given = isinstance(call, CompletionCall) and not isinstance(call.prompts[0], str)
    try:
        return [p if given else await asyncio.to_thread(to_ids, p) for p in call.prompts]
    except ValueError as error:
        raise RefusedError(str(error)) from error


def checked_request(prompt: list[int], max_tokens: int, **options: Any) -> Request:
    """A request, or RefusedError where there's no sense in it."""
    try:
        return Request(prompt, max_tokens, **options)
    except ValueError as error:
        raise RefusedError(str(error)) from error


def wanted_tokens(call: CompletionCall | ChatCall, room: int, most: int) -> int:
    """How many new tokens a call asks for; a chat that doesn't say takes all the `room`."""
    if isinstance(call, ChatCall):
        wanted = call.max_completion_tokens or call.max_tokens or max(1, room)
    else:
        wanted = call.max_tokens or SHORT_COMPLETION
    if wanted > most:
        raise RefusedError(f"max_tokens={wanted} is more than the {most} that this server gives.")
    return wanted


def event(body: dict[str, Any]) -> bytes:
    """One server-sent event."""
    return b"data: %b\n\n" % json.dumps(body, separators=(",", ":")).encode()
