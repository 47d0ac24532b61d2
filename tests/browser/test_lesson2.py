"""Lesson 2 in a real JupyterLab: the cliff that the kernel survives, and the explorer's levers."""

import json

import pytest
from lab import LabPage
from playwright.sync_api import Locator, expect

LESSON = "lesson2_memory_ceiling"
pytestmark = pytest.mark.slow
QWEN = {
    "model_type": "qwen3",
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "tie_word_embeddings": True,
}


def button(lab: LabPage, lever: str, value: str) -> Locator:
    row = lab.page.locator(".widget-hbox", has_text=lever).filter(
        has=lab.page.get_by_role("button")
    )
    return row.last.get_by_role("button", name=value, exact=True)


def text(lab: LabPage, cell_id: str) -> str:
    return lab.cells()[lab.index(cell_id)].text


def test_the_lesson_runs_meets_the_cliff_and_goes_on(courseware, lab):
    lab.open(f"solutions/{LESSON}/{LESSON}.ipynb")
    lab.run_all(timeout=480)
    assert lab.errors() == []
    # Both refusals were met, and cells after them ran in the same kernel.
    assert "ask for" in text(lab, "measure_b_max")
    assert "refused" in text(lab, "before_the_cliff")
    assert "and the kernel lives: a step in" in text(lab, "survive")
    for cell in ("show_pool", "show_curve", "show_sweep"):
        for theme in ("light", "dark"):
            lab.theme(theme)
            lab.screenshot(f"lesson2_{cell}_{theme}", lab.output(lab.index(cell)))
    explorer = lab.output(lab.index("explorer"))

    start = lab.chart()
    value = lab.value("Batch size")
    lab.press(lab.number("Batch size"), "ArrowUp")
    lab.wait_for_value("Batch size", value + 1)
    before = lab.chart()
    lab.drag("Context", 60)
    assert lab.chart_changed(before) != start

    before = lab.chart()
    button(lab, "KV heads", "1").click()
    pulled = lab.chart_changed(before)
    assert "baseline" in pulled

    area = lab.page.get_by_label("config.json", exact=True)
    area.fill("{")
    expect(lab.page.get_by_role("alert")).to_contain_text("JSON")
    assert lab.chart() == pulled
    # Weights that this lesson's small pool can't hold are answered in words, until a card can.
    area.fill(json.dumps(QWEN))
    expect(lab.page.get_by_role("alert")).to_contain_text("weights take")
    lab.page.get_by_label("Device", exact=True).select_option("NVIDIA H100 SXM")
    lab.chart_changed(pulled)
    expect(lab.page.get_by_label("Model", exact=True)).to_have_value("the pasted config.json")
    expect(lab.page.get_by_role("alert")).to_have_count(0)
    for theme in ("light", "dark"):
        lab.theme(theme)
        lab.screenshot(f"lesson2_explorer_{theme}", explorer)
    assert {url.rsplit("/", 1)[-1] for url in lab.foreign_requests()} <= {"colab-badge.svg"}
    assert lab.save().stat().st_size < 300_000


def test_a_student_without_a_prediction_reads_one_sentence(courseware, lab):
    lab.open(f"lessons/{LESSON}/{LESSON}.ipynb")
    shown = lab.run_to_error("measure_kv")
    assert "commit your prediction first" in shown
    assert "Traceback" not in shown
