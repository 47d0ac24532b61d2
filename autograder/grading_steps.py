"""The course's own steps in nbgrader's autograde and generate_feedback.

They close two ways to full marks without an answer, keep a warning from costing points, bound what
an output may weigh, and keep hidden tests out of the feedback. They are no sandbox: the tests still
run in the student's kernel, where student code can reach them.
"""

import json
import re

from nbconvert.exporters.exporter import ResourcesDict
from nbformat import NotebookNode
from nbformat.v4 import new_output
from nbgrader.preprocessors import NbGraderPreprocessor
from traitlets import Integer

from autograder.cells import HIDDEN, is_test, region, without_region

NOT_RUN = (
    "This test did not run, so it gives no points: an earlier cell stopped the kernel from running "
    "it, or the notebook asked for it to be skipped."
)
HIDDEN_FAILED = "A hidden test of this cell failed."
CUT = "... output cut: longer than {} bytes ..."
ANSI = re.compile(r"\x1b\[[0-9;]*m")
LINE_NUMBER = re.compile(r"^\s*(?:-+>)?\s*\d+(?: |$)")
Notebook = tuple[NotebookNode, ResourcesDict]


class DropWidgetState(NbGraderPreprocessor):
    """Remove the notebook's widget state: Colab saves one that stops generate_feedback."""

    def preprocess(self, nb: NotebookNode, resources: ResourcesDict) -> Notebook:
        nb.metadata.pop("widgets", None)
        return nb, resources


class FailWhatDidNotRun(NbGraderPreprocessor):
    """Give a test that was skipped or aborted an error: nbgrader takes silence for success."""

    def preprocess_cell(self, cell: NotebookNode, resources: ResourcesDict, index: int) -> Notebook:
        if is_test(cell) and cell.get("execution_count") is None:
            name = cell.metadata.nbgrader.grade_id
            self.log.warning("Test cell %s did not run: it scores 0", name)
            cell.outputs.append(
                new_output(
                    "error", ename="NotRun", evalue=NOT_RUN, traceback=[f"NotRun: {NOT_RUN}"]
                )
            )
        return cell, resources


class ForgiveWarnings(NbGraderPreprocessor):
    """Move stderr of a test to stdout: nbgrader takes a warning there for a failed test."""

    def preprocess_cell(self, cell: NotebookNode, resources: ResourcesDict, index: int) -> Notebook:
        if is_test(cell):
            for output in cell.outputs:
                if output.output_type == "stream":
                    output.name = "stdout"
        return cell, resources


class LimitBytes(NbGraderPreprocessor):
    """Cut what a cell put out beyond `max_bytes`; nbgrader itself counts only lines."""

    max_bytes = Integer(500_000, help="bytes of output kept of one cell").tag(config=True)

    def preprocess_cell(self, cell: NotebookNode, resources: ResourcesDict, index: int) -> Notebook:
        left = self.max_bytes
        for output in cell.get("outputs", ()):
            left -= self._limit(output, max(left, 0))
        return cell, resources

    def _limit(self, output: NotebookNode, left: int) -> int:
        """Cut one output to `left` bytes; returns the bytes that it takes now."""
        note = CUT.format(f"{self.max_bytes:,}")
        if output.output_type == "stream":
            output.text, used = _cut(output.text, left, note)
            return used
        if output.output_type == "error":
            text, used = _cut("\n".join(output.traceback), left, note)
            output.traceback = text.split("\n")
            output.evalue = _cut(output.evalue, left, note)[0]
            return used
        used = len(json.dumps(output.get("data", {})))
        if used > left:
            # The text stays where it fits: nbgrader reads partial credit from it.
            text, used = _cut(str(output.data.get("text/plain", "")), left, note)
            output.data = NotebookNode({"text/plain": text})
        return used


class HideHiddenTests(NbGraderPreprocessor):
    """Take hidden tests out of the feedback: out of the cells and out of the tracebacks."""

    def preprocess_cell(self, cell: NotebookNode, resources: ResourcesDict, index: int) -> Notebook:
        if is_test(cell):
            hidden = region(cell.source, HIDDEN)
            cell.source = without_region(cell.source, HIDDEN).rstrip()
            secret = {line.strip() for line in hidden if len(line.strip()) > 1}
            secret -= {line.strip() for line in cell.source.split("\n")}
            secret |= {f"### {mark}" for mark in HIDDEN if secret}
            for output in cell.outputs:
                if output.output_type == "error" and secret:
                    output.traceback = _without(output.traceback, secret)
        return cell, resources


def _cut(text: str, left: int, note: str) -> tuple[str, int]:
    """Return the text in at most about `left` bytes, with a note when cut, and its bytes."""
    data = text.encode("utf-8", "replace")
    if len(data) <= left:
        return text, len(data)
    return data[:left].decode("utf-8", "ignore") + "\n" + note, left


def _without(traceback: list[str], secret: set[str]) -> list[str]:
    """Return the traceback without the lines that quote hidden tests; says when one failed."""
    kept, failed = [], False
    for line in "\n".join(traceback).split("\n"):
        plain = ANSI.sub("", line)
        code = LINE_NUMBER.sub("", plain).strip()
        if code in secret or (len(code) > 8 and any(code in s for s in secret)):
            failed = failed or plain.lstrip().startswith("-")  # the arrow at the line that raised
        else:
            kept.append(line)
    return [HIDDEN_FAILED, *kept] if failed else kept
