"""How many tokens and sequences a KV pool holds, as the engines count them.

A pool is cut into blocks of a few tokens; a sequence takes whole blocks. What an engine's memory
fraction means differs: one function for each. It allocates nothing.
"""

from __future__ import annotations

import bisect
import math
from collections import Counter
from typing import NamedTuple

from .architecture import ModelShape
from .checks import gigabytes, positive_int, positive_number
from .hardware import parse_bytes

MAX_BATCHED_TOKENS = 8192  # vLLM's default: the largest chunk of prompt that one step takes


class NoRoomError(ValueError):
    """What must be held exceeds what there is; `missing_bytes` says by how much."""

    def __init__(self, sentence: str, missing_bytes: float) -> None:
        super().__init__(sentence)
        self.missing_bytes = missing_bytes


def as_bytes(name: str, size: float | str) -> float:
    """A size in bytes: a number >= 0 as it is, a text by its unit ("80 GB", "79.19 GiB")."""
    if isinstance(size, str):
        try:
            return parse_bytes(size)
        except ValueError as error:
            raise ValueError(f"{name}: {error} GB is 10^9 bytes, GiB is 2^30.") from None
    return size if size == 0 else positive_number(name, size)


def kv_pool(
    total_bytes: float | str,
    utilization: float,
    weight_bytes: float | str,
    activation_bytes: float | str,
    other_bytes: float | str = 0,
) -> float:
    """Bytes left for KV under vLLM's fraction, which is of all memory that the device shows.

    utilization x total - weights - peak of activations - other (CUDA context and the like). Raises
    NoRoomError, a ValueError, naming the bytes where nothing is left.
    """
    total = as_bytes("total_bytes", total_bytes)
    budget = fraction("utilization", utilization) * total
    return _left(
        budget,
        f"{utilization:.3g} of {gigabytes(total)}",
        weight_bytes,
        activation_bytes,
        other_bytes,
    )


def kv_pool_static(
    free_bytes: float | str, static_fraction: float, weight_bytes: float | str
) -> float:
    """Bytes left for KV under SGLang's static fraction: it holds weights and KV pool.

    static_fraction x free memory before loading - weights; activations live in the rest.
    """
    free = as_bytes("free_bytes", free_bytes)
    budget = fraction("static_fraction", static_fraction) * free
    return _left(budget, f"{static_fraction:.3g} of {gigabytes(free)}", weight_bytes)


def kv_pool_free(
    total_bytes: float | str,
    free_fraction: float,
    weight_bytes: float | str,
    activation_bytes: float | str,
    other_bytes: float | str = 0,
) -> float:
    """Bytes left for KV under TensorRT-LLM's fraction, which is of what is free after the rest.

    free_fraction x (total - weights - activations - other).
    """
    total = as_bytes("total_bytes", total_bytes)
    free = _left(total, "the device", weight_bytes, activation_bytes, other_bytes)
    return fraction("free_fraction", free_fraction) * free


