"""Figures of load on an endpoint: latency and goodput against the rate, the tail, where time goes.

They take what `decodelab.serve.loadtest` makes, or a saved one: a LoadResult, or a sweep of them.
All return a Figure, as those of decodelab.explain.figures do.
"""

from collections.abc import Callable, Mapping, Sequence
from math import floor, isfinite, log10

from decodelab.explain.chart import Axis, Panel, Rule, Series, stacked
from decodelab.explain.figures import Figure
from decodelab.explain.style import say
from decodelab.serve import SLO, Latencies
from decodelab.serve.load_result import LoadResult, knee

Sweep = Sequence[LoadResult]  # open loops, one a rate
ENGINES = ("typical", "tail", "level")  # roles of the first engine drawn, the second, the third
TERMS = {"http and client": "reserve", "to first token": "prefill", "after it": "decode"}
RARE = 1e-3  # the least share of gaps that is drawn


def latency_and_goodput(
    sweeps: Sweep | Mapping[str, Sweep],
    *,
    slo: SLO,
    percent: float = 95,
    title: str | None = None,
) -> Figure:
    """Draw TTFT and TPOT (ms, log) and goodput against the rate offered, with each engine's knee.

    Of one engine the median is drawn too, of several only the percentile `percent`.
    """
    named = _named(sweeps)
    knees = {name: knee(list(sweep), slo) for name, sweep in named.items()}
    percents = (50, percent) if len(named) == 1 else (percent,)
    ttft = _latency_panel("TTFT", named, percents, lambda result: result.ttft, slo.ttft)
    tpot = _latency_panel("TPOT", named, percents, lambda result: result.tpot, slo.tpot)
    return Figure(
        title=title or _follows(knees),
        x=Axis(quantity="load offered", unit="requests/s"),
        panels=(ttft, tpot, _goodput_panel(named, slo, knees)),
    )


def open_and_closed(
    opened: Sweep, closed: Sequence[LoadResult], *, percent: float = 95, title: str | None = None
) -> Figure:
    """Draw TTFT (ms, log) against requests/s: offered by open loops, reached by closed ones.

    Users who wait for an answer before they ask again send no more than the engine serves, so a
    closed loop never meets the queue that an open one does.
    """
    tail = lambda result: result.ttft.percentile(percent) * 1e3  # noqa: E731
    opened = sorted(opened, key=lambda result: result.rate)
    closed = sorted(closed, key=lambda result: result.concurrency)
    waits = [
        f"{say(tail(r))} ms for {_users(r)}, at {say(r.requests_per_second)} requests/s"
        for r in closed
    ]
    queues = [f"{say(tail(r))} ms at {say(r.rate)} requests/s" for r in opened]
    users = Series(
        name="closed loop",
        x=tuple(result.requests_per_second for result in closed),
        y=tuple(map(tail, closed)),
        kind="dots",
        role="measurement",
        # Where the engine is full they stand close together: only the ends are named.
        labels=tuple(_users(r) if r in (closed[0], closed[-1]) else "" for r in closed),
    )
    line = _line("open loop", {result.rate: tail(result) for result in opened}, "tail")
    room = (min(users.y) / 2,)  # for the labels below
    y = Axis(quantity=f"TTFT, p{say(percent)}", unit="ms", log=10, include=room)
    return Figure(
        title=title or f"p{say(percent)} TTFT: {queues[-1]} offered; closed loop: {waits[-1]}",
        x=Axis(quantity="load, offered or reached by a closed loop", unit="requests/s"),
        panels=(Panel(y=y, series=(line, users)),),
        words=f"Open loop: {', '.join(queues)}. Closed loop: {'; '.join(waits)}.",
    )


def gaps(
    results: LoadResult | Mapping[str, LoadResult],
    *,
    slo: float | None = None,
    title: str | None = None,
) -> Figure:
    """Draw the share of gaps between tokens (ITL, ms) that are longer than x, log-log.

    A line crosses 50% at the median and 1% at the p99. `slo` is in seconds.
    """
    named = results if isinstance(results, Mapping) else {"": results}
    roles = zip(named.items(), ENGINES, strict=False)
    series = tuple(_longer(name, result.itl, role) for (name, result), role in roles)
    tails = [
        f"{name} {say(result.itl.p50 * 1e3)} and {say(result.itl.p99 * 1e3)} ms".strip()
        for name, result in named.items()
    ]
    limits = _limit(slo, "x") if slo else ()
    y = Axis(quantity="gaps longer than that", unit="%", log=10, include=(RARE * 100, 100))
    x = Axis(quantity="gap between two tokens", unit="ms", log=10)
    title = title or f"Gap between tokens, p50 and p99: {', '.join(tails)}"
    return Figure(title=title, x=x, panels=(Panel(y=y, series=series, rules=limits),))


def terms(results: Mapping[str, LoadResult], *, title: str | None = None) -> Figure:
    """Draw one stacked bar an engine: the mean milliseconds of a request, by `LoadResult.terms`.

    Where one server tells less than another, all are split as their clients saw them.
    """
    rows = {name: result.terms() for name, result in results.items()}
    if len({tuple(row) for row in rows.values()}) > 1:
        seen = {name: (result.ttft.mean, result.e2e.mean) for name, result in results.items()}
        rows = {name: {"to first token": a, "after it": b - a} for name, (a, b) in seen.items()}
    names, bars = stacked(rows, 1e3, **TERMS)
    panel = Panel(y=Axis(quantity="", categories=names), series=bars)
    x = Axis(quantity="mean time of a request", unit="ms")
    return Figure(title=title or _difference(rows), x=x, panels=(panel,))


