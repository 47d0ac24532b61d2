"""What a lesson's notebook needs around its cells: preflight, rounds, stored measurements.

A round takes a committed prediction, runs a real measurement, and stores both in the cell's output
as JSON, so that they travel inside the notebook. When a grader runs the notebook again it replays
those measurements: a student is judged by their own machine. Nothing here measures or draws.
"""

import json
import math
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path

import torch
from IPython.display import display

from decodelab.explain.progress import progress
from decodelab.explain.quiz import Verdict, show
from decodelab.explain.rounds import Round, Stored, Table, committed
from decodelab.explain.style import say
from decodelab.measure import (
    Calibration,
    Decoder,
    ModelRunner,
    StepTimeModel,
    StepTiming,
    calibrate,
    contradiction,
    measure_linear,
    measure_prefill,
    measure_steps,
    pick_device,
    pick_dtype,
)
from decodelab.measure.device import cpu_name
from decodelab.measure.memory import available_bytes
from decodelab.predict import HARDWARE, SHAPES, ModelShape
from decodelab.serve import Engine, Request, RooflineRunner, summarize

MEASUREMENTS_FILE = "measurements.json"
CURVE = (1, 2, 4, 8, 16, 32, 64, 128)
SURFACE = {"batches": (1, 4, 16, 64), "contexts": (128, 512, 1024)}


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
        self._committed: dict[str, float] = {}
        self.rounds: dict[str, Round] = {}  # by name: run again, a round takes its old place
        self._calibration: Calibration | None = None
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

        The first number committed counts, whatever stands there when the cell is run again.
        Raises NotCommittedError when `predicted` is not yet a number.
        """
        said = committed(name, predicted)
        guess = self._committed.setdefault(name, said)
        value = float(measure())
        result = Round(name=name, predicted=guess, measured=value, unit=unit)
        self.rounds[name] = result
        if said != guess:
            print(f"Your first number counts, {say(guess)}; the cell now says {say(said)}.")
        payload = {"name": name, "predicted": guess, "unit": unit, "measured": {"value": value}}
        display(Stored(result, payload))
        return result

    def ready(self, predicted: object) -> None:
        """Ask for a prediction before a long measurement; NotCommittedError if it's no number."""
        committed("this round", predicted)

    def record(self, name: str, run: Callable[[], dict]) -> dict:
        """Return the stored measurement when a grader replays this notebook, else `run()` it."""
        if name in self._replay:
            return self._replay[name]
        return run()

    def stored(self, name: str, run: Callable[[], dict]) -> dict:
        """`record`, with the plain values of `run()` stored in this cell's output under `name`."""
        data = self.record(name, run)
        display(Stored(f"measured: {name}", {"name": name, "measured": data}))
        return data

    # What the rounds measure

    def calibrate(self) -> Calibration:
        """Measure this machine's bandwidth, FLOP/s and seconds a call."""
        data = self.stored("calibration", lambda: calibrate(self.device, self.dtype).as_dict())
        self._calibration = Calibration.from_dict(data)
        return self._calibration

    @property
    def calibration(self) -> Calibration:
        """What `calibrate` measured; ValueError before it has run."""
        if self._calibration is None:
            raise ValueError("this machine is not measured yet: run the cell of lab.calibrate()")
        return self._calibration

    def step(self, batch: int, context: int = 128) -> StepTiming:
        """Measure one decode step (median of several) of this lesson's model."""
        return self.cells([(batch, context)])[0]

    def curve(self, batches: Sequence[int] = CURVE, context: int = 128) -> list[StepTiming]:
        """Measure the decode step over batch sizes at one context length."""
        return self.cells([(b, context) for b in batches])

    def surface(self) -> list[StepTiming]:
        """Measure the decode step over batch and context, as far as memory allows."""
        return self.cells([(b, s) for s in SURFACE["contexts"] for b in SURFACE["batches"]])

    def cells(self, cells: list[tuple[int, int]]) -> list[StepTiming]:
        """Measure the decode step at each (batch, context), twice if the times contradict."""
        name = "steps " + " ".join(f"{b}x{s}" for b, s in cells)

        def measured() -> list[StepTiming]:
            steps = measure_steps(self.model, cells)
            return list(progress(steps, total=len(cells), unit="cell"))

        def run() -> dict:
            timings = measured()
            if contradiction(timings):  # a busy machine only ever adds time
                pairs = zip(timings, measured(), strict=True)
                timings = [min(pair, key=lambda t: t.seconds) for pair in pairs]
            return {"cells": [t.as_dict() for t in timings]}

        timings = [StepTiming(**c) for c in self.stored(name, run)["cells"]]
        if sentence := contradiction(timings):
            print(sentence)
        return timings

    def prefill(self, tokens: int = 512) -> float:
        """Measure one prefill of one prompt of `tokens` tokens; returns seconds."""
        run = lambda: {"seconds": measure_prefill(self.model, 1, tokens)}  # noqa: E731
        return self.stored(f"prefill 1x{tokens}", run)["seconds"]

    def linear(self, batches: Sequence[int], d_in: int = 4096, d_out: int = 4096) -> list[float]:
        """Measure one linear layer [B, d_in] x [d_in, d_out] at each batch; returns seconds."""

        def run() -> dict:
            steps = progress(batches, unit="batch")
            return {
                "seconds": [measure_linear(b, d_in, d_out, self.device, self.dtype) for b in steps]
            }

        return self.stored(f"linear {d_in}x{d_out}", run)["seconds"]

    def serve(
        self,
        name: str,
        requests: Sequence[Request],
        num_blocks: int,
        block_size: int = 16,
        **how: object,
    ) -> tuple[Engine, dict]:
        """Serve `requests` on this lesson's model; the engine, for its trace, and its figures.

        `how` is Engine's. A replay takes the stored figures, and a trace from a virtual clock: what
        is scheduled is the same where all requests are there at the start.
        """
        if name in self._replay:
            card = HARDWARE["NVIDIA T4"]
            runner = RooflineRunner(self.shape, card, num_blocks, block_size, dtype="fp16")
        else:
            runner = ModelRunner(self.model, num_blocks, block_size)
        engine = Engine(runner, **how)
        engine.run(requests)
        return engine, self.stored(name, lambda: served(engine))

    def judge(self, question: str, letter: str, terms: Mapping[str, float]) -> None:
        """Answer a choice among measured terms (A is the first) by the reader's own numbers.

        A term within 10% of the largest counts as largest: no measurement here is finer. Terms may
        have signs, as those of a difference: then size counts.
        """
        letters = dict(zip("ABCD", terms, strict=False))
        if letter not in letters:
            state, text = "unanswered", f"Choose one of {', '.join(letters)} and run this again."
        else:
            name, total = letters[letter], sum(terms.values())
            largest = [
                term for term in terms if abs(terms[term]) >= 0.9 * max(map(abs, terms.values()))
            ]
            state = "right" if name in largest else "wrong"
            text = f"{name} makes {1e3 * terms[name]:.3g} of {1e3 * total:.3g} ms here."
            if state == "right" and len(largest) > 1:
                text += f" As large, to 10%: {', '.join(t for t in largest if t != name)}."
        show(Verdict(question=question, state=state, text=text))

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


