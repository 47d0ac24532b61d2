"""Words for what a lesson's cells are: exercise, test, quiz, prediction, and the regions in them.

Used by the release, by its checks and by the mutants, so that all three agree. Changes no cell.
"""

import json
import re
from dataclasses import dataclass

from nbformat import NotebookNode

SOLUTION = ("BEGIN SOLUTION", "END SOLUTION")
HIDDEN = ("BEGIN HIDDEN TESTS", "END HIDDEN TESTS")
QUIZ_LINE = re.compile(
    r"""^(?P<name>\w+)\s*=\s*(?P<quote>["'])(?P<value>[^"']*)(?P=quote)"""
    r"""(?P<rest>\s*\#\s*@param\s*(?P<options>\[.*\])\s*)$""",
    re.MULTILINE,
)
PREDICTION_LINE = re.compile(
    r"^(?P<name>\s*\w+\s*=\s*)(?P<value>.*?)(?P<rest>\s*#\s*your prediction\b.*)$", re.MULTILINE
)


@dataclass(frozen=True, kw_only=True)
class Question:
    """An answer cell (exercise or quiz) with the grade cells that test it."""

    answer: NotebookNode
    tests: tuple[NotebookNode, ...]

    @property
    def grade_id(self) -> str:
        return nbgrader(self.answer)["grade_id"]

    @property
    def points(self) -> float:
        return sum(nbgrader(test).get("points", 0) for test in self.tests)


@dataclass(frozen=True, kw_only=True)
class Choice:
    """A quiz cell's line: variable, chosen letter, and the letters offered ("?" left out)."""

    name: str
    value: str
    options: tuple[str, ...]


def tags(cell: NotebookNode) -> set[str]:
    """Return a cell's tags."""
    return set(cell.metadata.get("tags", ()))


def nbgrader(cell: NotebookNode) -> dict:
    """Return a cell's nbgrader metadata, empty for cells that nbgrader doesn't know."""
    return cell.metadata.get("nbgrader", {})


def is_answer(cell: NotebookNode) -> bool:
    """True for code that the student writes and other cells test."""
    meta = nbgrader(cell)
    return cell.cell_type == "code" and meta.get("solution", False) and not meta.get("grade", False)


def is_test(cell: NotebookNode) -> bool:
    """True for a locked cell whose outcome gives points."""
    meta = nbgrader(cell)
    return cell.cell_type == "code" and meta.get("grade", False) and not meta.get("solution", False)


def is_written(cell: NotebookNode) -> bool:
    """True for an answer that a person grades."""
    return bool(nbgrader(cell).get("grade") and nbgrader(cell).get("solution"))


def questions(nb: NotebookNode) -> list[Question]:
    """Return the answer cells in order, each with the tests between it and the next answer."""
    found: list[tuple[NotebookNode, list[NotebookNode]]] = []
    for cell in nb.cells:
        if is_answer(cell) or is_written(cell):
            found.append((cell, []))
        elif is_test(cell) and found:
            found[-1][1].append(cell)
    return [Question(answer=a, tests=tuple(t)) for a, t in found if is_answer(a)]


def is_quiz(question: Question) -> bool:
    """True for a choice of one letter."""
    return "quiz" in tags(question.answer)


def is_measured(question: Question) -> bool:
    """True for a choice whose right letter depends on the student's own measurement.

    Such a cell has no feedback and calls no check: nobody knows the letter beforehand.
    """
    has_feedback = "feedback" in question.answer.metadata.get("decodelab", {})
    return is_quiz(question) and not has_feedback and ".check(" not in question.answer.source


def choice(cell: NotebookNode) -> Choice | None:
    """Return a quiz cell's choice, or None when it has no line `q1 = "B"  #@param [...]`."""
    match = QUIZ_LINE.search(cell.source)
    if match is None:
        return None
    try:
        offered = json.loads(match["options"])
    except json.JSONDecodeError:
        return None
    options = tuple(option for option in offered if option != "?")
    return Choice(name=match["name"], value=match["value"], options=options)


def region(source: str, marks: tuple[str, str]) -> list[str]:
    """Return the lines strictly between the marks (all regions of the cell together)."""
    inside, lines = False, []
    for line in source.split("\n"):
        if marks[0] in line:
            inside = True
        elif marks[1] in line:
            inside = False
        elif inside:
            lines.append(line)
    return lines


def without_region(source: str, marks: tuple[str, str]) -> str:
    """Return the source without the marked regions and without the marks."""
    inside, lines = False, []
    for line in source.split("\n"):
        if marks[0] in line:
            inside = True
        elif marks[1] in line:
            inside = False
        elif not inside:
            lines.append(line)
    return "\n".join(lines)
