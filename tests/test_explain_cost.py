"""Figures and explorer of money: they draw what economics computes, with dates on every price."""

import json
import re
from dataclasses import replace

import pytest
from decodelab.explain import explorers
from decodelab.explain.chart import Axis, Series
from decodelab.explain.cost_explorer import CostExplorer, cheapest_offer, cost_explorer
from decodelab.explain.cost_figures import (
    cost_against_batch,
    cost_at,
    cost_through_a_day,
    dollars,
)
from decodelab.explain.cost_view import OPEN_8B, Cost
from decodelab.explain.figures import Figure
from decodelab.explain.paint_matplotlib import paint_matplotlib, png
from decodelab.explain.paint_plotly import paint_plotly
from decodelab.explain.paint_svg import paint_svg
from decodelab.predict import (
    HARDWARE,
    SHAPES,
    Curve,
    Deployment,
    api_price,
    day,
    largest_batch,
    usd_per_million_tokens,
)
from ipywidgets import FloatLogSlider, Widget

USD = 2.95


@pytest.fixture(scope="module")
def llama() -> Deployment:
    return Deployment(shape=SHAPES["Llama-3.1-8B"], hardware=HARDWARE["NVIDIA H100 SXM"])


@pytest.fixture(scope="module")
def curve(llama: Deployment) -> Curve:
    return Curve.predicted(llama, 2048, 1024)


@pytest.fixture
def cost(llama: Deployment) -> Cost:
    seconds = {(b, 2048): 1.3 * llama.step(b, 2048).seconds for b in (1, 16, 64)}
    return Cost(deployment=llama, usd_per_gpu_hour=USD, measured=seconds, tpot_slo=0.02)


@pytest.fixture
def explorer(llama: Deployment, cost: Cost) -> CostExplorer:
    return cost_explorer(llama, measured=cost.measured, tpot_slo=0.02, batch=32, utilization=0.4)


def named(figure: Figure, panel: int = 0) -> dict[str, Series]:
    return {series.name: series for series in figure.panels[panel].series}


def role(figure: Figure, name: str, panel: int = 0) -> Series:
    return next(s for s in figure.panels[panel].series if s.role == name)


# Cost against batch


@pytest.mark.parametrize(
    ("speed", "utilization", "text"),
    [(125, 1.0, "$4.44"), (2690, 1.0, "$0.207"), (2690, 0.3, "$0.688")],
)
def test_two_dollars_an_hour_cost_what_they_do_on_paper(
    speed: float, utilization: float, text: str
) -> None:
    own = Curve.measured([(4, 4 / speed)])
    figure = cost_against_batch(usd_per_gpu_hour=2, utilization=utilization, measured=own)
    assert dollars(named(figure)["measured"].y[0]) == text
    assert text in figure.title


def test_cost_counts_all_users_tokens_and_waiting_is_each_users_own(curve: Curve) -> None:
    figure = cost_against_batch(usd_per_gpu_hour=USD, utilization=0.5, predicted=curve)
    money, wait = named(figure)["predicted"], named(figure, 1)["predicted"]
    batch = money.x[-1]
    seconds = curve.step(batch)
    assert money.y[-1] == pytest.approx(usd_per_million_tokens(USD, batch / seconds, 0.5))
    assert wait.y[-1] == pytest.approx(1e3 * seconds)
    assert wait.x == money.x == curve.batches


def test_the_end_by_the_slo_or_by_the_pool_is_a_red_dot_on_the_line(curve: Curve) -> None:
    slo = largest_batch(curve, 0.02).batch
    tight = cost_against_batch(usd_per_gpu_hour=USD, predicted=curve, tpot_slo=0.02)
    loose = cost_against_batch(usd_per_gpu_hour=USD, predicted=curve, tpot_slo=1.0)
    assert role(tight, "breach").x == (slo,)
    assert role(tight, "breach").name == f"TPOT ends at {slo}"
    assert role(loose, "breach").name == f"KV pool ends at {curve.batches[-1]}"
    assert [rule.at for rule in tight.panels[1].rules] == [20]


def test_the_last_measured_point_is_no_limit_of_the_machine() -> None:
    own = Curve.measured([(1, 0.01), (8, 0.02)])
    figure = cost_against_batch(usd_per_gpu_hour=1, measured=own)
    assert {series.role for series in figure.panels[0].series} == {"measurement"}


