"""Take the README's picture of a lesson: run it in JupyterLab, show its explorer, save a PNG.

`python tests/browser/pictures.py lesson1_why_batching` writes docs/pictures/lesson1.png, under
200 kB, from a real run on this machine.
"""

import shutil
import sys
import tempfile
from pathlib import Path

from lab import LabPage, lab_page
from PIL import Image

ROOT = Path(__file__).parents[2]
MOST_BYTES = 200_000


def take(lesson: str) -> Path:
    """Run `lesson` from solutions/ and write its picture; returns the file."""
    target = ROOT / "docs" / "pictures" / f"{lesson.split('_')[0]}.png"
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as home:
        shutil.copytree(ROOT / "solutions" / lesson, Path(home, lesson))
        with lab_page(Path(home, lesson), Path(home, "jupyter"), 1100, 1080) as lab:
            lab.open(f"{lesson}.ipynb")
            lab.command("application:toggle-left-area")
            lab.run_all(timeout=600)
            if errors := lab.errors():
                raise SystemExit(f"{lesson} does not run: {errors[0]}")
            lab.output(explorer_cell(lab))
            lab.page.screenshot(path=target)
    shrink(target)
    return target


def explorer_cell(lab: LabPage) -> int:
    """Which code cell shows the explorer."""
    shown = [i for i, cell in enumerate(lab.cells()) if any("widget-view" in m for m in cell.mimes)]
    if not shown:
        raise SystemExit("no cell of the lesson shows a widget to take a picture of")
    return shown[-1]


def shrink(path: Path) -> None:
    """Store the picture with 128 colours."""
    picture = Image.open(path).convert("RGB").quantize(128, dither=Image.Dither.NONE)
    picture.save(path, optimize=True)
    if path.stat().st_size > MOST_BYTES:
        raise SystemExit(f"{path} has {path.stat().st_size} bytes, more than {MOST_BYTES}")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit(__doc__)
    print(take(sys.argv[1]))
