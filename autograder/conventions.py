"""Check that a lesson's source is written so that the release can take every answer out of it.

Each check yields sentences that name the cell and what to do; no check changes anything. The quiz
tests are run with every letter: they are the instructor's own code.
"""

import ast
import re
from collections import Counter
from collections.abc import Callable, Iterator

from nbformat import NotebookNode

from autograder.cells import (
    HIDDEN,
    PREDICTION_LINE,
    SOLUTION,
    Question,
    choice,
    is_answer,
    is_measured,
    is_quiz,
    is_test,
    is_written,
    nbgrader,
    questions,
    region,
    tags,
    without_region,
)

FORBIDDEN_TAGS = {"skip-execution", "raises-exception", "instructor"}
PLACEHOLDERS = {"{{REPOSITORY}}", "{{VERSION}}", "{{COLAB_URL}}"}


class ConventionError(ValueError):
    """A lesson's source that must not be released; the message has one sentence a line."""


def check_source(nb: NotebookNode, lesson: str) -> None:
    """Raise ConventionError with every fault of the source, or return."""
    checks: tuple[Callable[[NotebookNode], Iterator[str]], ...] = (
        _ids,
        _graded_cells,
        _misplaced_answers,
        _colab_setup,
        _predictions,
        _placeholders,
    )
    faults = [fault for check in checks for fault in check(nb)]
    for question in questions(nb):
        faults += _quiz(question) if is_quiz(question) else _exercise(question)
    if faults:
        raise ConventionError("\n".join(f"{lesson}: {fault}" for fault in faults))


def _ids(nb: NotebookNode) -> Iterator[str]:
    if (nb.nbformat, nb.nbformat_minor) < (4, 5):
        yield "the notebook is older than nbformat 4.5, so its cells have no ids; save it anew"
        return
    for kind, names in (
        ("id", [cell.get("id", "") for cell in nb.cells]),
        ("grade_id", [nbgrader(c)["grade_id"] for c in nb.cells if "grade_id" in nbgrader(c)]),
    ):
        for name, count in Counter(names).items():
            if count > 1:
                yield f"{count} cells have the {kind} {name!r}; give each its own"


def _graded_cells(nb: NotebookNode) -> Iterator[str]:
    for cell in nb.cells:
        meta = nbgrader(cell)
        if not meta:
            continue
        name = meta.get("grade_id", cell.get("id"))
        for tag in sorted(tags(cell) & FORBIDDEN_TAGS):
            yield f"the graded cell {name!r} has the tag {tag}; remove it"
        if is_test(cell) and not meta.get("locked"):
            yield f"the test cell {name!r} is not locked; set locked to true"
        if is_test(cell) and not meta.get("points", 0) > 0:
            yield f"the test cell {name!r} gives no points"
        if is_test(cell) and not any(line.strip() for line in region(cell.source, HIDDEN)):
            yield f"the test cell {name!r} has no ### {HIDDEN[0]} region"


def _misplaced_answers(nb: NotebookNode) -> Iterator[str]:
    for cell in nb.cells:
        name = cell.get("id")
        if SOLUTION[0] in cell.source and not (is_answer(cell) or is_written(cell)):
            yield f"cell {name!r} has a solution region but is no solution cell"
        if HIDDEN[0] in cell.source and not is_test(cell):
            yield f"cell {name!r} has hidden tests but is no test cell"
        if PREDICTION_LINE.search(cell.source) and "predict" not in tags(cell):
            yield f"cell {name!r} has a line '# your prediction' but not the tag predict"
        if "quiz" in tags(cell) and not is_answer(cell):
            yield f"cell {name!r} has the tag quiz but is no solution cell"
        if choice(cell) and "quiz" not in tags(cell):
            yield f"cell {name!r} has a #@param choice but not the tag quiz"
        if "feedback" in cell.metadata.get("decodelab", {}) and "quiz" not in tags(cell):
            yield f"cell {name!r} has quiz feedback but not the tag quiz"


