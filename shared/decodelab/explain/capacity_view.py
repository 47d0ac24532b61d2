"""What the capacity explorer says and shows at one position of its controls; needs no widget.

Capacity itself is computed by `decodelab.predict.Deployment`, never here. Levers are data: whatever
LEVERS holds is offered and pulled.
"""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from html import escape

from decodelab.explain.figures import Figure
from decodelab.explain.memory_figures import (
    CONTEXTS,
    MOST,
    claim,
    frontier,
    largest,
    memory_bar,
    ridge_batch,
)
from decodelab.explain.paint_svg import paint_svg
from decodelab.explain.style import say
from decodelab.predict import Hardware, ModelShape
from decodelab.predict.capacity import as_bytes
from decodelab.predict.deployment import LEVERS, Deployment, pull

BASELINE = "baseline"  # what a lever stands at until it is pulled
ANY = (None, 4096, 1024)  # offered where a lever takes any number of tokens, or none
SIXTEEN = ("bf16", "fp16")


@dataclass(frozen=True, kw_only=True)
class Capacity:
    """What the explorer shows: a baseline, and the same deployment with levers pulled.

    `kv_bandwidth` is the measured bytes/s at which a step reads caches, `measured` the largest
    batches found by trying, {context: sequences}; `notes` are said beside the assumptions.
    """

    baseline: Deployment
    deployment: Deployment
    kv_bandwidth: float | None = None
    measured: Mapping[int, int] = field(default_factory=dict)
    contexts: tuple[int, int] = CONTEXTS
    max_batch: int = MOST
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.max_batch < 2 or not 0 < self.contexts[0] < self.contexts[1]:
            raise ValueError(
                "the controls need max_batch of 2 or more and contexts (low, high) that rise from "
                f"above 0, got max_batch={self.max_batch}, contexts={self.contexts}"
            )

    @property
    def pulled(self) -> bool:
        """Whether any lever was moved."""
        return self.deployment != self.baseline

    def figure(self, batch: int, context: int) -> Figure:
        """The frontier with the point ringed, beside the baseline's if a lever is pulled."""
        title = claim(self.deployment, batch, context)
        if self.pulled:
            title += f"; {BASELINE} {say(largest(self.baseline, context))}"
        return frontier(
            self.deployment,
            before=self.baseline if self.pulled else None,
            point=(batch, context),
            measured=self.measured,
            contexts=self.contexts,
            max_batch=self.max_batch,
            names=("memory ceiling", BASELINE),
            title=title,
        )

    def memory(self, batch: int, context: int) -> Figure:
        """What fills the device at this point, or at the largest batch where that is less."""
        rows = {}
        compared = {"": self.deployment} | ({f"{BASELINE}, ": self.baseline} if self.pulled else {})
        for name, one in compared.items():
            if one is self.deployment or largest(one, context):
                shown = max(1, min(batch, one.max_sequences(context)))
                rows[f"{name}B = {say(shown)}"] = one.memory(shown, context)
        gpus = max(one.tensor_parallel for one in compared.values())
        where = "the device" if gpus == 1 else "one GPU"
        return memory_bar(rows, title=f"Memory of {where} at this point")

    def readout(self, batch: int, context: int) -> str:
        """Say what fits, what ends the batch, and the speed at this point, in words and numbers."""
        one, said = self.deployment, []
        if batch > one.max_sequences(context):
            missing = -one.memory(batch, context)["free"]
            said.append(f"Out of memory by {say(missing / 1e9)} GB")
        else:
            step = one.step(batch, context)
            each = step.tokens_per_second_per_user
            said.append(
                f"At best {say(step.tokens_per_second)} tokens/s in all, {say(each)} for each user "
                f"({one.dtype} arithmetic)"
            )
        here = " on each GPU" if one.tensor_parallel > 1 else ""
        said.append(
            f"the pool of {say(one.pool_bytes / 1e9)} GB{here} holds {say(one.tokens)} tokens, "
            f"each {say(one.kv_bytes_per_token)} bytes of KV{here}"
        )
        said.append(self._end(context))
        if context > (one.shape.max_context or context):
            said.append(f"the model itself ends at {say(one.shape.max_context)} tokens")
        if self.kv_bandwidth:
            said.append(f"effective KV bandwidth {say(self.kv_bandwidth / 1e9)} GB/s, measured")
        return "; ".join(said) + "."

    def _end(self, context: int) -> str:
        """What ends the batch at `context`: memory, or the ridge."""
        most = self.deployment.max_sequences(context)
        ridge = ridge_batch(self.deployment, self.contexts[0], self.max_batch)
        if most < 1:
            longest = self.deployment.max_context(1)
            return f"not one sequence fits: the longest takes {say(longest)} tokens"
        if most < ridge:
            where = f"at {say(ridge)}" if ridge <= self.max_batch else "beyond this chart"
            return f"memory ends the batch at {say(most)}, before the ridge {where}"
        return (
            f"arithmetic ends the batch at the ridge, {say(ridge)}: more sequences add time, not "
            f"speed, though {say(most)} fit"
        )

    def _served(self) -> str:
        """How the deployment is served, in a sentence."""
        one = self.deployment
        held = as_bytes("activation_bytes", one.activation_bytes)
        held += as_bytes("other_bytes", one.other_bytes)
        apart = f", {say(held / 1e9)} GB for activations and other" if held else ""
        return (
            f"Weights in {one.weight_format}, KV in {one.kv_format}; utilization "
            f"{say(one.utilization)}{apart}."
        )

    def html(self, batch: int, context: int) -> str:
        """All that the explorer shows at one position of its controls."""
        words = escape(self.readout(batch, context))
        notes = escape(" ".join([self._served(), *self.deployment.assumptions, *self.notes]))
        return (
            f'<p role="status" style="max-width:720px;line-height:1.4">{words}</p>'
            + paint_svg(self.figure(batch, context))
            + paint_svg(self.memory(batch, context))
            + f'<p style="max-width:720px;line-height:1.3;font-size:11px">{notes}</p>'
        )


