"""Find what a released notebook still holds of its source's answers, anywhere in its JSON."""

from collections.abc import Iterator

from nbformat import NotebookNode

from autograder.cells import (
    HIDDEN,
    PREDICTION_LINE,
    SOLUTION,
    choice,
    is_quiz,
    is_written,
    questions,
    region,
    tags,
    without_region,
)

SHORTEST = 9  # a line such as `return x` gives nothing away


def leaks(source: NotebookNode, released: NotebookNode) -> list[str]:
    """Return every secret line of the source that the released notebook holds, and open answers."""
    public = "\n".join(_public(source))
    text = "\n".join(_strings(released))
    found = [s for s in _secrets(source) if len(s) >= SHORTEST and s not in public and s in text]
    for question in questions(released):
        if is_quiz(question) and choice(question.answer).value != "?":
            found.append(f"{question.grade_id} is answered")
    for cell in released.cells:
        if any(m["value"] != "..." for m in PREDICTION_LINE.finditer(cell.source)):
            found.append(f"{cell['id']} predicts")
        if cell.get("outputs") or cell.get("execution_count"):
            found.append(f"{cell['id']} has outputs")
    return found


def _secrets(source: NotebookNode) -> Iterator[str]:
    for cell in source.cells:
        lines = region(cell.source, SOLUTION) + region(cell.source, HIDDEN)
        if is_written(cell) or "instructor" in tags(cell):
            lines += cell.source.split("\n")
        lines += cell.metadata.get("decodelab", {}).get("feedback", {}).values()
        yield from (line.strip() for line in lines)


def _public(source: NotebookNode) -> Iterator[str]:
    for cell in source.cells:
        if not (is_written(cell) or "instructor" in tags(cell)):
            yield without_region(without_region(cell.source, SOLUTION), HIDDEN)


def _strings(node: object) -> Iterator[str]:
    if isinstance(node, str):
        yield node
    elif isinstance(node, dict):
        for key, value in node.items():
            yield str(key)
            yield from _strings(value)
    elif isinstance(node, list):
        for value in node:
            yield from _strings(value)
