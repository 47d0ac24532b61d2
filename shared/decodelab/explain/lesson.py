"""What a lesson's notebook needs around its cells: preflight, rounds, stored measurements.

A round takes a committed prediction, runs a real measurement, and stores both in the cell's output
as JSON, so that they travel inside the notebook. When a grader runs the notebook again it replays
those measurements: a student is judged by their own machine. Nothing here measures or draws.
"""

import json
import math
import numbers
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from html import escape
from pathlib import Path

import torch
from IPython.display import display

from decodelab.explain.progress import progress
from decodelab.measure import (
    Calibration,
    Decoder,
    StepTimeModel,
    StepTiming,
    calibrate,
    measure_linear,
    measure_prefill,
    measure_steps,
    pick_device,
    pick_dtype,
)
from decodelab.measure.memory import available_bytes
from decodelab.predict import SHAPES, ModelShape

MEASUREMENT_MIME = "application/vnd.decodelab.measurement+json"
MEASUREMENTS_FILE = "measurements.json"
CURVE = (1, 2, 4, 8, 16, 32, 64, 128)
SURFACE = {"batches": (1, 4, 16, 64), "contexts": (128, 512, 1024)}


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
            f"{self.name}: you said {self.predicted:.4g} {self.unit}, "
            f"measured {self.measured:.4g} {self.unit}, ratio {self.ratio:.2f}"
        )

    def _repr_html_(self) -> str:
        cells = (self.predicted, self.measured, self.ratio)
        head = (f"you said ({self.unit})", f"measured ({self.unit})", "measured / said")
        return (
            f"<table><caption>{escape(self.name)}</caption><tr>"
            + "".join(f"<th scope='col'>{escape(h)}</th>" for h in head)
            + "</tr><tr>"
            + "".join(f"<td>{c:.4g}</td>" for c in cells)
            + "</tr></table>"
        )


