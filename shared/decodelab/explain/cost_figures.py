"""Figures of money: $ per 10^6 tokens against batch, and hour by hour through a day.

What a token costs and what bounds the batch is computed by `decodelab.predict`, never here. They
return a Figure, as those of decodelab.explain.figures do.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from math import inf

from decodelab.explain.chart import Axis, Panel, Rule, Series
from decodelab.explain.figures import BATCH, Figure
from decodelab.explain.style import say
from decodelab.predict import (
    CostPoint,
    Curve,
    Day,
    largest_batch,
    usd_per_million_tokens,
)
from decodelab.predict.prices import APIPrice

DOLLARS = "$ per million tokens"
MISSING = "does not fit"
LIMITS = ("TPOT", "KV pool")  # of what ends a batch, those worth a mark
DAYS = ("typical", "tail", "level")  # roles of the first day drawn, the second, the third
Points = Sequence[CostPoint]


def cost_against_batch(
    *,
    usd_per_gpu_hour: float,
    utilization: float = 1.0,
    predicted: Curve | None = None,
    measured: Curve | None = None,
    tpot_slo: float | None = None,
    prices: Iterable[APIPrice] = (),
    marker: int | None = None,
    frame: Points = (),
    measured_name: str = "measured",
    title: str | None = None,
) -> Figure:
    """Draw $ per 10^6 output tokens (log) against batch, and below what each user waits for one.

    The batch at which `tpot_slo` (seconds) or the KV pool ends is marked; `prices` are lines at
    what APIs bill for output, `marker` rings a batch of `predicted`, `frame` stays in view.
    """
    curves = {"predicted": predicted, measured_name: measured}
    curves = {name: curve for name, curve in curves.items() if curve}
    paid = usd_per_gpu_hour, utilization
    costs = {name: curve.costs(*paid) for name, curve in curves.items() if curve.batches}
    if not (costs or marker):
        raise ValueError("There is no batch to draw: give a curve on which one sequence fits.")
    dots = [] if marker is None else [_ring(predicted, marker, *paid)]
    dots += _end(next(iter(curves.values())), tpot_slo, *paid)
    points = [*frame, *(p for own in costs.values() for p in own), *(p for _, _, p in dots)]
    x = Axis(**BATCH, log=2, include=(1, *(point.batch for point in points)))
    money = lambda point: point.usd_per_million_tokens  # noqa: E731
    wait = lambda point: point.seconds * 1e3  # noqa: E731
    prices, limit = list(prices), tpot_slo and tpot_slo * 1e3
    room = (limit * 1.25,) if limit else ()  # for the label of the SLO above all lines
    panels = (
        Panel(
            y=Axis(quantity=_cost_of(prices), unit=DOLLARS, log=10, include=_of(frame, money)),
            series=(*_views(costs, dots, money), *_bills(prices, max(x.include))),
        ),
        Panel(
            y=Axis(quantity="TPOT, each user", unit="ms", log=10, include=_of(frame, wait) + room),
            series=_views(costs, dots, wait),
            rules=_slo(limit),
            tall=120,
        ),
    )
    return Figure(title=title or _cheapest(costs), x=x, panels=panels)


def cost_through_a_day(days: Day | Mapping[str, Day], *, title: str | None = None) -> Figure:
    """Draw tokens/s asked for and paid for in each hour, and what those made in it cost (log).

    Of one day, or of several by name on one scale, such as one with replicas off at night.
    """
    named = dict(days) if isinstance(days, Mapping) else {"": days}
    most = max(max(_paid(day), default=0) for day in named.values())
    panels = [_load_panel(name, day, most) for name, day in named.items()]
    return Figure(
        title=title or _compared(named),
        x=Axis(quantity="hour of the day", include=(24,), every=6),
        panels=(*panels, _hourly_panel(named)),
        words=" ".join(_account(name, day) for name, day in named.items()),
    )


def dollars(value: float) -> str:
    """Write an amount, as in $0.207, with cents at least."""
    text = say(value)
    return f"${text}0" if text[-2:-1] == "." else f"${text}"


def cost_at(curve: Curve, batch: int, usd_per_gpu_hour: float, utilization: float) -> CostPoint:
    """What a batch would cost, also where it doesn't fit."""
    seconds, price = curve.step(batch), usd_per_gpu_hour * curve.gpus
    usd = usd_per_million_tokens(price, batch / seconds, utilization)
    return CostPoint(batch, seconds, batch / seconds, usd)


def _ring(curve: Curve, batch: int, *paid: float) -> tuple[str, str, CostPoint]:
    """The batch that is looked at, as (name, role, point)."""
    fits = curve.batches and batch <= curve.batches[-1]
    name, role = (f"batch {say(batch)}", "marker") if fits else (MISSING, "breach")
    return name, role, cost_at(curve, batch, *paid)


