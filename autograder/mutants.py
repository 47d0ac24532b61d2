"""Prove a lesson's tests: the reference passes; the blank and every kept wrong answer fail.

Wrong answers lie in tests/mutants/LESSON.toml, a table per exercise: its grade_id, and `wrong`, a
list of sources for its cell. Each runs in this process with only the cells it needs, found by the
names that cells bind and use; so it is quick, and no substitute for one real nbgrader run.
`python -m autograder.mutants [LESSON ...]` prints who scores what.
"""

import contextlib
import io
import re
import symtable
import sys
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import nbformat
from IPython.core.inputtransformer2 import TransformerManager
from nbformat import NotebookNode

from autograder.cells import (
    SOLUTION,
    Question,
    choice,
    is_measured,
    is_quiz,
    nbgrader,
    questions,
)
from autograder.project import ROOT

FEWEST = 3
STUB = 'raise NotImplementedError("write your answer here")'


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One answer to one question, with the points that its tests gave."""

    question: str
    answer: str
    score: float
    points: float


def run(nb: NotebookNode, wrong: dict[str, list[str]]) -> list[Trial]:
    """Try every question of a lesson's source with its reference, its blank and wrong answers.

    Choices that depend on a measurement are left out: they need a run of the whole lesson.
    """
    trials = []
    for question in questions(nb):
        if is_measured(question):
            continue
        for label, source in _answers(question, wrong.get(question.grade_id, [])):
            score = sum(
                nbgrader(test)["points"]
                for test in question.tests
                if _passes(nb, question.answer, source, test)
            )
            trials.append(
                Trial(question=question.grade_id, answer=label, score=score, points=question.points)
            )
    return trials


def faults(nb: NotebookNode, wrong: dict[str, list[str]]) -> Iterator[str]:
    """Yield a sentence for each test that lets a wrong answer pass or fails a right one."""
    trials = run(nb, wrong)
    exercises = {q.grade_id for q in questions(nb) if not is_quiz(q)}
    for unknown in sorted(set(wrong) - exercises):
        yield f"there are wrong answers for {unknown!r}, which is no exercise"
    for trial in trials:
        name = f"{trial.question}: the answer {trial.answer!r}"
        if trial.answer == "reference":
            if trial.score != trial.points:
                yield f"{name} gets {trial.score} of {trial.points} points"
        elif trial.answer == "blank" and trial.score:
            yield f"{name} gets {trial.score} points"
        elif trial.score >= trial.points:
            yield f"{name} is wrong and gets all {trial.points} points"
    for name in sorted(exercises):
        zeros = [t for t in trials if t.question == name and not t.score and "wrong" in t.answer]
        if len(zeros) < FEWEST:
            yield f"{name}: {len(zeros)} wrong answers score 0; keep at least {FEWEST}"


def read_lesson(lesson: str, root: Path = ROOT) -> tuple[NotebookNode, dict[str, list[str]]]:
    """Return a lesson's source and its wrong answers (none where no file keeps any)."""
    nb = nbformat.read(root / "solutions" / lesson / f"{lesson}.ipynb", as_version=4)
    path = root / "tests" / "mutants" / f"{lesson}.toml"
    tables = tomllib.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    return nb, {name: table["wrong"] for name, table in tables.items()}


def _answers(question: Question, wrong: Sequence[str]) -> Iterator[tuple[str, str]]:
    source = question.answer.source
    if is_quiz(question):
        picked = choice(question.answer)
        for letter in (picked.value, "?", *(o for o in picked.options if o != picked.value)):
            labels = {picked.value: "reference", "?": "blank"}
            yield labels.get(letter, f"wrong {letter}"), f"{picked.name} = {letter!r}"
        return
    yield "reference", source
    begin, end = SOLUTION
    yield "blank", re.sub(rf"\#+ {begin}.*?\#+ {end}", STUB, source, flags=re.DOTALL)
    for number, answer in enumerate(wrong, 1):
        yield f"wrong {number}", answer


def _passes(nb: NotebookNode, answer: NotebookNode, source: str, test: NotebookNode) -> bool:
    """Run the test on `source` in place of the answer, after the cells that the two need."""
    namespace: dict = {"__name__": "__main__"}
    with contextlib.redirect_stdout(io.StringIO()):
        for cell in needed(nb, answer, source, test):
            code = _python(source if cell is answer else cell.source)
            try:
                exec(compile(code, f"<{cell['id']}>", "exec"), namespace)
            except Exception as error:
                if cell is answer or cell is test:
                    return False
                raise RuntimeError(f"cell {cell['id']!r} fails outside its lesson") from error
    return True


def needed(
    nb: NotebookNode, answer: NotebookNode, source: str, test: NotebookNode
) -> list[NotebookNode]:
    """Return, in order, `answer`, `test` and the code cells that bind a name which they use.

    `source` stands for the answer's own. A name counts where it is bound last before its use. A
    cell that only changes an object is not seen; nor is one that rebinds a name from itself.
    """
    found, wanted, started = [], set(), False
    for cell in reversed(nb.cells):
        started = started or cell is test
        if not started or cell.cell_type != "code":
            continue
        binds, uses = _names(source if cell is answer else cell.source)
        if cell is test or cell is answer or binds & wanted:
            found.append(cell)
            wanted = (wanted - binds) | (uses - binds)
    return found[::-1]


def _names(source: str) -> tuple[set[str], set[str]]:
    """Return the global names that a cell binds and those that it uses, in functions too."""
    table = symtable.symtable(_python(source), "<cell>", "exec")
    symbols = table.get_symbols()
    binds = {s.get_name() for s in symbols if s.is_assigned() or s.is_imported()}
    uses = {s.get_name() for s in symbols if s.is_referenced()}
    inner = list(table.get_children())
    while inner:
        scope = inner.pop()
        uses |= {s.get_name() for s in scope.get_symbols() if s.is_global()}
        inner += scope.get_children()
    return binds, uses


def _python(source: str) -> str:
    """Return a cell's source with magics made plain calls."""
    return TransformerManager().transform_cell(source)


def main(lessons: Sequence[str]) -> int:
    """Print a line per answer and the faults; returns 1 when there is any."""
    names = lessons or sorted(p.parent.name for p in (ROOT / "solutions").glob("*/*.ipynb"))
    found: list[str] = []
    for lesson in names:
        nb, wrong = read_lesson(lesson)
        for trial in run(nb, wrong):
            print(f"{trial.score:4g} / {trial.points:g}  {trial.question}: {trial.answer}")
        found += [f"{lesson}: {fault}" for fault in faults(nb, wrong)]
    print("\n".join(found) or "every test tells right from wrong")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