class Lesson:
    """One student's run of one lesson on one device.

    `shape` names an entry of `decodelab.predict.SHAPES`; by default the largest that suits the
    device. The environment variable DECODELAB_SHAPE overrides it, for small machines and for tests.
    """

    def __init__(self, name: str, shape: str | None = None) -> None:
        self.name = name
        self.device = pick_device()
        self.dtype = pick_dtype(self.device)
        self._runs = shape or os.environ.get("DECODELAB_SHAPE") or default_shape(self.device)
        if self._runs not in SHAPES:
            raise ValueError(f"no shape is called {self._runs!r}; there are {', '.join(SHAPES)}")
        # A replay speaks of the shape and dtype that the student measured, wherever it runs.
        self._replay = load_replay()
        size = torch.empty(0, dtype=self.dtype).element_size()
        setup = self.record("setup", lambda: {"shape": self._runs, "bytes_per_element": size})
        self.shape_name, self.bytes_per_element = setup["shape"], setup["bytes_per_element"]
        self.shape: ModelShape = SHAPES[self.shape_name]

    @cached_property
    def model(self) -> Decoder:
        """A decoder with random weights, of this lesson's shape: speed doesn't depend on values."""
        return Decoder.random(SHAPES[self._runs], seed=0, device=self.device, dtype=self.dtype)

    def preflight(self) -> None:
        """Show in plain words what this notebook runs on and what it will ask of it."""
        setup = {"shape": self.shape_name, "bytes_per_element": self.bytes_per_element}
        table = Table(preflight_rows(self), caption="This machine")
        display(Stored(table, {"name": "setup", "measured": setup}))

    # Rounds

    def round(self, name: str, *, predicted: object, unit: str, measure: Callable) -> Round:
        """Run `measure()` against a committed prediction, and store both in the cell's output.

        Raises NotCommittedError when `predicted` is not yet a number.
        """
        guess = committed(name, predicted)
        value = float(measure())
        result = Round(name=name, predicted=guess, measured=value, unit=unit)
        payload = {"name": name, "predicted": guess, "unit": unit, "measured": {"value": value}}
        display(Stored(result, payload))
        return result

    def record(self, name: str, run: Callable[[], dict]) -> dict:
        """Return the stored measurement when a grader replays this notebook, else `run()` it."""
        if name in self._replay:
            return self._replay[name]
        return run()

    def _stored(self, name: str, run: Callable[[], dict]) -> dict:
        data = self.record(name, run)
        display(Stored(f"measured: {name}", {"name": name, "measured": data}))
        return data

    # What the rounds measure

    def calibrate(self) -> Calibration:
        """Measure this machine's bandwidth, FLOP/s and seconds a call."""
        data = self._stored("calibration", lambda: calibrate(self.device, self.dtype).as_dict())
        self.calibration = Calibration.from_dict(data)
        return self.calibration

    def step(self, batch: int, context: int = 128) -> StepTiming:
        """Measure one decode step (median of several) of this lesson's model."""
        return self.cells([(batch, context)])[0]

    def curve(self, batches: Sequence[int] = CURVE, context: int = 128) -> list[StepTiming]:
        """Measure the decode step over batch sizes at one context length."""
        return self.cells([(b, context) for b in batches])

    def surface(self) -> list[StepTiming]:
        """Measure the decode step over batch and context; what doesn't fit in memory is left out."""
        return self.cells([(b, s) for s in SURFACE["contexts"] for b in SURFACE["batches"]])

    def cells(self, cells: list[tuple[int, int]]) -> list[StepTiming]:
        """Measure the decode step at each (batch, context)."""
        name = "steps " + " ".join(f"{b}x{s}" for b, s in cells)

        def run() -> dict:
            timings = progress(measure_steps(self.model, cells), total=len(cells), unit="cell")
            return {"cells": [t.as_dict() for t in timings]}

        return [StepTiming(**c) for c in self._stored(name, run)["cells"]]

    def prefill(self, tokens: int = 512) -> float:
        """Measure one prefill of one prompt of `tokens` tokens; returns seconds."""
        run = lambda: {"seconds": measure_prefill(self.model, 1, tokens)}  # noqa: E731
        return self._stored(f"prefill 1x{tokens}", run)["seconds"]

    def linear(self, batches: Sequence[int], d_in: int = 4096, d_out: int = 4096) -> list[float]:
        """Measure one linear layer [B, d_in] x [d_in, d_out] at each batch; returns seconds."""

        def run() -> dict:
            steps = progress(batches, unit="batch")
            return {
                "seconds": [measure_linear(b, d_in, d_out, self.device, self.dtype) for b in steps]
            }

        return self._stored(f"linear {d_in}x{d_out}", run)["seconds"]

    def fit(self, surface: Sequence[StepTiming]) -> tuple[StepTimeModel, list[StepTiming]]:
        """Fit the additive model to the smallest, a middle and the largest batch of a surface.

        Only the shortest and the longest context count; returns the model and the unseen cells.
        """
        batches = sorted({t.batch for t in surface})
        contexts = [t.context for t in surface]
        chosen = {batches[0], batches[len(batches) // 2], batches[-1]}
        ends = {min(contexts), max(contexts)}
        known = [t for t in surface if t.batch in chosen and t.context in ends]
        unseen = [t for t in surface if t not in known]
        size = self.bytes_per_element
        return StepTimeModel.fit(self.shape, known, self.calibration, size), unseen


def committed(name: str, predicted: object) -> float:
    """Return the prediction as a float, or say how to commit one."""
    if isinstance(predicted, numbers.Real) and not isinstance(predicted, bool):
        if math.isfinite(predicted) and predicted > 0:
            return float(predicted)
        raise NotCommittedError(f"'{name}': a prediction is a positive number, not {predicted}.")
    raise NotCommittedError(
        f"'{name}': commit your prediction first. Replace the ... in the cell above by a number, "
        "run that cell, then run this one. A wrong number teaches more than none."
    )


def default_shape(device: torch.device) -> str:
    """Name the largest shape that suits the device: 135M on a CPU, 1B on a T4, 8B from 40 GB."""
    if device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
        return "Llama-3.1-8B" if total >= 40e9 else "Llama-3.2-1B"
    # 135M in fp32 is 0.54 GB; the widest cell of the surface adds 3 GB of KV.
    return "SmolLM2-135M" if available_bytes(device) >= 5e9 else "25M"


def load_replay(folder: Path | None = None) -> dict[str, dict]:
    """Return the student's own measurements when nbgrader runs this notebook again, else nothing."""
    path = (folder or Path.cwd()) / MEASUREMENTS_FILE
    if os.environ.get("NBGRADER_EXECUTION") != "autograde" or not path.exists():
        return {}
    stored = json.loads(path.read_text(encoding="utf-8"))
    return {name: payload.get("measured", {}) for name, payload in stored.items()}


def in_colab() -> bool:
    """True inside a Colab kernel."""
    return "google.colab" in sys.modules


def preflight_rows(lesson: Lesson) -> list[tuple[str, str]]:
    """Return (what, value) rows: device, dtype, memory, model, time budget, and what is missing."""
    shape, size = lesson.shape, lesson.bytes_per_element
    rows = [
        ("device", device_name(lesson.device)),
        ("memory free", f"{available_bytes(lesson.device) / 2**30:.1f} GiB"),
        ("dtype", f"{str(lesson.dtype).removeprefix('torch.')}, {size} bytes a weight"),
        ("model", f"{lesson.shape_name}, {shape.parameters / 1e6:,.0f} M random weights"),
        ("weights", f"{shape.parameters * size / 1e9:.2f} GB"),
        ("versions", f"Python {sys.version.split()[0]}, torch {torch.__version__}"),
        ("time", "about 3 minutes of measuring, 60-90 minutes of thinking"),
    ]
    if lesson.device.type != "cuda":
        how = "Runtime > Change runtime type > T4 GPU" if in_colab() else "a GPU is not needed"
        rows.append(("GPU", f"none: the same curves are measured on this CPU ({how})"))
    return rows


def device_name(device: torch.device) -> str:
    """Return a device's name in words."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"CPU, {torch.get_num_threads()} threads"


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
