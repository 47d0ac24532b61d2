"""OpenAI's completions and chat completions: what may be asked, and what is answered.

A field that isn't served allows `only` the value that asks for nothing, and one that nobody knows
is refused: neither is a silent default.
"""

from __future__ import annotations

import random
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from .request import Sampling


def _whole(text: str) -> str:
    """JSON can hold half of a surrogate pair, which no tokenizer can encode."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError("there is half a character in it, a lone surrogate") from None
    return text


def only(served: Any) -> AfterValidator:
    """The one value of a field that asks for nothing."""

    def check(value: Any) -> Any:
        if value != served:
            raise ValueError(f"only {served!r} is served here, which is the same as leaving it out")
        return value

    return AfterValidator(check)


Text = Annotated[str, AfterValidator(_whole)]
Stop = Annotated[Text, Field(min_length=1)]
Off = Annotated[bool, only(False)] | None
Zero = Annotated[float, only(0)] | None
TokenIds = Annotated[list[int], Field(min_length=1, fail_fast=True)]


class Strict(BaseModel):
    """No unknown fields, no conversions, no NaN."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class StreamOptions(Strict):
    """Usage in a last chunk of its own, or so far in every chunk."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class Options(Strict):
    """What both kinds of call have in common; without a seed, every call draws anew."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = Field(None, ge=1)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1, description="0 and -1 keep all.")
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    stop: Stop | Annotated[list[Stop], Field(max_length=4)] | None = None
    ignore_eos: bool | None = None
    return_token_ids: bool | None = None
    # Taken note of by other servers; here without effect.
    user: str | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    n: Annotated[int, only(1)] | None = None
    presence_penalty: Zero = None
    frequency_penalty: Zero = None
    min_p: Zero = None
    repetition_penalty: Annotated[float, only(1)] | None = None
    logit_bias: Annotated[dict[str, float], only({})] | None = None

    @property
    def stops(self) -> list[str]:
        """The stop strings, as a list."""
        return [self.stop] if isinstance(self.stop, str) else self.stop or []

    def sampling(self) -> Sampling:
        """As the engine has it; OpenAI's default is to draw at temperature 1."""
        return Sampling(
            temperature=1.0 if self.temperature is None else self.temperature,
            top_k=max(0, self.top_k or 0),
            top_p=1.0 if self.top_p is None else self.top_p,
            seed=random.getrandbits(62) if self.seed is None else self.seed,
        )


class CompletionCall(Options):
    """The body of /v1/completions: one prompt or several, as text or as token ids."""

    prompt: (
        Text
        | Annotated[list[Text], Field(min_length=1, fail_fast=True)]
        | TokenIds
        | Annotated[list[TokenIds], Field(min_length=1, fail_fast=True)]
    )
    echo: Off = None
    logprobs: None = None
    best_of: Annotated[int, only(1)] | None = None
    suffix: Annotated[str, only("")] | None = None

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        """Always a list of them."""
        single = isinstance(self.prompt, str) or isinstance(self.prompt[0], int)
        return [self.prompt] if single else self.prompt


class TextPart(Strict):
    """A piece of a message; only text is understood."""

    type: Literal["text"]
    text: Text


class Message(Strict):
    """One turn of a conversation."""

    role: Literal["system", "developer", "user", "assistant"]
    content: Text | Annotated[list[TextPart], Field(fail_fast=True)]
    name: str | None = None

    def plain(self) -> dict[str, str]:
        """Role and text, as chat templates take them."""
        parts = self.content
        text = parts if isinstance(parts, str) else "".join(part.text for part in parts)
        return {"role": self.role, "content": text}


class ChatCall(Options):
    """The body of /v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1, fail_fast=True)]
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: Off = None
    top_logprobs: Annotated[int, only(0)] | None = None
    tools: Annotated[list[Any], only([])] | None = None
    tool_choice: Annotated[str, only("none")] | None = None
    response_format: Annotated[dict[str, Any], only({"type": "text"})] | None = None

    @property
    def prompts(self) -> list[list[dict[str, str]]]:
        """One conversation, as chat templates take it."""
        return [[message.plain() for message in self.messages]]


class ErrorDetail(BaseModel):
    """What went wrong, and with which field."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorBody(BaseModel):
    """The body of every answer that isn't a 200."""

    error: ErrorDetail


ERROR_TYPES = {401: "authentication_error", 429: "rate_limit_error"}


def error_body(
    status: int, message: str, param: str | None = None, code: str | None = None
) -> dict[str, Any]:
    """What OpenAI answers with an HTTP status that isn't 200."""
    kind = ERROR_TYPES.get(status, "server_error" if status >= 500 else "invalid_request_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


@dataclass(frozen=True, kw_only=True)
class Shape:
    """How one of the two calls words its answers: whole, or in chunks."""

    prefix: str
    whole: str
    chunk: str
    say: Callable[[str], dict[str, Any]]
    say_more: Callable[[str, bool], dict[str, Any]]


def _delta(text: str, first: bool) -> dict[str, Any]:
    return {"delta": {"role": "assistant", "content": text} if first else {"content": text}}


COMPLETION = Shape(
    prefix="cmpl-",
    whole="text_completion",
    chunk="text_completion",
    say=lambda text: {"text": text},
    say_more=lambda text, first: {"text": text},
)
CHAT = Shape(
    prefix="chatcmpl-",
    whole="chat.completion",
    chunk="chat.completion.chunk",
    say=lambda text: {"message": {"role": "assistant", "content": text, "refusal": None}},
    say_more=_delta,
)


@dataclass(kw_only=True)
class Answer:
    """One call's answer in the making: the ids and times, and the tokens counted."""

    shape: Shape
    model: str
    prompt_tokens: int
    completion_tokens: int = 0
    cached_tokens: int = 0
    id: str = ""
    created: int = field(default_factory=lambda: int(time.time()))

    def __post_init__(self) -> None:
        self.id = f"{self.shape.prefix}{uuid.uuid4().hex}"

    def usage(self) -> dict[str, Any]:
        """Tokens so far."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }

    def body(self, choices: list[dict[str, Any]], *, chunk: bool, **more: Any) -> dict[str, Any]:
        """The answer with these choices, or a chunk of it."""
        kind = self.shape.chunk if chunk else self.shape.whole
        head = {"id": self.id, "object": kind, "created": self.created, "model": self.model}
        return {**head, "choices": choices, **more}
