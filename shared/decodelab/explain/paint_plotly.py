"""Draw a Chart as the JSON that plotly.js reads: the figure with hover, in JupyterLab offline.

Written as a plain dict, so that it needs no plotly to build, and holds none of the 7 kB template
that plotly adds to each figure. tests/test_explain_chart.py has plotly itself check it.
"""

from math import log10

from decodelab.explain.chart import NEAR_EDGE, WIDTH, Axis, Chart, Panel, Rule, Series, Span
from decodelab.explain.style import FAINT, INK, PAPER, ROLES


def paint_plotly(chart: Chart) -> dict:
    """Return `chart` as a plotly figure: {"data", "layout", "config"}."""
    data, notes, shapes, axes = [], [_title(chart)], [], {}
    for i, (panel, left, top, width, height) in enumerate(chart.boxes()):
        n = str(i + 1) if i else ""
        across = (left / WIDTH, (left + width) / WIDTH)
        up = (1 - (top + height) / chart.height, 1 - top / chart.height)
        last = panel is chart.panels[-1]
        title = {"text": chart.x.title if last else "", "standoff": 6, "font": {"size": 12}}
        axes[f"xaxis{n}"] = _axis(chart.x, chart.x_span, across, "y" + n)
        axes[f"xaxis{n}"] |= {"title": title, "showticklabels": last} | (
            {"matches": "x"} if n else {}
        )
        axes[f"yaxis{n}"] = _axis(panel.y, panel.y_span, up, "x" + n)
        data += [_trace(chart, panel, s, n) for s in panel.series]
        for rule in panel.rules:
            shapes.append(_rule_line(rule, n))
            notes.append(_rule_label(chart, panel, rule, n))
        notes += [_key(series, height, n) for series, height in panel.names()]
        notes += [_start(chart, panel, s, n) for s in panel.series if s.named_at == "start"]
        notes.append(_note(f"<b>{panel.y.title}</b>", 0, 1, n, yshift=12))
    layout = {
        "width": WIDTH, "height": round(chart.height), "showlegend": False, "barmode": "stack",
        "hovermode": "closest", "margin": dict.fromkeys("lrtb", 0), "annotations": notes,
        "shapes": shapes, "paper_bgcolor": PAPER, "plot_bgcolor": PAPER, **axes,
        "font": {"family": "sans-serif", "size": 12, "color": INK}, "bargap": 0.4,
    }  # fmt: skip
    return {"data": data, "layout": layout, "config": {"displayModeBar": False}}


def _axis(axis: Axis, span: Span, domain: Span, anchor: str) -> dict:
    ticks = axis.ticks(span)
    return {
        "type": "log" if axis.log else "linear",
        "range": [log10(v) for v in span] if axis.log else list(span),
        "domain": list(domain), "anchor": anchor, "zeroline": False,
        "tickvals": ticks, "ticktext": [axis.tick_text(t) for t in ticks],
        "gridcolor": FAINT, "showgrid": not axis.categories,
    }  # fmt: skip


