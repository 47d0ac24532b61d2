"""Sliders over a surface of step times: the model's line through the student's own dots.

Core ipywidgets and one SVG string, so that it redraws within a blink, follows the theme, and
works in JupyterLab, Notebook, VS Code and Colab with nothing fetched. It measures nothing.
"""

from base64 import b64encode
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from html import escape
from math import log, log2

from IPython.display import display
from ipywidgets import HTML, BoundedIntText, HBox, IntSlider, Layout, VBox, link

from decodelab.explain.figures import Figure, batch_curve, step_bars
from decodelab.explain.paint_matplotlib import png
from decodelab.explain.paint_svg import paint_svg
from decodelab.explain.style import say

WIDGET_MIME = "application/vnd.jupyter.widget-view+json"


@dataclass(frozen=True, kw_only=True)
class Surface:
    """Step time in seconds over (batch, context): predicted everywhere, measured at some cells.

    `bound(batch, context)` is the roofline's seconds, `terms(batch, context)` the prediction's
    parts by name, `kv_bytes(batch, context)` the cache, `limit(context)` the largest batch that
    fits, `kv_bandwidth` the measured bytes/s at which a step reads caches. All callables are pure
    and fast: they run at each move of a slider.
    """

    predicted: Callable[[int, int], float]
    measured: Mapping[tuple[int, int], float]
    bound: Callable[[int, int], float] | None = None
    terms: Callable[[int, int], Mapping[str, float]] | None = None
    kv_bytes: Callable[[int, int], float] | None = None
    limit: Callable[[int], int] | None = None
    kv_bandwidth: float | None = None
    max_batch: int = 128
    contexts: tuple[int, int] = (64, 4096)

    def __post_init__(self) -> None:
        if self.max_batch < 2 or not 0 < self.contexts[0] < self.contexts[1]:
            raise ValueError(
                "the sliders need max_batch of 2 or more and contexts (low, high) that rise from "
                f"above 0, got max_batch={self.max_batch}, contexts={self.contexts}"
            )
        if self.fits(self.contexts[1]) < 1:
            raise ValueError(
                f"not one sequence fits in memory at context {self.contexts[1]}; give a smaller "
                "context as the end of `contexts`"
            )

    @cached_property
    def batches(self) -> list[int]:
        """Where the lines are drawn: about two points each doubling."""
        steps = range(int(2 * log(self.max_batch, 2)) + 1)
        return sorted({round(2 ** (i / 2)) for i in steps} | {self.max_batch})

    @cached_property
    def frame(self) -> list[tuple[int, float]]:
        """What stays in view at every slider position, as (batch, seconds)."""
        corners = [(b, c) for c in self.contexts for b in (1, self.fits(c))]
        functions = [f for f in (self.predicted, self.bound) if f]
        seen = [(b, f(b, c)) for f in functions for b, c in corners]
        return seen + [(b, s) for (b, _), s in self.measured.items() if b <= self.max_batch]

    def fits(self, context: int) -> int:
        """The largest batch to show at `context`."""
        return min(self.limit(context), self.max_batch) if self.limit else self.max_batch

    def measured_near(self, context: int) -> tuple[int, dict[int, float]]:
        """The measured context nearest in ratio, and its {batch: seconds}; 0 and {} if none."""
        if not self.measured:
            return 0, {}
        near = min({c for _, c in self.measured}, key=lambda c: abs(log(c / context)))
        return near, {b: s for (b, c), s in sorted(self.measured.items()) if c == near}

    def figure(self, batch: int, context: int) -> Figure:
        """The batch curve at `context`, with `batch` ringed."""
        near, dots = self.measured_near(context)
        fits = self.fits(context)
        batches = sorted({b for b in [*self.batches, batch, fits] if 1 <= b <= fits})
        lines = {
            name: {b: f(b, context) for b in batches}
            for name, f in (("predicted", self.predicted), ("bound", self.bound))
            if f
        }
        return batch_curve(
            **lines,
            measured={b: s for b, s in dots.items() if b <= self.max_batch},
            measured_name=f"measured, context {say(near)}",
            marker={batch: self.predicted(batch, context)} if batch <= fits else None,
            limit=fits if fits < self.max_batch else None,
            log_latency=True,
            frame=self.frame,
            title=self.claim(batch, context),
        )

    def claim(self, batch: int, context: int) -> str:
        """The prediction at one point, or that it does not fit, in a line."""
        where, fits = f"Batch {batch} at context {say(context)}", self.fits(context)
        if batch > fits:
            return f"{where} does not fit in memory: at most batch {fits} does"
        seconds = self.predicted(batch, context)
        return f"{where}: {say(batch / seconds)} tokens/s, {say(seconds * 1e3)} ms per token"

    def readout(self, batch: int, context: int) -> str:
        """Say the prediction at one point in words and numbers, and the nearest measurement."""
        if batch > self.fits(context):
            return f"{self.claim(batch, context)}."
        said = [f"Predicted for each user: {say(1 / self.predicted(batch, context))} tokens/s"]
        if self.terms:
            terms = self.terms(batch, context)
            largest = max(terms, key=terms.get)
            said.append(f"largest term: {largest}, {terms[largest] / sum(terms.values()):.0%}")
        if self.kv_bytes:
            said.append(f"KV cache {say(self.kv_bytes(batch, context) / 1e9)} GB")
        if self.kv_bandwidth:
            said.append(f"effective KV bandwidth {say(self.kv_bandwidth / 1e9)} GB/s")
        return "; ".join(said) + f". {self._nearest(batch, context)}"

    def _nearest(self, batch: int, context: int) -> str:
        context, dots = self.measured_near(context)
        if not dots:
            return "Nothing measured yet."
        batch = min(dots, key=lambda b: abs(log(b / batch)))
        ratio = self.predicted(batch, context) / dots[batch]
        return (
            f"Nearest measurement, batch {batch} at context {say(context)}: "
            f"{say(dots[batch] * 1e3)} ms; the prediction there is {ratio:.2f} of it."
        )

    def html(self, batch: int, context: int) -> str:
        """All that the explorer shows at one position of its sliders."""
        words = escape(self.readout(batch, context))
        parts = [
            f'<p role="status" style="max-width:720px;line-height:1.4">{words}</p>',
            paint_svg(self.figure(batch, context)),
        ]
        if self.terms and batch <= self.fits(context):
            bars = {f"B = {batch}": self.terms(batch, context)}
            parts.append(paint_svg(step_bars(predicted=bars, title="The terms of this step")))
        return "".join(parts)


