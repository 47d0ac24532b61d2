"""The stepper and the figures of traces as a student meets them: in JupyterLab, in Chromium."""

import re

import pytest
from lab import LabPage, LabServer
from playwright.sync_api import Locator, expect
from toy import SERVING, write_stepper_toy


@pytest.fixture
def toy(lab: LabPage, lab_server: LabServer) -> LabPage:
    """The notebook of the stepper and the figures, run, with the stepper in view."""
    write_stepper_toy(lab_server.folder / "stepper.ipynb")
    lab.open("stepper.ipynb")
    lab.run_all()
    assert lab.errors() == []
    lab.output(0)
    return lab


def button(toy: LabPage, name: str) -> Locator:
    return toy.page.get_by_role("button", name=name, exact=True)


def expect_step(toy: LabPage, says: str) -> None:
    """Wait until the sentence of the step says so."""
    expect(toy.page.locator(".decodelab-step [role=status]")).to_contain_text(re.compile(says))


def test_the_keyboard_alone_walks_there_and_back_and_keeps_its_place(toy: LabPage) -> None:
    expect_step(toy, "^Step 6: ")
    button(toy, "Back").focus()
    for key, step in (("Enter", 5), ("Space", 4)):
        toy.page.keyboard.press(key)
        expect_step(toy, f"^Step {step}: ")
        expect(button(toy, "Back")).to_be_focused()
    toy.page.keyboard.press("Tab")
    expect(button(toy, "Step")).to_be_focused()
    toy.page.keyboard.press("Enter")
    expect_step(toy, "^Step 5: ")
    toy.page.keyboard.press("Tab")
    toy.page.keyboard.press("Enter")
    expect_step(toy, "All is done, in \\d+ steps")
    expect(button(toy, "Run to end")).to_be_focused()


def test_the_first_step_and_the_last_are_where_the_buttons_stop(toy: LabPage) -> None:
    for step in range(5, -1, -1):
        button(toy, "Back").click()
        expect_step(toy, f"^Step {step}: ")
    button(toy, "Back").click()
    button(toy, "Step").click()
    expect_step(toy, "^Step 1: ")
    button(toy, "Run to end").click()
    expect_step(toy, "All is done")
    button(toy, "Step").click()
    button(toy, "Back").click()
    expect(toy.page.locator(".decodelab-step [role=status]")).not_to_contain_text("All is done")


def test_another_policy_and_pool_start_anew(toy: LabPage) -> None:
    button(toy, "Run to end").click()
    expect_step(toy, "All is done")
    button(toy, "static").click()
    expect_step(toy, "^Step 6: .*padding until all are")
    button(toy, "64").click()
    expect(toy.page.locator(".decodelab-step .cell")).to_have_count(64)


def test_slots_blocks_and_sentence_tell_the_same_step(toy: LabPage) -> None:
    rows = toy.page.locator(".decodelab-step tr")
    expect(rows).to_have_count(7)
    table = rows.nth(1).locator("td").last.inner_text().split()
    owner = rows.nth(1).locator("td").nth(1).inner_text()
    for block in table:
        expect(toy.page.get_by_title(f"block {block}: {owner}", exact=True)).to_be_visible()


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_the_stepper_is_readable_in_both_themes(toy: LabPage, theme: str) -> None:
    toy.theme(theme)
    shown = toy.output(0)
    for text in (
        ".decodelab-step [role=status]",
        ".decodelab-step td",
        ".decodelab-step .owned > span",
    ):
        assert toy.contrast(shown.locator(text).first) > 4.5, text
    assert toy.contrast(shown.locator("svg text").first) > 7
    toy.screenshot(f"stepper_{theme}", shown)
    for i in range(len(SERVING)):
        toy.screenshot(f"serving{i}_{theme}", toy.output(1 + i))


def test_no_request_leaves_this_machine_and_the_saved_notebook_stays_small(toy: LabPage) -> None:
    button(toy, "Run to end").click()
    expect_step(toy, "All is done")
    saved = toy.save()
    assert toy.foreign_requests() == []
    assert len(toy.requests) > 20, "requests were not counted"
    assert saved.stat().st_size < 200_000
