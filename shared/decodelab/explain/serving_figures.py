"""Figures of serving, from an engine's trace alone: who sat where, what was padding, which blocks.

Each takes one trace, or several by name, drawn one above the other on one scale. Percentiles come
in as plain numbers, from `decodelab.serve.metrics` or a record. All return a Figure, as those of
decodelab.explain.figures do.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import takewhile
from math import isfinite

from decodelab.explain.chart import Axis, Panel, Rule, Series
from decodelab.explain.figures import Figure
from decodelab.explain.style import say
from decodelab.explain.timeline import (
    KINDS,
    By,
    Trace,
    edges,
    preempted,
    shares,
    staircase,
    stretches,
)
from decodelab.serve import StepRecord

Traces = Trace | Mapping[str, Trace]  # one, or several by name
Percentiles = Mapping[float, Mapping[float, float]]  # {x: {percent: seconds}}


def gantt(
    traces: Traces,
    *,
    by: By = "step",
    slots: int | None = None,
    until: float = 0.0,
    title: str | None = None,
) -> Figure:
    """Draw what each slot did for whom, over steps or seconds; of a lone trace, also its queue.

    A dot marks where a request was preempted. `slots` are drawn even where nobody sat in some,
    and x up to `until` even where the trace ends before.
    """
    named = _named(traces)
    slots = slots or _slots(named)
    panels = [_slot_panel(name, trace, by, slots) for name, trace in named.items()]
    if not isinstance(traces, Mapping):
        panels.append(_queue_panel(traces, by))
    return Figure(
        title=title or _done(named, by, slots),
        x=_axis(by, until),
        panels=tuple(panels),
        words=" ".join(_account(name, trace, slots) for name, trace in named.items()),
    )


def occupancy(
    traces: Traces, *, by: By = "step", slots: int | None = None, title: str | None = None
) -> Figure:
    """Draw how many slots decode, prefill, are padding (done, waiting for others) or are empty.

    Shares in the names are of all slots over all steps, or over the seconds of steps.
    """
    named = _named(traces)
    slots = slots or _slots(named)
    panels, useful = [], {}
    for name, trace in named.items():
        share = shares(trace, by, slots)
        useful[name] = f"{name} {share['prefill'] + share['decode']:.0%}".strip()
        areas, below = [], [0] * len(trace)
        for kind in ("decode", "prefill", "padding", "free"):
            counts = [slots if kind == "free" else _count(record, kind) for record in trace]
            top = [min(a + b, slots) for a, b in zip(below, counts, strict=True)]
            if top != below:
                label = f"{'empty' if kind == 'free' else kind} {share[kind]:.0%}"
                areas.append(_area(label, trace, top, by, kind))
            below = top
        y = Axis(quantity=f"{name} slots".strip(), include=(slots,))
        panels.append(Panel(y=y, series=tuple(reversed(areas)), tall=110))
    return Figure(
        title=title or f"Slots with work to do: {', '.join(useful.values())}",
        x=_axis(by),
        panels=tuple(panels),
        words=" ".join(_account(name, trace, slots) for name, trace in named.items()),
    )


def blocks(traces: Traces, *, by: By = "step", title: str | None = None) -> Figure:
    """Draw blocks in use against all of the pool; a dot marks where it ran out."""
    named, panels, said = _named(traces), [], []
    for name, trace in named.items():
        used, total = [record.blocks_used for record in trace], trace[0].blocks_total
        series = [_area("in use", trace, used, by, "KV")]
        if out := [i for i, record in enumerate(trace) if record.preempted]:
            starts = [start for start, _ in edges(trace, by)]
            x, y = tuple(starts[i] for i in out), (float(total),) * len(out)
            series.append(Series(name="preempted", x=x, y=y, kind="dots", role="breach"))
        pool = Rule(at=total, label=f"pool of {say(total)}", axis="y")
        y = Axis(quantity=f"{name} blocks".strip(), include=(total * 1.1,))
        panels.append(Panel(y=y, series=tuple(series), rules=(pool,), tall=130))
        peak = f"{name} {say(max(used))} of {say(total)}".strip()
        count = sum(len(trace[i].preempted) for i in out)
        said.append(f"{peak}, {_times(count, 'preemption')}" if count else peak)
    return Figure(
        title=title or f"Blocks in use at most: {'; '.join(said)}",
        x=_axis(by),
        panels=tuple(panels),
        words=f"Over {', '.join(f'{len(trace)} steps' for trace in named.values())}.",
    )


def latency_against_load(
    ttft: Percentiles,
    tpot: Percentiles,
    *,
    ttft_slo: float | None = None,
    tpot_slo: float | None = None,
    title: str | None = None,
) -> Figure:
    """Draw TTFT and TPOT (ms) against load: {requests/s: {percent: seconds}}, log y.

    The SLOs, in seconds, are lines that the highest percentile should stay below.
    """
    views = (("TTFT", ttft, ttft_slo), ("TPOT", tpot, tpot_slo))
    panels = [_percentile_panel(f"{name}, each user", *rest) for name, *rest in views]
    if title is None and (kept := [(c, slo) for _, c, slo in views if slo]):
        rates = sorted(kept[0][0])
        met = list(takewhile(lambda rate: all(_within(c, rate, slo) for c, slo in kept), rates))
        where = f"up to {say(met[-1])} requests/s" if met else f"not even at {say(rates[0])}"
        title = f"p{say(max(ttft[rates[0]]))} keeps to the SLO {where}{' requests/s' * (not met)}"
    x = Axis(quantity="load", unit="requests/s")
    title = title or "As load nears what the engine can serve, the queue takes over TTFT"
    return Figure(title=title, x=x, panels=tuple(panels))


def decode_gaps(
    itl: Percentiles,
    ttft: Percentiles | None = None,
    *,
    slo: float | None = None,
    title: str | None = None,
) -> Figure:
    """Draw the gap between two tokens of a request (ITL, ms) against token budget, log-log.

    {budget: {percent: seconds}}; with `ttft`, what a small budget costs is drawn below. `slo` is
    for the gap, in seconds.
    """
    panels = [_percentile_panel("gap between tokens, ITL", itl, slo)]
    if ttft:
        panels.append(_percentile_panel("time to first token, TTFT", ttft, None))
    tail = panels[0].series[-1]
    ends = dict.fromkeys(((tail.x[0], tail.y[0]), (tail.x[-1], tail.y[-1])))
    said = [f"{say(ms)} ms at a budget of {say(budget)} tokens" for budget, ms in ends]
    x = Axis(quantity="token budget of a step", unit="tokens", log=2)
    title = title or f"The {tail.name} gap between tokens: {', '.join(said)}"
    return Figure(title=title, x=x, panels=tuple(panels))


def _named(traces: Traces) -> dict[str, Trace]:
    named = dict(traces) if isinstance(traces, Mapping) else {"": traces}
    if not named or not all(named.values()):
        raise ValueError("There is no step to draw: run the engine, then give its trace.")
    return named


def _slots(named: Mapping[str, Trace]) -> int:
    """As many as ever had a row."""
    return 1 + max(row.slot for trace in named.values() for record in trace for row in record.rows)


def _axis(by: By, until: float = 0.0) -> Axis:
    if by == "step":
        return Axis(quantity="step", include=(10, until))
    return Axis(quantity="time", unit="s", include=(until,))


def _slot_panel(name: str, trace: Trace, by: By, slots: int) -> Panel:
    bars, series = stretches(trace, by), []
    for kind in KINDS:
        if of_kind := [bar for bar in bars if bar.kind == kind]:
            rows, ids, _, starts, lengths = zip(*of_kind, strict=True)
            more = {"role": kind, "start": starts, "labels": tuple(map(str, ids))}
            series.append(Series(name=kind, x=lengths, y=rows, kind="bar", **more))
    if out := preempted(trace, by, bars):
        x, y = tuple(bar.end for bar in out), tuple(bar.slot for bar in out)
        series.append(Series(name="preempted", x=x, y=y, kind="dots", role="breach"))
    y = Axis(quantity=name, categories=tuple(f"slot {i}" for i in range(slots)))
    return Panel(y=y, series=tuple(series), row=26 if slots <= 16 else 18)


def _queue_panel(trace: Trace, by: By) -> Panel:
    waiting = [record.num_waiting for record in trace]
    y = Axis(quantity="requests in the queue", include=(4,))
    return Panel(y=y, series=(_area("waiting", trace, waiting, by, "queue"),), tall=90)


def _area(name: str, trace: Trace, values: Sequence[float], by: By, role: str) -> Series:
    x, y = zip(*staircase(trace, values, by), strict=True)
    return Series(name=name, x=x, y=y, kind="area", role=role)


def _percentile_panel(quantity: str, curves: Percentiles, slo: float | None) -> Panel:
    percents = sorted({percent for curve in curves.values() for percent in curve})
    series = []
    for i, percent in enumerate(percents):
        points = [(x, c[percent] * 1e3) for x, c in sorted(curves.items()) if percent in c]
        points = [point for point in points if isfinite(point[1])]
        if points:
            x, y = zip(*points, strict=True)
            last = len(percents) > 1 and i == len(percents) - 1
            role = "tail" if last else "level" if i else "typical"
            series.append(Series(name=f"p{say(percent)}", x=x, y=y, role=role))
    if not series:
        raise ValueError(f"There is no {quantity} to draw: give {{x: {{percent: seconds}}}}.")
    limits = [
        Rule(at=limit * 1e3, label=f"SLO {say(limit * 1e3)} ms", axis="y", role="breach")
        for limit in (slo,)
        if limit
    ]
    y = Axis(quantity=quantity, unit="ms", log=10)
    return Panel(y=y, series=tuple(series), rules=tuple(limits), tall=150)


def _within(curves: Percentiles, x: float, slo: float) -> bool:
    """Whether the highest percentile there keeps to the SLO."""
    return curves[x][max(curves[x])] <= slo


def _count(record: StepRecord, kind: str) -> int:
    return sum(row.kind == kind for row in record.rows)


def _done(named: Mapping[str, Trace], by: By, slots: int) -> str:
    """The claim of a Gantt, from its own numbers."""
    unit = "steps" if by == "step" else "s"
    ends = {name: edges(trace, by)[-1][1] for name, trace in named.items()}
    if len(ends) == 1:
        [(name, trace)] = named.items()
        share = shares(trace, by, slots)
        requests = len({row.id for record in trace for row in record.rows})
        return (
            f"{_times(requests, 'request')} in {say(ends[name])} {unit}: slots have work "
            f"{share['prefill'] + share['decode']:.0%} of the time"
        )
    first, last = min(ends, key=ends.get), max(ends, key=ends.get)
    if ends[first] == ends[last]:
        return f"All are done after {say(ends[last])} {unit}"
    return (
        f"{first} is done after {say(ends[first])} {unit}, {last} after {say(ends[last])}: "
        f"{say(round(ends[last] / ends[first], 2))} times as long"
    )


def _account(name: str, trace: Trace, slots: int) -> str:
    """A trace in a sentence."""
    kinds = Counter(row.kind for record in trace for row in record.rows)
    requests = len({row.id for record in trace for row in record.rows})
    said = [f"{say(kinds[kind])} {kind}" for kind in KINDS]
    empty = slots * len(trace) - sum(kinds.values())
    return (
        f"{name or 'Trace'}: {_times(requests, 'request')} in {_times(len(trace), 'step')} of "
        f"{slots} slots; rows: {', '.join(said)}; {say(empty)} left empty; "
        f"{_times(sum(len(r.preempted) for r in trace), 'preemption')}; "
        f"at most {max(record.num_waiting for record in trace)} wait."
    )


def _times(count: int, noun: str) -> str:
    return f"{say(count)} {noun}{'' if count == 1 else 's'}"
