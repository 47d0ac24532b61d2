"""What a token costs: the price of a machine, its speed, and how much of it is really used.

Speed is a curve of seconds per decode step against batch, predicted or measured alike. Prices are
dated facts: see `prices`.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

from .architecture import ModelShape
from .capacity import NoRoomError
from .checks import positive_int, positive_number
from .deployment import Deployment
from .prices import TokenPrice


def usd_per_million_tokens(
    usd_per_hour: float, tokens_per_second: float, utilization: float = 1.0
) -> float:
    """Dollars per 10^6 tokens of a machine at `usd_per_hour` that makes `tokens_per_second`.

    tokens_per_second is the aggregate at full load, not one user's; `utilization` is the fraction
    of it that is really produced, over 0 and up to 1. Peak tokens are not billed tokens.
    """
    positive_number("usd_per_hour", usd_per_hour)
    positive_number("tokens_per_second", tokens_per_second)
    if positive_number("utilization", utilization) > 1:
        raise ValueError(f"utilization is a fraction up to 1, not {utilization!r}: 30% is 0.3.")
    return usd_per_hour * 1e6 / (3600 * tokens_per_second * utilization)


def token_price(
    usd_per_hour: float,
    prefill_tokens_per_second: float,
    decode_tokens_per_second: float,
    utilization: float = 1.0,
) -> TokenPrice:
    """What a machine's input and output cost apart, each at its own speed.

    The machine does one or the other: a token costs the time that it takes. Chunks of prompts
    that ride along with decodes cost less; `serve.sizing.simulate` counts those.
    """
    return TokenPrice(
        input=usd_per_million_tokens(usd_per_hour, prefill_tokens_per_second, utilization),
        output=usd_per_million_tokens(usd_per_hour, decode_tokens_per_second, utilization),
    )


def mixed_tokens_per_second(
    prompt: float,
    output: float,
    prefill_tokens_per_second: float,
    decode_tokens_per_second: float,
) -> float:
    """Tokens of both kinds per second at this mix of input and output: a harmonic mean.

    (prompt + output) / (prompt / prefill + output / decode), as in `token_price`.
    """
    positive_number("prefill_tokens_per_second", prefill_tokens_per_second)
    positive_number("decode_tokens_per_second", decode_tokens_per_second)
    seconds = positive_number("prompt", prompt) / prefill_tokens_per_second
    seconds += positive_number("output", output) / decode_tokens_per_second
    return (prompt + output) / seconds


class BreakEven(NamedTuple):
    """Where a machine costs what an API bills for the same tokens.

    A `utilization` above 1 can't be had: then the API is cheaper even than a full machine.
    """

    utilization: float
    tokens_per_day: float

    @property
    def possible(self) -> bool:
        """Whether a full machine is at least as cheap."""
        return self.utilization <= 1


def break_even(
    usd_per_hour: float, tokens_per_second: float, usd_per_million_api: float
) -> BreakEven:
    """The share of `tokens_per_second` that must be sold to match an API's price.

    utilization = usd_per_million_tokens(full load) / API; tokens a day = 24 usd_per_hour / API.
    Count the same tokens on both sides: of a mix, `mixed_tokens_per_second` and
    `TokenPrice.blended`.
    """
    full = usd_per_million_tokens(usd_per_hour, tokens_per_second)
    api = positive_number("usd_per_million_api", usd_per_million_api)
    return BreakEven(full / api, 24 * usd_per_hour / api * 1e6)


def experts_read(shape: ModelShape, batch: int) -> float:
    """Routed experts of one layer that a decode step of `batch` tokens is expected to read.

    E (1 - (1 - k/E)^B): see `Linear.touched`. ValueError on a dense model.
    """
    if shape.experts is None:
        raise ValueError("A dense model has no routed experts: each step reads all its weights.")
    routed = next(linear for linear in shape.linears() if linear.used is not None)
    return shape.experts.routed * routed.touched(positive_int("batch", batch))


class CostPoint(NamedTuple):
    """One batch: `seconds` per step are also each user's time per output token."""

    batch: int
    seconds: float
    tokens_per_second: float
    usd_per_million_tokens: float


