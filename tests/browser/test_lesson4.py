"""Lesson 4 in a real JupyterLab: servers start from its cells, with and without another engine."""

import shutil

import pytest
from conftest import ROOT
from lab import LabPage, LabServer

LESSON = "lesson4_serving_economics"
SOURCE = f"solutions/{LESSON}/{LESSON}.ipynb"
pytestmark = pytest.mark.slow


def run(lab: LabPage) -> None:
    """Open the lesson's source and run all of it."""
    lab.open(SOURCE)
    lab.run_all(timeout=900)
    assert lab.errors() == []


def test_the_lesson_runs_beside_a_real_engine_and_its_sliders_redraw_the_chart(courseware, lab):
    run(lab)
    assert "The other engine: " in lab.cells()[lab.index("rival")].text
    assert "Recorded" not in lab.cells()[lab.index("measure_rival")].text
    assert "queue" in lab.cells()[lab.index("chat")].text.lower(), "a real model answers"
    shown = ("show_knee", "show_open", "show_rival", "show_day", "show_cost", "explorer", "drill_1")
    for theme in ("light", "dark"):
        lab.theme(theme)
        for cell in shown:
            lab.screenshot(f"lesson4_{cell}_{theme}", lab.output(lab.index(cell)))
    lab.output(lab.index("explorer"))
    for name in ("Batch size", "Context", "Utilization, %"):
        lab.press(lab.handle(name), "ArrowRight", times=2)
    assert {url.rsplit("/", 1)[-1] for url in lab.foreign_requests()} <= {"colab-badge.svg"}
    assert lab.save().stat().st_size < 500_000


def test_without_another_engine_the_lesson_shows_a_recorded_run(browser, tmp_path, monkeypatch):
    monkeypatch.setenv("DECODELAB_OTHER_ENGINE", "none")
    folder, home = tmp_path / "course", tmp_path / "home"
    shutil.copytree(ROOT / "solutions" / LESSON, folder / "solutions" / LESSON)
    home.mkdir()
    server = LabServer(folder, home)
    try:
        lab = LabPage(browser.new_page(), server)
        run(lab)
        assert "No other engine" in lab.cells()[lab.index("rival")].text
        assert "Recorded, not measured here" in lab.cells()[lab.index("measure_rival")].text
        lab.page.close()
    finally:
        server.stop()


def test_a_student_without_a_prediction_reads_one_sentence(courseware, lab):
    lab.open(f"lessons/{LESSON}/{LESSON}.ipynb")
    shown = lab.run_to_error("measure_ttft")
    assert "commit your prediction first" in shown
    assert "Traceback" not in shown
