"""Charts as data, and the three painters that must agree on them."""

import json
import re
from io import BytesIO
from itertools import pairwise
from xml.etree import ElementTree

import pytest
from decodelab.explain.chart import Axis, Chart, Panel, Rule, Series, spread
from decodelab.explain.paint_matplotlib import PALETTE, paint_matplotlib, png
from decodelab.explain.paint_plotly import paint_plotly
from decodelab.explain.paint_svg import paint_svg
from decodelab.explain.style import INK, PAPER, ROLES, say
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image, ImageColor

SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture
def chart() -> Chart:
    """Every kind of mark, two panels, a title and a name that need escaping."""
    curve = Series(name='predicted <"at rest">', x=(1, 8, 64), y=(15, 90, 250))
    dots = Series(
        name="measured", x=(1, 64), y=(14, 240), kind="dots", role="measurement", labels=("a", "b")
    )
    top = Panel(
        y=Axis(quantity="throughput", unit="tokens/s", log=10),
        series=(curve, dots),
        rules=(
            Rule(at=32, label="out of memory beyond", role="breach"),
            Rule(at=100, label="goal", axis="y"),
        ),
    )
    below = Panel(y=Axis(quantity="time", unit="ms"), series=(curve,))
    return Chart(title="5 < 6 & so on", x=Axis(quantity="batch size", log=2), panels=(top, below))


@pytest.fixture
def bars() -> Chart:
    """Two rows of two stacked terms, with a measured dot."""
    rows = (0.0, 1.0)
    series = (
        Series(name="weights", x=(30, 30), y=rows, kind="bar", role="weights"),
        Series(name="KV", x=(1, 20), y=rows, kind="bar", role="KV"),
        Series(name="measured", x=(33,), y=(0.0,), kind="dots", role="measurement"),
    )
    panel = Panel(y=Axis(quantity="", categories=("B = 1", "B = 8")), series=series)
    return Chart(title="Terms", x=Axis(quantity="step time", unit="ms"), panels=(panel,))


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (0.20666, "0.207"),
        (23.84, "23.8"),
        (2690.4, "2,690"),
        (1024, "1,024"),
        (1e-5, "0.00001"),
        (-2.5, "-2.5"),
        (float("inf"), "endless"),
        (float("nan"), "no number"),
    ],
)
def test_numbers_are_written_as_prose_writes_them(value: float, text: str) -> None:
    assert say(value) == text


def test_an_axis_title_names_quantity_unit_and_log_scale() -> None:
    assert Axis(quantity="speed", unit="FLOP/s", log=10).title == "speed (FLOP/s), log scale"
    assert Axis(quantity="batch size").title == "batch size"


def test_a_linear_scale_starts_at_zero_and_holds_every_value() -> None:
    low, high = Axis(quantity="time", include=(9.0,)).span([3.0, 7.0])
    assert low == 0
    assert high > 9


def test_a_log_axis_refuses_zero_and_says_so() -> None:
    with pytest.raises(ValueError, match="throughput is on a log scale.*above 0"):
        Axis(quantity="throughput", log=10).span([0, 5])


def test_equal_ratios_are_equal_distances_on_a_log_axis_only() -> None:
    for log, equal in ((2, True), (10, True), (0, False)):
        axis, span = Axis(quantity="q", log=log), (1.0, 64.0)
        one, two = (axis.fraction(b, span) - axis.fraction(a, span) for a, b in ((2, 4), (16, 32)))
        assert (one == pytest.approx(two)) is equal


@given(st.floats(1e-3, 1e6), st.floats(1.01, 1e6), st.sampled_from([0, 2, 10]))
def test_ticks_lie_inside_the_span_and_are_few(low: float, ratio: float, log: int) -> None:
    axis = Axis(quantity="q", log=log)
    span = axis.span([low, low * ratio])
    ticks = axis.ticks(span)
    assert 2 <= len(ticks) <= 12
    assert all(span[0] <= t <= span[1] * (1 + 1e-9) for t in ticks)
    assert ticks == sorted(set(ticks))


@given(st.lists(st.floats(0, 1), max_size=8))
def test_names_at_the_edge_never_overlap_nor_leave_the_panel(heights: list[float]) -> None:
    placed = spread(sorted(heights), 0.1)
    assert all(b - a >= 0.1 - 1e-9 for a, b in pairwise(placed))
    assert all(-1e-9 <= p <= 1 for p in placed)


def test_each_bar_begins_where_the_one_before_it_ended(bars: Chart) -> None:
    found = [(s.name, row, start, length) for s, row, start, length in bars.panels[0].bars()]
    assert found[2:] == [("KV", 0.0, 30, 1), ("KV", 1.0, 30, 20)]
    assert bars.x_span[1] > 50, "the range must hold the stack, not its longest part"


def test_description_states_title_units_and_numbers(chart: Chart, bars: Chart) -> None:
    words = chart.describe()
    for part in (
        "5 < 6",
        "tokens/s",
        "15 at batch size 1",
        "250 at batch size 64",
        "memory beyond 32",
    ):
        assert part in words
    assert "KV 1 at B = 1, 20 at B = 8" in bars.describe()