class KVBlocks(NamedTuple):
    """A pool cut into `blocks`, each of `block_size` tokens of one group of layers.

    `groups` holds (window, number of groups): None sees all, 0 is a recurrent state. One pool
    serves all groups, so their blocks are alike (vLLM's hybrid cache; a plain model is one group).
    """

    blocks: int
    block_bytes: float
    block_size: int
    groups: tuple[tuple[int | None, int], ...]
    chunk: int
    state_blocks: int

    @property
    def tokens(self) -> int:
        """Tokens that the pool holds if every group keeps every token, as engines print it."""
        return self.blocks // sum(groups for _, groups in self.groups) * self.block_size

    def per_sequence(self, context: int) -> int:
        """Blocks of one sequence of `context` tokens.

        A window keeps itself and the chunk of prompt being computed, over a block boundary.
        """
        positive_int("context", context)
        blocks = 0
        for window, groups in self.groups:
            seen = context if window is None else min(window - 1 + self.chunk, context)
            held = -(-seen // self.block_size) + (window is not None)
            blocks += groups * (self.state_blocks if window == 0 else held)
        return blocks

    def concurrency(self, context: int) -> float:
        """Sequences of `context` tokens that fit, not rounded: vLLM's "maximum concurrency"."""
        return self.blocks / self.per_sequence(context)

    def sequences(self, context: int) -> int:
        """Whole sequences of `context` tokens that fit at once, 0 if not one."""
        return self.blocks // self.per_sequence(context)

    def context(self, batch: int) -> int | float:
        """The longest context at which `batch` sequences fit, 0 if none.

        Infinite where every layer has a window and all windows fit.
        """
        budget = self.blocks // positive_int("batch", batch)
        windows = [window for window, _ in self.groups]
        if None not in windows and self.per_sequence(max(windows) + self.chunk) <= budget:
            return math.inf
        lengths = range(self.block_size, (budget + 1) * self.block_size, self.block_size)
        return self.block_size * bisect.bisect_right(lengths, budget, key=self.per_sequence)


def kv_blocks(
    shape: ModelShape,
    pool_bytes: float | str,
    block_size: int = 16,
    bytes_per_element: float = 2,
    tensor_parallel: int = 1,
    pipeline_parallel: int = 1,
    chunk: int = MAX_BATCHED_TOKENS,
    state_bytes: int = 0,
    state_blocks: int = 1,
    round_up: bool = False,
) -> KVBlocks:
    """Cut the pool of one GPU into blocks.

    Layers that see alike form groups of one size; `chunk` is the longest piece of prompt that one
    step computes. Recurrent layers count only where `state_bytes` (of one layer and sequence, on
    one GPU) is given: then block_size grows until a block holds a state, and a sequence takes
    `state_blocks` of them (2 with vLLM's prefix caching). round_up: TensorRT-LLM's rounding; others
    round down. Raises ValueError on a pool smaller than one block for each group.
    """
    pool, state = as_bytes("pool_bytes", pool_bytes), as_bytes("state_bytes", state_bytes)
    positive_int("chunk", chunk)
    positive_int("state_blocks", state_blocks)
    layer_bytes = shape.layer_kv_bytes(bytes_per_element, tensor_parallel)
    size, groups = _groups(shape, states=state > 0)
    if state:
        held = positive_int("block_size", block_size) * layer_bytes
        block_size *= max(1, math.ceil(state / held))
    size = math.ceil(size / positive_int("pipeline_parallel", pipeline_parallel))
    block_bytes = positive_int("block_size", block_size) * layer_bytes * size
    blocks = (math.ceil if round_up else math.floor)(pool / block_bytes)
    needed = sum(count for _, count in groups)
    if blocks < needed:
        raise NoRoomError(
            f"A pool of {pool:,.0f} bytes is less than {needed} block(s) of {block_size} tokens "
            f"({block_bytes:,.0f} bytes each): not a token fits. pool_bytes is in bytes; write a "
            f'text such as "58.1 GiB" for anything else.',
            needed * block_bytes - pool,
        )
    return KVBlocks(blocks, block_bytes, block_size, groups, chunk, state_blocks)


def kv_tokens(
    shape: ModelShape,
    pool_bytes: float | str,
    block_size: int = 16,
    bytes_per_element: float = 2,
    tensor_parallel: int = 1,
    **options: int,
) -> int:
    """Tokens that a pool of `pool_bytes` on each GPU holds; options as in `kv_blocks`."""
    return kv_blocks(
        shape, pool_bytes, block_size, bytes_per_element, tensor_parallel, **options
    ).tokens


def max_sequences(
    shape: ModelShape,
    pool_bytes: float | str,
    context: int,
    block_size: int = 16,
    bytes_per_element: float = 2,
    tensor_parallel: int = 1,
    **options: int,
) -> int:
    """Sequences of `context` tokens that fit at once, 0 if not one; options as in `kv_blocks`."""
    return kv_blocks(
        shape, pool_bytes, block_size, bytes_per_element, tensor_parallel, **options
    ).sequences(context)


def max_context(
    shape: ModelShape,
    pool_bytes: float | str,
    batch: int,
    block_size: int = 16,
    bytes_per_element: float = 2,
    tensor_parallel: int = 1,
    **options: int,
) -> int | float:
    """The longest context at which `batch` sequences fit: see `KVBlocks.context`."""
    return kv_blocks(
        shape, pool_bytes, block_size, bytes_per_element, tensor_parallel, **options
    ).context(batch)


def fraction(name: str, value: float) -> float:
    """Return `value` if it is above 0 and up to 1."""
    if positive_number(name, value) > 1:
        raise ValueError(
            f"{name} is a fraction above 0 and up to 1, not {value!r}: write {value / 100:g} for "
            f"{value:g}%."
        )
    return value


def _groups(shape: ModelShape, states: bool) -> tuple[int, tuple[tuple[int | None, int], ...]]:
    """Layers per group, and the number of groups of each window.

    A group is as large as the rarest kind of layer is frequent, or as the most frequent where
    they are within half of each other; the last group of a kind is padded (vLLM's rule).
    """
    kinds = Counter(shape.windows or {None: shape.layers})
    if states and 0 not in kinds:
        raise ValueError("state_bytes is given, and every layer of this shape keeps a KV cache.")
    if not states:
        del kinds[0]
    fewest, most = min(kinds.values()), max(kinds.values())
    size = most if most < 1.5 * fewest else fewest
    return size, tuple((window, -(-count // size)) for window, count in kinds.items())


def _left(
    budget: float,
    of: str,
    weight_bytes: float | str,
    activation_bytes: float | str = 0,
    other_bytes: float | str = 0,
) -> float:
    """`budget` less the three; NoRoomError where nothing is left."""
    weights = as_bytes("weight_bytes", weight_bytes)
    activations = as_bytes("activation_bytes", activation_bytes)
    other = as_bytes("other_bytes", other_bytes)
    left = budget - weights - activations - other
    if left <= 0:
        raise NoRoomError(
            f"No room for a KV cache: weights take {gigabytes(weights)}, activations "
            f"{gigabytes(activations)}, other {gigabytes(other)}, and {of} is "
            f"{gigabytes(budget)}: {gigabytes(-left)} are missing. Take fewer bytes per weight, "
            f"more GPUs (tensor_parallel) or a larger device.",
            -left,
        )
    return left
