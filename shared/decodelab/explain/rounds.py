"""One round's result, and how it is shown and stored: a table beside JSON in the cell's output.

The JSON travels inside the notebook, so that a grader can replay what a student measured.
"""

import math
import numbers
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from decodelab.explain.style import say

MEASUREMENT_MIME = "application/vnd.decodelab.measurement+json"


class NotCommittedError(ValueError):
    """A measurement was asked for before its prediction; shown as a sentence, not a traceback."""

    def _render_traceback_(self) -> list[str]:
        return [str(self)]


@dataclass(frozen=True, kw_only=True)
class Round:
    """One prediction beside one measurement, both in `unit`."""

    name: str
    predicted: float
    measured: float
    unit: str

    @property
    def ratio(self) -> float:
        """Measured over predicted: 1 is a hit, 2 means that reality took twice the number."""
        return self.measured / self.predicted if self.predicted else math.inf

    def __repr__(self) -> str:
        return (
            f"{self.name}: you said {say(self.predicted)} {self.unit}, "
            f"measured {say(self.measured)} {self.unit}, ratio {self.ratio:.2f}"
        )

    def _repr_html_(self) -> str:
        cells = (say(self.predicted), say(self.measured), f"{self.ratio:.3g}")
        head = (f"you said ({self.unit})", f"measured ({self.unit})", "measured / said")
        return (
            f"<table><caption>{escape(self.name)}</caption><tr>"
            + "".join(f"<th scope='col'>{escape(h)}</th>" for h in head)
            + "</tr><tr>"
            + "".join(f"<td>{c}</td>" for c in cells)
            + "</tr></table>"
        )


def committed(name: str, predicted: object) -> float:
    """Return the prediction as a float, or say how to commit one."""
    if isinstance(predicted, numbers.Real) and not isinstance(predicted, bool):
        if math.isfinite(predicted) and predicted > 0:
            return float(predicted)
        raise NotCommittedError(f"'{name}': a prediction is a positive number, not {predicted}.")
    if predicted is not None and predicted is not Ellipsis:
        raise NotCommittedError(
            f"'{name}': a prediction is a number such as 12.5, not {predicted!r:.60}."
        )
    raise NotCommittedError(
        f"'{name}': commit your prediction first. Replace the ... in the cell above by a number, "
        "run that cell, then run this one. A wrong number teaches more than none."
    )


@dataclass(frozen=True)
class Table:
    """Rows of (what, value), shown as an HTML table with a text alternative."""

    rows: Sequence[tuple[str, str]]
    caption: str

    def __repr__(self) -> str:
        return "\n".join(f"{what}: {value}" for what, value in self.rows)

    def _repr_html_(self) -> str:
        body = "".join(
            f"<tr><th scope='row' style='text-align:left'>{escape(w)}</th>"
            f"<td style='text-align:left'>{escape(v)}</td></tr>"
            for w, v in self.rows
        )
        return f"<table><caption>{escape(self.caption)}</caption>{body}</table>"


@dataclass(frozen=True)
class Stored:
    """Something to show, with the JSON that the notebook keeps of it."""

    shown: object
    payload: dict

    def _repr_mimebundle_(self, include=None, exclude=None) -> dict:
        bundle = {"text/plain": str(self.shown), MEASUREMENT_MIME: self.payload}
        if hasattr(self.shown, "_repr_html_"):
            bundle["text/html"] = self.shown._repr_html_()
        return bundle
