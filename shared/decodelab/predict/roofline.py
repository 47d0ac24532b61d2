"""Arithmetic intensity, the ridge point, and how long a decode step must take.

Williams, Waterman, Patterson: Roofline (2009). These are bounds: no real step is faster. They know
nothing of kernel launches, caches or overlap; `decodelab.measure.StepTimeModel` fits those.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from .architecture import ModelShape
from .checks import gigabytes, positive_int, positive_number
from .hardware import Hardware


def linear_intensity(
    batch: int, d_in: int, d_out: int, weight_bytes: float = 2, activation_bytes: float = 2
) -> float:
    """FLOPs per byte of [batch, d_in] x [d_in, d_out]: weights, inputs, outputs moved once.

    2 B d_in d_out / (p_w d_in d_out + p_a B (d_in + d_out)), p in bytes per element. With
    activation_bytes=0 it counts weights alone, 2 B / p_w, and grows without end.
    """
    batch, d_in, d_out = _layer(batch, d_in, d_out)
    weights = positive_number("weight_bytes", weight_bytes) * d_in * d_out
    activations = _activation(activation_bytes) * batch * (d_in + d_out)
    return 2 * batch * d_in * d_out / (weights + activations)


def ridge_point(hardware: Hardware, dtype: str) -> float:
    """Dense FLOP/s over bytes/s: the intensity at which arithmetic takes as long as memory."""
    return hardware.peak(dtype) / hardware.bandwidth


def crossover_batch(
    ridge: float, d_in: int, d_out: int, weight_bytes: float = 2, activation_bytes: float = 2
) -> float:
    """The batch (not rounded) at which a linear layer's intensity equals `ridge` FLOP/byte.

    `linear_intensity` solved for B; with activation_bytes=0, ridge x weight_bytes / 2. Raises
    ValueError where the ridge is at or above the intensity that B can approach.
    """
    _, d_in, d_out = _layer(1, d_in, d_out)
    positive_number("ridge", ridge)
    flops, activations = 2 * d_in * d_out, _activation(activation_bytes) * (d_in + d_out)
    spare = flops - ridge * activations  # per sequence: what is left once its activations are paid
    if spare <= 0:
        raise ValueError(
            f"No batch reaches {ridge:g} FLOP/byte: as the batch grows, the intensity of a "
            f"{d_in} x {d_out} layer tends to {flops / activations:g} and stays below it."
        )
    return ridge * positive_number("weight_bytes", weight_bytes) * d_in * d_out / spare


class Term(NamedTuple):
    """One part of a step: its work, and the seconds that each of two limits would take."""

    flops: float
    bytes: float
    compute_seconds: float
    memory_seconds: float

    @property
    def seconds(self) -> float:
        """The slower of the two: they overlap at best."""
        return max(self.compute_seconds, self.memory_seconds)


@dataclass(frozen=True, kw_only=True)
class DecodeStep:
    """One decode step of `batch` sequences that hold `context` tokens each: one new token each.

    `linear` is all matrix multiplications, which read the weights once for the whole batch;
    `attention` reads each sequence's own KV cache. They run one after the other.
    """

    batch: int
    context: int
    linear: Term
    attention: Term

    @property
    def flops(self) -> float:
        """FLOPs of the step: 2 per weight and sequence, plus attention."""
        return self.linear.flops + self.attention.flops

    @property
    def bytes(self) -> float:
        """Bytes read: weights once, each sequence's KV. Activations and new KV are left out."""
        return self.linear.bytes + self.attention.bytes

    @property
    def intensity(self) -> float:
        """FLOPs per byte."""
        return self.flops / self.bytes

    @property
    def seconds(self) -> float:
        """Least time for the step, which is also each user's time per token."""
        return self.linear.seconds + self.attention.seconds

    @property
    def bound(self) -> str:
        """What limits more of the seconds: "memory" or, beyond half of them, "compute"."""
        terms = (self.linear, self.attention)
        arithmetic = sum(t.seconds for t in terms if t.compute_seconds > t.memory_seconds)
        return "compute" if arithmetic > self.seconds / 2 else "memory"

    @property
    def tokens_per_second(self) -> float:
        """Aggregate tokens/s of the batch."""
        return self.batch / self.seconds

    @property
    def tokens_per_second_per_user(self) -> float:
        """Tokens/s that each sequence sees."""
        return 1 / self.seconds

    @property
    def weight_seconds(self) -> float:
        """Seconds to stream the weights once."""
        return self.linear.memory_seconds

    @property
    def kv_seconds(self) -> float:
        """Seconds to stream the KV cache of every sequence."""
        return self.attention.memory_seconds

    @property
    def compute_seconds(self) -> float:
        """Seconds that the arithmetic alone would take at peak."""
        return self.linear.compute_seconds + self.attention.compute_seconds