def test_a_batch_that_does_not_fit_is_marked_beyond_the_line(curve: Curve) -> None:
    last = curve.batches[-1]
    inside, beyond = (
        cost_against_batch(usd_per_gpu_hour=USD, predicted=curve, marker=batch, tpot_slo=0.001)
        for batch in (last, last + 1)
    )
    assert role(inside, "marker").x == (last,)
    assert named(beyond)["does not fit"].x == (last + 1,)
    assert named(beyond)["does not fit"].role == "breach"


def test_where_nothing_fits_there_is_a_picture_only_of_what_was_asked_for(
    llama: Deployment,
) -> None:
    none = Curve.predicted(replace(llama, hardware=HARDWARE["NVIDIA A10"]), 131_072)
    assert not none.batches
    figure = cost_against_batch(usd_per_gpu_hour=1, predicted=none, marker=8)
    assert set(named(figure)) == {"does not fit"}
    with pytest.raises(ValueError, match="no batch to draw"):
        cost_against_batch(usd_per_gpu_hour=1, predicted=none)


def test_what_apis_bill_for_output_are_lines_with_provider_price_and_date(curve: Curve) -> None:
    assert not any("no longer listed" in row.note for row in OPEN_8B)
    figure = cost_against_batch(usd_per_gpu_hour=USD, predicted=curve, prices=OPEN_8B)
    groq = next(row for row in OPEN_8B if row.provider == "Groq")
    line = named(figure)["Groq $0.08"]
    assert set(line.y) == {groq.price.output} != {groq.price.input}
    assert groq.as_of in figure.panels[0].y.title
    assert not [s for s in figure.panels[1].series if s.name.startswith("Groq")]


def test_every_gpu_of_a_group_is_paid(llama: Deployment) -> None:
    two = Curve.predicted(replace(llama, tensor_parallel=2), 2048)
    speed = 8 / two.step(8)
    paid = cost_at(two, 8, USD, 1.0).usd_per_million_tokens
    assert paid == pytest.approx(usd_per_million_tokens(2 * USD, speed))


@pytest.mark.parametrize(
    ("value", "text"), [(0.08, "$0.08"), (0.1, "$0.10"), (12.1, "$12.10"), (4, "$4"), (307, "$307")]
)
def test_amounts_have_whole_cents_at_least(value: float, text: str) -> None:
    assert dollars(value) == text


# A day

WAVE = [100.0] * 12 + [3500.0] * 12


def test_an_idle_hour_is_dear_and_the_day_costs_its_dollars_over_its_tokens() -> None:
    always = day(WAVE, 1000, USD, replicas=4)
    figure = cost_through_a_day(always)
    hours = figure.panels[-1].series[0]
    assert hours.x[:2] == (0, 1)
    assert hours.y[0] == pytest.approx(usd_per_million_tokens(4 * USD, 100))
    assert hours.y[-1] == pytest.approx(usd_per_million_tokens(4 * USD, 3500))
    assert dollars(always.usd_per_million_tokens) in figure.title
    assert "45% utilization" in figure.title


def test_replicas_switched_off_are_compared_on_one_scale() -> None:
    days = {"always on": day(WAVE, 1000, USD, replicas=4), "as needed": day(WAVE, 1000, USD)}
    figure = cost_through_a_day(days)
    assert len(figure.panels) == 3
    assert len({panel.y_span for panel in figure.panels[:2]}) == 1
    roles = [series.role for series in figure.panels[-1].series]
    assert len(set(roles)) == 2
    assert "1 to 4 replicas on" in figure.describe()


def test_load_beyond_the_replicas_is_red_and_not_sold() -> None:
    figure = cost_through_a_day(day(WAVE, 1000, USD, replicas=3))
    areas = named(figure)
    assert areas["not served"].role == "breach"
    assert max(areas["not served"].y) == 3500
    assert max(areas["made"].y) == 3000
    assert "not served" in figure.describe()


def test_an_hour_without_tokens_has_no_price_per_token() -> None:
    quiet = day([0.0] * 6 + [500.0] * 18, 1000, USD, replicas=1)
    hours = cost_through_a_day(quiet).panels[-1].series[0]
    assert hours.x[0] == 6


def test_a_day_has_ticks_of_six_hours() -> None:
    axis = Axis(quantity="hour", include=(24,), every=6)
    assert axis.ticks(axis.span([0, 24])) == [0, 6, 12, 18, 24]


# How they are painted