def options(baseline: Deployment, lever: str) -> list[tuple[str, object]]:
    """What to offer for a lever as (text, value); the value that changes nothing is BASELINE."""
    values = LEVERS[lever].values(baseline)
    found = []
    for value in ANY if values is None else values:
        text = "none" if value is None else say(value) if isinstance(value, int) else str(value)
        with suppress(ValueError):  # a value that this shape refuses is not offered
            same = pull(baseline, lever, value) == baseline
            found.append((f"{text} ({BASELINE})", BASELINE) if same else (text, value))
    return found if BASELINE in dict(map(reversed, found)) else [(BASELINE, BASELINE), *found]


def pull_all(baseline: Deployment, choices: Mapping[str, object]) -> Deployment:
    """Pull each lever that does not stand at BASELINE."""
    for lever, value in choices.items():
        if value != BASELINE:
            baseline = pull(baseline, lever, value)
    return baseline


def notes_of(choices: Mapping[str, object]) -> tuple[str, ...]:
    """What the levers that do not stand at BASELINE have to say of themselves."""
    notes = (LEVERS[lever].note for lever, value in choices.items() if value != BASELINE)
    return tuple(filter(None, notes))


def on_card(cards: Deployment, shape: ModelShape, hardware: Hardware) -> Deployment:
    """`shape` on `hardware`, served as `cards` is, in the 16 bits that this device computes in."""
    sixteen = next((name for name in SIXTEEN if name in hardware.flops), "fp16")
    weights, kv = (
        sixteen if name in SIXTEEN else name for name in (cards.weight_format, cards.kv_format)
    )
    return replace(
        cards,
        shape=shape,
        hardware=hardware,
        weight_format=weights,
        kv_format=kv,
        dtype=sixteen if sixteen in hardware.flops else "fp32",
    )
