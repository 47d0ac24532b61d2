"""Fixtures for tests in a real browser; they skip where there is none, and fail in CI."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from lab import CHROMIUM, LabPage, LabServer, chromium

INSTALL = (
    "No Chromium found, so nothing was tested in a browser. Install it: `apt install chromium` "
    "(Debian, Ubuntu), or set CHROMIUM to the path of a Chromium or Google Chrome that you have."
)
HERE = Path(__file__).parent
ROOT = HERE.parents[1]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark each test here; keep them on one worker, since they share a server and two cores."""
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.browser)
            item.add_marker(pytest.mark.xdist_group("browser"))


@pytest.fixture(scope="module")
def browser():
    """A headless Chromium. Not for the session: while it lives, no test may use asyncio.run."""
    if CHROMIUM is None:
        (pytest.fail if os.environ.get("CI") else pytest.skip)(INSTALL)
    with chromium() as found:
        yield found


@pytest.fixture(scope="module")
def lab_server(tmp_path_factory: pytest.TempPathFactory, browser) -> Iterator[LabServer]:
    """A JupyterLab on an empty folder, `lab_server.folder`: put notebooks into it, then open."""
    folder = tmp_path_factory.mktemp("notebooks")
    server = LabServer(folder, tmp_path_factory.mktemp("jupyter"))
    yield server
    server.stop()


@pytest.fixture(scope="module")
def courseware(lab_server: LabServer) -> Path:
    """The start page, the released lessons and their sources, in the served folder."""
    for name in ("lessons", "solutions"):
        shutil.copytree(ROOT / name, lab_server.folder / name)
    return lab_server.folder


@pytest.fixture
def lab(lab_server: LabServer, browser) -> Iterator[LabPage]:
    """A fresh page on this module's JupyterLab."""
    context = browser.new_context(viewport={"width": 1280, "height": 1000})
    yield LabPage(context.new_page(), lab_server)
    context.close()