def served(engine: Engine) -> dict[str, float]:
    """What a run was worth, as plain numbers: seconds, shares of 1, tokens/s."""
    run = summarize(engine.trace, engine.sequences)
    figures = {
        "seconds": run.seconds,
        "steps": run.steps,
        "tokens_per_second": run.tokens_per_second,
        "padding": run.padding,
        "occupancy": run.occupancy,
        "peak": max(len(record.rows) for record in engine.trace),
        "preemptions": run.preemptions,
    }
    for name, latencies in (("ttft", run.ttft), ("tpot", run.tpot), ("itl", run.itl)):
        for percent in (50, 95, 100):
            figures[f"{name}_p{percent}"] = latencies.percentile(percent)
    return {name: value for name, value in figures.items() if math.isfinite(value)}


def default_shape(device: torch.device) -> str:
    """Name the largest shape that suits the device: 135M on a CPU, 1B on a T4, 8B from 40 GB."""
    if device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
        return "Llama-3.1-8B" if total >= 40e9 else "Llama-3.2-1B"
    # 135M in fp32 is 0.54 GB; the widest cell of the surface adds 3 GB of KV.
    return "SmolLM2-135M" if available_bytes(device) >= 5e9 else "25M"


def load_replay(folder: Path | None = None) -> dict[str, dict]:
    """Return the student's own measurements when a grader runs this notebook again."""
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
        ("time", "1 to 4 minutes of measuring, one to three hours of thinking"),
    ]
    if lesson.device.type != "cuda":
        how = "Runtime > Change runtime type > T4 GPU" if in_colab() else "a GPU is not needed"
        rows.append(("GPU", f"none: the same curves are measured on this CPU ({how})"))
    return rows


def device_name(device: torch.device) -> str:
    """Return a device's name in words."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{cpu_name()}, {torch.get_num_threads()} threads"
