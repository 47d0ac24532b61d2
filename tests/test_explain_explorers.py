"""The explorer without a browser: what it draws is a pure function of where its sliders stand."""

import re

import pytest
from decodelab.explain import explorers
from decodelab.explain.explorers import WIDGET_MIME, Surface, batch_context_explorer
from decodelab.explain.progress import progress
from ipywidgets import IntSlider, Widget

MEASURED = {(b, c): 1.1 * (0.03 + 1e-3 * b + 1e-6 * b * c) for b in (1, 8, 64) for c in (128, 1024)}


def terms(batch: int, context: int) -> dict[str, float]:
    return {"weights": 0.03, "arithmetic": 1e-3 * batch, "KV": 1e-6 * batch * context}


def predicted(batch: int, context: int) -> float:
    return sum(terms(batch, context).values())


@pytest.fixture
def surface() -> Surface:
    return Surface(
        predicted=predicted,
        measured=MEASURED,
        terms=terms,
        bound=lambda b, c: 0.03,
        kv_bytes=lambda b, c: 1e5 * b * c,
        limit=lambda c: 131_072 // c,
    )


def test_the_measured_context_shown_is_nearest_in_ratio(surface: Surface) -> None:
    assert surface.measured_near(300)[0] == 128
    assert surface.measured_near(400)[0] == 1024, "nearest by difference would be 128"
    assert surface.measured_near(400)[1] == {b: MEASURED[b, 1024] for b in (1, 8, 64)}


def test_line_and_ring_are_the_prediction_and_dots_the_measurement(surface: Surface) -> None:
    drawn = {s.role: s for s in surface.figure(8, 1024).panels[1].series}
    line = drawn["prediction"]
    assert line.y == pytest.approx([predicted(b, 1024) * 1e3 for b in line.x])
    assert (drawn["marker"].x, drawn["marker"].y) == (
        (8,),
        (pytest.approx(predicted(8, 1024) * 1e3),),
    )
    assert drawn["measurement"].y[1] == pytest.approx(MEASURED[8, 1024] * 1e3)
    assert drawn["measurement"].name == "measured, context 1,024"


def test_scales_stand_still_while_the_sliders_move(surface: Surface) -> None:
    first, other = surface.figure(1, 64), surface.figure(30, 4096)
    assert first.x_span == other.x_span
    assert [p.y_span for p in first.panels] == [p.y_span for p in other.panels]


def test_the_line_stops_where_memory_ends_and_beyond_it_says_so(surface: Surface) -> None:
    figure = surface.figure(64, 4096)
    line = next(s for s in figure.panels[0].series if s.role == "prediction")
    assert max(line.x) == 32
    assert [r.role for r in figure.panels[0].rules] == ["breach"]
    assert "does not fit in memory: at most batch 32" in surface.readout(64, 4096)
    assert not any(s.role == "marker" for s in figure.panels[0].series)
    assert not surface.figure(64, 512).panels[0].rules


def test_the_readout_states_every_number(surface: Surface) -> None:
    seconds = predicted(8, 1024)
    shown = surface.html(8, 1024)
    for words in (
        f"{8 / seconds:.3g} tokens/s", f"{1 / seconds:.3g} tokens/s", f"{seconds * 1e3:.3g} ms",
        "largest term: weights, 65%", "KV cache 0.819 GB", "the prediction there is 0.91 of it",
    ):  # fmt: skip
        assert words in shown, words


def test_the_chart_is_an_image_that_says_its_numbers(surface: Surface) -> None:
    labels = re.findall('role="img" aria-label="([^"]*)"', surface.html(8, 1024))
    assert len(labels) == 2
    assert "Batch 8 at context 1,024" in labels[0]
    assert "weights 30 at B = 8" in labels[1]


def test_an_explorer_needs_only_a_prediction() -> None:
    explorer = batch_context_explorer(predicted, {}, max_batch=4, batch=99, context=1)
    assert (explorer.batch.value, explorer.context.value) == (4, 64)
    assert "Nothing measured yet." in explorer.chart.value


def test_slider_and_number_box_move_as_one_and_redraw_once(
    surface: Surface, monkeypatch: pytest.MonkeyPatch
) -> None:
    explorer = batch_context_explorer(predicted, MEASURED)
    before = explorer.chart.value
    drawn = []
    monkeypatch.setattr(Surface, "html", lambda self, b, c: drawn.append((b, c)) or f"{b} {c}")
    slider = next(w for w in explorer.view.children[0].children if isinstance(w, IntSlider))
    slider.value = 16
    explorer.context.value = 1000
    assert drawn == [(16, 512), (16, 1000)]
    assert explorer.batch.value == 16
    assert explorer.chart.value != before
    assert explorer.figure().title.startswith("Batch 16 at context 1,000")


def test_an_explorer_is_one_display_with_a_still_picture_beside_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shown = []
    monkeypatch.setattr(explorers, "display", lambda bundle, raw: shown.append((bundle, raw)))
    explorer = batch_context_explorer(predicted, MEASURED)
    explorer._ipython_display_()
    [(bundle, raw)] = shown
    assert raw is True
    assert set(bundle) == {WIDGET_MIME, "image/png", "text/plain"}
    assert bundle[WIDGET_MIME]["model_id"] == explorer.view.model_id


def test_only_core_widgets_are_used() -> None:
    explorer = batch_context_explorer(predicted, MEASURED)
    modules, waiting = set(), [explorer.view]
    while waiting:
        widget: Widget = waiting.pop()
        modules.add(widget._model_module)
        waiting += getattr(widget, "children", ())
    assert modules == {"@jupyter-widgets/controls"}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"max_batch": 1}, "max_batch of 2 or more"),
        ({"contexts": (512, 512)}, "contexts \\(low, high\\) that rise"),
        ({"limit": lambda c: 0}, "not one sequence fits in memory at context 4096"),
    ],
)
def test_a_surface_that_cannot_be_shown_says_why(options: dict, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Surface(predicted=predicted, measured={}, **options)


def test_progress_outside_a_notebook_just_iterates(capsys: pytest.CaptureFixture) -> None:
    assert list(progress(range(3))) == [0, 1, 2]
    assert list(progress(iter("ab"), total=2, unit="cell")) == ["a", "b"]
    assert capsys.readouterr().out == ""
