"""A clone of the instructor's side in a temporary folder, with the real nbgrader run on it."""

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import nbformat
from nbformat import NotebookNode
from nbgrader.api import Gradebook, MissingEntry

REPOSITORY = Path(__file__).resolve().parents[2]


@dataclass(frozen=True, kw_only=True)
class Course:
    """A course with one lesson, below `root`."""

    root: Path
    lesson: str

    @classmethod
    def make(cls, root: Path, lesson: str, source: NotebookNode) -> "Course":
        """Copy what a grading run needs, and write the lesson's source."""
        ignore = shutil.ignore_patterns("__pycache__")
        shutil.copytree(REPOSITORY / "autograder", root / "autograder", ignore=ignore)
        shutil.copy(REPOSITORY / "pyproject.toml", root)
        course = cls(root=root, lesson=lesson)
        course._write(root / "solutions" / lesson, source)
        return course

    def nbgrader(
        self, command: str, *arguments: str, cwd: Path | None = None, settings: str = "autograder"
    ) -> subprocess.CompletedProcess:
        """Run `nbgrader COMMAND` in `cwd` (the root), with its settings searched in one folder."""
        environment = os.environ | {"JUPYTER_CONFIG_PATH": str(self.root / settings)}
        return subprocess.run(
            [sys.executable, "-m", "nbgrader", command, *arguments],
            cwd=cwd or self.root,
            env=environment,
            capture_output=True,
            text=True,
        )

    def released(self) -> NotebookNode:
        """Return the notebook that students get."""
        path = self.root / "lessons" / self.lesson / f"{self.lesson}.ipynb"
        return nbformat.read(path, as_version=4)

    def submit(self, student: str, nb: NotebookNode) -> None:
        """Put a notebook where nbgrader collects it."""
        self._write(self.root / "course" / "submitted" / student / self.lesson, nb)

    def scores(self, student: str) -> dict[str, float | None]:
        """Return the points by grade_id; None where a person has to grade."""
        url = f"sqlite:///{self.root / 'course' / 'gradebook.db'}"
        with Gradebook(url) as gradebook:
            try:
                submission = gradebook.find_submission(self.lesson, student)
            except MissingEntry:
                return {}
            return {g.name: g.auto_score for n in submission.notebooks for g in n.grades}

    def path(self, step: str, student: str) -> Path:
        """Return a student's folder of one step: autograded, feedback."""
        return self.root / "course" / step / student / self.lesson

    def _write(self, folder: Path, nb: NotebookNode) -> None:
        folder.mkdir(parents=True)
        nbformat.write(nb, folder / f"{self.lesson}.ipynb")
