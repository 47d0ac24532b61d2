"""A student who answers a real lesson right: runs it, and chooses by what was measured."""

import json
from copy import deepcopy
from pathlib import Path

from nbclient import NotebookClient
from nbformat import NotebookNode
from nbformat.v4 import new_code_cell

from autograder.cells import choice, is_answer, is_measured, is_written, questions

# Which letters of the measured choices pass, in the kernel that has just measured.
PROBE = """
import json
passing = {{name: [] for name in {tests!r}}}
for name, (options, source) in {tests!r}.items():
    for letter in options:
        try:
            exec(source, {{**globals(), name: letter}})
        except Exception:
            continue
        passing[name].append(letter)
print(json.dumps(passing))
"""


def run(source: NotebookNode, folder: Path) -> tuple[NotebookNode, dict[str, list[str]]]:
    """Run a lesson's source; returns it with outputs, and the letters right for this run."""
    measured = [q for q in questions(source) if is_measured(q)]
    tests = {
        q.grade_id: (choice(q.answer).options, "\n".join(t.source for t in q.tests))
        for q in measured
    }
    nb = deepcopy(source)
    for question in (q for q in questions(nb) if is_measured(q)):
        for test in question.tests:
            test.source = ""  # the letter in the source is right on some machines only
    nb.cells.append(new_code_cell(PROBE.format(tests=tests), id="probe"))
    NotebookClient(
        nb, timeout=300, kernel_name="python3", resources={"metadata": {"path": str(folder)}}
    ).execute()
    probe = nb.cells.pop()
    return nb, json.loads(probe.outputs[-1].text)


def submission(
    released: NotebookNode, executed: NotebookNode, letters: dict[str, list[str]]
) -> NotebookNode:
    """Return the released notebook with the reference's answers and that run's outputs."""
    done = {cell["id"]: cell for cell in executed.cells}
    nb = deepcopy(released)
    for cell in nb.cells:
        if is_answer(cell) or is_written(cell) or "predict" in cell.metadata.get("tags", ()):
            cell.source = done[cell["id"]].source
        if cell.cell_type == "code":
            cell.outputs = done[cell["id"]].outputs
    for question in questions(nb):
        if question.grade_id in letters:
            picked = letters[question.grade_id][0]
            question.answer.source = f"{question.grade_id} = {picked!r}"
    return nb
