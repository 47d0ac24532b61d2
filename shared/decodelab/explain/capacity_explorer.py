"""Sliders, levers, any model on any device: what fits, against the baseline as given.

Core ipywidgets and one SVG string, as in decodelab.explain.explorers. What is said and drawn is
decided in decodelab.explain.capacity_view.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from html import escape

from ipywidgets import HTML, Dropdown, HBox, Layout, Textarea, ToggleButtons, VBox, Widget

from decodelab.explain.capacity_view import (
    BASELINE,
    Capacity,
    options,
    pull_all,
    read_config,
    served_on,
)
from decodelab.explain.explorers import Shown, number_row
from decodelab.explain.figures import Figure
from decodelab.predict import HARDWARE, SHAPES, Hardware, ModelShape
from decodelab.predict.deployment import LEVERS, Deployment

PASTED = "the pasted config.json"
NAMES = "130px"  # width of the names before the controls


class CapacityExplorer(Shown):
    """A Capacity with sliders, a row of buttons for each lever, and any model and device."""

    def __init__(
        self, given: Capacity, models: Mapping[str, ModelShape], batch: int, context: int
    ) -> None:
        self.given, self.capacity = given, given
        self.models, device = dict(models), given.baseline.hardware
        self.devices: dict[str, Hardware] = {device.name: device} | dict(HARDWARE)
        shown = next(name for name, shape in models.items() if shape == given.baseline.shape)
        self.model = _menu("Model", list(models), shown)
        self.device = _menu("Device", list(self.devices), device.name)
        self.config = Textarea(
            description="config.json",
            placeholder="Paste the config.json of any model here",
            layout=Layout(width="720px", height="60px"),
        )
        self.levers = {lever: ToggleButtons(style={"button_width": "auto"}) for lever in LEVERS}
        self._offer(given.baseline)
        low, high = given.contexts
        wide = {"log": True, "width": "240px"}
        batch_row, self.batch = number_row("Batch size", batch, 1, given.max_batch, 1, **wide)
        context_row, self.context = number_row("Context", context, low, high, 64, **wide)
        self.message, self.chart = HTML(), HTML()
        for widget in (self.model, self.config, self.batch, self.context):
            widget.style.description_width = NAMES
        rows = [_row(LEVERS[lever].label, buttons) for lever, buttons in self.levers.items()]
        top = [HBox([self.model, self.device]), self.config, *rows, batch_row, context_row]
        self.view = VBox([*top, self.message, self.chart])
        self.redraw()
        self.config.observe(self._paste, names="value")
        for chooser in (self.model, self.device, *self.levers.values()):
            chooser.observe(self._choose, names="value")
        for number in (self.batch, self.context):
            number.observe(self.redraw, names="value")

    def redraw(self, change: object = None) -> None:
        """Draw what the sliders say."""
        self.chart.value = self.capacity.html(self.batch.value, self.context.value)

    def figure(self) -> Figure:
        return self.capacity.figure(self.batch.value, self.context.value)

    def _choose(self, change: object = None) -> None:
        """Show what the choosers say; what can't be is said in words, and nothing else changes."""
        with self._refusing():
            given, model = self.given, self.models[self.model.value]
            baseline = served_on(given.baseline, model, self.devices[self.device.value])
            self._offer(baseline)
            if baseline != given.baseline:  # what was measured was measured there
                given = replace(given, kv_bandwidth=None, measured={})
            choices = {lever: buttons.value for lever, buttons in self.levers.items()}
            deployment = pull_all(baseline, choices)
            capacity = replace(given, baseline=baseline, deployment=deployment)
            self.chart.value = capacity.html(self.batch.value, self.context.value)
            self.capacity = capacity

    def _paste(self, change: Mapping) -> None:
        """Read what was pasted, and show that model."""
        if not change["new"].strip():
            self.message.value = ""
            return
        with self._refusing():
            self.models[PASTED] = read_config(change["new"])
            with _unheard(self.model, self._choose):
                self.model.options = list(self.models)
                self.model.value = PASTED
            self._choose()

    def _offer(self, baseline: Deployment) -> None:
        """Offer what each lever can do for `baseline`; a lever stays pulled where it can."""
        for lever, buttons in self.levers.items():
            offered, old = options(baseline, lever), buttons.value
            if tuple(offered) != buttons.options:
                with _unheard(buttons, self._choose):
                    buttons.options = offered
                    buttons.value = old if old in [value for _, value in offered] else BASELINE

    @contextmanager
    def _refusing(self) -> Iterator[None]:
        """Turn a ValueError into a sentence above the chart, which stays as it was."""
        try:
            self.message.value = ""
            yield
        except ValueError as error:
            self.message.value = (
                f'<p role="alert" style="max-width:720px;line-height:1.4"><b>{escape(str(error))}'
                "</b> The chart is as it was.</p>"
            )


def capacity_explorer(
    deployment: Deployment,
    *,
    models: Mapping[str, ModelShape] = SHAPES,
    batch: int = 8,
    context: int = 8192,
    **capacity: object,
) -> CapacityExplorer:
    """Build the explorer of what fits around `deployment`, its baseline; `display` shows it.

    `models` are offered by name, beside all of HARDWARE and the deployment's own device. For the
    rest (`kv_bandwidth`, `measured`, `contexts`, `max_batch`) see Capacity.
    """
    if deployment.shape not in models.values():
        models = {"this model": deployment.shape} | dict(models)
    given = Capacity(baseline=deployment, deployment=deployment, **capacity)
    return CapacityExplorer(given, models, batch, context)


@contextmanager
def _unheard(widget: Widget, handler: Callable) -> Iterator[None]:
    """Change `widget` without telling `handler`."""
    with suppress(ValueError):  # it was not listening yet
        widget.unobserve(handler, names="value")
    yield
    widget.observe(handler, names="value")


def _menu(name: str, choices: list[str], value: str) -> Dropdown:
    return Dropdown(options=choices, value=value, description=name, layout=Layout(width="360px"))


def _row(name: str, buttons: ToggleButtons) -> HBox:
    """A lever: its name, wrapped where it is long, before its buttons."""
    label = HTML(f'<div style="line-height:1.2;text-align:right">{escape(name)}</div>')
    label.layout = Layout(width=NAMES, align_self="center")
    return HBox([label, buttons], layout=Layout(margin="2px 0", max_width="720px"))