def _colab_setup(nb: NotebookNode) -> Iterator[str]:
    code = [cell for cell in nb.cells if cell.cell_type == "code"]
    tagged = [cell for cell in code if "colab-setup" in tags(cell)]
    if len(tagged) != 1 or tagged[0] is not code[0]:
        yield "the first code cell, and no other, must have the tag colab-setup"
    elif not {"{{REPOSITORY}}", "{{VERSION}}"} <= _placeholders_in(tagged[0].source):
        yield "the colab-setup cell must install from {{REPOSITORY}} at v{{VERSION}}"


def _predictions(nb: NotebookNode) -> Iterator[str]:
    for cell in nb.cells:
        if "predict" in tags(cell) and not PREDICTION_LINE.search(cell.source):
            yield (
                f"cell {cell.get('id')!r} has the tag predict but no line "
                "`name = value  # your prediction`"
            )


def _placeholders(nb: NotebookNode) -> Iterator[str]:
    for cell in nb.cells:
        for name in sorted(_placeholders_in(cell.source) - PLACEHOLDERS):
            yield f"cell {cell.get('id')!r}: nothing fills {name}"


def _placeholders_in(source: str) -> set[str]:
    return set(re.findall(r"\{\{[A-Z_]+\}\}", source))


def _exercise(question: Question) -> Iterator[str]:
    name, source = question.grade_id, question.answer.source
    if not question.tests:
        yield f"no test cell follows the exercise {name!r}"
    if not any(line.strip() for line in region(source, SOLUTION)):
        yield f"the exercise {name!r} has no ### {SOLUTION[0]} region"
        return
    try:
        tree = ast.parse(source)
    except SyntaxError as error:
        yield f"the exercise {name!r} is not Python: {error}"
        return
    first = next(n for n, line in enumerate(source.split("\n"), 1) if SOLUTION[0] in line)
    owners = [
        node
        for node in tree.body
        if isinstance(node, ast.FunctionDef | ast.ClassDef)
        and node.lineno < first <= (node.end_lineno or 0)
    ]
    if not owners:
        yield f"the solution of {name!r} is not inside a function or class, so its stub can't raise"
    elif not ast.get_docstring(owners[0]):
        yield f"the exercise {name!r} has no docstring, which the student needs for the units"


def _quiz(question: Question) -> Iterator[str]:
    name, picked = question.grade_id, choice(question.answer)
    if picked is None:
        yield f'the quiz cell {name!r} has no line `{name} = "B"  #@param ["?", "A", "B"]`'
        return
    if picked.name != name:
        yield f"the quiz cell {name!r} sets {picked.name!r}; variable and grade_id must be one name"
    if picked.value not in picked.options:
        yield f"the quiz cell {name!r} answers {picked.value!r}, which it doesn't offer"
    if not question.tests:
        yield f"no test cell follows the quiz {name!r}"
    if is_measured(question):
        for test in question.tests:
            yield from _visible_test(name, (*picked.options, "?"), test)
        return
    feedback = question.answer.metadata.get("decodelab", {}).get("feedback", {})
    if set(feedback) != set(picked.options):
        yield (
            f"the quiz cell {name!r} needs metadata decodelab.feedback with a sentence for each of "
            f"{', '.join(picked.options)}; it has {', '.join(feedback) or 'none'}"
        )
    right = picked.value
    naming = rf"\b(?:answer|option|choice|letter)(?: is)?:? {right}\b|[\"'`(]{right}[\"'`)]"
    for option, text in feedback.items():
        if option != right and re.search(naming, text, re.IGNORECASE):
            yield f"the feedback of {name!r} for {option} names the right letter"
    for test in question.tests:
        letters = (*picked.options, "?")
        yield from _visible_test(name, letters, test)
        for letter in letters:
            passes = _outcome(test.source, name, letter) is None
            if passes != (letter == right):
                yield f"the test of {name!r} {'passes' if passes else 'fails'} on {letter!r}"


def _visible_test(name: str, letters: tuple[str, ...], test: NotebookNode) -> Iterator[str]:
    visible = without_region(test.source, HIDDEN)
    for letter in letters:
        if (error := _outcome(visible, name, letter)) is not None:
            yield f"the visible test of {name!r} raises on {letter!r} ({error}); Run All would stop"


def _outcome(source: str, name: str, letter: str) -> Exception | None:
    try:
        exec(compile(source, "<quiz test>", "exec"), {name: letter})
    except Exception as error:  # whatever an instructor's test raises is what we came to see
        return error
    return None
