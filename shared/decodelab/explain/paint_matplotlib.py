"""Draw a Chart with matplotlib: the still picture for GitHub and places without JavaScript."""

from __future__ import annotations

from io import BytesIO
from typing import TYPE_CHECKING

from decodelab.explain.chart import (
    LINE,
    NEAR_EDGE,
    WIDTH,
    Chart,
    Panel,
    Rule,
    Series,
    start_of_line,
)
from decodelab.explain.style import FAINT, INK, PAPER, ROLES

if TYPE_CHECKING:  # matplotlib takes half a second to import, and only a picture needs it
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

DPI = 100  # so that a pixel of the chart is a hundredth of an inch
HUES = [look.color for look in ROLES.values() if look.color not in (None, "none")]
PALETTE = list(dict.fromkeys([PAPER, FAINT, "#b1b0ae", "#71706f", INK, "#7db6d5", *HUES]))


def paint_matplotlib(chart: Chart) -> Figure:
    """Return `chart` as a matplotlib Figure that belongs to no backend and no pyplot state."""
    from matplotlib import rc_context

    with rc_context({"text.parse_math": False}):  # two prices in a line are not a formula
        return _paint(chart)


def _paint(chart: Chart) -> Figure:
    from matplotlib.figure import Figure
    from matplotlib.patheffects import withStroke

    figure = Figure(figsize=(WIDTH / DPI, chart.height / DPI), dpi=DPI, facecolor=PAPER)
    title = "\n".join(chart.title_lines)
    figure.text(8 / WIDTH, 1 - 8 / chart.height, title, va="top", color=INK, size=11, weight="bold")
    for panel, left, top, width, height in chart.boxes():
        place = (left, chart.height - top - height, width, height)
        scale = (WIDTH, chart.height, WIDTH, chart.height)
        axes = figure.add_axes([p / s for p, s in zip(place, scale, strict=True)], facecolor=PAPER)
        _axes(axes, chart, panel)
        for rule in panel.rules:
            _rule(axes, chart, rule)
        thick = min(0.6, panel.thick * len(panel.y.categories) / height)  # pixels as in the SVG
        for series, row, start, length in panel.bars():
            axes.barh(row, length, thick, start, **_fill(series.role), zorder=3)
        for series, row, middle, label in chart.bar_labels(panel):
            halo = withStroke(linewidth=4.5, foreground=ROLES[series.role].ink)
            place = {"ha": "center", "va": "center_baseline", "zorder": 4}
            axes.text(middle, row, label, size=8.5, color=INK, path_effects=[halo], **place)
        for series in panel.series:
            _points(axes, chart, panel, series)
        for series, up in panel.names():
            _key(axes, series, up, width)
    return figure


def png(chart: Chart) -> bytes:
    """Return `chart` as a PNG in its own 16 colours, a third of the bytes of any."""
    from PIL import Image, ImageColor

    raw, small, key = BytesIO(), BytesIO(), Image.new("P", (1, 1))
    key.putpalette([part for color in PALETTE for part in ImageColor.getrgb(color)])
    paint_matplotlib(chart).savefig(raw, format="png")
    picture = Image.open(raw).convert("RGB").quantize(palette=key, dither=Image.Dither.NONE)
    picture.save(small, format="png", optimize=True, bits=4)
    return small.getvalue()


def _axes(axes: Axes, chart: Chart, panel: Panel) -> None:
    for name, axis, span in (("x", chart.x, chart.x_span), ("y", panel.y, panel.y_span)):
        axes.set(**{f"{name}scale": "log" if axis.log else "linear", f"{name}lim": span})
        ticks = axis.ticks(span)
        side = getattr(axes, f"{name}axis")
        side.set_ticks(ticks, [axis.tick_text(t) for t in ticks])
        side.set_tick_params(length=0, colors=INK, labelsize=8.5)
    axes.minorticks_off()
    axes.grid(color=FAINT, axis="x" if panel.y.categories else "both")
    axes.set_axisbelow(True)
    axes.spines[:].set_visible(False)
    axes.set_title(panel.y.title, loc="left", size=8.5, weight="bold", color=INK)
    last = panel is chart.panels[-1]
    axes.set_xlabel(chart.x.title if last else "", color=INK, size=9)
    axes.tick_params(labelbottom=last)


