"""A figure as plain data: what is shown and where, in pixels; never how a library draws it.

The painters (paint_svg, paint_matplotlib, paint_plotly) take a Chart and agree on every tick,
range and label, since all of them are decided here. Not a plotting library: lines, areas, dots,
horizontal bars and reference lines are all that the course needs.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import ceil, floor, log, log10
from textwrap import wrap
from typing import Literal

from decodelab.explain.style import ROLES, say

Span = tuple[float, float]
LEFT, RIGHT, WIDTH = 64, 176, 720  # margins (left: at least) and full width, pixels
GAP, LINE, LETTER = 18, 18, 6.9  # below panels; height of a line, width of a letter of text
NEAR_EDGE = 0.75  # right of this fraction, a label stands before its point


@dataclass(frozen=True, kw_only=True)
class Axis:
    """A quantity, its unit, and its scale: `log` is 0 for linear, or the base of the ticks.

    `categories` names rows instead, the first on top; values are then row numbers from 0.
    `include` are values to keep in view, so that a scale stands still while a slider moves.
    `every` sets ticks that far apart on a linear scale, for what has a rhythm, such as hours.
    """

    quantity: str
    unit: str = ""
    log: Literal[0, 2, 10] = 0
    categories: tuple[str, ...] = ()
    include: tuple[float, ...] = ()
    every: float = 0

    @property
    def title(self) -> str:
        unit = f" ({self.unit})" if self.unit else ""
        return f"{self.quantity}{unit}{', log scale' if self.log else ''}"

    def span(self, values: Sequence[float]) -> Span:
        """The range to show: from 0 on a linear scale, with a margin on a logarithmic one."""
        if self.categories:
            return len(self.categories) - 0.5, -0.5
        values = [*values, *self.include]
        if not self.log:
            return 0.0, max(values) * 1.08
        if min(values) <= 0:
            raise ValueError(
                f"{self.quantity} is on a log scale, which has no place for {min(values)}; "
                "every value must be above 0"
            )
        margin = max((max(values) / min(values)) ** 0.05, 1.1)
        return min(values) / margin, max(values) * margin

    def fraction(self, value: float, span: Span) -> float:
        """Where `value` lies in `span`, 0 to 1."""
        low, high = span
        if self.log:
            return log(value / low) / log(high / low)
        return (value - low) / (high - low)

    def ticks(self, span: Span) -> list[float]:
        """Round values inside `span`, two to twelve."""
        low, high = span
        if self.categories:
            return list(range(len(self.categories)))
        if self.every:
            return [i * self.every for i in range(floor(high / self.every) + 1)]
        if not self.log:
            return round_values(low, high)
        first, last = ceil(log(low, self.log) - 1e-9), floor(log(high, self.log) + 1e-9)
        stride = max((last - first) // 8 + 1, 1)
        ticks = [float(self.log) ** e for e in range(first, last + 1, stride)]
        if self.log == 10 and len(ticks) < 3:
            tens = [m * 10.0**e for e in range(first - 1, last + 1) for m in (1, 2, 5)]
            ticks = [v for v in tens if low <= v <= high]
        return ticks if len(ticks) > 1 else round_values(low, high)

    def tick_text(self, value: float) -> str:
        return self.categories[int(value)] if self.categories else say(value)


@dataclass(frozen=True, kw_only=True)
class Series:
    """Points of one name and role: a line, dots, an area down to 0, or bars of length x in row y.

    Its name stands at the right edge of its panel, or in its line, where that starts. Bars begin
    at `start`, or each where the one before it in its row ends; a bar's label is written in it.
    """

    name: str
    x: tuple[float, ...]
    y: tuple[float, ...]
    kind: Literal["line", "area", "dots", "bar"] = "line"
    role: str = "prediction"
    labels: tuple[str, ...] = ()  # one a point, written beside it
    start: tuple[float, ...] = ()
    named_at: Literal["edge", "start"] = "edge"

    def __post_init__(self) -> None:
        if self.role not in ROLES:
            raise ValueError(f"unknown role {self.role!r}; choose one of {', '.join(ROLES)}")
        if not self.x or len(self.x) != len(self.y):
            raise ValueError(
                f"{self.name!r} needs at least one point and as many x as y, "
                f"got {len(self.x)} x and {len(self.y)} y"
            )


@dataclass(frozen=True, kw_only=True)
class Rule:
    """A reference line across the panel at `at` on its x or y axis, with a label."""

    at: float
    label: str
    axis: Literal["x", "y"] = "x"
    role: str = "bound"


@dataclass(frozen=True, kw_only=True)
class Panel:
    """One y axis and what is drawn against it."""

    y: Axis
    series: tuple[Series, ...]
    rules: tuple[Rule, ...] = ()
    tall: int = 210  # pixels, where rows don't decide
    row: int = 36  # pixels of a row

    @property
    def height(self) -> int:
        """Height of the plotting area, pixels."""
        rows = self.row * len(self.y.categories) or self.tall
        return max(rows, LINE * len(self.series))

    @property
    def thick(self) -> int:
        """Height of a bar, pixels."""
        return round(0.61 * self.row)

    @cached_property
    def y_span(self) -> Span:
        values = [v for s in self.series for v in s.y]
        return self.y.span(values + [r.at for r in self.rules if r.axis == "y"])

    def bars(self) -> Iterator[tuple[Series, float, float, float]]:
        """Each bar as (series, row, start, length)."""
        ends: dict[float, float] = {}
        for series in (s for s in self.series if s.kind == "bar"):
            for i, (length, row) in enumerate(zip(series.x, series.y, strict=True)):
                start = series.start[i] if series.start else ends.get(row, 0.0)
                ends[row] = start + length
                yield series, row, start, length

    def names(self) -> list[tuple[Series, float]]:
        """Each series named at the edge with its name's height: near its end, none on another."""
        if self.y.categories or any(s.kind == "area" for s in self.series):  # as they are stacked
            step = LINE / self.height
            return [(s, 1 - step * (i + 0.5)) for i, s in enumerate(self.series)]
        at_edge = [s for s in self.series if s.named_at == "edge"]
        ends = [(self.y.fraction(s.y[-1], self.y_span), s) for s in at_edge]
        ends.sort(key=lambda pair: pair[0])
        heights = spread([height for height, _ in ends], LINE / self.height)
        return [(s, height) for (_, s), height in zip(ends, heights, strict=True)]


