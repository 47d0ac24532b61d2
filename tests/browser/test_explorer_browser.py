"""The explorer and the figures as a student meets them: in JupyterLab, in a real Chromium.

Times are printed, not tested: see tests/bench/slider.py. Screenshots go to tests/browser/shots/.
"""

import json

import pytest
from lab import LabPage, LabServer, median
from toy import EXPLORER_CELL, FIRST_FIGURE_CELL, write_toy


@pytest.fixture
def toy(lab: LabPage, lab_server: LabServer) -> LabPage:
    """The toy notebook, run top to bottom, with the explorer in view."""
    write_toy(lab_server.folder / "toy.ipynb", figures=True)
    lab.open("toy.ipynb")
    lab.run_all()
    assert lab.errors() == []
    lab.output(EXPLORER_CELL)
    return lab


def test_both_sliders_move_the_chart_by_keyboard_and_by_mouse(toy: LabPage) -> None:
    for name, step in (("Batch size", 1), ("Context", 64)):
        start = toy.value(name)
        toy.press(toy.handle(name), "ArrowRight", times=2)
        toy.wait_for_value(name, start + 2 * step)
        toy.press(toy.number(name), "ArrowUp")
        toy.wait_for_value(name, start + 3 * step)
        before = toy.chart()
        toy.drag(name, across=60)
        after = toy.chart_changed(before)
        assert toy.value(name) > start + 3 * step
        toy.page.wait_for_function(
            "words => document.querySelector('.widget-html svg').ariaLabel.includes(words)",
            arg=f"{toy.value(name):,}",
        )
        assert after != before


def test_a_key_redraws_the_chart_in_a_blink(toy: LabPage) -> None:
    found = toy.latencies(toy.number("Batch size"), "ArrowUp", times=15)
    found += toy.latencies(toy.handle("Context"), "ArrowRight", times=15)
    print(f"key to changed chart: {median(found)}")
    assert len(found) == 30, "each key must redraw the chart"


def test_no_request_leaves_this_machine_and_the_saved_notebook_stays_small(toy: LabPage) -> None:
    toy.output(FIRST_FIGURE_CELL).hover()
    toy.page.locator(".js-plotly-plot .main-svg").first.wait_for()
    toy.page.wait_for_timeout(1000)  # plotly now stores its own picture in the notebook
    saved = toy.save()
    assert toy.foreign_requests() == []
    assert len(toy.requests) > 20, "requests were not counted"
    notebook = json.loads(saved.read_text(encoding="utf-8"))
    assert "widgets" not in notebook["metadata"]
    assert saved.stat().st_size < 200_000


def test_hovering_over_the_roofline_names_the_point(toy: LabPage) -> None:
    figure = toy.output(FIRST_FIGURE_CELL)
    figure.hover()
    point = figure.locator(".scatterlayer .trace").last.locator("path.point").last
    point.wait_for()
    box = point.bounding_box()
    toy.page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2, steps=5)
    label = figure.locator(".hoverlayer .hovertext")
    label.first.wait_for()
    assert "GFLOP/s" in label.first.text_content()


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_text_of_the_explorer_is_readable_in_both_themes(toy: LabPage, theme: str) -> None:
    toy.theme(theme)
    contrast = toy.contrast(toy.output(EXPLORER_CELL).locator("svg text").first)
    toy.screenshot(f"explorer_{theme}", toy.output(EXPLORER_CELL))
    toy.screenshot(f"roofline_{theme}", toy.output(FIRST_FIGURE_CELL))
    assert contrast > 7


def test_the_number_boxes_answer_the_keyboard_in_notebook_7(
    lab: LabPage, lab_server: LabServer
) -> None:
    pytest.importorskip("notebook", reason="Notebook 7 is not installed here")
    write_toy(lab_server.folder / "classic.ipynb")
    lab.open("classic.ipynb", app="notebooks")
    lab.run_all()
    for name in ("Batch size", "Context"):
        lab.press(lab.number(name), "ArrowUp", times=2)
    assert (lab.value("Batch size"), lab.value("Context")) == (10, 512 + 2 * 64)
    assert lab.foreign_requests() == []
