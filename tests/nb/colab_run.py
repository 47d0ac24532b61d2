"""Run every lesson's source under a kernel that looks like Colab's; exits 1 at the first error.

Called by tests/colab_venv.sh inside its venv, so it imports nothing of the grading or the tests.
"""

import os
import sys
import tempfile
import time
from pathlib import Path

import nbformat
from nbclient import NotebookClient

ROOT = Path(__file__).resolve().parents[2]
# In a Colab kernel google.colab is there before the first cell. An install must not happen: the
# venv already holds the project as the set-up cell would install it.
STARTUP = """
import google.colab

get_ipython().register_magic_function(lambda line: print("asked:", line), "line", "pip")
"""


def run(path: Path) -> None:
    """Run one notebook in an empty folder; raises nbclient's CellExecutionError."""
    nb = nbformat.read(path, as_version=4)
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        resources = {"metadata": {"path": folder}}
        NotebookClient(nb, timeout=300, kernel_name="python3", resources=resources).execute()
    outputs = sum(len(cell.get("outputs", ())) for cell in nb.cells)
    seconds = time.perf_counter() - start
    print(f"{path.stem}: {len(nb.cells)} cells, {outputs} outputs, no error, {seconds:.0f} s")


def main() -> None:
    with tempfile.TemporaryDirectory() as profile:
        startup = Path(profile) / "profile_default" / "startup"
        startup.mkdir(parents=True)
        (startup / "00-colab.py").write_text(STARTUP, encoding="utf-8")
        os.environ["IPYTHONDIR"] = profile
        os.environ["PYTHONPATH"] = str(ROOT / "tests" / "stubs")
        lessons = sorted((ROOT / "solutions").glob("*/*.ipynb"))
        if not lessons:
            sys.exit("solutions/ holds no lesson")
        for path in lessons:
            run(path)


if __name__ == "__main__":
    main()
