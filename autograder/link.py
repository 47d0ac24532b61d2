"""Make plain `nbgrader COMMAND LESSON` find this course: `python -m autograder.link`, once.

Writes one file into the environment that runs it (etc/jupyter), where every Jupyter tool looks.
"""

import sys
from pathlib import Path

CONFIG = Path(__file__).resolve().parent / "nbgrader_config.py"


def link(prefix: Path = Path(sys.prefix)) -> Path:
    """Write the file and return its path."""
    target = prefix / "etc" / "jupyter" / "nbgrader_config.py"
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(f"load_subconfig({str(CONFIG)!r})\n", encoding="utf-8")
    return target


if __name__ == "__main__":
    print(f"nbgrader now finds {CONFIG} by way of {link()}")
