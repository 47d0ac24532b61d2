"""Record one run of this device as JSON, for people who don't have such a device.

`python -m decodelab.explain.record` measures what Lesson 1 measures, at this device's real size,
and writes one file into `recorded/`; with `--engines`, the two engines that Lesson 4 compares. A
lesson shows these runs as recorded, never as the reader's.
"""

import argparse
import json
import platform
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date
from importlib.metadata import version
from pathlib import Path

from decodelab.explain.lesson import CURVE, default_shape, device_name
from decodelab.measure import (
    Calibration,
    Decoder,
    StepTiming,
    calibrate,
    measure_steps,
    pick_device,
    pick_dtype,
)
from decodelab.predict import SHAPES
from decodelab.serve import azure

FOLDER = Path(__file__).parent / "recorded"


@dataclass(frozen=True, kw_only=True)
class Recording:
    """A batch curve at one context, the ceilings measured beside it, and where it comes from."""

    device: str
    recorded_on: str
    commit: str
    versions: dict[str, str]
    shape: str
    calibration: Calibration
    curve: list[StepTiming]

    @property
    def label(self) -> str:
        """One line that says that this is a recording, and of what."""
        return f"recorded {self.recorded_on} on {self.device}, torch {self.versions['torch']}"


def make_recording(shape: str, batches: Sequence[int] = CURVE, context: int = 128) -> dict:
    """Measure this device with the named shape; returns what `load` reads."""
    device = pick_device()
    dtype = pick_dtype(device)
    ceilings = calibrate(device, dtype)
    model = Decoder.random(SHAPES[shape], device=device, dtype=dtype)
    curve = list(measure_steps(model, [(b, context) for b in batches]))
    return {
        "device": device_name(device),
        "recorded_on": date.today().isoformat(),
        "commit": commit(),
        "versions": {"python": platform.python_version(), "torch": version("torch")},
        "shape": shape,
        "calibration": ceilings.as_dict(),
        "curve": [t.as_dict() for t in curve],
    }


def load(path: Path) -> Recording:
    """Read one recorded run."""
    data = json.loads(path.read_text(encoding="utf-8"))
    data["calibration"] = Calibration.from_dict(data["calibration"])
    data["curve"] = [StepTiming(**t) for t in data["curve"]]
    return Recording(**data)


def recordings(folder: Path = FOLDER) -> list[Recording]:
    """Every recorded run, by file name."""
    return [load(path) for path in sorted(folder.glob("*.json"))]


def commit() -> str:
    """The commit that this checkout is at, or "unknown" outside one."""
    run = ["git", "-C", str(FOLDER.parent), "rev-parse", "--short", "HEAD"]
    found = subprocess.run(run, capture_output=True, text=True, check=False)
    return found.stdout.strip() or "unknown"


def record_engines(shape: str) -> Path:
    """Our engine and the other one that is installed, under Lesson 4's load; returns the file."""
    from decodelab.explain.serving_lesson import RECORDED, ServingLesson, packed

    lab = ServingLesson("recording", shape)
    lab.start(max_batch=8, token_budget=256)
    if lab.rival(max_batch=8, token_budget=256) is None:
        raise SystemExit("There is no other engine to record.")
    pair = lab.compare("recording", azure("conversation", 48, scale=16), users=8)
    RECORDED.parent.mkdir(parents=True, exist_ok=True)
    fields = dict(zip(("ours", "theirs"), map(packed, pair), strict=True))
    RECORDED.write_text(json.dumps(fields, indent=1) + "\n", encoding="utf-8")
    return RECORDED


def main() -> None:
    """Write recorded/DEVICE.json, or with --engines what Lesson 4 shows without another engine."""
    parser = argparse.ArgumentParser(description="Record one run of this device.")
    parser.add_argument("--shape", choices=SHAPES, help="default: what Lesson 1 uses here")
    parser.add_argument("--folder", type=Path, default=FOLDER)
    parser.add_argument("--engines", action="store_true", help="Lesson 4's two engines")
    options = parser.parse_args()
    if options.engines:
        print(f"wrote {record_engines(options.shape or '25M')}")
        return
    data = make_recording(options.shape or default_shape(pick_device()))
    name = "".join(c if c.isalnum() else "_" for c in data["device"].lower())
    options.folder.mkdir(parents=True, exist_ok=True)
    target = options.folder / f"{name}.json"
    target.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    print(f"wrote {target}")


if __name__ == "__main__":
    main()
