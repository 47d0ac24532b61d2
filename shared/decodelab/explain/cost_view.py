"""What the cost explorer says and shows at one position of its controls; needs no widget.

Costs and limits are computed by `decodelab.predict.economics`, never here.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache, lru_cache
from html import escape
from math import inf, log

from decodelab.explain.cost_figures import cost_against_batch, cost_at, dollars
from decodelab.explain.figures import Figure
from decodelab.explain.paint_svg import paint_svg
from decodelab.explain.style import say
from decodelab.predict import (
    APIPrice,
    CostPoint,
    Curve,
    Deployment,
    api_price,
    break_even,
    largest_batch,
)

OPEN_8B = (api_price("Llama-3.1-8B", "Together"), api_price("llama-3.1-8b-instant", "Groq"))
INPUT = "Output tokens alone: prompts take a machine's time too, and an API bills them apart."
LOWEST = 0.2  # the least utilization whose costs stay in view


@dataclass(frozen=True, kw_only=True)
class Cost:
    """$ per 10^6 output tokens over batch, context, price and utilization.

    `measured` holds the reader's own seconds of a decode step, {(batch, context): seconds}.
    `predicted(batch, context)`, in seconds, replaces the roofline of `deployment`. `tpot_slo` is
    in seconds; `prices` are drawn beside. `usd_per_gpu_hour` keeps its costs in view.
    """

    deployment: Deployment
    usd_per_gpu_hour: float
    measured: Mapping[tuple[int, int], float] = field(default_factory=dict)
    predicted: Callable[[int, int], float] | None = None
    tpot_slo: float | None = None
    prices: tuple[APIPrice, ...] = OPEN_8B
    contexts: tuple[int, int] = (128, 32_768)
    max_batch: int = 1024

    def __post_init__(self) -> None:
        if self.max_batch < 2 or not 0 < self.contexts[0] < self.contexts[1]:
            raise ValueError(
                "the sliders need max_batch of 2 or more and contexts (low, high) that rise from "
                f"above 0, got max_batch={self.max_batch}, contexts={self.contexts}"
            )

    def curve(self, context: int) -> Curve:
        """Predicted seconds of a step at each batch that fits."""
        return _curve(self.deployment, context, self.max_batch, self.predicted)

    def own(self, context: int) -> tuple[int, Curve | None]:
        """The measured context nearest in ratio, and its curve; 0 and None if there is none."""
        if not self.measured:
            return 0, None
        near = min({c for _, c in self.measured}, key=lambda c: abs(log(c / context)))
        points = [
            (b, s) for (b, c), s in self.measured.items() if c == near and b <= self.max_batch
        ]
        return near, Curve.measured(points, self.deployment.tensor_parallel) if points else None

    @property
    def frame(self) -> list[CostPoint]:
        """What stays in view wherever batch and context stand, at the price as given."""
        curves = [curve for context in self.contexts if (curve := self.curve(context)).batches]
        ends = [(curve, batch) for curve in curves for batch in (1, curve.batches[-1])]
        return [
            cost_at(curve, batch, self.usd_per_gpu_hour, share)
            for curve, batch in ends
            for share in (1.0, LOWEST)
        ]

    def figure(self, usd: float, share: float, batch: int, context: int) -> Figure:
        """Cost against batch at `usd` per GPU and hour, with `share` of the capacity sold."""
        near, own = self.own(context)
        return cost_against_batch(
            usd_per_gpu_hour=usd,
            utilization=share,
            predicted=self.curve(context),
            measured=own,
            measured_name=f"measured at {say(near)}",
            tpot_slo=self.tpot_slo,
            prices=self.prices,
            marker=batch,
            frame=self.frame,
            title=self.claim(usd, share, batch, context),
        )

    def claim(self, usd: float, share: float, batch: int, context: int) -> str:
        """What a million tokens cost at one point, or that it does not fit, in a line."""
        curve, where = self.curve(context), f"atch {say(batch)} at context {say(context)}"
        last = curve.batches[-1] if curve.batches else 0
        if batch > last:
            most = f"at most {say(last)} does" if last else "not one sequence does"
            return f"B{where} does not fit: {most}"
        cost = dollars(cost_at(curve, batch, usd, share).usd_per_million_tokens)
        return f"{cost} a million output tokens: b{where}, {share:.0%} utilization"

    def readout(self, usd: float, share: float, batch: int, context: int) -> str:
        """Say speed, what ends the batch, and where each API is met, in words and numbers."""
        curve = self.curve(context)
        said, last = [], largest_batch(curve, self.tpot_slo or inf)
        if curve.batches and batch <= curve.batches[-1]:
            point = cost_at(curve, batch, usd, share)
            speed = point.tokens_per_second
            said.append(
                f"Busy, it makes {say(speed)} tokens/s; each user waits {say(point.seconds * 1e3)} "
                f"ms for a token."
            )
            said += [_against(row, usd * curve.gpus, speed) for row in self.prices]
        most = "No batch will do" if last.batch is None else f"Largest batch {say(last.batch)}"
        said.append(f"{most}: {last.reason}")
        return " ".join([*said, self._nearest(usd, share, batch, context)])

    def _nearest(self, usd: float, share: float, batch: int, context: int) -> str:
        """The measurement nearest in ratio."""
        near, curve = self.own(context)
        if curve is None:
            return "Nothing measured yet."
        batch = min(curve.batches, key=lambda b: abs(log(b / batch)))
        cost = dollars(curve.cost(batch, usd, share).usd_per_million_tokens)
        return f"Nearest measurement, batch {say(batch)} at context {say(near)}: {cost}."

    def html(self, usd: float, share: float, batch: int, context: int, note: str = "") -> str:
        """All that the explorer shows at one position of its controls; `note` comes last."""
        point = usd, share, batch, context
        notes = [*map(_dated, self.prices), *self.deployment.assumptions, INPUT, note]
        return (
            f'<p role="status" style="max-width:720px;line-height:1.4">'
            f"{escape(self.readout(*point))}</p>"
            + paint_svg(self.figure(*point))
            + '<p style="max-width:720px;line-height:1.3;font-size:11px">'
            + f"{escape(' '.join(filter(None, notes)))}</p>"
        )


@lru_cache(maxsize=64)
def _curve(deployment: Deployment, context: int, most: int, predicted: Callable | None) -> Curve:
    """Each step is computed once: price and utilization don't change it."""
    curve = Curve.predicted(deployment, context, most)
    step = (lambda batch: predicted(batch, context)) if predicted else curve.step
    return replace(curve, step=cache(step))


def _against(row: APIPrice, usd_per_hour: float, speed: float) -> str:
    """From which utilization on a machine at this speed costs less than an API bills for output."""
    even = break_even(usd_per_hour, speed, row.price.output)
    api = f"{row.name} ({dollars(row.price.output)})"
    if not even.possible:
        return f"{api} stays cheaper, even than a full machine."
    return f"It is cheaper than {api} from {say(100 * even.utilization)}% utilization on."


def _dated(row: APIPrice) -> str:
    return (
        f"{row.name}: {dollars(row.price.output)} a million output tokens as of {row.as_of}, "
        f"{row.source}{f', {row.note}' if row.note else ''}."
    )