def _end(curve: Curve, tpot_slo: float | None, *paid: float) -> list[tuple[str, str, CostPoint]]:
    """Where the SLO or memory ends the batch, as `_ring`; nothing where neither does."""
    last = largest_batch(curve, tpot_slo or inf)
    if last.batch is None or last.binds not in LIMITS:
        return []
    point = curve.cost(last.batch, *paid)
    return [(f"{last.binds} ends at {say(last.batch)}", "breach", point)]


def _views(
    costs: Mapping[str, Points],
    dots: Iterable[tuple[str, str, CostPoint]],
    value: Callable[[CostPoint], float],
) -> tuple[Series, ...]:
    """The prediction as a line, measured points as dots, and the dots of their own."""
    line, own = ("line", "prediction"), ("dots", "measurement")
    rows = [
        (name, *(line if name == "predicted" else own), points) for name, points in costs.items()
    ]
    rows += [(name, "dots", role, (point,)) for name, role, point in dots]
    return tuple(
        Series(name=name, kind=kind, role=role, x=_of(own, lambda p: p.batch), y=_of(own, value))
        for name, kind, role, own in rows
    )


def _cost_of(prices: Iterable[APIPrice]) -> str:
    """The quantity, and of when the prices beside it are."""
    dates = ", ".join(sorted({row.as_of for row in prices}))
    return f"cost of output, and APIs' prices of {dates}" if dates else "cost of output"


def _bills(prices: Iterable[APIPrice], last: float) -> list[Series]:
    """A line across at what each API bills for output."""
    found = []
    for row in prices:
        bill, provider = row.price.output, row.provider.split(" /")[0]
        name = f"{provider} {dollars(bill)}"
        found.append(Series(name=name, x=(1, last), y=(bill, bill), role="level"))
    return found


def _slo(limit: float | None) -> tuple[Rule, ...]:
    if not limit:
        return ()
    return (Rule(at=limit, label=f"SLO {say(limit)} ms", axis="y", role="breach"),)


def _of(points: Points, value: Callable[[CostPoint], float]) -> tuple[float, ...]:
    return tuple(map(value, points))


def _cheapest(costs: Mapping[str, Points]) -> str:
    """The claim of the last curve: its first batch and its cheapest."""
    if not costs:
        return "Not one sequence fits"
    name, points = list(costs.items())[-1]
    first, best = points[0], min(points, key=lambda point: point.usd_per_million_tokens)
    return (
        f"A million output tokens: {dollars(first.usd_per_million_tokens)} at batch "
        f"{say(first.batch)}, {dollars(best.usd_per_million_tokens)} at batch {say(best.batch)} "
        f"({name})"
    )


# A day


def _paid(day: Day) -> list[float]:
    """Tokens/s that the replicas on could make, by hour."""
    return [count * day.tokens_per_second for count in day.replicas]


def _steps(values: Sequence[float]) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """x and y of a staircase of hours."""
    x = tuple(hour + end for hour in range(len(values)) for end in (0, 1))
    return x, tuple(value for value in values for _ in (0, 1))


def _load_panel(name: str, day: Day, most: float) -> Panel:
    rows = [("paid for", _paid(day), "reserve"), ("made", day.served, "decode")]
    if day.unserved:
        rows.insert(0, ("not served", day.loads, "breach"))
    series = []
    for label, values, role in rows:
        x, y = _steps(values)
        series.append(Series(name=label, x=x, y=y, kind="area", role=role))
    y = Axis(quantity=f"load, {name}" if name else "load", unit="tokens/s", include=(most,))
    return Panel(y=y, series=tuple(series), tall=120)


def _hourly_panel(named: Mapping[str, Day]) -> Panel:
    """Dollars per 10^6 tokens of each hour in which any were made, and of each day as a whole."""
    series = []
    for (name, day), role in zip(named.items(), DAYS, strict=False):
        hours = zip(day.replicas, day.served, strict=True)
        found = {
            hour: usd_per_million_tokens(count * day.usd_per_hour, made)
            for hour, (count, made) in enumerate(hours)
            if made
        }
        x, y = zip(
            *((hour + end, usd) for hour, usd in found.items() for end in (0, 1)), strict=True
        )
        series.append(Series(name=name or "that hour", x=x, y=y, role=role))
    return Panel(
        y=Axis(quantity="cost of the hour", unit=DOLLARS, log=10), series=tuple(series), tall=130
    )


def _compared(named: Mapping[str, Day]) -> str:
    """The claim of a day: what a token costs, and at which utilization."""
    said = [
        f"{name} {dollars(day.usd_per_million_tokens)} at {day.utilization:.0%} utilization".strip()
        for name, day in named.items()
    ]
    return f"A million tokens over the day: {'; '.join(said)}"


def _account(name: str, day: Day) -> str:
    most, least = max(day.replicas), min(day.replicas)
    on = f"{most}" if most == least else f"{least} to {most}"
    lost = f", {say(day.unserved)} not served" if day.unserved else ""
    return (
        f"{name or 'The day'}: {on} replicas on, load {say(min(day.loads))} to "
        f"{say(max(day.loads))} tokens/s, {say(day.tokens)} tokens made{lost}, {dollars(day.usd)}."
    )
