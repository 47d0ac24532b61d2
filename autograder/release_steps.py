"""The course's own steps in nbgrader's generate_assignment: checks, quiz feedback, placeholders.

Each is an nbconvert preprocessor; nbgrader_config.py puts them in order. What they leave of a cell
is what a student gets, so metadata is kept by a list of names, never by a list of what to drop.
"""

import json
from pathlib import Path

from decodelab.explain.quiz import seal
from nbconvert.exporters.exporter import ResourcesDict
from nbformat import NotebookNode
from nbgrader.preprocessors import ClearSolutions, NbGraderPreprocessor
from traitlets import Unicode

from autograder.cells import (
    PREDICTION_LINE,
    QUIZ_LINE,
    SOLUTION,
    choice,
    is_answer,
    is_measured,
    is_quiz,
    questions,
    tags,
    without_region,
)
from autograder.conventions import check_source
from autograder.project import QUIZZES, ROOT, read_project

CELL_METADATA = ("nbgrader", "tags", "deletable", "editable", "cellView", "jupyter")
LANGUAGE = {"name": "python"}
KERNEL = {"display_name": "Python 3", "language": "python", "name": "python3"}
Notebook = tuple[NotebookNode, ResourcesDict]


class CheckSource(NbGraderPreprocessor):
    """Refuse a source whose answers the later steps would not find."""

    def preprocess(self, nb: NotebookNode, resources: ResourcesDict) -> Notebook:
        check_source(nb, resources["nbgrader"]["assignment"])
        return nb, resources


class StoreQuizFeedback(NbGraderPreprocessor):
    """Write the enciphered feedback that the released quiz cells look up."""

    folder = Unicode(str(ROOT / QUIZZES), help="where LESSON.json is written").tag(config=True)

    def preprocess(self, nb: NotebookNode, resources: ResourcesDict) -> Notebook:
        feedback, right = {}, {}
        for question in questions(nb):
            if is_quiz(question) and not is_measured(question):
                picked = choice(question.answer)
                feedback[picked.name] = dict(question.answer.metadata["decodelab"]["feedback"])
                right[picked.name] = picked.value
        if feedback:
            lesson = resources["nbgrader"]["assignment"]
            text = json.dumps(seal(lesson, feedback, right), indent=1) + "\n"
            Path(self.folder).mkdir(parents=True, exist_ok=True)
            (Path(self.folder) / f"{lesson}.json").write_text(text, encoding="utf-8")
        return nb, resources


class DropInstructorCells(NbGraderPreprocessor):
    """Leave out the cells that only instructors read."""

    def preprocess(self, nb: NotebookNode, resources: ResourcesDict) -> Notebook:
        nb.cells = [cell for cell in nb.cells if "instructor" not in tags(cell)]
        return nb, resources


class FillPlaceholders(NbGraderPreprocessor):
    """Write the course's address and version where the source has {{...}}."""

    def preprocess(self, nb: NotebookNode, resources: ResourcesDict) -> Notebook:
        project = read_project()
        for cell in nb.cells:
            cell.source = project.fill(cell.source, resources["nbgrader"]["assignment"])
        return nb, resources


class ClearAnswers(ClearSolutions):
    """Clear solutions as nbgrader does; reset quiz choices to "?" and predictions to `...`."""

    def preprocess_cell(self, cell: NotebookNode, resources: ResourcesDict, index: int) -> Notebook:
        if cell.cell_type == "code" and "predict" in tags(cell):
            cell.source = PREDICTION_LINE.sub(r"\g<name>...\g<rest>", cell.source)
        if is_answer(cell) and "quiz" in tags(cell):
            cell.source = QUIZ_LINE.sub(r'\g<name> = "?"\g<rest>', cell.source)
            # Where the right letter depends on a measurement, the reference computes it below.
            cell.source = without_region(cell.source, SOLUTION).rstrip()
            return cell, resources
        return super().preprocess_cell(cell, resources, index)


class KeepStudentMetadata(NbGraderPreprocessor):
    """Keep of the metadata what a student's notebook needs, and add what Colab reads."""

    def preprocess(self, nb: NotebookNode, resources: ResourcesDict) -> Notebook:
        exercises = (question for question in questions(nb) if not is_quiz(question))
        go_on = {test["id"] for question in exercises for test in question.tests}
        for cell in nb.cells:
            kept = {k: v for k, v in sorted(cell.metadata.items()) if k in CELL_METADATA}
            names = list(dict.fromkeys(kept.pop("tags", ())))
            if cell["id"] in go_on or "try" in names:
                # With this tag JupyterLab's Run All goes on past an exercise not yet solved.
                names.append("raises-exception")
            cell.metadata = NotebookNode({**kept, "tags": names} if names else kept)
        nb.metadata = NotebookNode(
            {
                "accelerator": "GPU",
                "colab": {
                    "gpuType": "T4",
                    "name": f"{resources['nbgrader']['notebook']}.ipynb",
                    "provenance": [],
                    "toc_visible": True,
                },
                "kernelspec": KERNEL,
                "language_info": LANGUAGE,
            }
        )
        return nb, resources


class TrimTests(NbGraderPreprocessor):
    """Remove the blank lines that hidden tests leave behind."""

    def preprocess_cell(self, cell: NotebookNode, resources: ResourcesDict, index: int) -> Notebook:
        cell.source = cell.source.rstrip()
        return cell, resources
