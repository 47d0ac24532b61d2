"""A lesson of a few cells that has one of everything the release and the grading must handle."""

from copy import deepcopy

from nbformat import NotebookNode
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

MIME = "application/vnd.decodelab.measurement+json"
LESSON = "toy_lesson"
FEEDBACK = {
    "A": "That counts the weights once for every request, as if nothing were shared.",
    "B": "All requests of a step share one reading of the weights.",
    "C": "The cache grows with the requests, and here only weights are asked for.",
}
MODEL_ANSWER = "Because the pool of slots is finite, and each sequence holds some of it."
INSTRUCTOR_NOTE = "Most students forget the pool; ask them what a sequence holds."
SOLUTION_LINE = "bytes_once = layers * width * width * 2"

SETUP = """#@title Set-up
import sys

if "google.colab" in sys.modules:
    %pip install -q "decodelab @ git+{{REPOSITORY}}@v{{VERSION}}"
"""
MEASURE = f"""import json, os, pathlib
from IPython.display import display

stored = pathlib.Path("measurements.json")
replayed = os.environ.get("NBGRADER_EXECUTION") == "autograde" and stored.exists()
payloads = json.loads(stored.read_text()) if replayed else {{}}
measured = payloads["step"]["measured"]["value"] if payloads else 5.0
display({{"{MIME}": {{"name": "step", "measured": {{"value": measured}}}}}}, raw=True)
"""
EXERCISE = f'''def weight_bytes(layers, width):
    """Return the bytes of `layers` square fp16 matrices."""
    ### BEGIN SOLUTION
    {SOLUTION_LINE}
    return bytes_once
    ### END SOLUTION
'''
EXERCISE_TEST = """assert weight_bytes(1, 2) == 8, "two bytes for each of the four weights"
### BEGIN HIDDEN TESTS
expected_of_thirty = 30 * 576 * 576 * 2
assert weight_bytes(30, 576) == expected_of_thirty
### END HIDDEN TESTS"""
QUIZ = """q1 = "B"  #@param ["?", "A", "B", "C"]
quiz = None
"""
QUIZ_TEST = """assert q1 in {"?", "A", "B", "C"}, "q1 takes one letter"
### BEGIN HIDDEN TESTS
assert q1 == "B"
### END HIDDEN TESTS"""
CAUSE = 'cause = "A"  #@param ["?", "A", "B"]'
CAUSE_TEST = """assert cause in {"?", "A", "B"}, "cause takes one letter"
### BEGIN HIDDEN TESTS
assert cause == ("A" if measured > 3 else "B")
### END HIDDEN TESTS"""


def _meta(grade_id: str, *, grade: bool, solution: bool, locked: bool, points: int = 0) -> dict:
    meta = {"grade_id": grade_id, "grade": grade, "solution": solution, "locked": locked}
    meta |= {"schema_version": 3, "task": False}
    return {"nbgrader": meta | ({"points": points} if grade else {})}


def _answer(grade_id: str, source: str, **metadata) -> NotebookNode:
    meta = _meta(grade_id, grade=False, solution=True, locked=False)
    return new_code_cell(source, id=grade_id, metadata=meta | metadata)


def _test(grade_id: str, source: str, points: int) -> NotebookNode:
    meta = _meta(grade_id, grade=True, solution=False, locked=True, points=points)
    return new_code_cell(source, id=grade_id, metadata=meta)


def toy_lesson() -> NotebookNode:
    """Return the source, as an instructor writes it; 2 + 1 + 1 points by tests, 3 by hand."""
    locked = _meta("question", grade=False, solution=False, locked=True)
    written = _meta("why", grade=True, solution=True, locked=False, points=3)
    badge = "# A toy\n\n[![Open in Colab](badge.svg)]({{COLAB_URL}})"
    payload = {"name": "step", "measured": {"value": 5.0}}
    cells = [
        new_markdown_cell(badge, id="title"),
        new_code_cell(SETUP, id="setup", metadata={"tags": ["colab-setup"], "cellView": "form"}),
        new_markdown_cell(INSTRUCTOR_NOTE, id="note", metadata={"tags": ["instructor"]}),
        new_code_cell(
            "my_ms = 123.456  # your prediction, ms", id="my_ms", metadata={"tags": ["predict"]}
        ),
        new_code_cell(
            MEASURE,
            id="measure",
            execution_count=4,
            outputs=[new_output("display_data", {MIME: payload})],
        ),
        _answer("weight_bytes", EXERCISE),
        new_code_cell("weight_bytes(2, 4)", id="try_it", metadata={"tags": ["try"]}),
        _test("weight_bytes_counts_two_bytes_each", EXERCISE_TEST, 2),
        _answer("q1", QUIZ, tags=["quiz"], decodelab={"feedback": dict(FEEDBACK)}),
        _test("q1_is_answered", QUIZ_TEST, 1),
        _answer("cause", CAUSE, tags=["quiz"]),
        _test("cause_is_your_own", CAUSE_TEST, 1),
        new_markdown_cell("Why can't the batch grow for ever?", id="question", metadata=locked),
        new_markdown_cell(MODEL_ANSWER, id="why", metadata=written),
    ]
    nb = new_notebook(cells=cells, metadata={"kernelspec": kernelspec()})
    nb.nbformat_minor = 5
    return nb


def kernelspec() -> dict:
    return {"name": "python3", "display_name": "Python 3", "language": "python"}


def cell(nb: NotebookNode, cell_id: str) -> NotebookNode:
    """Return the cell with that id."""
    return next(c for c in nb.cells if c["id"] == cell_id)


def with_source(nb: NotebookNode, **sources: str) -> NotebookNode:
    """Return a copy in which the named cells have other sources."""
    copy = deepcopy(nb)
    for cell_id, source in sources.items():
        cell(copy, cell_id).source = source
    return copy


def without(nb: NotebookNode, cell_id: str) -> NotebookNode:
    """Return a copy that lacks one cell."""
    copy = deepcopy(nb)
    copy.cells = [c for c in copy.cells if c["id"] != cell_id]
    return copy
