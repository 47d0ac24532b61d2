"""Lesson 1 in a real JupyterLab: as an instructor runs it, and as a student meets it."""

import json
from pathlib import Path

import pytest
from lab import LabPage

ROOT = Path(__file__).parents[2]
LESSON = "lesson1_why_batching"
pytestmark = pytest.mark.slow


def open_lesson(lab: LabPage, stage: str) -> None:
    lab.open(f"{stage}/{LESSON}/{LESSON}.ipynb")


def test_the_lesson_runs_top_to_bottom_and_its_sliders_redraw_the_chart(courseware, lab):
    open_lesson(lab, "solutions")
    lab.run_all(timeout=480)
    assert lab.errors() == []
    lab.output(lab.index("explorer"))
    seen = {lab.chart()}
    for name in ("Batch size", "Context"):
        step = {"Batch size": 1, "Context": 64}[name]
        start = lab.value(name)
        lab.press(lab.handle(name), "ArrowRight", times=2)
        lab.wait_for_value(name, start + 2 * step)
        seen.add(lab.chart())
        lab.press(lab.number(name), "ArrowUp")
        lab.wait_for_value(name, start + 3 * step)
        seen.add(lab.chart())
        before, value = lab.chart(), lab.value(name)
        lab.drag(name, 60)
        seen.add(lab.chart_changed(before))
        assert lab.value(name) > value
    assert len(seen) == 7
    for theme in ("light", "dark"):
        lab.theme(theme)
        for cell in ("explorer", "measure_b1", "show_curve", "show_terms", "show_phases"):
            lab.screenshot(f"lesson1_{cell}_{theme}", lab.output(lab.index(cell)))
    # The Colab badge is for readers who are online; offline its text stands in its place.
    assert {url.rsplit("/", 1)[-1] for url in lab.foreign_requests()} <= {"colab-badge.svg"}
    assert lab.save().stat().st_size < 300_000


def test_a_student_meets_a_sentence_where_a_prediction_is_missing(courseware, lab):
    open_lesson(lab, "lessons")
    shown = lab.run_to_error("measure_ridge")
    assert "commit your prediction first" in shown
    assert "Traceback" not in shown
    # Quizzes before it answered "?" with a request to choose, and raised nothing.
    assert "Choose one of" in lab.cells()[lab.index("q1")].text


def test_the_start_page_lists_four_lessons_and_opens_the_first(courseware, lab):
    lab.page.goto(f"{lab.server.url}/lab/tree/lessons/README.md?reset")
    page = lab.page.locator(".jp-RenderedMarkdown").first
    link = page.get_by_role("link", name="Why batching is everything").first
    link.wait_for(timeout=60_000)
    assert page.inner_text().count("not written yet") == 0
    link.click()
    lab.page.wait_for_function(
        "name => window.jupyterapp?.shell.currentWidget?.context?.path.endsWith(name)",
        arg=f"{LESSON}.ipynb",
        timeout=60_000,
    )


def test_the_lesson_carries_no_outputs_or_widget_state():
    for stage in ("lessons", "solutions"):
        path = ROOT / stage / LESSON / f"{LESSON}.ipynb"
        notebook = json.loads(path.read_text(encoding="utf-8"))
        assert "widgets" not in notebook["metadata"]
        assert path.stat().st_size < 200_000
        for cell in notebook["cells"]:
            assert not cell.get("outputs")
            assert (
                len(
                    cell["source"].splitlines()
                    if isinstance(cell["source"], str)
                    else cell["source"]
                )
                <= 25
                or cell["cell_type"] == "markdown"
            )