class Shown:
    """A widget `view` that shows itself, with `figure()` as PNG for places without widgets."""

    view: VBox

    def figure(self) -> Figure:
        """The static twin: the same chart where the controls stand now."""
        raise NotImplementedError

    def _ipython_display_(self) -> None:
        # One display_data message, never an execute_result: Colab adds its widget manager's
        # address to display_data alone.
        figure = self.figure()
        bundle = {
            WIDGET_MIME: {"version_major": 2, "version_minor": 0, "model_id": self.view.model_id},
            "image/png": b64encode(png(figure)).decode(),
            "text/plain": figure.describe(),
        }
        display(bundle, raw=True)


class Explorer(Shown):
    """A Surface with two sliders."""

    def __init__(self, surface: Surface, batch: int, context: int) -> None:
        self.surface = surface
        low, high = surface.contexts
        batch_row, self.batch = number_row("Batch size", batch, 1, surface.max_batch, 1)
        context_row, self.context = number_row("Context", context, low, high, 64)
        self.chart = HTML()
        self.view = VBox([batch_row, context_row, self.chart])
        for number in (self.batch, self.context):
            number.observe(self.redraw, names="value")
        self.redraw()

    def redraw(self, change: object = None) -> None:
        """Draw what the sliders say."""
        self.chart.value = self.surface.html(self.batch.value, self.context.value)

    def figure(self) -> Figure:
        return self.surface.figure(self.batch.value, self.context.value)


def batch_context_explorer(
    predicted: Callable[[int, int], float],
    measured: Mapping[tuple[int, int], float],
    *,
    batch: int = 8,
    context: int = 512,
    **surface: object,
) -> Explorer:
    """Build the explorer of step time over batch size and context; `display` shows it.

    `predicted(batch, context)` and `measured[batch, context]` are seconds; for the rest
    (`bound`, `terms`, `kv_bytes`, `limit`, `max_batch`, `contexts`) see Surface.
    """
    return Explorer(Surface(predicted=predicted, measured=measured, **surface), batch, context)


def number_row(
    name: str,
    value: int,
    low: int,
    high: int,
    step: int,
    log: bool = False,
    width: str = "190px",
) -> tuple[HBox, BoundedIntText]:
    """A slider for the mouse beside a number box, which any keyboard reaches; they move as one.

    With `log`, equal ways on the slider are equal ratios, and the box holds what is in between.
    """
    wide = {"readout": False, "layout": Layout(width="420px")}
    box = BoundedIntText(
        value=value, min=low, max=high, step=step, description=name, layout=Layout(width=width)
    )
    if log:
        slider = _ratios(box, **wide)
    else:
        slider = IntSlider(value=box.value, min=low, max=high, step=step, **wide)
        link((slider, "value"), (box, "value"))
    return HBox([box, slider]), box


def _ratios(box: BoundedIntText, **look: object) -> IntSlider:
    """A slider over about eight values of `box` each doubling, multiples of its step."""
    notches = range(int(8 * log2(box.min)), int(8 * log2(box.max)) + 1)
    rounded = {round(2 ** (i / 8) / box.step) * box.step for i in notches}
    values = sorted({box.min, box.max, *(v for v in rounded if box.min < v < box.max)})

    def nearest() -> int:
        return min(range(len(values)), key=lambda i: abs(log(values[i] / box.value)))

    def follow(change: Mapping) -> None:
        if change["new"] != nearest():  # else the box moved first, to somewhere in between
            box.value = values[change["new"]]

    slider = IntSlider(value=nearest(), min=0, max=len(values) - 1, **look)
    slider.observe(follow, names="value")
    box.observe(lambda change: setattr(slider, "value", nearest()), names="value")
    return slider
