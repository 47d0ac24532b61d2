"""A model on a device: what fits, how fast a step is at best, and what each lever changes.

All of it follows from a shape, a device and the formats; nothing is measured. Every figure is of
one GPU unless it says otherwise.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import NamedTuple

from .architecture import ModelShape
from .capacity import (
    MAX_BATCHED_TOKENS,
    KVBlocks,
    NoRoomError,
    as_bytes,
    fraction,
    kv_blocks,
    kv_pool,
)
from .checks import gigabytes, positive_int
from .hardware import Hardware
from .quantization import (
    FORMATS,
    KV_FORMATS,
    kv_element_bytes,
    layers_of_stages,
    part_of,
    streamed_bytes,
    weight_bytes,
    weight_format,
)
from .roofline import DecodeStep, decode_step

GPUS = (1, 2, 4, 8)  # what the lever of tensor parallelism offers: one node's


@dataclass(frozen=True, kw_only=True)
class Deployment:
    """`shape` served on `hardware`, memory shared out as vLLM does (`kv_pool`).

    `activation_bytes` and `other_bytes` (CUDA context and the like) are numbers of bytes or texts
    with a unit, as an engine prints them at start-up. `dtype` is that of the arithmetic.
    """

    shape: ModelShape
    hardware: Hardware
    weight_format: str = "bf16"
    kv_format: str = "bf16"
    utilization: float = 0.9
    activation_bytes: float | str = 0
    other_bytes: float | str = 0
    block_size: int = 16
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    chunk: int = MAX_BATCHED_TOKENS
    dtype: str = "bf16"

    def __post_init__(self) -> None:
        weight_format(self.weight_format)
        fraction("utilization", self.utilization)
        positive_int("block_size", self.block_size)
        positive_int("chunk", self.chunk)
        as_bytes("activation_bytes", self.activation_bytes)
        as_bytes("other_bytes", self.other_bytes)
        layers_of_stages(self.shape.layers, self.pipeline_parallel)
        self.shape.layer_kv_bytes(kv_element_bytes(self.kv_format), self.tensor_parallel)

    @property
    def weight_bytes(self) -> float:
        """Bytes of weights on the fullest GPU."""
        parallel = self.tensor_parallel, self.pipeline_parallel
        return weight_bytes(self.shape, self.weight_format, *parallel)

    @property
    def kv_bytes_per_token(self) -> float:
        """Bytes of KV that one token adds on one GPU, on the pipeline stage with most layers."""
        per_token = self.shape.kv_bytes_per_token(KV_FORMATS[self.kv_format], self.tensor_parallel)
        stages = layers_of_stages(self.shape.layers, self.pipeline_parallel)
        return per_token * max(stages) / self.shape.layers

    @property
    def pool_bytes(self) -> float:
        """Bytes left for KV on the fullest GPU; NoRoomError where nothing is left."""
        total = self.hardware.capacity_bytes
        held = self.weight_bytes, self.activation_bytes, self.other_bytes
        return kv_pool(total, self.utilization, *held)

    @property
    def blocks(self) -> KVBlocks:
        """The pool cut into blocks."""
        return self._cut(self.pool_bytes)

    @property
    def tokens(self) -> int:
        """Tokens that the pool holds."""
        return self.blocks.tokens

    def max_sequences(self, context: int) -> int:
        """Sequences of `context` tokens that fit at once, 0 if not one."""
        return self.blocks.sequences(context)

    def max_context(self, batch: int) -> int | float:
        """The longest context at which `batch` sequences fit: see `KVBlocks.context`."""
        return self.blocks.context(batch)

    def memory(self, batch: int, context: int) -> dict[str, float]:
        """Bytes of one GPU by use, in whole blocks of KV; they add up to its memory.

        "reserve" is what `utilization` leaves alone, and `other_bytes`. "free" is negative where
        the sequences don't fit: so many bytes are missing.
        """
        total = self.hardware.capacity_bytes
        other = as_bytes("other_bytes", self.other_bytes)
        blocks = self._cut(total)  # how many there are plays no part
        used = {
            "weights": self.weight_bytes,
            "KV": positive_int("batch", batch) * blocks.per_sequence(context) * blocks.block_bytes,
            "activations": as_bytes("activation_bytes", self.activation_bytes),
            "reserve": total * (1 - self.utilization) + other,
        }
        return used | {"free": total - sum(used.values())}

    def step(self, batch: int, context: int, check_memory: bool = True) -> DecodeStep:
        """The least time for one decode step over all GPUs of a tensor-parallel group.

        Raises NoRoomError, a ValueError, naming the bytes where the sequences don't fit, unless
        check_memory is False.
        """
        if check_memory:
            self._check(batch, context)
        gpus, shape = self.tensor_parallel, self.shape
        group = replace(
            self.hardware,
            bandwidth=self.hardware.bandwidth * gpus,
            flops={dtype: rate * gpus for dtype, rate in self.hardware.flops.items()},
        )
        copies = gpus * shape.layer_kv_bytes(1, gpus) / shape.layer_kv_bytes(1)
        per_weight = streamed_bytes(shape, self.weight_format, batch) / shape.streamed(batch)
        per_cached = KV_FORMATS[self.kv_format] * copies
        return decode_step(
            shape, group, batch, context, per_weight, per_cached, self.dtype, check_memory=False
        )

    @property
    def assumptions(self) -> tuple[str, ...]:
        """What the figures take for granted, a sentence each."""
        device, shape, gpus = self.hardware, self.shape, self.tensor_parallel
        size = f"{gigabytes(device.capacity_bytes)} ({device.capacity_bytes / 2**30:.2f} GiB)"
        usable = device.usable_memory_bytes is not None
        figure = "usable" if usable else "nominal, for want of a usable figure"
        heads = "is 1 KV head" if shape.kv_heads == 1 else f"are {shape.kv_heads} KV heads"
        copied = "a latent has no heads" if shape.mla else f"there {heads}"
        held = as_bytes("activation_bytes", self.activation_bytes)
        other = as_bytes("other_bytes", self.other_bytes)
        stated = {
            f"The memory of {device.name} is {size}, {figure}.": True,
            "Activations are taken as 0 bytes: an engine prints its own at start-up.": held == 0,
            "Other bytes, such as for a CUDA context, are taken as 0.": other == 0,
            f"Each of {gpus} GPUs keeps copies of KV: {copied}.": gpus > 1
            and (shape.mla is not None or shape.kv_heads < gpus),
            "Communication between GPUs takes no time.": gpus * self.pipeline_parallel > 1,
            "Pipeline stages run one after the other: a step is no faster for them.": (
                self.pipeline_parallel > 1
            ),
            f"A window keeps its tokens and up to {self.chunk} of a prompt being read.": any(
                shape.windows or ()
            ),
        }
        return tuple(sentence for sentence, holds in stated.items() if holds) + shape.notes

    def _cut(self, pool_bytes: float) -> KVBlocks:
        return kv_blocks(
            self.shape,
            pool_bytes,
            self.block_size,
            KV_FORMATS[self.kv_format],
            self.tensor_parallel,
            pipeline_parallel=self.pipeline_parallel,
            chunk=self.chunk,
        )

    def _check(self, batch: int, context: int) -> None:
        most, memory = self.max_sequences(context), self.memory(batch, context)
        if batch > most:
            raise NoRoomError(
                f"{batch} sequences of {context} tokens take {gigabytes(memory['KV'])} of KV, and "
                f"the pool beside {gigabytes(memory['weights'])} of weights is "
                f"{gigabytes(self.pool_bytes)}: at most {most} fit.",
                -memory["free"],
            )


class Lever(NamedTuple):
    """A change of one thing: what it is called, the values it takes, and how it changes.

    `note` says what a reader of the figures should know once it is pulled.
    """

    label: str
    values: Callable[[Deployment], tuple | None]  # None: no window, or any number of tokens
    change: Callable[[Deployment, object], Deployment]
    note: str = ""


def _kv_heads(deployment: Deployment, value: int) -> Deployment:
    return replace(deployment, shape=replace(deployment.shape, kv_heads=value))


def _window(deployment: Deployment, value: int | None) -> Deployment:
    shape = deployment.shape
    windows = tuple(0 if old == 0 else value for old in shape.windows or (None,) * shape.layers)
    if all(window is None for window in windows):
        windows = None
    return replace(deployment, shape=replace(shape, windows=windows))


def _divisors(deployment: Deployment) -> tuple[int, ...]:
    if deployment.shape.mla:
        return ()
    heads = deployment.shape.heads
    return tuple(heads // n for n in range(1, heads + 1) if heads % n == 0)


def _weight_formats(deployment: Deployment) -> tuple[str, ...]:
    """Those that cover something: mxfp4 covers experts alone."""
    parts = {part_of(linear) for linear in deployment.shape.linears()}
    return tuple(name for name, f in FORMATS.items() if not f.parts or parts & f.parts.keys())


def _gpus(deployment: Deployment) -> tuple[int, ...]:
    """Numbers of GPUs over which heads and KV heads split evenly, those in use among them."""
    found = []
    for gpus in sorted({*GPUS, deployment.tensor_parallel}):
        with suppress(ValueError):
            deployment.shape.layer_kv_bytes(1, gpus)
            found.append(gpus)
    return tuple(found)


LEVERS: dict[str, Lever] = {
    "kv_heads": Lever(
        "KV heads",
        _divisors,
        _kv_heads,
        "KV heads size the K and V projections too, so the weights and with them the pool change "
        "a little beside the cache.",
    ),
    "window": Lever("window, tokens", lambda _: None, _window),
    "kv_format": Lever(
        "KV format", lambda _: tuple(KV_FORMATS), lambda d, value: replace(d, kv_format=value)
    ),
    "weight_format": Lever(
        "weight format", _weight_formats, lambda d, value: replace(d, weight_format=value)
    ),
    "tensor_parallel": Lever(
        "GPUs",
        _gpus,
        lambda d, value: replace(d, tensor_parallel=value),
        "With several GPUs (tensor parallelism), bytes are those of one GPU, and tokens, sequences "
        "and speed those of all together.",
    ),
}


def pull(deployment: Deployment, lever: str, value: object) -> Deployment:
    """The same deployment with one of LEVERS set to `value`, and nothing else changed.

    Raises ValueError naming the levers, or the values that this one takes.
    """
    if lever not in LEVERS:
        raise ValueError(f"No lever {lever!r}. Levers: {', '.join(LEVERS)}.")
    values = LEVERS[lever].values(deployment)
    if values is None:
        if value is not None:
            positive_int(f"{lever} (None: no window)", value)
    elif value not in values:
        allowed = ", ".join(map(str, values)) or "none, since this model caches a latent"
        raise ValueError(f"{lever} can't be {value!r} here. Allowed: {allowed}.")
    return LEVERS[lever].change(deployment, value)
