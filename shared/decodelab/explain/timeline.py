"""A trace as what can be drawn: bars of a slot, corners of a curve, shares of all slots."""

from collections import Counter
from collections.abc import Hashable, Sequence
from typing import Literal, NamedTuple

from decodelab.serve import StepRecord

Trace = Sequence[StepRecord]
By = Literal["step", "seconds"]
KINDS = ("prefill", "decode", "padding")


class Stretch(NamedTuple):
    """Steps in a row in which a slot did one thing for one request, on the x axis of a figure."""

    slot: int
    id: Hashable
    kind: str
    start: float
    length: float

    @property
    def end(self) -> float:
        return self.start + self.length


def edges(trace: Trace, by: By) -> list[tuple[float, float]]:
    """Where each step starts and ends: its number, or seconds since the first one started."""
    if by == "step":
        return [(i, i + 1) for i in range(len(trace))]
    return [(record.start - trace[0].start, record.end - trace[0].start) for record in trace]


def stretches(trace: Trace, by: By = "step") -> list[Stretch]:
    """The trace as bars: a slot's steps of one kind for one request are one, so there are few."""
    found: list[Stretch] = []
    latest: dict[int, int] = {}  # slot -> place in `found` of what it did in the step before
    for (start, end), record in zip(edges(trace, by), trace, strict=True):
        now = {}
        for row in record.rows:
            at = latest.get(row.slot)
            if at is not None and found[at][:3] == (row.slot, row.id, row.kind):
                found[at] = found[at]._replace(length=end - found[at].start)
            else:
                at = len(found)
                found.append(Stretch(row.slot, row.id, row.kind, start, end - start))
            now[row.slot] = at
        latest = now
    return found


def preempted(trace: Trace, by: By, bars: list[Stretch]) -> list[Stretch]:
    """The bar that each preemption cut short: the last of that request before that step."""
    found = []
    for (start, _), record in zip(edges(trace, by), trace, strict=True):
        for id in record.preempted:
            found += [bar for bar in bars if bar.id == id and bar.start < start][-1:]
    return found


def staircase(trace: Trace, values: Sequence[float], by: By = "step") -> list[tuple[float, float]]:
    """One value a step, as corners (x, value); 0 where no step runs, for want of requests."""
    corners: list[tuple[float, float]] = []
    for (start, end), value in zip(edges(trace, by), values, strict=True):
        x, y = corners[-1] if corners else (0.0, 0.0)
        if by == "seconds" and start - x > (end - start) / 2:  # idle, not just between steps
            corners += [(x, 0.0), (start, 0.0)]
            y = 0.0
        if value == y and len(corners) > 1:
            corners[-1] = (end, value)
        else:
            corners += [(start, value), (end, value)]
    return corners


def shares(trace: Trace, by: By, slots: int) -> dict[str, float]:
    """What part of slots x x-axis each kind takes, and what is "free", while steps run."""
    taken, whole = Counter(), 0.0
    for (start, end), record in zip(edges(trace, by), trace, strict=True):
        whole += (end - start) * slots
        for row in record.rows:
            taken[row.kind] += end - start
    shares = {kind: taken[kind] / whole for kind in KINDS}
    return shares | {"free": 1 - sum(shares.values())}
