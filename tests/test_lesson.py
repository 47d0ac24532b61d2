"""Rounds, stored measurements and their replay, on the smallest shape."""

import json
import math

import pytest
from decodelab.explain import lesson as module
from decodelab.explain.lesson import MEASUREMENTS_FILE, Lesson
from decodelab.explain.record import load, make_recording
from decodelab.explain.rounds import MEASUREMENT_MIME, NotCommittedError, Round, committed
from decodelab.measure import StepTiming
from decodelab.predict import SHAPES, ModelShape

TINY = ModelShape(
    layers=2, hidden=64, heads=4, kv_heads=2, head_dim=16, ffn=96, vocab=256, tied=True,
    max_context=2048,
)  # fmt: skip


@pytest.fixture
def shown(monkeypatch):
    """What the lesson displays, in order."""
    things = []
    monkeypatch.setattr(module, "display", things.append)
    return things


@pytest.fixture
def tiny(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(SHAPES, "tiny", TINY)
    monkeypatch.delenv("NBGRADER_EXECUTION", raising=False)
    return Lesson("lesson1_why_batching", shape="tiny")


def payloads(shown) -> dict:
    bundles = [t._repr_mimebundle_() for t in shown if hasattr(t, "_repr_mimebundle_")]
    stored = [b[MEASUREMENT_MIME] for b in bundles if MEASUREMENT_MIME in b]
    return {p["name"]: p for p in json.loads(json.dumps(stored))}


@pytest.mark.parametrize("value", [..., None, "40", True, float("nan"), math.inf, 0, -3])
def test_a_round_refuses_to_measure_without_a_positive_number(tiny, shown, value):
    def measure():
        raise AssertionError("measured before a prediction was committed")

    with pytest.raises(NotCommittedError, match="prediction"):
        tiny.round("step", predicted=value, unit="ms", measure=measure)


def test_a_missing_prediction_is_shown_as_one_sentence():
    with pytest.raises(NotCommittedError) as caught:
        committed("step", ...)
    assert len(caught.value._render_traceback_()) == 1


def test_a_round_stores_prediction_and_measurement_in_the_output(tiny, shown):
    result = tiny.round("step", predicted=2, unit="ms", measure=lambda: 5)
    assert isinstance(result, Round)
    assert result.ratio == 2.5
    assert payloads(shown)["step"] == {
        "name": "step", "predicted": 2.0, "unit": "ms", "measured": {"value": 5.0},
    }  # fmt: skip


def test_the_first_number_committed_counts(tiny, shown):
    assert tiny.round("step", predicted=2, unit="ms", measure=lambda: 4).ratio == 2
    assert tiny.round("step", predicted=4, unit="ms", measure=lambda: 4).ratio == 2


def test_ceilings_are_asked_for_by_name_before_they_are_measured(tiny):
    with pytest.raises(ValueError, match="run the cell of lab.calibrate"):
        tiny.calibration  # noqa: B018


@pytest.mark.parametrize(
    ("letter", "state"), [("A", "right"), ("B", "right"), ("C", "wrong"), ("?", "unanswered")]
)
def test_a_cause_is_judged_by_the_readers_own_numbers(tiny, monkeypatch, letter, state):
    said = []
    monkeypatch.setattr(module, "show", said.append)
    tiny.judge("cause1", letter, {"weights": 0.020, "KV": 0.019, "arithmetic": 0.002})
    assert said[0].state == state


def test_a_grader_replays_what_the_student_measured(tiny, shown, monkeypatch, tmp_path):
    tiny.preflight()
    measured = [tiny.calibrate(), tiny.cells([(1, 8), (2, 8)]), tiny.prefill(8)]
    (tmp_path / MEASUREMENTS_FILE).write_text(json.dumps(payloads(shown)))
    monkeypatch.setenv("NBGRADER_EXECUTION", "autograde")
    for name in ("calibrate", "measure_steps", "measure_prefill"):
        monkeypatch.setattr(module, name, lambda *a, **k: pytest.fail("measured again"))
    grader = Lesson("lesson1_why_batching", shape="25M")
    assert [grader.calibrate(), grader.cells([(1, 8), (2, 8)]), grader.prefill(8)] == measured
    assert grader.shape == TINY, "the student's shape counts, not the grader's"


def test_outside_grading_a_stray_file_is_not_replayed(tiny, shown, tmp_path):
    (tmp_path / MEASUREMENTS_FILE).write_text(
        json.dumps({"prefill 1x8": {"measured": {"seconds": 99.0}}})
    )
    assert Lesson("x", shape="tiny").prefill(8) < 99


def test_an_unknown_shape_is_refused_by_name():
    with pytest.raises(ValueError, match="'13T'.*SmolLM2-135M"):
        Lesson("x", shape="13T")


def test_the_fit_is_judged_on_cells_that_it_never_saw(tiny, shown):
    tiny.calibrate()
    timings = tiny.cells([(b, s) for b in (1, 2, 4) for s in (8, 16, 32)])
    fitted, unseen = tiny.fit(timings)
    assert [(t.batch, t.context) for t in unseen] == [(1, 16), (2, 16), (4, 16)]
    assert sum(fitted.terms(2, 16).values()) == pytest.approx(fitted.predict(2, 16))


def test_a_recorded_run_says_what_it_is_and_comes_back_whole(tiny, tmp_path):
    data = make_recording("tiny", batches=(1, 2), context=8)
    (tmp_path / "run.json").write_text(json.dumps(data))
    run = load(tmp_path / "run.json")
    assert run.label.startswith("recorded ")
    assert [t.batch for t in run.curve] == [1, 2]
    assert run.calibration.bandwidth > 0


def test_a_second_prediction_is_answered_and_the_first_one_counts(tiny, shown, capsys):
    for said in (3, 5):
        tiny.round("again", predicted=said, unit="ms", measure=lambda: 4)
    assert tiny.rounds["again"].predicted == 3
    assert "first number counts, 3; the cell now says 5" in capsys.readouterr().out


def test_times_that_contradict_each_other_are_measured_again_and_named(
    tiny, shown, monkeypatch, capsys
):
    runs = []

    def steps(model, cells):
        runs.append(cells)
        slow = {1: 9.0, 2: 0.01 * len(runs)}[cells[0][0]]
        for batch, context in cells:
            seconds = slow if (batch, context) == cells[0] else 0.1
            yield StepTiming(batch=batch, context=context, seconds=seconds, spread=0.0)

    monkeypatch.setattr("decodelab.explain.lesson.measure_steps", steps)
    assert [t.seconds for t in tiny.cells([(2, 64), (4, 64)])] == [0.01, 0.1]
    assert (len(runs), capsys.readouterr().out.count("contradict")) == (1, 0)
    tiny.cells([(1, 64), (4, 64)])
    assert len(runs) == 3
    assert "batch 1 at context 64 took 9,000 ms, batch 4" in capsys.readouterr().out
