"""K and V of every token so far: a flat pool of slots per layer.

The cache answers one question: which slot holds position p of row r? Here r * length + p, so a
row's past is one piece of memory and `read` returns a view of it. Another rule (block tables, a
ring of one window) needs another class with `at`, whose view has `columns`, `write` and `read`; the
model can't tell.
"""

from __future__ import annotations

import torch

from decodelab.predict import ModelShape

from .device import element_bytes
from .memory import require_bytes

# B rows, S new tokens a row, C context columns, H KV heads, D head_dim.


class KVCache:
    """`rows` sequences of up to `length` tokens. Raises NotEnoughMemoryError before it allocates.

    Without `check_memory` nobody is asked, and the device itself refuses what it can't hold. Rows
    in use come first: a forward of B sequences reads and writes rows 0 to B - 1. A layer with a
    sliding window keeps every token too, and masks.
    """

    def __init__(
        self,
        shape: ModelShape,
        rows: int,
        length: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        check_memory: bool = True,
    ) -> None:
        bytes_per_token = shape.kv_bytes_per_token(element_bytes(dtype))
        if check_memory:
            require_bytes(
                rows * length * bytes_per_token,
                device,
                f"KV cache of {rows} rows of {length} tokens",
                "Take a smaller batch, a shorter context, or a shape with fewer KV heads.",
            )
        # Zeros, because a masked column still meets its softmax weight of 0, and 0 * NaN is NaN.
        size = (shape.layers, 2 * shape.kv_heads, rows * length, shape.head_dim)
        self._hold(torch.zeros(size, dtype=dtype, device=device), rows, length)

    def _hold(self, pool: torch.Tensor, rows: int, length: int) -> None:
        self.pool = pool[:, :, : rows * length]  # [layers, 2H, slots, D]
        self.rows, self.length = rows, length

    @property
    def bytes(self) -> int:
        """Bytes that this cache holds, by the size of its tensor."""
        return self.pool.nbytes

    @property
    def bytes_per_token(self) -> int:
        """Bytes of K and V of one token over all layers."""
        layers, heads, _, head_dim = self.pool.shape
        return layers * heads * head_dim * self.pool.element_size()

    def reshaped(self, rows: int, length: int) -> KVCache:
        """The same memory as another number of rows of another length; contents are scrambled."""
        slots = self.pool.shape[2]
        if rows * length > slots:
            raise ValueError(f"{rows} rows of {length} tokens need more than the {slots} slots.")
        view = object.__new__(KVCache)
        view._hold(self.pool, rows, length)
        return view

    def at(self, positions: torch.Tensor, context: int) -> CacheView:
        """The cache as one forward sees it: new tokens at `positions` [B, S], columns 0 .. C - 1.

        The caller keeps B <= rows and every position below C <= length.
        """
        rows = torch.arange(positions.shape[0], device=positions.device)
        return CacheView(self, rows[:, None] * self.length + positions, context)

    def move(self, source: int, target: int, tokens: int) -> None:
        """Copy the first `tokens` tokens of row `source` over row `target`."""
        old, new = source * self.length, target * self.length
        self.pool[:, :, new : new + tokens] = self.pool[:, :, old : old + tokens]


class CacheView:
    """Where one forward writes its K and V and what it reads; `context` columns a row."""

    def __init__(self, cache: KVCache, slots: torch.Tensor, context: int) -> None:
        self.cache, self.slots, self.context = cache, slots, context  # slots [B, S]

    def columns(self, window: int | None) -> torch.Tensor:
        """The position that each column holds in layers of that window: [C] or [B, C], -1: none.

        All layers keep all tokens here; a cache that drops what a window can't see says so here.
        """
        return torch.arange(self.context, device=self.slots.device)

    def write(self, layer: int, kv: torch.Tensor) -> None:
        """Store K heads, then V heads, of the new tokens: kv [B, S, 2H, D]."""
        pool = self.cache.pool[layer]
        pool.index_copy_(1, self.slots.flatten(), kv.flatten(0, 1).transpose(0, 1))

    def read(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of each row's first C positions, [B, H, C, D] each: views, nothing copied."""
        rows = self.cache.pool[layer].unflatten(1, (self.cache.rows, self.cache.length))
        seen = rows[:, : self.slots.shape[0], : self.context].transpose(0, 1)  # [B, 2H, C, D]
        return seen.chunk(2, dim=1)
