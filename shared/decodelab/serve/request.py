"""One request, and the sequence that it becomes: its tokens, its state, its timestamps.

A request is what a client asks, and never changes; a sequence is what the engine makes of it.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field

from decodelab.predict.checks import positive_int, positive_number


class RefusedError(ValueError):
    """A request that the engine won't take; the sentence says why, and the engine goes on."""


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How the next token is drawn: greedily at temperature 0, else from softmax(logits / T).

    `top_k` keeps the k likeliest (0: all), `top_p` the fewest that hold that probability. Token
    number i of a request is drawn with (seed, i) alone, whatever else is in the batch.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.temperature != 0:
            positive_number("temperature (0 is greedy)", self.temperature)
        if self.top_k != 0:
            positive_int("top_k (0 keeps all)", self.top_k)
        if positive_number("top_p", self.top_p) > 1:
            raise ValueError(f"top_p must be at most 1 (which keeps all), not {self.top_p!r}.")
        if not isinstance(self.seed, int):
            raise ValueError(f"seed must be a whole number, not {self.seed!r}.")


GREEDY = Sampling()


@dataclass(frozen=True)
class Request:
    """Continue `prompt` (token ids) by `max_tokens` new ones, or up to one of `eos`.

    `arrival` is in seconds after the request is handed to the engine, which also chooses an `id`
    where there is none. Raises ValueError on an empty prompt and on numbers that make no sense.
    """

    prompt: tuple[int, ...]
    max_tokens: int
    id: Hashable = None
    arrival: float = 0.0
    sampling: Sampling = GREEDY
    eos: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        eos = self.eos if isinstance(self.eos, Iterable) else {self.eos} - {None}
        for name, value in (("prompt", token_ids(self.prompt)), ("eos", frozenset(eos))):
            object.__setattr__(self, name, value)
        if not self.prompt:
            raise ValueError("The prompt is empty: give it at least one token, such as BOS.")
        if not isinstance(self.id, Hashable):
            raise ValueError(f"An id must be hashable, such as a number or a text: {self.id!r}.")
        positive_int("max_tokens", self.max_tokens)
        if self.arrival != 0:
            positive_number("arrival", self.arrival)


def token_ids(prompt: Iterable[int]) -> tuple[int, ...]:
    """Token ids as plain ints; ValueError on a text or whatever else holds no whole numbers."""
    try:
        return tuple(operator.index(token) for token in prompt)
    except TypeError:
        raise ValueError(f"A prompt must be a list of token ids, not {prompt!r}.") from None


@dataclass(eq=False)
class Sequence:
    """A request inside the engine; `tokens` are its prompt and all that it has emitted.

    KV of the first `computed` tokens is in the cache. A preempted sequence loses that and keeps
    its tokens. `slot` is its row of the batch while it runs; all times are on the engine's clock.
    """

    request: Request
    arrival: float = 0.0
    status: str = "waiting"  # then "running", and at last "finished", "refused" or "cancelled"
    reason: str = ""  # why it was refused, or what ended it: "length" or "eos"
    computed: int = 0
    slot: int | None = None
    preemptions: int = 0
    number: int = 0  # place in the queue among those that arrive at once
    tokens: list[int] = field(default_factory=list)
    token_times: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.tokens = self.tokens or list(self.request.prompt)

    @property
    def id(self) -> Hashable:
        """The id of its request."""
        return self.request.id

    @property
    def output(self) -> list[int]:
        """The new token ids so far, an EOS that ended them included."""
        return self.tokens[len(self.request.prompt) :]

    @property
    def remaining(self) -> int:
        """Tokens whose KV is still to be computed before the next one can be sampled."""
        return len(self.tokens) - self.computed

    @property
    def decoding(self) -> bool:
        """Whether the newest emitted token is all that remains; a recompute is a prefill again."""
        return self.remaining == 1 and len(self.tokens) > len(self.request.prompt)

    @property
    def max_length(self) -> int:
        """Positions of KV that it may come to fill: its last token is emitted and never fed."""
        return len(self.request.prompt) + self.request.max_tokens - 1

    def append(self, token: int, now: float) -> None:
        """Emit one token at time `now`; the last one finishes the sequence."""
        self.tokens.append(token)
        self.token_times.append(now)
        if token in self.request.eos:
            self.status, self.reason = "finished", "eos"
        elif len(self.token_times) == self.request.max_tokens:
            self.status, self.reason = "finished", "length"

    @property
    def ttft(self) -> float:
        """Seconds from arrival to the first token: queue and prefill. nan before there is one."""
        return self.token_times[0] - self.arrival if self.token_times else math.nan

    @property
    def e2e(self) -> float:
        """Seconds from arrival to the last token so far."""
        return self.token_times[-1] - self.arrival if self.token_times else math.nan

    @property
    def tpot(self) -> float:
        """(e2e - ttft) / (n - 1), seconds per token after the first; nan below two tokens."""
        gaps = len(self.token_times) - 1
        return (self.e2e - self.ttft) / gaps if gaps > 0 else math.nan

    @property
    def itl(self) -> list[float]:
        """Seconds between one token and the next, each gap by itself."""
        return [later - earlier for earlier, later in itertools.pairwise(self.token_times)]