class DoesNotFitError(ValueError):
    """Weights and KV cache exceed the device's memory; carries the bytes of each.

    `largest_batch` is the most sequences that would fit at this context, 0 if not even one.
    """

    def __init__(
        self, hardware: Hardware, batch: int, context: int, weights: float, kv_per_sequence: float
    ) -> None:
        self.weight_bytes, self.kv_bytes = weights, batch * kv_per_sequence
        self.needed_bytes = self.weight_bytes + self.kv_bytes
        self.capacity_bytes = hardware.capacity_bytes
        self.largest_batch = max(0, int((self.capacity_bytes - weights) // kv_per_sequence))
        largest = (
            f"The largest batch that fits at this context is {self.largest_batch}."
            if self.largest_batch
            else "Not even one sequence fits: take fewer bytes per weight or a larger device."
        )
        super().__init__(
            f"Batch {batch} at context {context} needs {gigabytes(self.needed_bytes)} "
            f"({gigabytes(weights)} of weights, {gigabytes(self.kv_bytes)} of KV cache), and "
            f"{hardware.name} has {gigabytes(self.capacity_bytes)}. {largest}"
        )


def decode_step(
    shape: ModelShape,
    hardware: Hardware,
    batch: int,
    context: int,
    weight_bytes: float = 2,
    kv_bytes: float = 2,
    dtype: str = "bf16",
    check_memory: bool = True,
) -> DecodeStep:
    """The least time for one decode step, with the traffic and the limit behind it.

    seconds = max(W/BW, 2 B P/peak) + max(KV/BW, attention FLOPs/peak). W is what a step streams:
    no input embedding, and of routed experts those that the batch is expected to meet. P is the
    weights multiplied per token. weight_bytes and kv_bytes are bytes per element (0.5 for int4);
    `dtype` is that of the arithmetic. Raises DoesNotFitError unless check_memory is False.
    """
    batch, context = positive_int("batch", batch), positive_int("context", context)
    positive_number("weight_bytes", weight_bytes)
    positive_number("kv_bytes", kv_bytes)
    peak = hardware.peak(dtype)
    kv_per_sequence = shape.kv_bytes(context, kv_bytes)
    stored = shape.parameters * weight_bytes
    if check_memory and stored + batch * kv_per_sequence > hardware.capacity_bytes:
        raise DoesNotFitError(hardware, batch, context, stored, kv_per_sequence)

    def term(flops: float, num_bytes: float) -> Term:
        return Term(flops, num_bytes, flops / peak, num_bytes / hardware.bandwidth)

    return DecodeStep(
        batch=batch,
        context=context,
        linear=term(2 * batch * shape.matmul_parameters, shape.streamed(batch) * weight_bytes),
        attention=term(batch * shape.attention_flops(context), batch * kv_per_sequence),
    )


def _layer(batch: int, d_in: int, d_out: int) -> tuple[int, int, int]:
    named = {"batch": batch, "d_in": d_in, "d_out": d_out}
    return tuple(positive_int(name, value) for name, value in named.items())


def _activation(num_bytes: float) -> float:
    return num_bytes if num_bytes == 0 else positive_number("activation_bytes", num_bytes)