@dataclass(frozen=True, kw_only=True)
class Chart:
    """A claim as title, and panels one above the other on a shared x axis.

    `words` say what it shows where numbers of each series would say it badly.
    """

    title: str
    x: Axis
    panels: tuple[Panel, ...]
    words: str = ""

    @cached_property
    def x_span(self) -> Span:
        """The shared range of x; bars count with their stacked ends."""
        values = [x for p in self.panels for s in p.series if s.kind != "bar" for x in s.x]
        values += [start + length for p in self.panels for _, _, start, length in p.bars()]
        values += [r.at for p in self.panels for r in p.rules if r.axis == "x"]
        return self.x.span(values)

    @property
    def title_lines(self) -> list[str]:
        return wrap(self.title, 80)

    @property
    def left(self) -> float:
        """The left margin, wide enough for the names of rows."""
        names = [name for panel in self.panels for name in panel.y.categories]
        return max([LEFT, *(14 + 7.5 * len(name) for name in names)])

    def bar_labels(self, panel: Panel) -> Iterator[tuple[Series, float, float, str]]:
        """Each label whose bar is long enough for it, as (series, row, middle, label)."""
        pixels = (WIDTH - self.left - RIGHT) / (self.x_span[1] - self.x_span[0])
        for series in (s for s in panel.series if s.kind == "bar"):
            marks = zip(series.y, series.start, series.x, series.labels, strict=False)
            for row, start, length, label in marks:
                if label and LETTER * len(label) + 2 <= length * pixels:
                    yield series, row, start + length / 2, label

    def boxes(self) -> list[tuple[Panel, float, float, float, float]]:
        """Each panel with left, top, width, height of its plotting area, in pixels."""
        top, boxes = LINE * len(self.title_lines) + 18.0, []
        for panel in self.panels:
            top += 20 if panel.y.title else 0
            boxes.append((panel, self.left, top, WIDTH - self.left - RIGHT, panel.height))
            top += panel.height + GAP
        return boxes

    @property
    def height(self) -> float:
        *_, top, _, height = self.boxes()[-1]
        return top + height + 46

    def describe(self) -> str:
        """Say in words and numbers what the figure shows, a sentence a panel."""
        said = [self.words] if self.words else [self._describe_panel(p) for p in self.panels]
        return " ".join([f"{self.title}.", *said])

    def _describe_panel(self, panel: Panel) -> str:
        said = [self._describe_series(s, panel.y) for s in panel.series]
        for rule in panel.rules:
            unit = (self.x if rule.axis == "x" else panel.y).unit
            at = say(rule.at)
            said.append(rule.label if at in rule.label else f"{rule.label} {at} {unit}")
        subject = self.x.title if panel.y.categories else panel.y.title
        return f"{subject[:1].upper()}{subject[1:]}: {'; '.join(said)}."

    def _describe_series(self, series: Series, y: Axis) -> str:
        if y.categories:
            pairs = [(say(x), y.tick_text(row)) for x, row in zip(series.x, series.y, strict=True)]
            return f"{series.name} " + ", ".join(f"{x} at {row}" for x, row in pairs)
        points = list(zip(series.x, series.y, strict=True))
        if series.labels:
            where = [f"{say(v)} at {self.x.quantity} {say(x)}" for x, v in points]
            return ", ".join(f"{n}: {w}" for n, w in zip(series.labels, where, strict=True))
        ends = points if len(points) == 1 else [points[0], points[-1]]
        said = [f"{say(v)} at {self.x.quantity} {say(x)}" for x, v in ends]
        return f"{series.name} {' to '.join(said)}"


