"""The student's own measurements, taken out of the outputs of a submitted notebook.

nbgrader clears outputs before it runs a notebook, and a grader's machine is another machine than
the student's. So what a lesson measured is written beside the notebook, where the lesson's
measuring functions find it and replay it. Whoever forges an output forges only this.
"""

import json
from collections.abc import Iterator

from nbconvert.exporters.exporter import ResourcesDict
from nbformat import NotebookNode
from nbgrader.preprocessors import NbGraderPreprocessor

MIME = "application/vnd.decodelab.measurement+json"
FILE_NAME = "measurements.json"  # decodelab.explain.lesson reads it
MAX_BYTES_EACH = 64_000
MAX_BYTES = 1_000_000


class HarvestMeasurements(NbGraderPreprocessor):
    """Write FILE_NAME beside the autograded notebook; runs before the outputs are cleared."""

    def preprocess(
        self, nb: NotebookNode, resources: ResourcesDict
    ) -> tuple[NotebookNode, ResourcesDict]:
        text = json.dumps(harvest(nb), indent=1, allow_nan=False)
        # nbconvert's writer puts these beside the notebook. Always, even when empty: a file of
        # that name that came with the submission must not count.
        outputs = resources.get("outputs") or {}
        resources["outputs"] = {**outputs, FILE_NAME: text.encode()}
        return nb, resources


def harvest(nb: NotebookNode) -> dict[str, dict]:
    """Return the last payload of each name, in notebook order; leave what is no small plain JSON.

    A payload is {"name": str, "measured": {...}, ...}, at most MAX_BYTES_EACH; MAX_BYTES in all.
    """
    found: dict[str, dict] = {}
    for payload in _payloads(nb):
        if _size(payload) <= MAX_BYTES_EACH:
            found.pop(payload["name"], None)
            found[payload["name"]] = payload
    total, kept = 0, {}
    for name, payload in found.items():
        total += _size(payload)
        if total <= MAX_BYTES:
            kept[name] = payload
    return kept


def _payloads(nb: NotebookNode) -> Iterator[dict]:
    for cell in nb.cells:
        for output in cell.get("outputs", ()):
            payload = output.get("data", {}).get(MIME)
            if (
                isinstance(payload, dict)
                and isinstance(payload.get("name"), str)
                and isinstance(payload.get("measured"), dict)
            ):
                yield payload


def _size(payload: dict) -> float:
    """Bytes of the payload as JSON; infinite for what is not plain finite JSON."""
    try:
        return len(json.dumps(payload, allow_nan=False))
    except (TypeError, ValueError, RecursionError):
        return float("inf")