class BatchChoice(NamedTuple):
    """The batch that was asked for, None where there is none; what binds, and a sentence on it.

    binds: "TPOT", "price", "KV pool", "weights", "measurement" or "most".
    """

    batch: int | None
    binds: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class Curve:
    """Seconds of a decode step at each batch from the first to the last of `batches`.

    `batches` are those drawn, none where not one sequence fits; `step` knows those between, too.
    `end` names what bounds them ("KV pool", "weights", "measurement", "most"), `reason` says it.
    A price per GPU and hour is paid for each of `gpus`.
    """

    step: Callable[[int], float]
    batches: tuple[int, ...]
    end: str
    reason: str
    gpus: int = 1

    @classmethod
    def predicted(cls, deployment: Deployment, context: int, most: int | None = None) -> Curve:
        """The roofline of a deployment up to what its KV pool holds, or up to `most` sequences."""
        if deployment.pipeline_parallel > 1:
            raise ValueError(
                "A pipeline keeps several batches in flight, and one step's time doesn't price "
                "them: take pipeline_parallel=1."
            )
        name = f"{deployment.tensor_parallel} x {deployment.hardware.name}"
        try:
            last, end = deployment.max_sequences(context), "KV pool"
            reason = f"The KV pool of {name} holds {last} sequences of {context} tokens."
        except NoRoomError as error:
            last, end, reason = 0, "weights", str(error)
        if most is not None and positive_int("most", most) < last:
            last, end, reason = most, "most", f"No batch above {most} was asked for."
        return cls(
            step=lambda batch: deployment.step(batch, context, check_memory=False).seconds,
            batches=_grid(last),
            end=end,
            reason=reason,
            gpus=deployment.tensor_parallel,
        )

    @classmethod
    def measured(cls, points: Iterable[tuple[int, float]], gpus: int = 1) -> Curve:
        """One's own curve: (batch, seconds per step) pairs, a straight line from each to the next.

        Nothing is known beyond them. ValueError on no points, or on two of one batch.
        """
        points = sorted(points)
        batches = [positive_int("A measured batch", batch) for batch, _ in points]
        seconds = [positive_number("Measured seconds", taken) for _, taken in points]
        if not points or len(set(batches)) < len(batches):
            raise ValueError(f"A curve takes one point for each batch, at least one: {points}.")

        def step(batch: int) -> float:
            right = bisect.bisect_left(batches, batch)
            if batches[right] == batch:
                return seconds[right]
            share = (batch - batches[right - 1]) / (batches[right] - batches[right - 1])
            return seconds[right - 1] + share * (seconds[right] - seconds[right - 1])

        reason = f"No batch above {batches[-1]} was measured."
        positive_int("gpus", gpus)
        return cls(step=step, batches=tuple(batches), end="measurement", reason=reason, gpus=gpus)

    def cost(self, batch: int, usd_per_gpu_hour: float, utilization: float = 1.0) -> CostPoint:
        """$/Mtok of output at one batch; ValueError beyond the curve's ends."""
        if not self.batches:
            raise ValueError(self.reason)
        first, last = self.batches[0], self.batches[-1]
        if not first <= positive_int("batch", batch) <= last:
            raise ValueError(f"The curve goes from batch {first} to {last}, not to {batch}.")
        seconds = self.step(batch)
        price = positive_number("usd_per_gpu_hour", usd_per_gpu_hour) * self.gpus
        speed = batch / seconds
        return CostPoint(batch, seconds, speed, usd_per_million_tokens(price, speed, utilization))

    def costs(self, usd_per_gpu_hour: float, utilization: float = 1.0) -> tuple[CostPoint, ...]:
        """$/Mtok of output at each of `batches`."""
        return tuple(self.cost(batch, usd_per_gpu_hour, utilization) for batch in self.batches)


