"""A small notebook with every figure and the explorer, over an invented surface of step times."""

from pathlib import Path

import nbformat.v4 as v4

EXPLORER_CELL, FIRST_FIGURE_CELL = 1, 2  # the latter is the roofline

SURFACE = """
from dataclasses import replace
from IPython.display import display
from decodelab.explain import batch_context_explorer, figures

def terms(batch, context):
    return {"weights": .032, "KV": 2.7e-6 * batch * context,
            "arithmetic": .0023 * batch, "overhead": .030}

def predicted(batch, context):
    return sum(terms(batch, context).values())

def bound(batch, context):
    return max(.032, .0022 * batch) + terms(batch, context)["KV"]

BATCHES = (1, 2, 4, 8, 16, 32, 64)
measured = {(b, c): predicted(b, c) * (1 + .08 * (-1) ** i)
            for i, b in enumerate(BATCHES) for c in (128, 512, 2048)}
steps = {b: measured[b, 128] for b in BATCHES}
line = {b: predicted(b, 128) for b in BATCHES}
"""
EXPLORER = """
explorer = batch_context_explorer(
    predicted, measured, terms=terms, bound=bound, max_batch=128, contexts=(64, 4096),
    kv_bytes=lambda b, c: 46e3 * b * c, limit=lambda c: int(16e9 / 46e3 / c),
)
display(explorer)
"""
FIGURES = (
    "figures.roofline(flops=120e9, bandwidth=17e9, predicted={'on paper, B = 1': .5},\n"
    "    measured={'decode, B = 1': (.5, 3.9e9), 'decode, B = 8': (3.9, 21e9),\n"
    "              'decode, B = 64': (28, 50e9), 'prefill, 512 tokens': (200, 88e9)})",
    "figures.intensity_curve(ridge=140)",
    "figures.batch_curve(predicted=line, measured=steps, bound={b: bound(b, 128) for b in line})",
    "figures.batch_curve(predicted=line, measured=steps, limit=64, log=False)",
    "figures.step_bars(predicted={f'B = {b}': terms(b, 512) for b in (1, 8, 64)},\n"
    "    measured={f'B = {b}': measured[b, 512] for b in (1, 8, 64)})",
    "figures.cost_curve(usd_per_hour=2, predicted=line, measured=steps)",
)


def write_toy(path: Path, figures: bool = False, hover: bool = False) -> Path:
    """Write the toy notebook to `path`: the explorer, then if asked every figure, with hover."""
    cells = [SURFACE, EXPLORER, *(FIGURES if figures else ())]
    if hover:
        cells = [f"replace({c}, hover=True)" if c in FIGURES else c for c in cells]
    notebook = v4.new_notebook(cells=[v4.new_code_cell(c.strip()) for c in cells])
    notebook.metadata.kernelspec = {"name": "python3", "display_name": "Python 3"}
    path.write_text(v4.writes(notebook), encoding="utf-8")
    return path


CAPACITY = """
from dataclasses import replace
from IPython.display import display
from decodelab.explain.capacity_explorer import capacity_explorer
from decodelab.predict import HARDWARE, SHAPES
from decodelab.predict.deployment import Deployment

deployment = Deployment(shape=SHAPES["Llama-3.1-8B"], hardware=HARDWARE["NVIDIA H100 SXM"])
explorer = capacity_explorer(deployment, batch=32, kv_bandwidth=2.6e12, measured={16384: 27})
display(explorer)
"""


def write_capacity_toy(path: Path) -> Path:
    """Write a notebook of one cell, the capacity explorer, to `path`."""
    notebook = v4.new_notebook(cells=[v4.new_code_cell(CAPACITY.strip())])
    notebook.metadata.kernelspec = {"name": "python3", "display_name": "Python 3"}
    path.write_text(v4.writes(notebook), encoding="utf-8")
    return path


STEPPER = """
from random import Random
from decodelab.explain import serving_figures, stepper
from decodelab.predict import HARDWARE, SHAPES
from decodelab.serve import Engine, Request, RooflineRunner

def make(policy="continuous", num_blocks=20):
    runner = RooflineRunner(SHAPES["Llama-3.1-8B"], HARDWARE["NVIDIA H100 SXM"], num_blocks)
    return Engine(runner, policy, max_batch=6, token_budget=64)

def workload(count, seed=0):
    draw = Random(seed)
    return [Request([draw.randrange(100) for _ in range(draw.randrange(8, 60))],
                    draw.choice((4, 8, 30, 60)), id="ABCDEFGHIJKLMNOPQRSTUVWXYZ"[i])
            for i in range(count)]

shown = stepper(make, workload(12), step=6, policy=("continuous", "static"), num_blocks=(20, 64))
shown
"""
SERVING = (
    "traces = {}\n"
    "for policy in ('static', 'continuous'):\n"
    "    engine = make(policy, 80)\n"
    "    engine.run(workload(24))\n"
    "    traces[policy] = engine.trace\n"
    "tight = make()\n"
    "tight.run(workload(24))\n"
    "serving_figures.gantt(tight.trace)",
    "serving_figures.gantt(traces)",
    "serving_figures.occupancy(traces)",
    "serving_figures.blocks({'tight': tight.trace, **traces})",
)


def write_stepper_toy(path: Path) -> Path:
    """Write a notebook with the stepper, then the figures of traces, to `path`."""
    cells = [v4.new_code_cell(cell.strip()) for cell in (STEPPER, *SERVING)]
    notebook = v4.new_notebook(cells=cells)
    notebook.metadata.kernelspec = {"name": "python3", "display_name": "Python 3"}
    path.write_text(v4.writes(notebook), encoding="utf-8")
    return path
