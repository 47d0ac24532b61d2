"""Make lessons/ and the quiz feedback from solutions/: `python -m autograder.release [--check]`.

Everything is made in a temporary folder first, so that a source with a fault changes nothing. The
same source gives the same bytes. The gradebook is left alone: `nbgrader generate_assignment` does
the same release and writes it there too.
"""

import argparse
import logging
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import nbformat
from nbgrader.converters import GenerateAssignment, NbGraderException
from nbgrader.coursedir import CourseDirectory
from traitlets.config import Config
from traitlets.config.loader import PyFileConfigLoader
from traitlets.log import get_logger

from autograder.conventions import ConventionError, check_source
from autograder.project import QUIZZES, ROOT, Project, read_project

LESSONS_FOLDER = Path("lessons")
IGNORED = {".ipynb_checkpoints", ".gitkeep", ".DS_Store"}


@dataclass(frozen=True, kw_only=True)
class Lesson:
    """One line of the start page."""

    name: str
    title: str
    claim: str


LESSONS = (
    Lesson(
        name="lesson1_why_batching",
        title="Why batching is everything",
        claim="One decode step reads every weight once, whether it serves one request or thirty.",
    ),
    Lesson(
        name="lesson2_memory_ceiling",
        title="The memory ceiling",
        claim="The KV cache, not arithmetic, decides how many requests decode together.",
    ),
    Lesson(
        name="lesson3_continuous_batching",
        title="Continuous batching",
        claim="Refilling a seat at the step it falls free is worth more than a faster kernel.",
    ),
    Lesson(
        name="lesson4_serving_economics",
        title="Serving engines and the economics of tokens",
        claim="The price of a million tokens follows from your own batch curve and its load.",
    ),
)
BADGE = "[![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)]({})"


class ReleaseError(ValueError):
    """A lesson that can't be released; the message says why."""


def written(root: Path = ROOT) -> list[str]:
    """Return the names of the lessons that have a source."""
    return sorted(path.parent.name for path in (root / "solutions").glob("*/*.ipynb"))


def generate(lessons: Sequence[str], out: Path, root: Path = ROOT) -> None:
    """Write lessons/ and the quiz feedback of `lessons` below `out`, as below the root.

    Raises ReleaseError for a name without source, or for a source with faults.
    """
    for lesson in lessons:
        source = root / "solutions" / lesson / f"{lesson}.ipynb"
        if not source.exists():
            raise ReleaseError(f"{lesson} has no source: {source.relative_to(root)} is missing")
        try:
            check_source(nbformat.read(source, as_version=4), lesson)
        except ConventionError as error:
            raise ReleaseError(str(error)) from error
        _generate_assignment(lesson, out, root)
    page = out / LESSONS_FOLDER / "README.md"
    page.parent.mkdir(parents=True, exist_ok=True)
    page.write_text(start_page(read_project(), written(root)), encoding="utf-8")


def _generate_assignment(lesson: str, out: Path, root: Path) -> None:
    config = PyFileConfigLoader(str(ROOT / "autograder" / "nbgrader_config.py")).load_config()
    config.merge(
        Config(
            CourseDirectory={
                "root": str(root),
                "assignment_id": lesson,
                "release_directory": str(out.resolve() / LESSONS_FOLDER),
            },
            BaseConverter={"force": True},
            GenerateAssignment={"no_database": True},
            SaveCells={"enabled": False},
            StoreQuizFeedback={"folder": str(out / QUIZZES)},
        )
    )
    get_logger().setLevel(logging.ERROR)
    try:
        GenerateAssignment(coursedir=CourseDirectory(config=config), config=config).start()
    except NbGraderException as error:
        raise ReleaseError(f"{lesson}: nbgrader could not release it: {error}") from error


def start_page(project: Project, sources: Sequence[str]) -> str:
    """Return the page that JupyterLab opens on: the lessons, and how to start one."""
    rows = []
    for number, lesson in enumerate(LESSONS, 1):
        if lesson.name in sources:
            link = f"[{lesson.title}]({lesson.name}/{lesson.name}.ipynb)"
            badge = BADGE.format(project.colab_url(lesson.name))
        else:
            link, badge = lesson.title, "not written yet"
        rows.append(f"| {number} | {link} | {lesson.claim} | {badge} |")
    return "\n".join(
        [
            "# Continuous batching and serving engines",
            "",
            "Predict, measure, explain: in each lesson you commit a number, measure it on your "
            "own machine, and say where the difference comes from.",
            "",
            "Click a lesson to open it: one to three hours each, in this order, without a GPU.",
            "",
            "| | Lesson | What you will be able to show | Without installing |",
            "|---|---|---|---|",
            *rows,
            "",
            "Run the cells from top to bottom with Shift+Enter. Where a cell says `...`, write "
            "your prediction; where it says `raise NotImplementedError`, write your answer; where "
            'a quiz says `"?"`, write a letter.',
            "",
        ]
    )


def differences(out: Path, lessons: Sequence[str], root: Path = ROOT) -> list[str]:
    """Return a sentence for each file below `root` that isn't what `out` holds."""
    found = []
    for path in _files(out):
        there = root / path
        if not there.exists():
            found.append(f"{path.as_posix()} is missing")
        elif there.read_bytes() != (out / path).read_bytes():
            found.append(f"{path.as_posix()} differs from what its source gives")
    for lesson in lessons:
        for path in _files(root, LESSONS_FOLDER / lesson):
            if not (out / path).exists():
                found.append(f"{path.as_posix()} comes from no source; delete it")
    return found


def _files(base: Path, below: Path = Path()) -> Iterator[Path]:
    for path in sorted((base / below).rglob("*")):
        relative = path.relative_to(base)
        if path.is_file() and not IGNORED & set(relative.parts):
            yield relative


def release(lessons: Sequence[str] = (), check: bool = False, root: Path = ROOT) -> list[str]:
    """Make the lessons (all that have a source, by default) and write what changed below `root`.

    Returns a sentence for each file that differed. With `check`, writes nothing.
    """
    names = list(lessons) or written(root)
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder)
        generate(names, out, root)
        found = differences(out, names, root)
        for path in _files(out) if not check else ():
            target = root / path
            if not target.exists() or target.read_bytes() != (out / path).read_bytes():
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(out / path, target)
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit status, 1 when --check found a difference."""
    parser = argparse.ArgumentParser(prog="python -m autograder.release", description=__doc__)
    parser.add_argument("lesson", nargs="*", help="lessons to release (default: all)")
    parser.add_argument("--check", action="store_true", help="write nothing; fail on a difference")
    arguments = parser.parse_args(argv)
    try:
        found = release(arguments.lesson, check=arguments.check)
    except ReleaseError as error:
        print(error, file=sys.stderr)
        return 1
    for sentence in found:
        print(sentence)
    if not arguments.check:
        print("written" if found else "nothing to write")
    elif found:
        print("Run `make release`, and commit what it writes.")
    return int(arguments.check and bool(found))


if __name__ == "__main__":
    sys.exit(main())
