"""The course's figures: each function turns plain numbers into a Figure that shows itself.

A figure is a PNG, the roofline also a plotly figure with hover; `describe()` says it in words.
Step times come in as {batch size: seconds}, so no figure needs a model or a device.
"""

from base64 import b64encode
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec

from decodelab.explain.chart import Axis, Chart, Panel, Rule, Series
from decodelab.explain.paint_matplotlib import png
from decodelab.explain.paint_plotly import paint_plotly
from decodelab.explain.style import say
from decodelab.predict import crossover_batch, linear_intensity, usd_per_million_tokens

Steps = Mapping[int, float]  # {batch size: seconds of one decode step}
BATCH = {"quantity": "batch size", "unit": "sequences"}
PLOTLY_MIME = "application/vnd.plotly.v1+json"


@dataclass(frozen=True, kw_only=True)
class Figure(Chart):
    """A Chart that a notebook can show: one output that holds PNG and words, plotly with `hover`.

    Hover has a price: once the mouse meets the figure, plotly's own picture of some 50 kB takes
    the PNG's place in the saved notebook. `dataclasses.replace(figure, hover=True)` pays it.
    """

    hover: bool = False

    def _repr_mimebundle_(self, include: object = None, exclude: object = None) -> tuple:
        words = self.describe()
        bundle = {"text/plain": words, "image/png": b64encode(png(self)).decode()}
        if self.hover and find_spec("plotly"):
            bundle[PLOTLY_MIME] = paint_plotly(self)
        return bundle, {"image/png": {"alt": words}}


def roofline(
    *,
    flops: float,
    bandwidth: float,
    measured: Mapping[str, tuple[float, float]] | None = None,
    predicted: Mapping[str, float] | None = None,
    title: str = "Left of the ridge, memory sets the speed; right of it, arithmetic does",
) -> Figure:
    """Draw the roof min(peak, bandwidth x intensity), in FLOP/s against FLOP/byte, log-log.

    `measured` puts {label: (intensity, FLOP/s)} where it was; `predicted` puts {label: intensity}
    on the roof. `flops` in FLOP/s, `bandwidth` in bytes/s.
    """
    scale, unit = (1e12, "TFLOP/s") if flops >= 1e12 else (1e9, "GFLOP/s")
    ridge = flops / bandwidth
    measured, predicted = measured or {}, predicted or {}
    seen = [x for x, _ in measured.values()] + list(predicted.values())
    ends = min([ridge / 10, *seen]) / 2, max([ridge, *seen]) * 12  # room for labels on the right
    roof = lambda x: min(flops, bandwidth * x) / scale  # noqa: E731
    corners = (ends[0], ridge, ends[1])
    series = [Series(name="roof", x=corners, y=tuple(map(roof, corners)))]
    if predicted:
        x = tuple(predicted.values())
        y, labels = tuple(map(roof, x)), tuple(predicted)
        series.append(Series(name="predicted", x=x, y=y, kind="dots", labels=labels))
    if measured:
        x, y = zip(*measured.values(), strict=True)
        y = tuple(v / scale for v in y)
        more = {"kind": "dots", "role": "measurement", "labels": tuple(measured)}
        series.append(Series(name="measured", x=x, y=y, **more))
    lowest = min(v for s in series for v in s.y) / 2  # room for a label below
    panel = Panel(
        y=Axis(quantity="speed", unit=unit, log=10, include=(lowest,)),
        series=tuple(series),
        rules=(Rule(at=ridge, label=f"ridge {say(ridge)}"),),
    )
    x = Axis(quantity="arithmetic intensity", unit="FLOP/byte", log=10)
    return Figure(title=title, x=x, panels=(panel,), hover=True)


def batch_curve(
    *,
    predicted: Steps | None = None,
    measured: Steps | None = None,
    bound: Steps | None = None,
    marker: Steps | None = None,
    limit: int | None = None,
    log: bool = True,
    log_latency: bool = False,
    frame: Iterable[tuple[int, float]] = (),
    measured_name: str = "measured",
    title: str | None = None,
) -> Figure:
    """Draw throughput (tokens/s, all users) and time per token (ms, each user) against batch size.

    `bound` is the roofline's, `marker` a point to ring, `limit` the largest batch that fits in
    memory, `frame` (batch, seconds) pairs to keep in view. `log` is for batch and throughput.
    """
    rows = [
        ("roofline bound", bound, "line", "bound"),
        ("predicted", predicted, "line", "prediction"),
        (measured_name, measured, "dots", "measurement"),
        *[(f"batch {batch}", marker, "dots", "marker") for batch in marker or ()],
    ]
    limits = (Rule(at=limit, label="out of memory beyond", role="breach"),) if limit else ()
    views = (
        ("throughput, all users", "tokens/s", 10 if log else 0, _throughput),
        ("time per token, each user", "ms", 10 if log_latency else 0, lambda b, s: s * 1e3),
    )
    panels = []
    for quantity, unit, scale, convert in views:
        keep = tuple(convert(b, s) for b, s in frame)
        y = Axis(quantity=quantity, unit=unit, log=scale, include=keep)
        panels.append(Panel(y=y, series=_steps(rows, convert), rules=limits, tall=165))
    x = Axis(**BATCH, log=2 if log else 0, include=tuple(b for b, _ in frame))
    return Figure(title=title or _gain(measured or predicted), x=x, panels=tuple(panels))


