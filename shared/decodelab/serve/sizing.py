"""Size and price a deployment: replay a trace on replicas of it, on the roofline's clock.

Engine and scheduler are those that serve; only the model is left out. The roofline is a bound, so
a real fleet is slower. No network, no failures, no replica that starts or stops.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Hashable, Iterable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, replace

from decodelab.predict import Deployment, MixedStep
from decodelab.predict.checks import positive_int, positive_number

from . import metrics
from .engine import Engine
from .metrics import SLO, Latencies
from .request import RefusedError, Request, Sequence
from .runner import Result, Work
from .trace import StepRecord

WAITS = 0.05  # the share of time from which on waiting is more than a burst

# Which replica a request goes to, from its number and how many each has in flight.
ROUTERS: dict[str, Callable[[int, list[int]], int]] = {
    "round robin": lambda number, loads: number % len(loads),
    "least loaded": lambda number, loads: loads.index(min(loads)),
}


@dataclass(frozen=True, kw_only=True)
class Fleet:
    """`replicas` of one deployment behind a router: see ROUTERS.

    `usd_per_gpu_hour` is paid for every GPU of every replica; `overhead_seconds` come on top of
    the roofline in each step.
    """

    deployment: Deployment
    usd_per_gpu_hour: float
    replicas: int = 1
    max_batch: int = 256
    token_budget: int = 2048
    router: str = "least loaded"
    overhead_seconds: float = 0.0

    def __post_init__(self) -> None:
        positive_number("usd_per_gpu_hour", self.usd_per_gpu_hour)
        for name in ("replicas", "max_batch", "token_budget"):
            positive_int(name, getattr(self, name))
        if self.router not in ROUTERS:
            raise ValueError(f"No router {self.router!r}. Routers: {', '.join(ROUTERS)}.")
        if self.overhead_seconds != 0:
            positive_number("overhead_seconds", self.overhead_seconds)
        if self.deployment.pipeline_parallel > 1:
            raise ValueError("A step's time says nothing of a pipeline: take pipeline_parallel=1.")

    @property
    def gpus(self) -> int:
        """GPUs of all replicas."""
        return self.replicas * self.deployment.tensor_parallel

    @property
    def usd_per_hour(self) -> float:
        """Dollars per hour of the whole fleet."""
        return self.gpus * self.usd_per_gpu_hour


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a trace was worth on a fleet. `seconds` go from the first arrival to the last token.

    `met` of `requests` kept to the SLO; `refused` could never fit. `busy` is the share of the
    replicas' time in which steps ran. Of that, `waits` says in what share requests waited, by what
    for: "max_batch", "token_budget" or "KV pool".
    """

    fleet: Fleet
    seconds: float
    requests: int
    met: int
    refused: int
    preemptions: int
    prompt_tokens: int
    new_tokens: int
    busy: float
    waits: dict[str, float]
    ttft: Latencies
    tpot: Latencies
    e2e: Latencies

    @property
    def goodput(self) -> float:
        """Requests per second that met the SLO."""
        return self.met / self.seconds

    @property
    def goodput_share(self) -> float:
        """Of all requests, refused ones included, those that met the SLO."""
        return self.met / self.requests

    @property
    def tokens_per_second(self) -> float:
        """New tokens of all replicas together."""
        return self.new_tokens / self.seconds

    @property
    def usd(self) -> float:
        """What the fleet cost for so long, idle or not.

        An API bills `TokenPrice.usd(prompt_tokens, new_tokens)` for the same requests.
        """
        return self.fleet.usd_per_hour * self.seconds / 3600

    @property
    def usd_per_million_tokens(self) -> float:
        """Dollars over the new tokens really made: no utilization has to be guessed."""
        return self.usd * 1e6 / self.new_tokens

    @property
    def usd_per_million_requests(self) -> float:
        """Dollars over the requests that met the SLO; inf if none did."""
        return self.usd * 1e6 / self.met if self.met else math.inf

    @property
    def binds(self) -> str:
        """What requests waited for longest; "nothing" where they did in under WAITS of the time.

        Then only a faster step makes latency better, and fewer replicas make it cheaper.
        """
        longest = max(self.waits, key=self.waits.get, default="nothing")
        return longest if self.waits.get(longest, 0) >= WAITS else "nothing"


