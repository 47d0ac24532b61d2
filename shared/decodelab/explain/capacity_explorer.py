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
    notes_of,
    on_card,
    options,
    pull_all,
)
from decodelab.explain.explorers import Shown, number_row
from decodelab.explain.figures import Figure
from decodelab.explain.pasted_config import read_config
from decodelab.predict import HARDWARE, SHAPES, Hardware, ModelShape
from decodelab.predict.deployment import LEVERS, Deployment

PASTED = "the pasted config.json"
NAMES = "130px"  # width of the names before the controls
GREY = 0.35  # opacity of a chart that is not of what the choosers say


class CapacityExplorer(Shown):
    """A Capacity with sliders, a row of buttons for each lever, and any model and device."""

    def __init__(
        self,
        given: Capacity,
        cards: Deployment,
        models: Mapping[str, ModelShape],
        batch: int,
        context: int,
    ) -> None:
        self.given, self.cards, self.capacity = given, cards, given
        self.models, device = dict(models), given.baseline.hardware
        self.shipped: str | None = None  # the format of the pasted model's weights, where known
        own = {device.name: device}  # first, and never the table's of the same name
        self.devices: dict[str, Hardware] = own | dict(HARDWARE) | own
        model = next(name for name, shape in models.items() if shape == given.baseline.shape)
        self.shown, self.refused = (model, device.name), False
        self.model = _menu("Model", list(models), model)
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
        """Draw what the sliders say; grey, where the choosers say what can't be."""
        drawn = self.capacity.html(self.batch.value, self.context.value)
        self.chart.value = f'<div style="opacity:{GREY}">{drawn}</div>' if self.refused else drawn

    def figure(self) -> Figure:
        return self.capacity.figure(self.batch.value, self.context.value)

    def _choose(self, change: object = None) -> None:
        """Show what the choosers say; what can't be is said in words, and the old chart is grey."""
        try:
            capacity = self._chosen()
            self.chart.value = capacity.html(self.batch.value, self.context.value)
        except ValueError as error:
            self.refused = True
            self._say(error)
            self.redraw()
        else:
            self.capacity, self.refused = capacity, False
            self.shown = self.model.value, self.device.value
            self.message.value = ""

    def _chosen(self) -> Capacity:
        """What the choosers say; ValueError where that can't be shown."""
        given, baseline = self.given, self._baseline()
        self._offer(baseline)
        if baseline != given.baseline:  # what was measured was measured there
            given = replace(given, kv_bandwidth=None, measured={})
        choices = {lever: buttons.value for lever, buttons in self.levers.items()}
        deployment = pull_all(baseline, choices)
        return replace(given, baseline=baseline, deployment=deployment, notes=notes_of(choices))

    def _baseline(self) -> Deployment:
        """The model on the device, each as chosen: as given on the device as given, else a card."""
        given, shape = self.given.baseline, self.models[self.model.value]
        device = self.devices[self.device.value]
        if device == given.hardware:
            baseline = replace(given, shape=shape)
        else:
            baseline = on_card(self.cards, shape, device)
        shipped = self.shipped if self.model.value == PASTED else None
        return replace(baseline, weight_format=shipped or baseline.weight_format)

    def _paste(self, change: Mapping) -> None:
        """Read what was pasted, and show that model."""
        if change["new"].strip():
            try:
                self.models[PASTED], self.shipped = read_config(change["new"])
            except ValueError as error:
                self._say(error)
                return
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

    def _say(self, error: ValueError) -> None:
        """Say above the chart what can't be shown, and what still is."""
        model, device = self.shown
        self.message.value = (
            f'<p role="alert" style="max-width:720px;line-height:1.4"><b>{escape(str(error))}'
            f"</b> The chart still shows {escape(model)} on {escape(device)}.</p>"
        )


def capacity_explorer(
    deployment: Deployment,
    *,
    cards: Deployment | None = None,
    models: Mapping[str, ModelShape] = SHAPES,
    batch: int = 8,
    context: int = 8192,
    **capacity: object,
) -> CapacityExplorer:
    """Build the explorer of what fits around `deployment`, its baseline; `display` shows it.

    `models` are offered by name, beside all of HARDWARE and the deployment's own device. On any
    other device a model is served as `cards` is (utilization, activations, formats; its model and
    device play no part), by default as vLLM serves unless told otherwise. For the rest
    (`kv_bandwidth`, `measured`, `contexts`, `max_batch`) see Capacity.
    """
    if deployment.shape not in models.values():
        models = {"this model": deployment.shape} | dict(models)
    given = Capacity(baseline=deployment, deployment=deployment, **capacity)
    cards = cards or Deployment(shape=deployment.shape, hardware=deployment.hardware)
    return CapacityExplorer(given, cards, models, batch, context)


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
