"""The rules of the house: which wing may import what, and that one project says one thing."""

import ast
import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[1]
LIBRARY = ROOT / "shared" / "decodelab"
# What each wing may import beside the standard library. decodelab.X stands for the wing X.
ALLOWED = {
    "predict": {"decodelab.predict"},
    "serve": {"decodelab", "decodelab.serve", "decodelab.predict"},
    "measure": {
        "decodelab.measure", "decodelab.serve", "decodelab.predict", "torch", "numpy",
        "safetensors", "gguf", "huggingface_hub", "jinja2",
    },
}  # fmt: skip
# The extra `serve`: for the endpoint and its clients, which `import decodelab.serve` doesn't load.
ENDPOINT = {
    "aiohttp", "fastapi", "prometheus_client", "pydantic", "starlette", "tqdm", "uvicorn",
}  # fmt: skip
MODULES = sorted(LIBRARY.rglob("*.py"))


def imports(path: Path) -> list[tuple[str, bool]]:
    """Every absolute module name that a file imports, and whether inside a function."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    lazy = {
        id(node)
        for owner in ast.walk(tree)
        if isinstance(owner, ast.FunctionDef)
        for node in ast.walk(owner)
    }
    names = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names += [(alias.name, id(node) in lazy) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            package = ".".join(path.relative_to(LIBRARY.parent).parent.parts)
            module = f"{package}.{node.module or ''}".rstrip(".") if node.level else node.module
            names.append((module, id(node) in lazy))
    return names


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(LIBRARY)))
def test_imports_point_one_way(path):
    wing = path.relative_to(LIBRARY).parts[0]
    if wing not in ALLOWED:
        return
    for name, lazy in imports(path):
        root = ".".join(name.split(".")[:2]) if name.startswith("decodelab") else name.split(".")[0]
        if root in sys.stdlib_module_names or (wing == "serve" and root in ENDPOINT):
            continue
        assert root in ALLOWED[wing], f"{path.name} imports {name}"
        if root in {"safetensors", "gguf", "huggingface_hub", "jinja2"}:
            assert lazy, f"{path.name} must import {name} only where it is used"


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(LIBRARY)))
def test_modules_are_short_and_have_no_star_import_or_global(path):
    text = path.read_text(encoding="utf-8")
    assert text.count("\n") <= 310, "split it"
    for node in ast.walk(ast.parse(text)):
        assert not isinstance(node, ast.Global)
        if isinstance(node, ast.ImportFrom):
            assert all(alias.name != "*" for alias in node.names)
        if isinstance(node, ast.FunctionDef):
            assert node.end_lineno - node.lineno <= 60, f"{node.name} is longer than a screen"


@pytest.mark.parametrize(
    ("module", "absent"),
    [
        ("decodelab", {"torch", "numpy", "matplotlib", "ipywidgets", "plotly"}),
        ("decodelab.predict", {"torch", "numpy", "matplotlib", "ipywidgets", "plotly"}),
        ("decodelab.serve", {"torch", "numpy", "matplotlib", "ipywidgets", "plotly", *ENDPOINT}),
        ("decodelab.measure", {"matplotlib", "ipywidgets", "plotly", "transformers", "IPython"}),
    ],
)
def test_a_wing_loads_nothing_that_it_does_not_need(module, absent):
    code = f"import sys, json, {module}; print(json.dumps(sorted(sys.modules)))"
    loaded = json.loads(subprocess.run([sys.executable, "-c", code], capture_output=True).stdout)
    assert module in loaded
    assert not absent & set(loaded)


def test_environment_yml_agrees_with_pyproject():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    environment = yaml.safe_load((ROOT / "environment.yml").read_text())
    assert environment["channels"] == ["conda-forge"]
    plain = [d for d in environment["dependencies"] if isinstance(d, str)]
    assert f"python{project['requires-python']}" in plain
    for wanted in plain:
        assert wanted.count("=") - wanted.count(">=") - wanted.count("<=") < 2, "no build strings"
        if not wanted.startswith(("python", "pip")):
            assert wanted in project["optional-dependencies"]["lab"]
    pip = next(d["pip"] for d in environment["dependencies"] if isinstance(d, dict))
    assert pip == ["-e .[lab,serve]"]


def test_every_dependency_is_pinned_and_inside_its_bounds():
    from packaging.requirements import Requirement

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = (ROOT / "constraints.txt").read_text().split()
    pins = {re.sub(r"[-_.]+", "-", n).lower(): v for n, v in (line.split("==") for line in lines)}
    extras = project["optional-dependencies"].values()
    for text in [*project["dependencies"], *(t for extra in extras for t in extra)]:
        wanted = Requirement(text)
        if wanted.name != "decodelab":
            assert wanted.specifier.contains(pins[wanted.name.lower()]), text


def test_one_version_everywhere():
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert f'__version__ = "{version}"' in (LIBRARY / "__init__.py").read_text()
    assert f"version: {version}" in (ROOT / "CITATION.cff").read_text()
    assert f"## {version}" in (ROOT / "CHANGELOG.md").read_text()
