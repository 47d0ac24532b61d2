"""Grade simulated students with the real nbgrader: who gets points, who must not, what they see."""

import csv
import json
import re
import subprocess
import sys
from copy import deepcopy
from html import unescape
from pathlib import Path

import nbformat
import pytest
from decodelab.explain.lesson import MEASUREMENTS_FILE
from decodelab.explain.rounds import MEASUREMENT_MIME
from nb.course import Course
from nb.toy import (
    LESSON,
    MIME,
    cell,
    toy_lesson,
    with_source,
    without,
)
from nbformat import NotebookNode
from nbformat.v4 import new_code_cell, new_output

from autograder.cells import questions
from autograder.grading_steps import FailWhatDidNotRun, LimitBytes
from autograder.measurements import FILE_NAME, MAX_BYTES_EACH, harvest
from autograder.measurements import MIME as HARVESTED_MIME

pytestmark = pytest.mark.slow

TEST, QUIZ, CAUSE = "weight_bytes_counts_two_bytes_each", "q1_is_answered", "cause_is_your_own"
FULL = {TEST: 2.0, QUIZ: 1.0, CAUSE: 1.0}
NOTHING = {TEST: 0.0, QUIZ: 0.0, CAUSE: 0.0}
ANSWERS = {
    "weight_bytes": "def weight_bytes(layers, width):\n    return layers * width**2 * 2",
    "q1": 'q1 = "B"',
    "cause": 'cause = "A"',
    "why": "Each sequence holds slots of a finite pool.",
}
WRONG = {"weight_bytes": "def weight_bytes(layers, width):\n    return 8", "q1": 'q1 = "A"'}
WRONG["cause"] = 'cause = "B"'
SECRETS = ("expected_of_thirty", 'assert q1 == "B"', "measured > 3", "BEGIN HIDDEN")


def skipping(nb: NotebookNode) -> NotebookNode:
    nb = deepcopy(nb)
    for name in FULL:
        cell(nb, name).metadata["tags"] = ["skip-execution"]
    return nb


def measured_elsewhere(nb: NotebookNode, value: float) -> NotebookNode:
    nb = deepcopy(nb)
    payload = {"name": "step", "measured": {"value": value}}
    cell(nb, "measure").outputs = [new_output("display_data", {MIME: payload})]
    return nb


def saved_by_colab(nb: NotebookNode) -> NotebookNode:
    nb = deepcopy(nb)
    nb.metadata["widgets"] = {"application/vnd.jupyter.widget-state+json": {"model": {}}}
    nb.nbformat_minor = 0
    for c in nb.cells:
        c.metadata["id"] = c.pop("id")
    return nb


def students(released: NotebookNode) -> dict[str, NotebookNode]:
    right, wrong = with_source(released, **ANSWERS), with_source(released, **WRONG)
    warns = "def weight_bytes(layers, width):\n    import sys\n    print('slow', file=sys.stderr)\n"
    stops = new_code_cell("get_ipython().kernel._aborting = True")
    stopped = deepcopy(wrong)
    stopped.cells.insert(5, stops)
    bare = deepcopy(right)
    for c in bare.cells:
        c.metadata.pop("nbgrader", None)
    return {
        "blank": released,
        "right": right,
        "wrong": wrong,
        "skips_tests": skipping(wrong),
        "stops_kernel": stopped,
        "warns": with_source(right, weight_bytes=warns + "    return layers * width**2 * 2"),
        "prints_much": with_source(right, try_it="print('x' * 3_000_000)"),
        "lost_test": without(right, TEST),
        "lost_written": without(right, "why"),
        "lost_metadata": bare,
        "own_machine": measured_elsewhere(with_source(right, cause='cause = "B"'), 1.0),
        "from_colab": saved_by_colab(right),
    }


@pytest.fixture(scope="module")
def course(tmp_path_factory: pytest.TempPathFactory) -> Course:
    course = Course.make(tmp_path_factory.mktemp("course"), LESSON, toy_lesson())
    assert course.nbgrader("generate_assignment", LESSON).returncode == 0
    for student, nb in students(course.released()).items():
        course.submit(student, nb)
    course.submit("zoe_comes_last", with_source(course.released(), **ANSWERS))
    course.nbgrader("autograde", LESSON)
    course.nbgrader("generate_feedback", LESSON)
    course.nbgrader("export")
    return course


def points_of(course: Course, student: str) -> dict[str, float | None]:
    return {name: score for name, score in course.scores(student).items() if name in FULL}


def feedback(course: Course, student: str) -> str:
    """Return the text that the feedback page shows, without its markup."""
    page = (course.path("feedback", student) / f"{LESSON}.html").read_text(encoding="utf-8")
    return unescape(re.sub(r"<[^>]*>", "", page))


def test_the_blank_release_scores_nothing(course: Course) -> None:
    assert course.scores("blank") == NOTHING | {"why": 0.0}


def test_the_right_answers_score_full_and_wait_for_the_written_one(course: Course) -> None:
    assert course.scores("right") == FULL | {"why": None}


@pytest.mark.parametrize("student", ["wrong", "skips_tests", "stops_kernel"])
def test_wrong_answers_score_nothing_even_when_the_tests_are_kept_from_running(
    course: Course, student: str
) -> None:
    assert points_of(course, student) == NOTHING