def _difference(rows: Mapping[str, Mapping[str, float]]) -> str:
    """The claim of a split: which term makes most of what the slowest takes more."""
    total = {name: sum(row.values()) for name, row in rows.items()}
    slow, fast = max(total, key=total.get), min(total, key=total.get)
    more = {term: rows[slow][term] - rows[fast].get(term, 0.0) for term in rows[slow]}
    largest = max(more, key=more.get)
    if total[slow] == total[fast]:
        most = max(rows[slow], key=rows[slow].get)
        return f"{slow}: {say(total[slow] * 1e3)} ms a request; the largest term: {most}"
    return (
        f"{slow} takes {say(round(total[slow] / total[fast], 2))} times as long as {fast}: "
        f"{say(more[largest] * 1e3)} of {say((total[slow] - total[fast]) * 1e3)} ms more are "
        f"{largest}"
    )


def _named(sweeps: Sweep | Mapping[str, Sweep]) -> dict[str, Sweep]:
    """Sweeps by name, a lone one as ""; ValueError where there is nothing to draw, or too much."""
    named = dict(sweeps) if isinstance(sweeps, Mapping) else {"": sweeps}
    if not named or not all(named.values()):
        raise ValueError("There is no load to draw: give the results of one rate or more.")
    if len(named) > len(ENGINES):
        raise ValueError(f"One figure holds {len(ENGINES)} engines at most, not {len(named)}.")
    return named


def _follows(knees: Mapping[str, float]) -> str:
    """The claim of a sweep: up to which rate goodput follows the load."""
    of = {name: f" with {name}" if name else "" for name in knees}
    met = [f"{say(rate)} requests/s{of[name]}" for name, rate in knees.items() if isfinite(rate)]
    none = [f"at no rate tried{of[name]}" for name, rate in knees.items() if not isfinite(rate)]
    said = ([f"up to {', '.join(met)}"] if met else []) + none
    return f"Goodput follows the load {', '.join(said)}"


def _latency_panel(
    quantity: str,
    named: Mapping[str, Sweep],
    percents: Sequence[float],
    of: Callable[[LoadResult], Latencies],
    limit: float,
) -> Panel:
    series = []
    for (name, sweep), role in zip(named.items(), ENGINES, strict=False):
        for i, percent in enumerate(percents):
            points = {result.rate: of(result).percentile(percent) * 1e3 for result in sweep}
            if points := {rate: ms for rate, ms in points.items() if isfinite(ms) and ms > 0}:
                series.append(
                    _line(name or f"p{say(percent)}", points, role if name else ENGINES[i])
                )
    if not series:
        raise ValueError(f"There is no {quantity} to draw: no request was finished.")
    rules = _limit(limit, "y") if isfinite(limit) else ()
    which = f", p{say(percents[0])}" if len(percents) == 1 else ""
    room = tuple(rule.at * 1.25 for rule in rules)  # for the label of a limit above all lines
    y = Axis(quantity=f"{quantity}{which}", unit="ms", log=10, include=room)
    return Panel(y=y, series=tuple(series), rules=rules, tall=130)


def _goodput_panel(named: Mapping[str, Sweep], slo: SLO, knees: Mapping[str, float]) -> Panel:
    most = max(result.rate for sweep in named.values() for result in sweep)
    series = [Series(name="the load itself", x=(0, most), y=(0, most), role="bound")]
    for (name, sweep), role in zip(named.items(), ENGINES, strict=False):
        good = {result.rate: result.goodput(slo) for result in sweep}
        series.append(_line(name or "goodput", good, role))
    if found := {name: rate for name, rate in knees.items() if isfinite(rate)}:
        at = [next(r for r in named[name] if r.rate == rate) for name, rate in found.items()]
        x, y = tuple(found.values()), tuple(result.goodput(slo) for result in at)
        labels = tuple(f"{say(rate)} requests/s" for rate in x)
        series.append(Series(name="knee", x=x, y=y, kind="dots", role="marker", labels=labels))
    y = Axis(quantity="goodput, requests within the SLO", unit="requests/s")
    return Panel(y=y, series=tuple(series), tall=150)


def _limit(seconds: float, axis: str) -> tuple[Rule]:
    return (Rule(at=seconds * 1e3, label=f"SLO {say(seconds * 1e3)} ms", axis=axis, role="breach"),)


def _line(name: str, points: Mapping[float, float], role: str) -> Series:
    """A line through `points`, or a dot where there is only one."""
    x, y = zip(*sorted(points.items()), strict=True)
    return Series(name=name, x=x, y=y, kind="line" if len(x) > 1 else "dots", role=role)


def _longer(name: str, latencies: Latencies, role: str) -> Series:
    """The share of samples (%) that are longer than x (ms), down to RARE or the largest of them.

    Gaps of 0, between tokens that came in one piece, have no place on a log scale.
    """
    rarest = max(RARE, 1 / max(len(latencies.samples), 1))
    shares = [10 ** (-i / 20) for i in range(1, 1 + floor(-20 * log10(rarest) + 1e-9))]
    points = [(latencies.percentile(100 - 100 * share) * 1e3, share * 100) for share in shares]
    if rarest > RARE:
        points.append((max(latencies.samples, default=0) * 1e3, rarest * 100))
    points = [point for point in points if point[0] > 0]
    if not points:
        raise ValueError(f"No gap to draw {name}: no two tokens came one after the other.")
    x, y = zip(*points, strict=True)
    return Series(name=name or "gaps", x=x, y=y, role=role)


def _users(result: LoadResult) -> str:
    return f"{say(result.concurrency)} user{'' if result.concurrency == 1 else 's'}"
