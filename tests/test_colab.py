"""Colab: installing the project changes nothing that is there, and the set-up cell asks no more."""

import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import nbformat
import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from autograder.cells import tags
from autograder.project import ROOT, read_project
from autograder.release import written

CONSTRAINTS = ROOT / "tests" / "colab-constraints.txt"
NO_INDEX = re.compile(r"error sending request|failed to fetch|dns error|could not connect", re.I)
NEVER_IN_BASE = {"nbgrader", "jupyterlab", "notebook", "plotly", "ipywidgets", "ipython"}
# JupyterLab is the one thing of `lab` that Colab replaces; gguf reads one optional kind of file.
NOT_ON_COLAB = {"jupyterlab", "gguf"}


def pins() -> dict[str, str]:
    lines = CONSTRAINTS.read_text(encoding="utf-8").splitlines()
    pairs = (line.split("==") for line in lines if line and not line.startswith("#"))
    return {canonicalize_name(name): version for name, version in pairs}


def project_table() -> dict:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def solve(*arguments: str) -> subprocess.CompletedProcess:
    """Resolve the project with Colab's pins by metadata alone: nothing is installed."""
    command = [sys.executable, "-m", "uv", "pip", "compile", "--quiet", "--no-header"]
    command += ["--no-annotate", "--python-version", "3.13"]
    command += ["--python-platform", "x86_64-unknown-linux-gnu", "--constraints", str(CONSTRAINTS)]
    command += [*arguments, str(ROOT / "pyproject.toml")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    if done.returncode and NO_INDEX.search(done.stderr) and not os.environ.get("CI"):
        pytest.skip("no package index can be reached to resolve against")
    return done


@pytest.mark.parametrize("extra", [(), ("--extra", "serve")], ids=["core", "serve"])
def test_installing_the_project_changes_no_package_of_colab(extra: tuple[str, ...]) -> None:
    done = solve(*extra)
    assert done.returncode == 0, done.stderr
    solved = {
        canonicalize_name(r.name): str(r.specifier) for r in map(Requirement, done.stdout.split())
    }
    changed = {n: s for n, s in solved.items() if n in pins() and s != f"=={pins()[n]}"}
    assert {"torch", "numpy"} <= set(solved)
    assert changed == {}
    assert not NEVER_IN_BASE & set(solved)


def test_the_grade_extra_could_not_be_installed_on_colab() -> None:
    done = solve("--extra", "grade")
    assert done.returncode != 0, "the solve finds no conflict where there is one"
    assert "nbgrader" in done.stderr


def test_everything_a_lesson_installs_or_draws_with_is_on_colab_already() -> None:
    project = project_table()
    extras = project["optional-dependencies"]
    needed = project["dependencies"] + extras["lab"] + extras["serve"]
    for requirement in map(Requirement, needed):
        name = canonicalize_name(requirement.name)
        if name not in NOT_ON_COLAB:
            assert requirement.specifier.contains(pins()[name]), f"Colab has {name} {pins()[name]}"


# A notebook shell without our library, in which %pip and ! are written down and not run.
RUN_SETUP = """
import json, sys
from pathlib import Path

sys.meta_path = [f for f in sys.meta_path if "__editable__" not in getattr(f, "__module__", "")]
sys.path = [p for p in sys.path if not (Path(p) / "decodelab").is_dir()]
source, on_colab = json.loads(sys.argv[1])
if on_colab:
    import google.colab
from IPython.core.interactiveshell import InteractiveShell

asked, shell = [], InteractiveShell.instance()
shell.register_magic_function(lambda line: asked.append(f"%pip {line}"), "line", "pip")
shell.system = shell.system_piped = shell.system_raw = lambda line: asked.append(f"!{line}")
print(json.dumps([shell.run_cell(source).success, asked]))
"""


def run_setup(lesson: str, on_colab: bool) -> tuple[bool, list[str]]:
    """Run the released set-up cell; returns whether it succeeded, and the commands it asked for."""
    nb = nbformat.read(ROOT / "lessons" / lesson / f"{lesson}.ipynb", as_version=4)
    (cell,) = (c for c in nb.cells if "colab-setup" in tags(c))
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    if on_colab:
        environment["PYTHONPATH"] = str(ROOT / "tests" / "stubs")
    done = subprocess.run(
        [sys.executable, "-c", RUN_SETUP, json.dumps([cell.source, on_colab])],
        env=environment,
        cwd=Path(ROOT).anchor,
        capture_output=True,
        text=True,
        check=True,
    )
    success, asked = json.loads(done.stdout.splitlines()[-1])
    return success, asked


@pytest.mark.parametrize("lesson", written())
def test_the_set_up_cell_installs_the_project_at_its_tag_and_nothing_else(lesson: str) -> None:
    project = read_project()
    name = "decodelab[serve]" if lesson.startswith("lesson4") else "decodelab"
    requirement = f"{name} @ git+{project.repository}@v{project.version}"
    assert run_setup(lesson, on_colab=True) == (True, [f'%pip install -q "{requirement}"'])


@pytest.mark.parametrize("lesson", written())
def test_the_set_up_cell_does_nothing_elsewhere(lesson: str) -> None:
    assert run_setup(lesson, on_colab=False) == (True, [])


@pytest.mark.slow
def test_lessons_run_on_colab_s_notebook_stack() -> None:
    done = subprocess.run(
        ["bash", str(ROOT / "tests" / "colab_venv.sh")], capture_output=True, text=True
    )
    said = done.stdout + done.stderr
    if done.returncode == 77:
        pytest.skip(said.strip().splitlines()[-1])
    assert done.returncode == 0, said[-4000:]