@pytest.mark.parametrize(
    "student", ["warns", "prints_much", "lost_test", "lost_written", "from_colab", "zoe_comes_last"]
)
def test_right_answers_score_full_in_spite_of_an_accident(course: Course, student: str) -> None:
    assert points_of(course, student) == FULL


def test_a_choice_is_judged_by_the_student_s_own_measurement(course: Course) -> None:
    assert points_of(course, "own_machine") == FULL
    written = json.loads((course.path("autograded", "own_machine") / FILE_NAME).read_text())
    assert written == {"step": {"name": "step", "measured": {"value": 1.0}}}


def test_a_notebook_that_lost_its_metadata_is_refused_and_not_graded_0(course: Course) -> None:
    assert set(course.scores("lost_metadata").values()) == {None}
    assert not course.path("autograded", "lost_metadata").exists()


def test_a_test_that_did_not_run_says_so_in_the_feedback(course: Course) -> None:
    assert "This test did not run" in feedback(course, "stops_kernel")


@pytest.mark.parametrize("student", ["right", "wrong", "blank", "from_colab"])
def test_feedback_shows_no_hidden_test(course: Course, student: str) -> None:
    text = feedback(course, student)
    assert "two bytes for each of the four weights" in text, "the visible test is shown"
    assert [secret for secret in SECRETS if secret in text] == []


def test_feedback_says_that_a_hidden_test_failed_only_when_one_did(course: Course) -> None:
    said = "A hidden test of this cell failed."
    assert said in feedback(course, "wrong")
    assert feedback(course, "wrong").count(said) == 3
    # The stub fails at the visible test; the two choices left at "?" fail at a hidden one.
    assert feedback(course, "blank").count(said) == 2


def test_a_cell_s_output_is_bounded_in_bytes(course: Course) -> None:
    path = course.path("autograded", "prints_much") / f"{LESSON}.ipynb"
    assert path.stat().st_size < 1_000_000


def test_the_export_has_a_row_for_everybody(course: Course) -> None:
    with open(course.root / "course" / "grades.csv", encoding="utf-8") as file:
        scores = {row["student_id"]: float(row["score"]) for row in csv.DictReader(file)}
    assert scores["right"] == 4
    assert scores["blank"] == scores["wrong"] == 0
    assert len(scores) == 13


@pytest.mark.parametrize("way", ["linked", "inside autograder/", "by a flag"])
def test_nbgrader_finds_the_course(course: Course, way: str, tmp_path: Path) -> None:
    settings, cwd, flags = "nowhere", tmp_path, []
    if way == "linked":
        link = "import pathlib, autograder.link as l; l.link(pathlib.Path('prefix'))"
        subprocess.run([sys.executable, "-c", link], cwd=course.root, check=True)
        settings = "prefix/etc/jupyter"
    elif way == "inside autograder/":
        cwd = course.root / "autograder"
    else:
        flags = [f"--NbGrader.config_file={course.root / 'autograder' / 'nbgrader_config.py'}"]
    to = tmp_path / "grades.csv"
    done = course.nbgrader("export", "--to", str(to), *flags, cwd=cwd, settings=settings)
    assert done.returncode == 0, done.stderr
    assert f"{LESSON},,,right," in to.read_text()


def test_the_lesson_and_the_grader_agree_on_the_measurements_file() -> None:
    assert MEASUREMENT_MIME == HARVESTED_MIME == MIME
    assert MEASUREMENTS_FILE == FILE_NAME


def notebook_with(*payloads: object) -> NotebookNode:
    nb = toy_lesson()
    cell(nb, "measure").outputs = [new_output("display_data", {MIME: p}) for p in payloads]
    return nb


def test_the_last_measurement_of_a_name_counts() -> None:
    first, other, last = (
        {"name": name, "measured": {"value": v}} for name, v in (("a", 1), ("b", 2), ("a", 3))
    )
    assert harvest(notebook_with(first, other, last)) == {"a": last, "b": other}


@pytest.mark.parametrize(
    "payload",
    [
        "text",
        {"measured": {"value": 1}},
        {"name": "a"},
        {"name": "a", "measured": 3},
        {"name": "a", "measured": {"value": float("nan")}},
        {"name": "a", "measured": {"value": "x" * MAX_BYTES_EACH}},
    ],
)
def test_only_small_plain_measurements_are_harvested(payload: object) -> None:
    good = {"name": "good", "measured": {"value": 1}}
    assert harvest(notebook_with(payload, good)) == {"good": good}


def test_a_test_cell_that_ran_is_left_as_it_is() -> None:
    test = questions(toy_lesson())[0].tests[0]
    for count, outputs in ((7, 0), (None, 1)):
        ran = deepcopy(test)
        ran.execution_count = count
        FailWhatDidNotRun().preprocess_cell(ran, {}, 0)
        assert len(ran.outputs) == outputs


def test_cut_outputs_stay_within_the_limit_and_valid() -> None:
    nb = toy_lesson()
    cell(nb, "measure").outputs = [
        new_output("stream", name="stdout", text="\u00e9" * 600),
        new_output("display_data", {"image/png": "x" * 2000, "text/plain": "a figure"}),
        new_output("error", ename="E", evalue="e" * 900, traceback=["t" * 900]),
    ]
    LimitBytes(max_bytes=1000).preprocess_cell(cell(nb, "measure"), {}, 0)
    nbformat.validate(nb)
    assert len(json.dumps(cell(nb, "measure").outputs)) < 6000
    assert "image/png" not in json.dumps(cell(nb, "measure").outputs)