def test_svg_is_an_image_with_its_numbers_as_text_alternative(chart: Chart, bars: Chart) -> None:
    for one in (chart, bars):
        root = ElementTree.fromstring(paint_svg(one).replace("<svg ", f'<svg xmlns="{SVG[1:-1]}" '))
        assert root.get("role") == "img"
        assert root.get("aria-label") == one.describe()


def test_svg_text_takes_the_ink_of_the_page(chart: Chart) -> None:
    root = ElementTree.fromstring(paint_svg(chart).replace("<svg ", f'<svg xmlns="{SVG[1:-1]}" '))
    assert {text.get("fill") for text in root.iter(f"{SVG}text")} == {"currentColor"}
    assert INK not in paint_svg(chart)
    assert PAPER not in paint_svg(chart)


def test_nothing_in_a_picture_comes_from_the_network(chart: Chart) -> None:
    assert "http" not in paint_svg(chart) + json.dumps(paint_plotly(chart))


def test_three_painters_write_the_same_ticks(chart: Chart, bars: Chart) -> None:
    for one in (chart, bars):
        figure, plotly, svg = paint_matplotlib(one), paint_plotly(one), paint_svg(one)
        for i, (panel, axes) in enumerate(zip(one.panels, figure.axes, strict=True), 1):
            expected = [panel.y.tick_text(t) for t in panel.y.ticks(panel.y_span)]
            assert [t.get_text() for t in axes.get_yticklabels()] == expected
            assert plotly["layout"][f"yaxis{i if i > 1 else ''}"]["ticktext"] == expected
            assert all(f">{text}</text>" in svg for text in expected)


def test_plotly_itself_accepts_the_figure(chart: Chart, bars: Chart) -> None:
    graph_objects = pytest.importorskip("plotly.graph_objects")
    for one in (chart, bars):
        painted = json.loads(json.dumps(paint_plotly(one)))
        figure = graph_objects.Figure(data=painted["data"], layout=painted["layout"])
        assert len(figure.data) == sum(len(p.series) for p in one.panels)
        with pytest.raises(ValueError, match="dashed"):
            graph_objects.Figure(data=[{"type": "scatter", "line": {"dashed": True}}])


def test_png_keeps_every_role_colour_and_stays_small(chart: Chart, bars: Chart) -> None:
    for one in (chart, bars):
        data = png(one)
        assert len(data) < 16_000
        picture = Image.open(BytesIO(data)).convert("RGB")
        found = {color for _, color in picture.getcolors(100_000)}
        roles = {s.role for p in one.panels for s in p.series} | {
            r.role for p in one.panels for r in p.rules
        }
        assert {ImageColor.getrgb(ROLES[role].ink) for role in roles} <= found
    assert len(PALETTE) <= 16


def test_red_is_for_breaches_alone_and_lines_differ_in_grey() -> None:
    assert [role for role, look in ROLES.items() if look.color == ROLES["breach"].color] == [
        "breach"
    ]
    lines = ("prediction", "variant", "bound", "breach")
    assert len({ROLES[role].dash for role in lines}) == len(lines)
    terms = ("weights", "KV", "arithmetic", "overhead")
    assert len({ROLES[role].hatch for role in terms}) == len(terms)


def test_paper_and_ink_are_easily_told_apart() -> None:
    def light(color: str) -> float:
        parts = [v / 255 for v in ImageColor.getrgb(color)]
        linear = [v / 12.92 if v <= 0.04045 else ((v + 0.055) / 1.055) ** 2.4 for v in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2] + 0.05

    assert light(PAPER) / light(INK) > 7


def test_a_series_with_an_unknown_role_or_missing_points_is_refused() -> None:
    with pytest.raises(ValueError, match="unknown role 'red'.*prediction"):
        Series(name="a", x=(1,), y=(1,), role="red")
    with pytest.raises(ValueError, match="2 x and 1 y"):
        Series(name="a", x=(1, 2), y=(1,))
    with pytest.raises(ValueError, match="at least one point"):
        Series(name="a", x=(), y=())


def test_a_long_title_is_wrapped_and_makes_the_figure_taller(chart: Chart) -> None:
    long = Chart(title="word " * 30, x=chart.x, panels=chart.panels)
    assert long.height > chart.height
    assert len(re.findall('font-size="15"', paint_svg(long))) == len(long.title_lines) == 2


def test_long_names_of_rows_get_the_room_they_need(bars: Chart) -> None:
    axis = Axis(quantity="", categories=("batch 64 x context 1,024", "B = 8"))
    wide = Chart(title="", x=bars.x, panels=(Panel(y=axis, series=bars.panels[0].series),))
    figure = paint_matplotlib(wide)
    figure.canvas.draw()
    assert min(t.get_window_extent().x0 for t in figure.axes[0].get_yticklabels()) > 0
