"""Every real lesson through the real nbgrader: blank scores 0, reference scores full."""

import os
from dataclasses import dataclass

import pytest
from nb.course import Course
from nb.reference import run, submission

from autograder.cells import choice, is_measured, is_written, nbgrader, questions
from autograder.mutants import read_lesson
from autograder.release import written

pytestmark = pytest.mark.slow


@dataclass(frozen=True)
class Graded:
    course: Course
    letters: dict[str, list[str]]


@pytest.fixture(scope="module", params=written())
def graded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Graded:
    # A small shape: what is tested here is the way of the answers, not the speed of the machine.
    os.environ.setdefault("DECODELAB_SHAPE", "25M")
    lesson, source = request.param, read_lesson(request.param)[0]
    course = Course.make(tmp_path_factory.mktemp("course"), lesson, source)
    assert course.nbgrader("generate_assignment", lesson).returncode == 0
    executed, letters = run(source, tmp_path_factory.mktemp("student"))
    course.submit("blank", course.released())
    course.submit("reference", submission(course.released(), executed, letters))
    done = course.nbgrader("autograde", lesson)
    assert done.returncode == 0, done.stderr[-3000:]
    return Graded(course, letters)


def maxima(graded: Graded) -> dict[str, float | None]:
    """Return the most points of each graded cell; None for what a person grades."""
    source = read_lesson(graded.course.lesson)[0]
    points = {
        nbgrader(t)["grade_id"]: nbgrader(t)["points"] for q in questions(source) for t in q.tests
    }
    return points | {nbgrader(c)["grade_id"]: None for c in source.cells if is_written(c)}


def test_the_blank_lesson_scores_0(graded: Graded) -> None:
    assert graded.course.scores("blank") == dict.fromkeys(maxima(graded), 0)


def test_the_reference_scores_full(graded: Graded) -> None:
    assert graded.course.scores("reference") == maxima(graded)


def test_a_choice_by_measurement_has_right_and_wrong_letters(graded: Graded) -> None:
    source = read_lesson(graded.course.lesson)[0]
    for question in filter(is_measured, questions(source)):
        right = graded.letters[question.grade_id]
        assert right, f"no letter of {question.grade_id} is right for this run"
        assert set(right) < set(choice(question.answer).options)
