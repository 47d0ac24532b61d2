"""The course's figures: the numbers in them, their claims, and how they show themselves."""

import json
from dataclasses import replace

import pytest
from decodelab.explain import figures
from decodelab.explain.chart import Series
from decodelab.explain.figures import PLOTLY_MIME, Figure

STEPS = {1: 0.070, 8: 0.104, 64: 0.344}


def series(figure: Figure, name: str, panel: int = 0) -> Series:
    return next(s for s in figure.panels[panel].series if s.name == name)


def test_the_roof_is_the_lower_of_bandwidth_and_peak() -> None:
    figure = figures.roofline(
        flops=120e9, bandwidth=17e9, predicted={"left": 0.5, "right": 100}, measured={"m": (1, 3e9)}
    )
    assert series(figure, "predicted").y == pytest.approx((8.5, 120))
    assert series(figure, "predicted").y != pytest.approx((120, 1700)), "max in place of min"
    assert series(figure, "measured").y == pytest.approx((3,))
    assert figure.panels[0].rules[0].at == pytest.approx(120 / 17)
    assert "GFLOP/s" in figure.describe()
    assert "TFLOP/s" in figures.roofline(flops=312e12, bandwidth=2e12).describe()


def test_throughput_counts_every_sequence_and_latency_does_not() -> None:
    figure = figures.batch_curve(measured=STEPS)
    assert series(figure, "measured").y == pytest.approx((1 / 0.070, 8 / 0.104, 64 / 0.344))
    assert series(figure, "measured").y != pytest.approx(tuple(1 / s for s in STEPS.values()))
    assert series(figure, "measured", 1).y == pytest.approx((70, 104, 344))
    assert series(figure, "measured", 1).y != pytest.approx((70, 13, 5.4), rel=0.01), "divided by B"


def test_the_title_of_a_batch_curve_is_its_own_gain() -> None:
    title = figures.batch_curve(measured=STEPS).title
    assert "Batch 64: 13 times" in title
    assert "4.9 times as long" in title
    assert figures.batch_curve(measured=STEPS, title="Mine").title == "Mine"


def test_a_batch_curve_has_one_y_axis_a_panel_and_marks_where_memory_ends() -> None:
    figure = figures.batch_curve(predicted=STEPS, measured=STEPS, bound=STEPS, limit=64)
    assert [p.y.unit for p in figure.panels] == ["tokens/s", "ms"]
    assert [(r.at, r.role) for r in figure.panels[0].rules] == [(64, "breach")]
    assert "log scale" in figure.x.title
    assert "log scale" not in figures.batch_curve(measured=STEPS, log=False).x.title


def test_prediction_is_a_line_and_measurement_dots_everywhere() -> None:
    drawn = [
        figures.batch_curve(predicted=STEPS, measured=STEPS),
        figures.cost_curve(usd_per_hour=2, predicted=STEPS, measured=STEPS),
    ]
    for figure in drawn:
        kinds = {(s.name, s.kind, s.role) for p in figure.panels for s in p.series}
        assert kinds == {("predicted", "line", "prediction"), ("measured", "dots", "measurement")}


def test_step_bars_stack_the_terms_in_milliseconds_and_name_the_largest() -> None:
    terms = {"B = 1": {"weights": 0.032, "KV": 0.001}, "B = 8": {"weights": 0.032, "KV": 0.040}}
    figure = figures.step_bars(predicted=terms, measured={"B = 8": 0.080, "B = 99": 1.0})
    ends = {row: start + length for _, row, start, length in figure.panels[0].bars()}
    assert ends == pytest.approx({0.0: 33, 1.0: 72})
    assert series(figure, "measured").x == (80,)
    assert series(figure, "measured").y == (1.0,)
    assert figure.title == "The largest term: weights at B = 1, KV at B = 8"


def test_the_ridge_of_140_is_reached_at_140_and_at_150() -> None:
    figure = figures.intensity_curve(ridge=140)
    assert "reached at B = 140 and 150" in figure.panels[0].rules[0].label
    assert series(figure, "weights alone").y[6] == pytest.approx(64.0)
    assert series(figure, "with activations").y[6] == pytest.approx(62.1, abs=0.05)
    assert "140 and never" not in figure.describe()
    assert "and never" in figures.intensity_curve(ridge=3000).describe()


def test_cost_divides_the_bill_by_all_tokens_made() -> None:
    figure = figures.cost_curve(usd_per_hour=2, measured={1: 1 / 125, 64: 64 / 2690})
    assert series(figure, "measured").y == pytest.approx((4.444, 0.2065), rel=1e-3)
    used = figures.cost_curve(usd_per_hour=2, measured={64: 64 / 2690}, utilization=0.3)
    assert series(used, "measured").y == pytest.approx((0.688,), rel=1e-3)
    assert series(used, "measured").y != pytest.approx((0.2065 * 0.3,), rel=1e-2)


def test_a_curve_with_nothing_in_it_says_what_to_give() -> None:
    with pytest.raises(ValueError, match="predicted or measured as {batch size: seconds}"):
        figures.cost_curve(usd_per_hour=2)
    with pytest.raises(ValueError, match="predicted or measured"):
        figures.batch_curve(bound={}, title="none")


def test_a_figure_shows_itself_as_one_output_of_png_and_words() -> None:
    figure = figures.cost_curve(usd_per_hour=2, measured=STEPS)
    data, metadata = figure._repr_mimebundle_()
    assert set(data) == {"image/png", "text/plain"}
    assert data["text/plain"] == figure.describe() == metadata["image/png"]["alt"]
    assert set(replace(figure, hover=True)._repr_mimebundle_()[0]) > set(data)


def test_the_roofline_has_hover_where_plotly_is_and_does_without(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    figure = figures.roofline(flops=120e9, bandwidth=17e9)
    data, _ = figure._repr_mimebundle_()
    assert "%{y" in json.dumps(data[PLOTLY_MIME])
    assert len(json.dumps(data)) < 25_000
    monkeypatch.setattr(figures, "find_spec", lambda name: None)
    assert set(figure._repr_mimebundle_()[0]) == {"image/png", "text/plain"}
