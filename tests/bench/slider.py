"""From a key on a slider to the redrawn chart, in JupyterLab and Chromium: the median in ms.

Prints one line a slider and the whole as JSON; the goal is a median under 100 ms. Run it on a
quiet machine: `python tests/bench/slider.py [presses, at most 28]`.
"""

import json
import statistics
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "browser"))

from lab import lab_page
from toy import EXPLORER_CELL, write_capacity_toy, write_toy

GOAL_MS = 100
EXPLORERS = {"lesson 1": (write_toy, EXPLORER_CELL), "lesson 2": (write_capacity_toy, 0)}


def measure(presses: int) -> dict[str, list[float]]:
    """Milliseconds of each press, by explorer and control."""
    found = {}
    with tempfile.TemporaryDirectory() as home:
        notebooks = Path(home, "notebooks")
        notebooks.mkdir()
        with lab_page(notebooks, Path(home, "jupyter")) as lab:
            for lesson, (write, cell) in EXPLORERS.items():
                path = write(notebooks / f"{lesson}.ipynb")
                lab.open(path.name)
                lab.run_all()
                lab.output(cell)
                for name in ("Batch size", "Context"):
                    for kind, control in (("slider", lab.handle), ("number box", lab.number)):
                        times = lab.latencies(control(name), "ArrowUp", presses)
                        found[f"{lesson}: {name}, {kind}"] = times
    return found


def main() -> None:
    found = measure(int(sys.argv[1]) if len(sys.argv) > 1 else 25)
    report = {}
    for name, times in found.items():
        median, largest = statistics.median(times), max(times)
        report[name] = {"median_ms": round(median, 1), "largest_ms": round(largest, 1)}
        print(f"{name:34} median {median:4.0f} ms, largest {largest:4.0f} ms of {len(times)}")
    overall = statistics.median([ms for times in found.values() for ms in times])
    print(json.dumps({"goal_ms": GOAL_MS, "median_ms": round(overall, 1), "controls": report}))
    print(f"Goal of {GOAL_MS} ms {'reached' if overall < GOAL_MS else 'missed'}: {overall:.0f} ms.")


if __name__ == "__main__":
    main()
