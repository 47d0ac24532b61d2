"""Requests to serve: real traces, Poisson arrivals, mixes of lengths. The same for the same seed.

Prompts are random token ids, as neither speed nor scheduling depends on what they say.
"""

from __future__ import annotations

import csv
import gzip
import itertools
import math
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from random import Random
from typing import NamedTuple

from decodelab.predict.checks import positive_int, positive_number

from .request import Request

FOLDER = Path(__file__).parent / "traces"
TRACES = ("conversation", "code")
VOCAB = 256  # ids that nearly every model has


class Lengths(NamedTuple):
    """What one request is made of, in tokens: its prompt, and what it is to be given."""

    prompt: int
    output: int


class TraceRow(NamedTuple):
    """One request of a real trace, `seconds` after the first one; lengths in tokens."""

    seconds: float
    prompt: int
    output: int


@cache
def azure_trace(name: str) -> tuple[TraceRow, ...]:
    """An hour of a service in Azure in 2023, "conversation" or "code", in order of arrival.

    Microsoft, CC BY 4.0, from Patel et al., "Splitwise", ISCA 2024; see traces/README.md.
    """
    if name not in TRACES:
        raise ValueError(f"No trace {name!r}. Traces: {', '.join(TRACES)}.")
    with gzip.open(FOLDER / f"azure2023_{name}.csv.gz", "rt", encoding="utf-8") as file:
        _, *rows = csv.reader(file)
    return tuple(TraceRow(float(s), int(prompt), int(output)) for s, prompt, output in rows)


def azure(
    name: str,
    count: int,
    seed: int = 0,
    *,
    scale: float = 1.0,
    max_context: int | None = None,
    rate: float | None = None,
    vocab: int = VOCAB,
    prefix: int = 0,
) -> tuple[Request, ...]:
    """`count` successive requests of `azure_trace(name)`, from a place that the seed chooses.

    Scaled down by one rule: every length is divided by `scale`, rounded, and at least 1; with
    `max_context`, by what lets the trace's longest request fit, if that is more. Arrivals are
    stretched by one factor to `rate` requests per second on average, so that bursts stay bursts.
    `prefix` as in `make_requests`.
    """
    trace = azure_trace(name)
    if positive_int("count", count) > len(trace):
        raise ValueError(f"The trace {name!r} has {len(trace)} requests, not {count}.")
    positive_number("scale", scale)
    if max_context is not None:
        room = max_context - prefix - 1  # two roundings add one token at most
        longest = max(row.prompt + row.output for row in trace)
        scale = max(scale, longest / positive_int("max_context - prefix - 1", room))
    start = Random(seed).randrange(len(trace) - count + 1)
    rows = trace[start : start + count]
    lengths = [[max(1, round(n / scale)) for n in (row.prompt, row.output)] for row in rows]
    arrivals = [row.seconds - rows[0].seconds for row in rows]
    if rate is not None and arrivals[-1] > 0:
        stretch = (count - 1) / positive_number("rate", rate) / arrivals[-1]
        arrivals = [moment * stretch for moment in arrivals]
    return make_requests(lengths, arrivals, seed, vocab, prefix)


def poisson(
    rate: float,
    lengths: Iterable[tuple[int, int]],
    count: int,
    seed: int = 0,
    *,
    vocab: int = VOCAB,
    prefix: int = 0,
) -> tuple[Request, ...]:
    """Open loop: `rate` requests a second on average, each at a moment that ignores the others.

    `lengths` are (prompt, output) pairs, repeated as often as needed: [(64, 10)] is a constant.
    """
    positive_number("rate", rate)
    random, repeated = Random(f"{seed} arrivals"), _repeat(lengths, count)
    arrivals = itertools.accumulate(random.expovariate(rate) for _ in repeated)
    return make_requests(repeated, arrivals, seed, vocab, prefix)


def offline(
    lengths: Iterable[tuple[int, int]],
    count: int,
    seed: int = 0,
    *,
    vocab: int = VOCAB,
    prefix: int = 0,
) -> tuple[Request, ...]:
    """All there from the start, with lengths as in `poisson`."""
    return make_requests(_repeat(lengths, count), [0.0] * count, seed, vocab, prefix)


def one_long_in_eight(prompt: int = 16, long: int = 100, short: int = 10) -> list[Lengths]:
    """The mix that static batching suffers from: 396 decode steps for 32 requests in 8 slots.

    Continuous batching needs 126 (`metrics.steps_from_lengths`).
    """
    return [Lengths(prompt, long), *[Lengths(prompt, short)] * 7]


def lognormal(
    prompt: float, output: float, count: int, seed: int = 0, *, sigma: float = 0.9, most: int = 1024
) -> list[Lengths]:
    """`count` lengths with these medians and a long tail, as real ones have, cut at `most`.

    `sigma` is the standard deviation of their logarithms; 0 makes all equal.
    """
    random = Random(f"{seed} lengths")

    def draw(median: float) -> int:
        return min(most, max(1, round(median * math.exp(random.gauss(0, sigma)))))

    return [Lengths(draw(prompt), draw(output)) for _ in range(count)]


def make_requests(
    lengths: Iterable[tuple[int, int]],
    arrivals: Iterable[float],
    seed: int = 0,
    vocab: int = VOCAB,
    prefix: int = 0,
) -> tuple[Request, ...]:
    """A request per (prompt, output) in `lengths`, with ids 0, 1, ... and token ids below `vocab`.

    All begin with the same `prefix` tokens, a system prompt, which come on top of their own.
    """
    positive_int("vocab", vocab)
    if prefix:
        positive_int("prefix", prefix)

    def ids(of: object, count: int) -> list[int]:
        return Random(f"{seed} {of}").choices(range(vocab), k=count)

    system = ids("prefix", prefix)
    return tuple(
        Request([*system, *ids(id, prompt)], output, id=id, arrival=arrival)
        for id, ((prompt, output), arrival) in enumerate(zip(lengths, arrivals, strict=True))
    )


def _repeat(lengths: Iterable[tuple[int, int]], count: int) -> list[tuple[int, int]]:
    repeated = list(itertools.islice(itertools.cycle(lengths), positive_int("count", count)))
    if not repeated:
        raise ValueError("There are no lengths: give at least one (prompt, output) pair.")
    return repeated