def largest_batch(curve: Curve, tpot: float = math.inf) -> BatchChoice:
    """The largest batch such that it and every smaller one keep to `tpot` seconds per token.

    A limit on the batch lets smaller ones run too. Where there is none, `reason` says why: an SLO
    below the first step, or no room for one sequence or for the weights.
    """
    if tpot != math.inf:
        positive_number("tpot", tpot)
    late = next((batch for batch in curve.batches if curve.step(batch) > tpot), None)
    if late is None:
        return BatchChoice(curve.batches[-1] if curve.batches else None, curve.end, curve.reason)
    first = curve.batches[0]
    if late == first:
        return BatchChoice(
            None,
            "TPOT",
            f"One step of batch {first} takes {curve.step(first) * 1e3:.3g} ms, over the TPOT of "
            f"{tpot * 1e3:.3g} ms: no batch keeps to it.",
        )
    good = curve.batches[curve.batches.index(late) - 1]
    batch = good + bisect.bisect_right(range(good + 1, late), tpot, key=curve.step)
    return BatchChoice(
        batch,
        "TPOT",
        f"A step of batch {batch + 1} takes {curve.step(batch + 1) * 1e3:.4g} ms, over the TPOT of "
        f"{tpot * 1e3:.4g} ms.",
    )


def smallest_batch(
    curve: Curve, usd_per_gpu_hour: float, usd_per_million: float, utilization: float = 1.0
) -> BatchChoice:
    """The smallest batch whose tokens cost `usd_per_million` or less, such as an API's price."""
    positive_number("usd_per_million", usd_per_million)
    if not curve.batches:
        return BatchChoice(None, curve.end, curve.reason)

    def cheap(batch: int) -> bool:
        cost = curve.cost(batch, usd_per_gpu_hour, utilization).usd_per_million_tokens
        return cost <= usd_per_million

    found = next((i for i, batch in enumerate(curve.batches) if cheap(batch)), None)
    if found is None:
        best = cheapest_batch(curve, usd_per_gpu_hour, utilization=utilization)
        return BatchChoice(
            None,
            "price",
            f"The cheapest, batch {best.batch}, costs ${best.usd_per_million_tokens:.3g} per 10^6 "
            f"tokens, more than ${usd_per_million:.3g}. {curve.reason}",
        )
    between = range(curve.batches[max(0, found - 1)], curve.batches[found] + 1)
    batch = between[bisect.bisect_left(between, True, key=cheap)]
    return BatchChoice(
        batch, "price", f"Smaller batches cost more than ${usd_per_million:.3g} per 10^6 tokens."
    )


def cheapest_batch(
    curve: Curve, usd_per_gpu_hour: float, tpot: float = math.inf, utilization: float = 1.0
) -> CostPoint:
    """The batch with the cheapest token among those that keep to `tpot` (see `largest_batch`).

    Of several as cheap the smallest: there a larger one costs latency and saves nothing.
    ValueError with the reason where no batch keeps to it.
    """
    largest = largest_batch(curve, tpot)
    if largest.batch is None:
        raise ValueError(largest.reason)
    drawn = [batch for batch in curve.batches if batch < largest.batch]
    # The cheapest is among these: between two drawn batches, cost falls or rises all the way.
    points = [curve.cost(b, usd_per_gpu_hour, utilization) for b in (*drawn, largest.batch)]
    least = min(point.usd_per_million_tokens for point in points) * (1 + 1e-9)
    batch = smallest_batch(curve, usd_per_gpu_hour, least, utilization).batch
    return curve.cost(batch, usd_per_gpu_hour, utilization)


def _grid(last: int, per_octave: int = 8) -> tuple[int, ...]:
    """1 .. last in whole numbers, about evenly on a log axis."""
    if last == 0:
        return ()
    steps = math.ceil(math.log2(last) * per_octave)
    return tuple(sorted({1, last, *(round(2 ** (i / per_octave)) for i in range(steps))}))