@pytest.mark.parametrize("text", ["Groq $0.08", "as needed"])
def test_every_painter_names_what_is_drawn(curve: Curve, text: str) -> None:
    days = {"always on": day(WAVE, 1000, USD, replicas=4), "as needed": day(WAVE, 1000, USD)}
    money = cost_against_batch(usd_per_gpu_hour=USD, predicted=curve, prices=OPEN_8B)
    figure = cost_through_a_day(days) if text == "as needed" else money
    assert text in paint_svg(figure)
    assert text in json.dumps(paint_plotly(figure))
    assert text in figure.describe()
    assert len(png(figure)) < 25_000


def test_two_prices_in_a_line_are_not_taken_for_a_formula(curve: Curve) -> None:
    figure = cost_against_batch(usd_per_gpu_hour=USD, predicted=curve)
    assert figure.title.count("$") == 2
    painted = paint_matplotlib(figure)
    assert not any(text.get_parse_math() for text in painted.texts)


# What the explorer says


def test_the_claim_is_what_economics_computes_at_this_point(cost: Cost, curve: Curve) -> None:
    expected = curve.cost(32, 2.0, 0.4).usd_per_million_tokens
    said = cost.claim(2.0, 0.4, 32, 2048)
    assert said == f"{dollars(expected)} a million output tokens: batch 32 at context 2,048, " + (
        "40% utilization"
    )
    last = curve.batches[-1]
    assert cost.claim(2.0, 0.4, last + 1, 2048).endswith(f"does not fit: at most {last} does")


def test_the_readout_says_where_each_api_is_met_and_what_ends_the_batch(
    cost: Cost, curve: Curve
) -> None:
    said = cost.readout(USD, 1.0, 192, 2048)
    speed = 192 / curve.step(192)
    share = usd_per_million_tokens(USD, speed) / 0.18
    assert share < 1
    for words in (
        f"cheaper than Llama-3.1-8B, Together ($0.18) from {100 * share:.1f}% utilization on",
        "llama-3.1-8b-instant, Groq ($0.08) stays cheaper",
        f"Largest batch {largest_batch(curve, 0.02).batch}: ",
        "over the TPOT of 20 ms",
        "Nearest measurement, batch 64 at context 2,048",
    ):
        assert words in said, words
    assert "No batch will do: One step of batch 1" in replace(cost, tpot_slo=0.001).readout(
        USD, 1.0, 8, 2048
    )


def test_every_price_has_its_date_and_source_below(cost: Cost) -> None:
    shown = cost.html(USD, 0.5, 8, 2048)
    for row in OPEN_8B:
        assert f"{row.name}: {dollars(row.price.output)}" in shown
        assert f"as of {row.as_of}, {row.source}" in shown
    assert "an API bills them apart" in shown
    gone = replace(cost, prices=(api_price("llama3.1-8b", "Cerebras"),))
    assert "no longer listed on 2026-07-17" in gone.html(USD, 0.5, 8, 2048)


def test_the_readers_own_model_of_a_step_replaces_the_roofline(cost: Cost) -> None:
    mine = replace(cost, predicted=lambda batch, context: 0.5 + 0.001 * batch)
    expected = usd_per_million_tokens(USD, 8 / 0.508)
    assert mine.claim(USD, 1.0, 8, 2048).startswith(dollars(expected))


def test_measured_points_are_those_of_the_nearest_context_and_say_so(cost: Cost) -> None:
    more = {(4, 512): 0.02} | dict(cost.measured)
    both = replace(cost, measured=more)
    assert named(both.figure(USD, 1.0, 8, 400))["measured at 512"].x == (4,)
    assert named(both.figure(USD, 1.0, 8, 4096))["measured at 2,048"].x == (1, 16, 64)
    assert "Nothing measured yet." in replace(cost, measured={}).readout(USD, 1.0, 8, 2048)


# The explorer


def test_the_scale_stands_still_while_batch_and_context_move(explorer: CostExplorer) -> None:
    before = explorer.figure()
    explorer.batch.value, explorer.context.value = 64, 8192
    after = explorer.figure()
    assert [panel.y_span for panel in before.panels] == [panel.y_span for panel in after.panels]
    assert before.x_span == after.x_span


def test_each_slider_changes_what_a_token_costs(explorer: CostExplorer) -> None:
    seen = {explorer.figure().title}
    for slider, value in (
        (explorer.price, 1.25), (explorer.share, 80), (explorer.batch, 64), (explorer.context, 512),
    ):  # fmt: skip
        slider.value = value
        assert explorer.figure().title not in seen
        assert explorer.figure().title in explorer.chart.value
        seen.add(explorer.figure().title)


