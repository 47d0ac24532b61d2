"""Sliders over price, utilization, batch and context: what a million output tokens cost.

Core ipywidgets and one SVG string, as in decodelab.explain.explorers. What is said and drawn is
decided in decodelab.explain.cost_view.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace

from ipywidgets import HTML, BoundedFloatText, Dropdown, FloatLogSlider, HBox, Layout, VBox, link

from decodelab.explain.capacity_view import on_card
from decodelab.explain.cost_figures import dollars
from decodelab.explain.cost_view import Cost
from decodelab.explain.explorers import Shown, number_row
from decodelab.explain.figures import Figure
from decodelab.predict import HARDWARE, SHAPES, Deployment, GPUPrice, ModelShape, gpu_prices

NAMES = "130px"  # width of the names before the controls


class CostExplorer(Shown):
    """A Cost with four sliders, and any model on any device at the price it is listed for."""

    def __init__(
        self, given: Cost, cards: Deployment, models: Mapping[str, ModelShape], *start: int
    ) -> None:
        self.given, self.cards, self.cost, self.note = given, cards, given, ""
        self.models, own = dict(models), given.deployment.hardware
        self.devices = {own.name: own} | dict(HARDWARE) | {own.name: own}
        name = next(name for name, shape in models.items() if shape == given.deployment.shape)
        self.model = _menu("Model", models, name)
        self.device = _menu("Device", self.devices, own.name)
        utilization, batch, context = start
        price_row, self.price = _price_row(given.usd_per_gpu_hour)
        wide, log = {"width": "240px"}, {"log": True, "width": "240px"}
        share_row, self.share = number_row("Utilization, %", utilization, 1, 100, 1, **wide)
        batch_row, self.batch = number_row("Batch size", batch, 1, given.max_batch, 1, **log)
        context_row, self.context = number_row("Context", context, *given.contexts, 64, **log)
        self.chart, numbers = HTML(), (self.price, self.share, self.batch, self.context)
        for widget in (self.model, *numbers):
            widget.style.description_width = NAMES
        choosers = HBox([self.model, self.device])
        rows = [choosers, price_row, share_row, batch_row, context_row]
        self.view = VBox([*rows, self.chart])
        self.redraw()
        self.model.observe(self._choose, names="value")
        self.device.observe(self._choose, names="value")
        for number in numbers:
            number.observe(self.redraw, names="value")

    @property
    def point(self) -> tuple[float, float, int, int]:
        """Where the sliders stand: $ per GPU and hour, utilization of 1, batch, context."""
        return self.price.value, self.share.value / 100, self.batch.value, self.context.value

    def redraw(self, change: object = None) -> None:
        """Draw what the sliders say."""
        self.chart.value = self.cost.html(*self.point, note=self.note)

    def figure(self) -> Figure:
        return self.cost.figure(*self.point)

    def _choose(self, change: Mapping) -> None:
        """Show the model on the device; what was measured is shown only where it was measured."""
        given, device = self.given.deployment, self.devices[self.device.value]
        shape = self.models[self.model.value]
        if (shape, device) == (given.shape, given.hardware):
            self.cost = self.given
        else:
            own = replace(given, shape=shape)
            moved = own if device == given.hardware else on_card(self.cards, shape, device)
            self.cost = replace(self.given, deployment=moved, measured={}, predicted=None)
        if change["owner"] is self.device:
            usd, self.note = self._listed(device.name)
            self.cost = replace(self.cost, usd_per_gpu_hour=usd)
            self.price.value = usd
        self.redraw()

    def _listed(self, device: str) -> tuple[float, str]:
        """The price of a device and a sentence on it: as given, as listed, or as it stands."""
        if device == self.given.deployment.hardware.name:
            return self.given.usd_per_gpu_hour, ""
        if offer := cheapest_offer(device):
            usd = offer.usd_per_gpu_hour
            said = (
                f"{dollars(usd)} an hour for a GPU: {offer.provider}, {offer.kind}, {offer.as_of}."
            )
            return usd, said
        return self.price.value, f"No price is listed for {device}: the one shown is yours to set."


def cost_explorer(
    deployment: Deployment,
    *,
    usd_per_gpu_hour: float | None = None,
    cards: Deployment | None = None,
    models: Mapping[str, ModelShape] = SHAPES,
    utilization: float = 0.5,
    batch: int = 8,
    context: int = 2048,
    **cost: object,
) -> CostExplorer:
    """Build the explorer of what tokens cost around `deployment`; `display` shows it.

    Without `usd_per_gpu_hour`, the cheapest listed offer of its device, or $1. `models` and `cards`
    as in `capacity_explorer`. For the rest (`measured`, `predicted`, `tpot_slo`, `prices`,
    `contexts`, `max_batch`) see Cost.
    """
    if deployment.shape not in models.values():
        models = {"this model": deployment.shape} | dict(models)
    if usd_per_gpu_hour is None:
        offer = cheapest_offer(deployment.hardware.name)
        usd_per_gpu_hour = offer.usd_per_gpu_hour if offer else 1.0
    given = Cost(deployment=deployment, usd_per_gpu_hour=usd_per_gpu_hour, **cost)
    cards = cards or Deployment(shape=deployment.shape, hardware=deployment.hardware)
    return CostExplorer(given, cards, models, round(100 * utilization), batch, context)


def cheapest_offer(device: str) -> GPUPrice | None:
    """The cheapest listed: on demand if there is one, as spot machines are taken away at will."""
    offers = gpu_prices(device)
    return next((offer for offer in offers if offer.kind == "on-demand"), next(iter(offers), None))


def _menu(name: str, choices: Iterable[str], value: str) -> Dropdown:
    layout = Layout(width="360px")
    return Dropdown(options=list(choices), value=value, description=name, layout=layout)


def _price_row(usd: float) -> tuple[HBox, BoundedFloatText]:
    """A slider over cents to a hundred dollars beside a number box, as `number_row`."""
    box = BoundedFloatText(
        value=usd,
        min=0.01,
        max=100,
        step=0.05,
        description="$ per GPU-hour",
        layout={"width": "240px"},
    )
    slider = FloatLogSlider(
        value=box.value, min=-2, max=2, step=0.02, readout=False, layout=Layout(width="420px")
    )
    link((slider, "value"), (box, "value"), (lambda usd: float(f"{usd:.3g}"), float))
    return HBox([box, slider]), box
