"""What a run was worth, from the engine's trace and its sequences alone; and what lengths foretell.

Latencies are those of finished requests. A percentile is the nearest rank: the smallest sample that
at least so many percent of all don't exceed.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from itertools import chain
from statistics import fmean

from decodelab.predict.checks import positive_int

from .request import Sequence
from .scheduler import POLICIES
from .trace import Row, StepRecord

Sequences = Mapping[Hashable, Sequence]


def percentile(values: Iterable[float], percent: float) -> float:
    """The smallest of `values` that at least `percent` % of them don't exceed; nan of none."""
    if not 0 < percent <= 100:
        raise ValueError(f"percent must be above 0 and at most 100, not {percent!r}.")
    ordered = sorted(values)
    return ordered[math.ceil(len(ordered) * percent / 100) - 1] if ordered else math.nan


@dataclass(frozen=True)
class Latencies:
    """Samples of one latency, in seconds."""

    samples: tuple[float, ...]

    @property
    def mean(self) -> float:
        """Their mean; nan of none."""
        return fmean(self.samples) if self.samples else math.nan

    def percentile(self, percent: float) -> float:
        """By nearest rank."""
        return percentile(self.samples, percent)

    @property
    def p50(self) -> float:
        """The median."""
        return self.percentile(50)

    @property
    def p95(self) -> float:
        """What one in twenty exceeds."""
        return self.percentile(95)

    @property
    def p99(self) -> float:
        """What one in a hundred exceeds."""
        return self.percentile(99)


def finished(sequences: Sequences) -> list[Sequence]:
    """Those that got all their tokens; what was refused or cancelled has no latency."""
    return [sequence for sequence in sequences.values() if sequence.status == "finished"]


def ttft(sequences: Sequences) -> Latencies:
    """Time to the first token, from arrival: queue and prefill. One sample a request."""
    return Latencies(tuple(sequence.ttft for sequence in finished(sequences)))


def tpot(sequences: Sequences) -> Latencies:
    """Time per output token after the first. One sample a request that has two or more."""
    return Latencies(tuple(s.tpot for s in finished(sequences) if len(s.token_times) > 1))


def itl(sequences: Sequences) -> Latencies:
    """Inter-token latency: the gaps of all requests in one pool, each as it was."""
    return Latencies(tuple(chain.from_iterable(s.itl for s in finished(sequences))))


def e2e(sequences: Sequences) -> Latencies:
    """From arrival to the last token. One sample a request."""
    return Latencies(tuple(sequence.e2e for sequence in finished(sequences)))


@dataclass(frozen=True, kw_only=True)
class SLO:
    """What a request must keep to, in seconds; infinite: no matter."""

    ttft: float = math.inf
    tpot: float = math.inf
    e2e: float = math.inf

    def met(self, sequence: Sequence) -> bool:
        """Whether it finished within all limits; without a second token there's no TPOT to miss."""
        late = sequence.ttft > self.ttft or sequence.tpot > self.tpot or sequence.e2e > self.e2e
        return sequence.status == "finished" and not late


@dataclass(frozen=True, kw_only=True)
class Summary:
    """One run. `seconds` go from the first arrival to the end of the last step.

    Shares are of 1. `occupancy`: of the time of all slots while steps ran, that in which the slot
    had a token to compute. `useful_rows`: of all rows computed, those with a real token.
    `padding`: of all tokens computed, those thrown away. `blocks_mean` is over the time of steps.
    `goodput` counts requests per second that meet all of the SLO. `scheduler_seconds` is per step.
    """

    seconds: float
    steps: int
    requests: int
    prompt_tokens: int
    new_tokens: int
    ttft: Latencies
    tpot: Latencies
    itl: Latencies
    e2e: Latencies
    goodput: float
    occupancy: float
    useful_rows: float
    padding: float
    preemptions: int
    blocks_peak: int
    blocks_mean: float
    scheduler_seconds: float

    @property
    def tokens_per_second(self) -> float:
        """New tokens of all requests together."""
        return _ratio(self.new_tokens, self.seconds)

    @property
    def requests_per_second(self) -> float:
        """Requests finished."""
        return _ratio(self.requests, self.seconds)


def summarize(
    trace: SequenceOf[StepRecord],
    sequences: Sequences,
    slo: SLO = SLO(),
    slots: int | None = None,
) -> Summary:
    """Everything above, of an engine's `trace` and `sequences` after one run.

    Without `slots`, the batch is as wide as it ever was.
    """
    seconds = _seconds(trace, sequences)
    busy = sum(record.seconds for record in trace)
    rows = [row for record in trace for row in record.rows]
    slots = slots or 1 + max((row.slot for row in rows), default=0)
    padded, real = sum(row.padding for row in rows), sum(row.tokens for row in rows)
    return Summary(
        seconds=seconds,
        steps=len(trace),
        requests=len(finished(sequences)),
        prompt_tokens=sum(record.prompt_tokens for record in trace),
        new_tokens=sum(len(record.emitted) for record in trace),
        ttft=ttft(sequences),
        tpot=tpot(sequences),
        itl=itl(sequences),
        e2e=e2e(sequences),
        goodput=_ratio(sum(map(slo.met, sequences.values())), seconds),
        occupancy=_ratio(sum(r.seconds * _useful(r.rows) for r in trace), slots * busy),
        useful_rows=_ratio(_useful(rows), len(rows)),
        padding=_ratio(padded, padded + real),
        preemptions=sum(len(record.preempted) for record in trace),
        blocks_peak=max((record.blocks_used for record in trace), default=0),
        blocks_mean=_ratio(sum(r.seconds * r.blocks_used for r in trace), busy),
        scheduler_seconds=_ratio(sum(r.scheduler_seconds for r in trace), len(trace)),
    )


def _seconds(trace: SequenceOf[StepRecord], sequences: Sequences) -> float:
    arrivals = [s.arrival for s in sequences.values() if s.status != "refused"]
    return trace[-1].end - min(arrivals) if trace else 0.0


def _useful(rows: Iterable[Row]) -> int:
    return sum(row.tokens > 0 for row in rows)


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else math.nan


def decode_steps(trace: SequenceOf[StepRecord]) -> int:
    """Decode steps of the slot with most of them: its waiting included, its prefills left out."""
    slots = Counter(row.slot for r in trace for row in r.rows if row.kind != "prefill")
    return max(slots.values(), default=0)


def steps_from_lengths(lengths: SequenceOf[int], slots: int, policy: str) -> int:
    """`decode_steps` of requests that are all there at the start, from their output lengths alone.

    No engine, no model: each prompt takes one step, which makes the first token. Static (and
    dynamic): the longest of each batch. Continuous: the next request takes the slot that is free
    first.
    """
    positive_int("slots", slots)
    if policy not in POLICIES:
        raise ValueError(f"No policy {policy!r}. Policies: {', '.join(POLICIES)}.")
    lengths = [positive_int("A length", length) for length in lengths]
    if policy != "continuous":
        return sum(max(lengths[i : i + slots]) - 1 for i in range(0, len(lengths), slots))
    free = [(0, slot) for slot in range(slots)]  # a heap: when each slot is free
    steps = [0] * slots
    for length in lengths:
        moment, slot = free[0]
        heapq.heapreplace(free, (moment + length, slot))
        steps[slot] += length - 1
    return max(steps)
