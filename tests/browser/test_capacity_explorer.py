"""The capacity explorer as a student meets it: in JupyterLab, in a real Chromium."""

import json
from pathlib import Path

import pytest
from lab import LabPage, LabServer
from playwright.sync_api import Locator, expect
from toy import write_capacity_toy

CONFIG = {
    "model_type": "llama", "hidden_size": 2048, "intermediate_size": 8192,
    "num_hidden_layers": 16, "num_attention_heads": 32, "num_key_value_heads": 8,
    "vocab_size": 128256, "tie_word_embeddings": True,
}  # fmt: skip
CONFIGS = Path(__file__).parents[1] / "data" / "hf_configs"
DEEPSEEK = (CONFIGS / "deepseek-ai--DeepSeek-V3.json").read_text(encoding="utf-8")


@pytest.fixture
def toy(lab: LabPage, lab_server: LabServer) -> LabPage:
    """The notebook of the explorer alone, run, with it in view."""
    write_capacity_toy(lab_server.folder / "capacity.ipynb")
    lab.open("capacity.ipynb")
    lab.run_all()
    assert lab.errors() == []
    lab.output(0)
    return lab


def button(toy: LabPage, lever: str, value: str) -> Locator:
    row = toy.page.locator(".widget-hbox", has_text=lever).filter(
        has=toy.page.get_by_role("button")
    )
    return row.last.get_by_role("button", name=value, exact=True)


def choose(toy: LabPage, lever: str, value: str) -> str:
    """Press a lever's button; returns what the chart then says of itself."""
    before = toy.chart()
    button(toy, lever, value).click()
    return toy.chart_changed(before)


def test_sliders_move_the_ring_by_keyboard_and_by_mouse(toy: LabPage) -> None:
    toy.press(toy.handle("Batch size"), "ArrowRight", times=2)
    toy.wait_for_value("Batch size", 38)
    toy.press(toy.number("Batch size"), "ArrowUp")
    toy.wait_for_value("Batch size", 39)
    toy.press(toy.handle("Context"), "ArrowLeft", times=8)
    toy.wait_for_value("Context", 4096)
    assert "batch 39 39 at context 4,096" in toy.chart()
    before = toy.chart()
    toy.drag("Batch size", across=200)
    assert "does not fit" in toy.chart_changed(before)


def test_levers_move_the_frontier_and_the_baseline_stays(toy: LabPage) -> None:
    assert toy.chart().startswith("56 sequences fit at context 8,192.")
    assert "112 sequences fit at context 8,192; baseline 56" in choose(toy, "KV format", "fp8")
    # More than twice as many: K and V projections shrink too, and leave more for the pool.
    assert "226 sequences fit at context 8,192; baseline 56" in choose(toy, "KV heads", "4")
    choose(toy, "KV format", "bf16 (baseline)")
    assert choose(toy, "KV heads", "8 (baseline)").startswith("56 sequences fit")


def test_another_model_and_device_are_chosen_from_menus(toy: LabPage) -> None:
    before = toy.chart()
    toy.page.get_by_label("Device", exact=True).select_option("NVIDIA H200 SXM")
    before = toy.chart_changed(before)
    toy.page.get_by_label("Model", exact=True).select_option("Llama-2-13B")
    assert "sequences fit" in toy.chart_changed(before) or "does not fit" in toy.chart()
    expect(button(toy, "KV heads", "40 (baseline)")).to_be_visible()


def test_any_config_can_be_pasted_and_a_bad_one_is_answered_in_words(toy: LabPage) -> None:
    good, area = toy.chart(), toy.page.get_by_label("config.json", exact=True)
    area.fill(json.dumps({"model_type": "llama", "hidden_size": 4096}))
    alert = toy.page.get_by_role("alert")
    expect(alert).to_contain_text("num_attention_heads")
    assert toy.chart() == good
    area.fill(json.dumps(CONFIG))
    assert toy.chart_changed(good) != good
    expect(alert).to_have_count(0)
    expect(toy.page.get_by_label("Model", exact=True)).to_have_value("the pasted config.json")
    assert toy.errors() == []


def test_a_model_that_needs_eight_gpus_gets_them(toy: LabPage) -> None:
    good = toy.chart()
    toy.page.get_by_label("Device", exact=True).select_option("NVIDIA H200 SXM")
    good = toy.chart_changed(good)
    toy.page.get_by_label("config.json", exact=True).fill(DEEPSEEK)
    alert = toy.page.get_by_role("alert")
    expect(alert).to_contain_text("The chart still shows Llama-3.1-8B on NVIDIA H200 SXM")
    expect(toy.page.locator(".widget-html div[style*='opacity']").first).to_have_css(
        "opacity", "0.35"
    )
    assert toy.chart() == good
    toy.screenshot("capacity_refused", toy.output(0))
    assert "sequences fit" in choose(toy, "GPUs", "8")
    expect(alert).to_have_count(0)
    expect(button(toy, "weight format", "fp8 (baseline)")).to_be_visible()
    expect(toy.page.locator(".widget-html div[style*='opacity']")).to_have_count(0)
    toy.screenshot("capacity_eight_gpus", toy.output(0))


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_text_of_the_explorer_is_readable_in_both_themes(toy: LabPage, theme: str) -> None:
    choose(toy, "KV format", "fp8")
    toy.theme(theme)
    text = toy.output(0).locator("svg text", has_text="tokens/s").first
    assert toy.contrast(text) > 7
    toy.screenshot(f"capacity_{theme}", toy.output(0))


def test_no_request_leaves_this_machine_and_the_saved_notebook_stays_small(toy: LabPage) -> None:
    saved = toy.save()
    assert toy.foreign_requests() == []
    assert len(toy.requests) > 20, "requests were not counted"
    assert saved.stat().st_size < 200_000
