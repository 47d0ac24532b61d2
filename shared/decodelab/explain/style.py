"""How figures look: one colour, dash and hatch for each role, and how numbers are written.

Hues are Okabe and Ito's, told apart by colour-blind readers; dash and hatch carry the same
distinction in grey. Prediction is a blue line and measurement an orange dot, everywhere;
vermilion is kept for what breaks: an SLO missed, memory run out, a request preempted.
"""

from dataclasses import dataclass
from math import floor, isfinite, isnan, log10

# Where a figure can't follow the page's theme it brings its own paper and ink.
PAPER, INK, FAINT = "#fbfaf7", "#333333", "#e2e0da"


@dataclass(frozen=True, kw_only=True)
class Look:
    """Colour (None: the ink of the page), dash as (on, off, ...) pixels, and hatch of a role.

    `thin` halves the width of its lines, for what stands behind the others.
    """

    color: str | None = None
    dash: tuple[int, ...] = ()
    hatch: str = ""
    thin: bool = False

    @property
    def ink(self) -> str:
        """The colour on the figure's own paper."""
        return self.color or INK


ROLES = {
    "prediction": Look(color="#0072B2"),
    "measurement": Look(color="#E69F00"),
    "variant": Look(color="#CC79A7", dash=(10, 3, 2, 3)),
    "bound": Look(dash=(6, 4)),
    "breach": Look(color="#D55E00", dash=(2, 3)),
    "marker": Look(),
    "weights": Look(color="#56B4E9"),
    "KV": Look(color="#009E73", hatch="/"),
    "arithmetic": Look(color="#CC79A7", hatch="x"),
    "overhead": Look(color="#F0E442", hatch="."),
    "activations": Look(color="#CC79A7", hatch="\\"),
    "reserve": Look(color="#b1b0ae", hatch="."),
    "free": Look(color="none"),
    "level": Look(color="#71706f", thin=True),
    "prefill": Look(color="#CC79A7", hatch="x"),
    "decode": Look(color="#56B4E9"),
    "padding": Look(color="#b1b0ae", hatch="/"),
    "queue": Look(color="#F0E442", hatch="."),
    "typical": Look(color="#009E73"),
    "tail": Look(color="#CC79A7", dash=(10, 3, 2, 3)),
}


def say(value: float) -> str:
    """Write a number as prose does: 1,024 whole, others to three digits (0.207, 23.8, 2,690)."""
    if not isfinite(value):
        return "no number" if isnan(value) else "endless"
    if value == int(value):
        return f"{int(value):,}"
    digits = 2 - floor(log10(abs(value)))
    text = f"{round(value, digits):,.{max(digits, 0)}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text
