"""Drive a real JupyterLab with a real Chromium, for tests, benchmarks and pictures.

`LabServer` runs `jupyter lab` on a copy of a folder with settings of its own; `LabPage` is one
open notebook: run it, read it, move its sliders. Needs playwright's Python and a Chromium.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import urlopen

from playwright.sync_api import Browser, Locator, Page, expect, sync_playwright

SHOTS = Path(__file__).parent / "shots"
CHROMIUM = os.environ.get("CHROMIUM") or next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
ARGS = [
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
    "--disable-background-networking", "--disable-component-update",
]  # fmt: skip
THEMES = {"light": "JupyterLab Light", "dark": "JupyterLab Dark"}
SETTINGS = Path(__file__).parents[2] / "shared" / "jupyter" / "overrides.json"  # as `make lab` has
# In the page: note when keys go down and when the chart's DOM changes.
WATCH = """() => {
  const chart = document.querySelector('.widget-html svg').closest('.widget-html');
  window.changes = [];
  window.watchedSince = performance.now();
  window.watcher?.disconnect();
  window.watcher = new MutationObserver(() => window.changes.push(performance.now()));
  window.watcher.observe(chart, {childList: true, subtree: true, characterData: true});
  window.pressed = [];
  window.addEventListener('keydown', () => window.pressed.push(performance.now()), true);
}"""


CONTRAST = """element => {
  const canvas = document.createElement('canvas').getContext('2d');
  const light = css => {
    canvas.clearRect(0, 0, 1, 1); canvas.fillStyle = css; canvas.fillRect(0, 0, 1, 1);
    const [r, g, b, alpha] = canvas.getImageData(0, 0, 1, 1).data;
    const part = v => (v /= 255) <= .04045 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4;
    return alpha ? .2126 * part(r) + .7152 * part(g) + .0722 * part(b) + .05 : null;
  };
  const style = getComputedStyle(element);
  const ink = light(element.closest('svg') ? style.fill : style.color);
  let ground = null;
  for (let e = element; e && ground === null; e = e.parentElement)
    ground = light(getComputedStyle(e).backgroundColor);
  return Math.max(ink / ground, ground / ink);
}"""


class LabServer:
    """A `jupyter lab` of its own on a free loopback port, without token, news or your settings."""

    def __init__(self, folder: Path, home: Path) -> None:
        """Serve `folder` (already a copy); configuration and logs live in `home`."""
        for plugin, values in json.loads(SETTINGS.read_text(encoding="utf-8")).items():
            package, name = plugin.split(":")
            folder_of = home / "settings" / package
            folder_of.mkdir(parents=True, exist_ok=True)
            (folder_of / f"{name}.jupyterlab-settings").write_text(json.dumps(values))
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        self.folder = folder
        names = ("CONFIG_DIR", "DATA_DIR", "RUNTIME_DIR")
        paths = {f"JUPYTER_{name}": str(home / name) for name in names} | {
            "JUPYTERLAB_SETTINGS_DIR": str(home / "settings"),
            "JUPYTERLAB_WORKSPACES_DIR": str(home / "workspaces"),
            "IPYTHONDIR": str(home / "ipython"),
        }
        command = [
            sys.executable, "-m", "jupyter", "lab", "--no-browser", "--ip=127.0.0.1",
            f"--port={port}", "--ServerApp.port_retries=0", "--IdentityProvider.token=",
            "--LabApp.expose_app_in_browser=True",
            "--JupyterNotebookApp.expose_app_in_browser=True",
            f"--ServerApp.root_dir={folder}",
            "--allow-root",
        ]  # fmt: skip
        self.log = home / "jupyter.log"
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                command, env=os.environ | paths, stdout=log, stderr=subprocess.STDOUT
            )
        self._wait(60)

    def _wait(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end and self.process.poll() is None:
            try:
                urlopen(f"{self.url}/api", timeout=2).close()
                return
            except OSError:
                time.sleep(0.2)
        self.stop()
        raise RuntimeError(f"jupyter lab did not start within {seconds} s:\n{self.log.read_text()}")

    def stop(self) -> None:
        """Stop the server and its kernels."""
        self.process.terminate()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


@dataclass
class Cell:
    """What one code cell shows: its text, the kinds of its outputs, and its error if any."""

    text: str
    error: str | None
    mimes: set[str] = field(default_factory=set)


class LabPage:
    """One notebook open in JupyterLab, or in Notebook 7 with `app="notebooks"`."""

    def __init__(self, page: Page, server: LabServer) -> None:
        self.page, self.server = page, server
        self.requests: list[str] = []
        page.on("request", lambda request: self.requests.append(request.url))
        page.on("websocket", lambda socket: self.requests.append(socket.url))

    def open(self, path: str, app: str = "lab/tree", timeout: float = 90) -> None:
        """Open the notebook at `path` in the served folder and wait for its kernel."""
        self.page.goto(f"{self.server.url}/{app}/{path}?reset")
        self.page.wait_for_function(
            "() => window.jupyterapp?.shell.currentWidget?.sessionContext?.session?.kernel?"
            ".status === 'idle'",
            timeout=timeout * 1000,
        )

    def command(self, name: str, **args: object) -> None:
        """Run a JupyterLab command and wait until it is done."""
        self.page.evaluate(
            "([name, args]) => jupyterapp.commands.execute(name, args).then(() => null)",
            [name, args],
        )

    def run_all(self, timeout: float = 300) -> None:
        """Choose Run > Run All Cells, and wait until every code cell has run."""
        self.page.get_by_role("menuitem", name="Run", exact=True).click()
        self.page.get_by_role("menuitem", name="Run All Cells", exact=True).click()
        self.page.wait_for_function(
            """() => {
              const panel = jupyterapp.shell.currentWidget;
              const code = [...panel.content.model.cells].filter(c => c.type === 'code');
              const written = code.filter(c => c.sharedModel.getSource().trim());
              return written.every(c => c.executionState !== 'running' && c.executionCount)
                && panel.sessionContext.session.kernel.status === 'idle';
            }""",
            timeout=timeout * 1000,
            polling=250,
        )

    def cells(self) -> list[Cell]:
        """The code cells of the notebook as they stand, read from its model."""
        raw = self.page.evaluate(
            """() => [...jupyterapp.shell.currentWidget.content.model.cells]
                 .filter(c => c.type === 'code').map(c => c.outputs.toJSON())"""
        )
        return [_cell(outputs) for outputs in raw]

    def index(self, cell_id: str) -> int:
        """Which code cell, from 0, has this id."""
        code = [c for c in self.source()["cells"] if c["cell_type"] == "code"]
        return [c["id"] for c in code].index(cell_id)

    def run_to_error(self, cell_id: str, timeout: float = 120) -> str:
        """Run all cells; returns the error at this one, once it's there, as a reader sees it."""
        self.command("notebook:run-all-cells")
        index = self.index(cell_id)
        self.page.wait_for_function(
            """index => [...jupyterapp.shell.currentWidget.content.model.cells]
                 .filter(c => c.type === 'code')[index].outputs.toJSON()
                 .some(o => o.output_type === 'error')""",
            arg=index,
            timeout=timeout * 1000,
        )
        return self.output(index).inner_text()

    def errors(self) -> list[str]:
        """The error of each cell that failed."""
        return [cell.error for cell in self.cells() if cell.error]

    def source(self) -> dict:
        """The notebook as it would be saved."""
        return self.page.evaluate("() => jupyterapp.shell.currentWidget.content.model.toJSON()")

    def save(self) -> Path:
        """Save the notebook; returns its file."""
        self.command("docmanager:save")
        path = self.page.evaluate("() => jupyterapp.shell.currentWidget.context.path")
        return self.server.folder / path

    def theme(self, name: str) -> None:
        """Switch to the "light" or "dark" theme."""
        self.command("apputils:change-theme", theme=THEMES[name])
        light = str(name == "light").lower()
        self.page.wait_for_selector(f"body[data-jp-theme-light='{light}']", state="attached")

    def screenshot(self, name: str, of: Locator | None = None) -> Path:
        """Save what is on screen, or one element scrolled into view, as shots/NAME.png."""
        SHOTS.mkdir(exist_ok=True)
        path = SHOTS / f"{name}.png"
        (of or self.page).screenshot(path=path)
        return path

    def output(self, index: int) -> Locator:
        """The outputs of code cell `index` (from 0), scrolled into view; off screen, none exist."""
        self.page.evaluate(
            """index => {
              const content = jupyterapp.shell.currentWidget.content;
              const cell = content.widgets.filter(w => w.model.type === 'code')[index];
              document.querySelectorAll('[data-shown]').forEach(e => delete e.dataset.shown);
              cell.outputArea.node.dataset.shown = 'yes';
              return content.scrollToItem(content.widgets.indexOf(cell), 'start');
            }""",
            index,
        )
        found = self.page.locator("[data-shown='yes']")
        for _ in range(2):  # cells that come into view change their height and move the rest
            found.wait_for()
            found.evaluate("e => e.closest('.jp-Cell').scrollIntoView({block: 'start'})")
            self.page.wait_for_timeout(300)
        return found

    def contrast(self, of: Locator) -> float:
        """Ratio of luminances of an element and the first ground behind it."""
        return of.evaluate(CONTRAST)

    def foreign_requests(self) -> list[str]:
        """Every address asked for that is not on this machine."""
        local = {"127.0.0.1", "localhost", None}
        return [u for u in self.requests if urlsplit(u).hostname not in local]

    # Sliders, by the name written before them

    def number(self, name: str) -> Locator:
        """The number box called `name`."""
        return self.page.get_by_label(name, exact=True).first

    def handle(self, name: str) -> Locator:
        """The slider handle in the row of the number box `name`."""
        row = self.page.locator(".widget-hbox", has=self.page.get_by_label(name, exact=True))
        return row.first.locator(".noUi-handle")

    def value(self, name: str) -> int:
        """What the number box called `name` reads."""
        return int(self.number(name).input_value())

    def wait_for_value(self, name: str, value: int, timeout: float = 10) -> None:
        """Wait until the number box called `name` reads `value`."""
        expect(self.number(name)).to_have_value(str(value), timeout=timeout * 1000)

    def chart(self) -> str:
        """What the explorer's chart says of itself: its text alternative, numbers included."""
        return self.page.locator(".widget-html svg").first.get_attribute("aria-label")

    def press(self, target: Locator, key: str, times: int = 1) -> None:
        """Focus `target` and press `key`, waiting after each press until the chart has changed."""
        target.focus()
        for _ in range(times):
            before = self.chart()
            self.page.keyboard.press(key)
            self.chart_changed(before)

    def drag(self, name: str, across: float) -> None:
        """Drag the handle of slider `name` by `across` pixels, in ten moves."""
        box = self.handle(name).bounding_box()
        x, y = box["x"] + box["width"] / 2, box["y"] + box["height"] / 2
        self.page.mouse.move(x, y)
        self.page.mouse.down()
        for step in range(1, 11):
            self.page.mouse.move(x + across * step / 10, y)
        self.page.mouse.up()
        self.settle()

    def settle(self, quiet: float = 0.5) -> None:
        """Wait until the chart has not changed for `quiet` seconds: a drag redraws many times."""
        self.page.evaluate(WATCH)
        self.page.wait_for_function(
            "quiet => performance.now() - (changes.at(-1) ?? watchedSince) > quiet",
            arg=quiet * 1000,
            timeout=20_000,
        )

    def chart_changed(self, before: str, timeout: float = 10) -> str:
        """Wait until the chart's text alternative differs from `before`; returns the new one."""
        self.page.wait_for_function(
            "before => document.querySelector('.widget-html svg')?.ariaLabel !== before",
            arg=before,
            timeout=timeout * 1000,
        )
        return self.chart()

    def latencies(self, target: Locator, key: str, times: int) -> list[float]:
        """Milliseconds from each press of `key` to the chart's next change in the DOM."""
        target.focus()
        self.page.evaluate(WATCH)
        found = []
        for _ in range(times):
            self.page.evaluate("() => { changes.length = 0; pressed.length = 0 }")
            self.page.keyboard.press(key)
            self.page.wait_for_function("() => changes.length > 0", timeout=10_000)
            found.append(self.page.evaluate("() => changes[0] - pressed[0]"))
            self.page.wait_for_timeout(60)
        return found


def _cell(outputs: list[dict]) -> Cell:
    text, error, mimes = [], None, set()
    for output in outputs:
        text.append("".join(output.get("text", "")))
        text.append("".join(output.get("data", {}).get("text/plain", "")))
        mimes |= set(output.get("data", {}))
        if output["output_type"] == "error":
            error = f"{output['ename']}: {output['evalue']}"
    return Cell(text="\n".join(filter(None, text)), error=error, mimes=mimes)


@contextmanager
def chromium() -> Iterator[Browser]:
    """A headless Chromium."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=ARGS)
        yield browser
        browser.close()


@contextmanager
def lab_page(folder: Path, home: Path, width: int = 1280, height: int = 1000) -> Iterator[LabPage]:
    """A LabPage on a server of its own for `folder`; `home` is an empty folder for its settings."""
    server = LabServer(folder, home)
    try:
        with chromium() as browser:
            page = browser.new_page(viewport={"width": width, "height": height})
            yield LabPage(page, server)
    finally:
        server.stop()


def median(milliseconds: list[float]) -> str:
    """Say the median and the largest."""
    middle = statistics.median(milliseconds)
    return f"median {middle:.0f} ms, largest {max(milliseconds):.0f} ms of {len(milliseconds)}"