def _trace(chart: Chart, panel: Panel, series: Series, n: str) -> dict:
    look, unit = ROLES[series.role], panel.y.unit
    where = f"{chart.x.quantity} %{{x:,.4~g}} {chart.x.unit}"
    hover = (
        "%{y}: %{x:,.4~g} " + chart.x.unit
        if panel.y.categories
        else (f"%{{y:,.4~g}} {unit}<br>{where}")
    )
    trace = {
        "x": list(series.x), "y": list(series.y), "name": series.name, "xaxis": f"x{n}",
        "yaxis": f"y{n}", "hovertemplate": f"{series.name}<br>{hover}<extra></extra>",
    }  # fmt: skip
    edge = {"color": INK, "width": 0.7}
    hatch = {"shape": look.hatch, "size": 6, "fillmode": "overlay", "fgcolor": INK}
    color = "rgba(0,0,0,0)" if look.ink == "none" else look.ink
    if series.kind == "bar":
        fill = {"color": color, "line": edge, "pattern": hatch}
        if series.start:
            trace |= {"base": list(series.start), "text": list(series.labels)}
        return trace | {"type": "bar", "orientation": "h", "marker": fill}
    if series.kind == "area":
        trace |= {"fill": "tozeroy", "fillcolor": color, "fillpattern": hatch, "line": edge}
        return trace | {"type": "scatter", "mode": "lines"}
    if series.kind == "line":
        return trace | {"type": "scatter", "mode": "lines", "line": _line(series.role, 2.5)}
    ring = {"symbol": "circle-open", "size": 16, "color": INK, "line": {"width": 2}}
    near_edge = (chart.x.fraction(x, chart.x_span) > NEAR_EDGE for x in series.x)
    places = ["bottom left" if near else "bottom right" for near in near_edge]
    dot = {"size": 10, "color": look.ink, "line": edge}
    return trace | {
        "type": "scatter", "mode": "markers+text" if series.labels else "markers",
        "text": list(series.labels), "textposition": places,
        "marker": ring if series.role == "marker" else dot,
    }  # fmt: skip


def _line(role: str, width: float) -> dict:
    dash = ",".join(f"{d}px" for d in ROLES[role].dash) or "solid"
    return {"color": ROLES[role].ink, "width": width / (1 + ROLES[role].thin), "dash": dash}


def _title(chart: Chart) -> dict:
    text = "<br>".join(f"<b>{line}</b>" for line in chart.title_lines)
    paper = {"xref": "paper", "yref": "paper", "x": 8 / WIDTH, "y": 1, "font": {"size": 15}}
    return _note(text, 0, 1, "", yshift=-6, yanchor="top") | paper


def _note(text: str, x: float, y: float, n: str, **more: object) -> dict:
    place = {"xref": f"x{n} domain", "yref": f"y{n} domain", "xanchor": "left", "yanchor": "middle"}
    return {"text": text, "x": x, "y": y, "showarrow": False, "align": "left", **place, **more}


def _rule_line(rule: Rule, n: str) -> dict:
    other = "y" if rule.axis == "x" else "x"
    at = {f"{rule.axis}{i}": rule.at for i in (0, 1)} | {f"{other}0": 0, f"{other}1": 1}
    refs = {f"{rule.axis}ref": f"{rule.axis}{n}", f"{other}ref": f"{other}{n} domain"}
    return {"type": "line", "line": _line(rule.role, 1.5), **at, **refs}


def _rule_label(chart: Chart, panel: Panel, rule: Rule, n: str) -> dict:
    if rule.axis == "y":
        up = panel.y.fraction(rule.at, panel.y_span)
        return _note(rule.label, 0, up, n, xshift=5, yshift=9)
    across = chart.x.fraction(rule.at, chart.x_span)
    before = across > NEAR_EDGE
    shift = {"xshift": -5 if before else 5, "xanchor": "right" if before else "left"}
    return _note(rule.label, across, 0, n, yshift=10, **shift)


def _start(chart: Chart, panel: Panel, series: Series, n: str) -> dict:
    across = chart.x.fraction(series.x[0], chart.x_span)
    up = panel.y.fraction(series.y[0], panel.y_span)
    return _note(series.name, across, up, n, bgcolor=PAPER)


def _key(series: Series, up: float, n: str) -> dict:
    dashed = ROLES[series.role].dash
    dot = "◯" if series.role == "marker" else "●"
    glyph = {"bar": "■", "area": "■", "dots": dot, "line": "╍╍" if dashed else "━━"}[series.kind]
    ink = INK if ROLES[series.role].ink == "none" else ROLES[series.role].ink
    glyph = "□" if ROLES[series.role].ink == "none" else glyph
    swatch = f'<span style="color:{ink}">{glyph}</span>'
    return _note(f"{swatch} {series.name}", 1, up, n, xshift=12)
