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
from toy import EXPLORER_CELL, write_toy

GOAL_MS = 100


def measure(presses: int) -> dict[str, list[float]]:
    """Milliseconds of each press, by control."""
    with tempfile.TemporaryDirectory() as home:
        notebooks = Path(home, "notebooks")
        notebooks.mkdir()
        write_toy(notebooks / "toy.ipynb")
        with lab_page(notebooks, Path(home, "jupyter")) as lab:
            lab.open("toy.ipynb")
            lab.run_all()
            lab.output(EXPLORER_CELL)
            return {
                f"{name}, {kind}": lab.latencies(control(name), "ArrowUp", presses)
                for name in ("Batch size", "Context")
                for kind, control in (("slider", lab.handle), ("number box", lab.number))
            }


def main() -> None:
    found = measure(int(sys.argv[1]) if len(sys.argv) > 1 else 25)
    report = {}
    for name, times in found.items():
        median, largest = statistics.median(times), max(times)
        report[name] = {"median_ms": round(median, 1), "largest_ms": round(largest, 1)}
        print(f"{name:24} median {median:4.0f} ms, largest {largest:4.0f} ms of {len(times)}")
    overall = statistics.median([ms for times in found.values() for ms in times])
    print(json.dumps({"goal_ms": GOAL_MS, "median_ms": round(overall, 1), "controls": report}))
    print(f"Goal of {GOAL_MS} ms {'reached' if overall < GOAL_MS else 'missed'}: {overall:.0f} ms.")


if __name__ == "__main__":
    main()