def test_half_the_utilization_doubles_the_cost(explorer: CostExplorer) -> None:
    explorer.share.value = 80
    full = role(explorer.figure(), "marker").y[0]
    explorer.share.value = 40
    assert role(explorer.figure(), "marker").y[0] == pytest.approx(2 * full)


def test_price_slider_and_box_move_as_one_and_the_box_keeps_what_is_typed(
    explorer: CostExplorer,
) -> None:
    row = next(box for box in explorer.view.children if explorer.price in box.children)
    slider = next(w for w in row.children if isinstance(w, FloatLogSlider))
    slider.value = 3.3884415613920256
    assert explorer.price.value == 3.39
    explorer.price.value = 5.123
    assert explorer.price.value == 5.123
    assert slider.value == pytest.approx(5.123)


def test_a_device_brings_its_listed_price_with_date_and_source(explorer: CostExplorer) -> None:
    explorer.device.value = "NVIDIA L40S"
    offer = cheapest_offer("NVIDIA L40S")
    assert explorer.price.value == offer.usd_per_gpu_hour
    assert f"{offer.provider}, {offer.kind}, {offer.as_of}" in explorer.chart.value
    explorer.device.value = "NVIDIA T4"
    assert explorer.price.value == offer.usd_per_gpu_hour
    assert "No price is listed for NVIDIA T4" in explorer.chart.value
    explorer.device.value = "NVIDIA H100 SXM"
    assert explorer.price.value == explorer.given.usd_per_gpu_hour


def test_a_price_on_demand_goes_before_a_cheaper_one_that_can_be_taken_away() -> None:
    offer = cheapest_offer("NVIDIA H100 SXM")
    assert offer.kind == "on-demand"
    assert cheapest_offer("no such device") is None


def test_what_was_measured_is_shown_only_where_it_was_measured(explorer: CostExplorer) -> None:
    assert "Nearest measurement" in explorer.chart.value
    explorer.device.value = "NVIDIA H200 SXM"
    assert "Nothing measured yet" in explorer.chart.value
    explorer.device.value = "NVIDIA H100 SXM"
    explorer.model.value = "Llama-2-7B"
    assert "Nothing measured yet" in explorer.chart.value
    explorer.model.value = "Llama-3.1-8B"
    assert "Nearest measurement" in explorer.chart.value


def test_every_model_is_drawn_on_every_device(explorer: CostExplorer) -> None:
    explorer.batch.value = 8
    for model in ("SmolLM2-135M", "Llama-2-13B"):
        explorer.model.value = model
        for device in HARDWARE:
            explorer.device.value = device
            assert re.search("a million output tokens: batch 8|does not fit", explorer.chart.value)


def test_weights_that_do_not_fit_are_said_and_raise_nothing(explorer: CostExplorer) -> None:
    explorer.device.value = "NVIDIA T4"
    assert "not one sequence does" in explorer.chart.value
    assert "No batch will do: No room for a KV cache" in explorer.chart.value
    assert len(png(explorer.figure())) > 1000


def test_the_machine_of_the_reader_comes_first_and_costs_what_he_says(llama: Deployment) -> None:
    own = replace(llama.hardware, name="this machine")
    mine = cost_explorer(replace(llama, hardware=own), usd_per_gpu_hour=0.2)
    assert mine.device.options[0] == "this machine"
    assert mine.price.value == 0.2
    assert cost_explorer(replace(llama, hardware=own)).price.value == 1.0


def test_the_explorer_is_one_display_with_a_still_picture_and_core_widgets_only(
    explorer: CostExplorer, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = []
    monkeypatch.setattr(explorers, "display", lambda bundle, raw: shown.append(bundle))
    explorer._ipython_display_()
    assert set(shown[0]) == {explorers.WIDGET_MIME, "image/png", "text/plain"}
    assert "a million output tokens" in shown[0]["text/plain"]
    modules, waiting = set(), [explorer.view]
    while waiting:
        widget: Widget = waiting.pop()
        modules.add(widget._model_module)
        waiting += getattr(widget, "children", ())
    assert modules == {"@jupyter-widgets/controls"}


def test_contexts_that_do_not_rise_are_refused(llama: Deployment) -> None:
    with pytest.raises(ValueError, match="contexts \\(low, high\\) that rise"):
        cost_explorer(llama, contexts=(512, 512))