def stacked(
    rows: Mapping[str, Mapping[str, float]], scale: float = 1.0, **roles: str
) -> tuple[tuple[str, ...], tuple[Series, ...]]:
    """Turn {row: {term: value}} into names of rows and one bar Series a term, times `scale`.

    A term's role is its own name, or roles[term].
    """
    terms = dict.fromkeys(term for row in rows.values() for term in row)
    numbers = tuple(map(float, range(len(rows))))
    return tuple(rows), tuple(
        Series(
            name=term,
            x=tuple(row.get(term, 0.0) * scale for row in rows.values()),
            y=numbers,
            kind="bar",
            role=roles.get(term, term),
        )
        for term in terms
    )


def start_of_line(points: Sequence[Span], name: str, unit: float = 1.0) -> list[Span]:
    """`points` without what a name written at their start covers; `unit` is a pixel's width."""
    start = points[0][0] + (LETTER * len(name) + 4) * unit
    after = [point for point in points if point[0] > start]
    if not after:
        return [points[-1]]
    (x0, y0), (x1, y1) = points[-len(after) - 1], after[0]
    return [(start, y0 + (y1 - y0) * (start - x0) / (x1 - x0)), *after]


def round_values(low: float, high: float) -> list[float]:
    """Multiples of 1, 2, 2.5 or 5 times a power of ten from `low` to `high`, at most seven."""
    step = 10.0 ** floor(log10((high - low) / 3))
    step *= next(m for m in (1, 2, 2.5, 5, 10) if (high - low) / (step * m) <= 6)
    return [i * step for i in range(ceil(low / step), floor(high / step) + 1)]


def spread(heights: Sequence[float], gap: float) -> list[float]:
    """Move rising `heights`, each 0 to 1, as little as needed to lie `gap` apart, inside 0..1."""
    placed: list[float] = []
    for height in heights:
        placed.append(max(height, placed[-1] + gap) if placed else max(height, 0.0))
    ceiling = 1.0
    for i in reversed(range(len(placed))):
        placed[i] = min(placed[i], ceiling)
        ceiling = placed[i] - gap
    return placed