def step_bars(
    *,
    predicted: Mapping[str, Mapping[str, float]],
    measured: Mapping[str, float] | None = None,
    title: str | None = None,
) -> Figure:
    """Draw one stacked bar a row: {row: {term: seconds}}, with {row: measured seconds} as dots.

    Terms are weights, KV, arithmetic, overhead (in seconds; drawn in ms).
    """
    rows, terms = tuple(predicted), dict.fromkeys(t for bar in predicted.values() for t in bar)
    numbers = tuple(map(float, range(len(rows))))
    bars = [
        Series(
            name=term,
            x=tuple(predicted[row].get(term, 0.0) * 1e3 for row in rows),
            y=numbers,
            kind="bar",
            role=term,
        )
        for term in terms
    ]
    if found := {row: s for row, s in (measured or {}).items() if row in predicted}:
        x, y = tuple(s * 1e3 for s in found.values()), tuple(float(rows.index(r)) for r in found)
        bars.append(Series(name="measured", x=x, y=y, kind="dots", role="measurement"))
    panel = Panel(y=Axis(quantity="", categories=rows), series=tuple(bars))
    largest = [f"{max(bar, key=bar.get)} at {row}" for row, bar in predicted.items()]
    title = title or f"The largest term: {', '.join(largest)}"
    return Figure(title=title, x=Axis(quantity="step time", unit="ms"), panels=(panel,))


def intensity_curve(
    *,
    ridge: float,
    d_in: int = 4096,
    d_out: int = 4096,
    weight_bytes: float = 2,
    activation_bytes: float = 2,
    batches: Sequence[int] = tuple(2**i for i in range(11)),
    title: str = "Activations bend the line, so the ridge is reached a little later",
) -> Figure:
    """Draw a linear layer's FLOP/byte against batch, weights alone and with activations.

    The ridge (FLOP/byte) is marked with the batch at which each line reaches it.
    """
    series, crossings = [], []
    for name, role, size in (
        ("weights alone", "variant", 0),
        ("with activations", "prediction", activation_bytes),
    ):
        y = tuple(linear_intensity(b, d_in, d_out, weight_bytes, size) for b in batches)
        series.append(Series(name=name, x=tuple(batches), y=y, role=role))
        try:
            crossings.append(say(crossover_batch(ridge, d_in, d_out, weight_bytes, size)))
        except ValueError:
            crossings.append("never")
    label = f"ridge {say(ridge)}, reached at B = {crossings[0]} and {crossings[1]}"
    panel = Panel(
        y=Axis(quantity="arithmetic intensity", unit="FLOP/byte", log=10),
        series=tuple(series),
        rules=(Rule(at=ridge, label=label, axis="y"),),
    )
    return Figure(title=title, x=Axis(**BATCH, log=2), panels=(panel,))


def cost_curve(
    *,
    usd_per_hour: float,
    predicted: Steps | None = None,
    measured: Steps | None = None,
    utilization: float = 1.0,
    title: str = "The bill is fixed, so every empty slot makes tokens dearer",
) -> Figure:
    """Draw dollars per million tokens against batch size, for a machine at `usd_per_hour`."""

    def dollars(batch: float, seconds: float) -> float:
        return usd_per_million_tokens(usd_per_hour, batch / seconds, utilization)

    rows = [
        ("predicted", predicted, "line", "prediction"),
        ("measured", measured, "dots", "measurement"),
    ]
    panel = Panel(
        y=Axis(quantity="cost", unit="$ per million tokens", log=10), series=_steps(rows, dollars)
    )
    return Figure(title=title, x=Axis(**BATCH, log=2), panels=(panel,))


def _throughput(batch: float, seconds: float) -> float:
    return batch / seconds


def _gain(steps: Steps) -> str:
    """The claim of a batch curve, from its own numbers."""
    low, high = min(steps), max(steps)
    gain = say(round(steps[low] * high / (steps[high] * low), 1))
    wait = say(round(steps[high] / steps[low], 1))
    return f"Batch {high}: {gain} times the tokens of batch {low}; each takes {wait} times as long"


def _steps(rows: list[tuple], convert: Callable[[float, float], float]) -> tuple[Series, ...]:
    """Turn each (name, {batch: seconds}, kind, role) into a Series of convert(batch, seconds)."""
    series = []
    for name, steps, kind, role in rows:
        if steps:
            x = tuple(sorted(steps))
            y = tuple(convert(batch, steps[batch]) for batch in x)
            series.append(Series(name=name, x=x, y=y, kind=kind, role=role))
    if not series:
        raise ValueError("nothing to draw: give predicted or measured as {batch size: seconds}")
    return tuple(series)