def _line(role: str, width: float = 2) -> dict:
    look = ROLES[role]
    width /= 1 + look.thin
    dash = tuple(d / width for d in look.dash)
    return {"color": look.ink, "linestyle": (0, dash) if dash else "-", "linewidth": width}


def _fill(role: str) -> dict:
    look = ROLES[role]
    return {"facecolor": look.ink, "edgecolor": INK, "linewidth": 0.6, "hatch": look.hatch * 3}


def _dots(role: str) -> dict:
    ring = role == "marker"
    return {
        "linestyle": "none", "marker": "o", "markersize": 11 if ring else 7,
        "markerfacecolor": "none" if ring else ROLES[role].ink, "markeredgecolor": INK,
        "markeredgewidth": 1.5 if ring else 0.7, "zorder": 5,
    }  # fmt: skip


def _points(axes: Axes, chart: Chart, panel: Panel, series: Series) -> None:
    if series.kind == "bar":
        return
    if series.kind == "area":
        axes.fill_between(series.x, series.y, **_fill(series.role), zorder=3)
        return
    if series.named_at == "start":
        _named_line(axes, chart, panel, series)
        return
    axes.plot(series.x, series.y, **(_line if series.kind == "line" else _dots)(series.role))
    for x, y, label in zip(series.x, series.y, series.labels, strict=False):
        before = chart.x.fraction(x, chart.x_span) > NEAR_EDGE
        place = {"xytext": (-7 if before else 7, -13), "ha": "right" if before else "left"}
        axes.annotate(label, (x, y), textcoords="offset points", size=9, color=INK, **place)


def _named_line(axes: Axes, chart: Chart, panel: Panel, series: Series) -> None:
    inside = {"transform": axes.transAxes}
    pairs = zip(series.x, series.y, strict=True)
    points = [
        (chart.x.fraction(x, chart.x_span), panel.y.fraction(y, panel.y_span)) for x, y in pairs
    ]
    left, points = points[0][0], start_of_line(points, series.name, 1 / axes.bbox.width)
    axes.plot(*zip(*points, strict=True), **_line(series.role), **inside)
    axes.text(left, points[0][1], series.name, size=9, color=INK, va="center", **inside)


def _rule(axes: Axes, chart: Chart, rule: Rule) -> None:
    text = {"size": 9, "color": INK, "textcoords": "offset points"}
    if rule.axis == "x":
        axes.axvline(rule.at, **_line(rule.role, 1.2))
        before = chart.x.fraction(rule.at, chart.x_span) > NEAR_EDGE
        place = {"xycoords": ("data", "axes fraction"), "ha": "right" if before else "left"}
        axes.annotate(rule.label, (rule.at, 0), (-4 if before else 4, 5), **place, **text)
    else:
        axes.axhline(rule.at, **_line(rule.role, 1.2))
        place = {"xycoords": ("axes fraction", "data")}
        axes.annotate(rule.label, (0, rule.at), (4, 4), **place, **text)


def _key(axes: Axes, series: Series, up: float, width: float) -> None:
    on_edge = {"transform": axes.transAxes, "clip_on": False}
    across = [1 + (12 + 22 * i) / width for i in (0, 0.5, 1)]
    if series.kind == "line":
        axes.plot(across[::2], [up, up], **_line(series.role), **on_edge)
    elif series.kind == "dots":
        axes.plot(across[1], up, **_dots(series.role), **on_edge)
    else:
        half = LINE / 3 / axes.bbox.height
        wide = (across[2] - across[0]) * 0.64
        axes.add_patch(_box(across[1] - wide / 2, up - half, wide, 2 * half, series, on_edge))
    axes.text(1 + 40 / width, up, series.name, va="center", color=INK, size=9, **on_edge)


def _box(x: float, y: float, width: float, height: float, series: Series, where: dict):
    from matplotlib.patches import Rectangle

    return Rectangle((x, y), width, height, **_fill(series.role), **where)