def simulate(fleet: Fleet, requests: Iterable[Request], slo: SLO) -> Outcome:
    """Serve `requests` on the fleet, each at its arrival, to the end.

    Five minutes of a real conversation trace, 400,000 tokens, take about six seconds. ValueError
    where there is nothing to serve; NoRoomError, one too, where the weights don't fit.
    """
    requests = sorted(requests, key=lambda request: request.arrival)
    if not requests:
        raise ValueError("There are no requests to size a fleet by: give at least one.")
    replicas = [_Replica(fleet) for _ in range(fleet.replicas)]
    route = ROUTERS[fleet.router]
    numbered = (replace(request, id=number) for number, request in enumerate(requests))
    for moment, together in itertools.groupby(numbered, key=lambda request: request.arrival):
        for each in replicas:
            each.advance(moment)
        for request in together:
            chosen = route(request.id, [each.in_flight(moment) for each in replicas])
            replicas[chosen].add(request)
    for each in replicas:
        each.advance(math.inf)
    return _outcome(fleet, requests, replicas, slo)


class _Replica:
    """One engine, stepped as far as the router's time, and sums over its steps."""

    def __init__(self, fleet: Fleet) -> None:
        runner = _StepClock(fleet.deployment, fleet.overhead_seconds)
        self.engine = Engine(runner, "continuous", fleet.max_batch, fleet.token_budget)
        self.ends: list[float] = []  # when each request that has finished did so
        self.added = self.refused = self.preemptions = 0
        self.busy, self.waited = 0.0, Counter()

    def advance(self, moment: float) -> None:
        """Run every step that starts before `moment`: the last one may end after it."""
        engine = self.engine
        while engine.now < moment and (record := engine.step()):
            self.ends += [record.end] * len(record.finished)
            self.preemptions += len(record.preempted)
            self.busy += record.seconds
            if record.num_waiting:
                self.waited[self._short_of(record)] += record.seconds
            engine.trace.clear()

    def in_flight(self, moment: float) -> int:
        """Requests sent here that are unfinished at `moment`."""
        return self.added - bisect_right(self.ends, moment)

    def add(self, request: Request) -> None:
        """Hand in a request that arrives now, though the last step may end later."""
        now = self.engine.now
        try:
            id = self.engine.add(replace(request, arrival=max(0.0, request.arrival - now)))
        except RefusedError:
            self.refused += 1
        else:
            self.added += 1
            self.engine.sequences[id].arrival = request.arrival

    def _short_of(self, record: StepRecord) -> str:
        """What keeps the first in the queue out of this step."""
        scheduler = self.engine.scheduler
        if len(scheduler.running) + len(record.finished) == scheduler.max_batch:
            return "max_batch"
        if sum(row.tokens for row in record.rows) == scheduler.token_budget:
            return "token_budget"
        return "KV pool"


class _StepClock:
    """A runner that knows only how long a step takes; every token is 0."""

    real_time = False

    def __init__(self, deployment: Deployment, overhead_seconds: float) -> None:
        self.step, self.overhead = MixedStep(deployment), overhead_seconds
        self.num_blocks = deployment.tokens // deployment.block_size
        self.block_size = deployment.block_size
        self.max_context, self.vocab = deployment.shape.max_context, deployment.shape.vocab

    def run(self, work: SequenceOf[Work]) -> Result:
        """Zeros at once, and the seconds of the roofline."""
        seconds = self.step.seconds((row.start, len(row.tokens)) for row in work)
        return Result([0 if row.sample else None for row in work], seconds + self.overhead)


def _outcome(
    fleet: Fleet, requests: SequenceOf[Request], replicas: SequenceOf[_Replica], slo: SLO
) -> Outcome:
    sequences: dict[Hashable, Sequence] = {}
    for each in replicas:
        sequences |= each.engine.sequences
    done = metrics.finished(sequences)
    if not done:
        reason = next(iter(sequences.values())).reason
        raise ValueError(f"None of {len(requests)} requests can be served. {reason}")
    seconds = max(each.ends[-1] for each in replicas if each.ends) - requests[0].arrival
    busy = sum(each.busy for each in replicas)
    waited = sum((each.waited for each in replicas), Counter())
    return Outcome(
        fleet=fleet,
        seconds=seconds,
        requests=len(requests),
        met=sum(map(slo.met, sequences.values())),
        refused=sum(sequence.status == "refused" for sequence in sequences.values()),
        preemptions=sum(each.preemptions for each in replicas),
        prompt_tokens=sum(len(sequence.request.prompt) for sequence in done),
        new_tokens=sum(len(sequence.token_times) for sequence in done),
        busy=busy / (seconds * fleet.replicas),
        waits={name: share / busy for name, share in waited.items()},
        ttft=metrics.ttft(sequences),
        tpot=metrics.tpot(sequences),
        e2e=metrics.e2e(sequences),
    )
