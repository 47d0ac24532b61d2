"""Draw a Chart as one SVG string: fast enough to redraw while a slider moves.

Text and axes are `currentColor`, so the picture follows the page's theme; it is an image with
a text alternative to a screen reader. No hover, no script, nothing fetched.
"""

from html import escape

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
from decodelab.explain.style import INK, ROLES

Box = tuple[Panel, float, float, float, float]
HATCHES = {
    "KV": "M0 7L7 0",
    "arithmetic": "M0 0L7 7M0 7L7 0",
    "overhead": "M2 3.5h3",
    "activations": "M0 0L7 7",
    "reserve": "M2 3.5h3",
}
DEFS = "".join(
    f'<pattern id="decodelab-{name}" width="7" height="7" patternUnits="userSpaceOnUse">'
    f'<path d="{path}" stroke="#000" stroke-opacity=".55" fill="none"/></pattern>'
    for name, path in HATCHES.items()
)
PATTERNS = {  # role -> its own of these, or the first that looks the same
    role: role if role in HATCHES else next(h for h in HATCHES if ROLES[h].hatch == look.hatch)
    for role, look in ROLES.items()
    if look.hatch
}


def paint_svg(chart: Chart) -> str:
    """Return `chart` as an `<svg>` element as wide as its page allows, up to 720 px."""
    parts = [
        f'<svg viewBox="0 0 {WIDTH} {chart.height:.0f}" role="img" '
        f'aria-label="{escape(chart.describe())}" font-family="sans-serif" font-size="12" '
        f'style="width:100%;max-width:{WIDTH}px;color:inherit"><defs>{DEFS}</defs>'
    ]
    for i, line in enumerate(chart.title_lines):
        parts.append(_text(8, 20 + LINE * i, line, 'font-size="15" font-weight="bold"'))
    for box in chart.boxes():
        parts += _axes(chart, box)
        parts += [_rule(chart, box, rule) for rule in box[0].rules]
        parts += _bars(chart, box)
        parts += [_area(chart, box, s) for s in box[0].series if s.kind == "area"]
        parts += [_series(chart, box, s) for s in box[0].series if s.kind in ("line", "dots")]
        parts += [_key(box, series, height) for series, height in box[0].names()]
    return "".join(parts) + "</svg>"


def _at(chart: Chart, box: Box, x: float, y: float) -> tuple[float, float]:
    panel, left, top, width, height = box
    across, up = chart.x.fraction(x, chart.x_span), panel.y.fraction(y, panel.y_span)
    return left + across * width, top + (1 - up) * height


