"""Lesson 3 in a real JupyterLab: it runs, and its stepper is walked by keyboard alone."""

import re

import pytest
from lab import LabPage
from playwright.sync_api import expect

LESSON = "lesson3_continuous_batching"
pytestmark = pytest.mark.slow


def expect_step(lab: LabPage, says: str) -> None:
    """Wait until the sentence of the step says so."""
    expect(lab.page.locator(".decodelab-step [role=status]")).to_contain_text(re.compile(says))


def test_the_lesson_runs_and_its_stepper_works_by_keyboard(courseware, lab):
    lab.open(f"solutions/{LESSON}/{LESSON}.ipynb")
    lab.run_all(timeout=540)
    assert lab.errors() == []
    for cell in ("show_gantts", "show_blocks", "show_preemption", "show_gaps", "show_knee"):
        for theme in ("light", "dark"):
            lab.theme(theme)
            lab.screenshot(f"lesson3_{cell}_{theme}", lab.output(lab.index(cell)))
    stepper = lab.output(lab.index("stepper"))
    expect_step(lab, "^Step 1: ")
    lab.page.get_by_role("button", name="Step", exact=True).focus()
    for step in (2, 3, 4):
        lab.page.keyboard.press("Enter")
        expect_step(lab, f"^Step {step}: ")
    lab.screenshot("lesson3_stepper_dark", stepper)
    lab.page.keyboard.press("Tab")
    lab.page.keyboard.press("Enter")
    expect_step(lab, "All is done")
    assert {url.rsplit("/", 1)[-1] for url in lab.foreign_requests()} <= {"colab-badge.svg"}
    assert lab.save().stat().st_size < 400_000


def test_a_student_without_a_prediction_reads_one_sentence(courseware, lab):
    lab.open(f"lessons/{LESSON}/{LESSON}.ipynb")
    shown = lab.run_to_error("measure_padding")
    assert "commit your prediction first" in shown
    assert "Traceback" not in shown
