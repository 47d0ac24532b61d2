"""The course's figures: each function turns plain numbers into a Figure that shows itself.

In JupyterLab a figure has hover (plotly); elsewhere the same figure is a PNG; `describe()` says
it in words. Step times come in as {batch size: seconds}, so no figure needs a model or a device.
"""

from base64 import b64encode
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.util import find_spec

from decodelab.explain.chart import Axis, Chart, Panel, Rule, Series
from decodelab.explain.paint_matplotlib import png
from decodelab.explain.paint_plotly import paint_plotly
from decodelab.predict import crossover_batch, linear_intensity, usd_per_million_tokens

Steps = Mapping[int, float]  # {batch size: seconds of one decode step}
PLOTLY_MIME = "application/vnd.plotly.v1+json"


class Figure(Chart):
    """A Chart that a notebook can show: one output that holds plotly, PNG and words."""

    def _repr_mimebundle_(self, include: object = None, exclude: object = None) -> tuple:
        words = self.describe()
        bundle = {"text/plain": words, "image/png": b64encode(png(self)).decode()}
        if find_spec("plotly"):
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
    ends = min([ridge / 100, *seen]) / 1.5, max([ridge * 20, *seen]) * 1.5
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
    panel = Panel(
        y=Axis(quantity="speed", unit=unit, log=10),
        series=tuple(series),
        rules=(Rule(at=ridge, label="ridge point"),),
    )
    x = Axis(quantity="arithmetic intensity", unit="FLOP/byte", log=10)
    return Figure(title=title, x=x, panels=(panel,))