def _text(x: float, y: float, text: str, more: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" fill="currentColor" {more}>{escape(text)}</text>'


def _stroke(role: str, width: float = 2.5) -> str:
    look = ROLES[role]
    dash = f' stroke-dasharray="{" ".join(map(str, look.dash))}"' if look.dash else ""
    width /= 1 + look.thin
    return f'fill="none" stroke="{look.color or "currentColor"}" stroke-width="{width}"{dash}'


def _axes(chart: Chart, box: Box) -> list[str]:
    panel, left, top, width, height = box
    right, bottom, parts = left + width, top + height, []
    faint = 'stroke="currentColor" stroke-opacity=".18"'
    for x in chart.x.ticks(chart.x_span):
        px, _ = _at(chart, box, x, panel.y_span[0])
        parts.append(f'<path d="M{px:.1f} {top}V{bottom}" {faint}/>')
        if panel is chart.panels[-1]:
            parts.append(_text(px, bottom + 16, chart.x.tick_text(x), 'text-anchor="middle"'))
    for y in panel.y.ticks(panel.y_span):
        _, py = _at(chart, box, chart.x_span[1], y)
        parts.append("" if panel.y.categories else f'<path d="M{left} {py:.1f}H{right}" {faint}/>')
        parts.append(_text(left - 6, py + 4, panel.y.tick_text(y), 'text-anchor="end"'))
    if panel is chart.panels[-1]:
        parts.append(_text(left + width / 2, bottom + 36, chart.x.title, 'text-anchor="middle"'))
    return [*parts, _text(left, top - 8, panel.y.title, 'font-weight="bold"')]


def _rule(chart: Chart, box: Box, rule: Rule) -> str:
    panel, left, top, width, height = box
    if rule.axis == "x":
        x, _ = _at(chart, box, rule.at, panel.y_span[0])
        before = x > left + width * NEAR_EDGE
        path, label = (
            f"M{x:.1f} {top}V{top + height}",
            (x + (-5 if before else 5), top + height - 7),
        )
    else:
        _, y = _at(chart, box, chart.x_span[0], rule.at)
        before, path, label = False, f"M{left} {y:.1f}H{left + width}", (left + 5, y - 5)
    anchor = 'text-anchor="end"' if before else ""
    return f'<path d="{path}" {_stroke(rule.role, 1.5)}/>' + _text(*label, rule.label, anchor)


def _bars(chart: Chart, box: Box) -> list[str]:
    parts, thick = [], box[0].thick
    for series, row, start, length in box[0].bars():
        (x0, y), (x1, _) = _at(chart, box, start, row), _at(chart, box, start + length, row)
        parts.append(_swatch(series.role, x0, y - thick / 2, x1 - x0, thick))
    for series, row, middle, label in chart.bar_labels(box[0]):
        x, y = _at(chart, box, middle, row)
        halo = f'stroke="{ROLES[series.role].color}" stroke-width="5" paint-order="stroke"'
        parts.append(
            f'<text x="{x:.1f}" y="{y + 4:.1f}" text-anchor="middle" fill="{INK}" {halo}>'
            f"{escape(label)}</text>"
        )
    return parts


def _area(chart: Chart, box: Box, series: Series) -> str:
    corners = [(series.x[0], 0.0), *zip(series.x, series.y, strict=True), (series.x[-1], 0.0)]
    points = " ".join("{:.1f},{:.1f}".format(*_at(chart, box, x, y)) for x, y in corners)
    return _fill(f'<polygon points="{points}"', series.role)


def _swatch(role: str, x: float, y: float, width: float, height: float) -> str:
    place = f'x="{x:.1f}" y="{y:.1f}" width="{max(width, 0):.1f}" height="{height}"'
    return _fill(f"<rect {place}", role)


def _fill(shape: str, role: str) -> str:
    """An open tag, filled as its role is: colour, edge and hatch."""
    hatch = f'{shape} fill="url(#decodelab-{PATTERNS[role]})"/>' if role in PATTERNS else ""
    edge = 'stroke="currentColor" stroke-width=".7"'
    return f'{shape} fill="{ROLES[role].color}" {edge}/>{hatch}'


def _dot(role: str, x: float, y: float) -> str:
    if role == "marker":
        return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="8" {_stroke(role, 2)}/>'
    edge = 'stroke="currentColor" stroke-width="1"'
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="5" fill="{ROLES[role].color}" {edge}/>'


def _series(chart: Chart, box: Box, series: Series) -> str:
    points = [_at(chart, box, x, y) for x, y in zip(series.x, series.y, strict=True)]
    if series.kind == "line":
        name = ""
        if series.named_at == "start":
            left, points = points[0][0], start_of_line(points, series.name)
            name = _text(left, points[0][1] + 4, series.name)
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        return f'<polyline points="{path}" {_stroke(series.role)} stroke-linejoin="round"/>{name}'
    labels = []
    for (x, y), label in zip(points, series.labels, strict=False):
        before = 'text-anchor="end"' if x > box[1] + box[3] * NEAR_EDGE else ""
        labels.append(_text(x - 9 if before else x + 9, y + 16, label, before))
    return "".join([_dot(series.role, x, y) for x, y in points] + labels)


def _key(box: Box, series: Series, height_fraction: float) -> str:
    _, left, top, width, height = box
    x, y = left + width + 12, top + (1 - height_fraction) * height
    if series.kind == "line":
        swatch = f'<path d="M{x} {y:.1f}h22" {_stroke(series.role)}/>'
    elif series.kind in ("bar", "area"):
        swatch = _swatch(series.role, x + 4, y - 6, 14, 12)
    else:
        swatch = _dot(series.role, x + 11, y)
    return swatch + _text(x + 28, y + 4, series.name)
