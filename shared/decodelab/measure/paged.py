"""The KV cache in blocks: position p of a sequence is in slot table[p // b] * b + p % b.

The memory is KVCache's own, a flat pool of slots per layer; only the rule that finds a slot is
another. Reading copies: the blocks of all rows are gathered in one call, each as one piece. Who
owns which block is the business of `decodelab.serve`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from decodelab.predict import ModelShape
from decodelab.predict.checks import positive_int

from .device import element_bytes
from .kv_cache import CacheView, KVCache
from .memory import require_bytes

# B rows, S new tokens a row, C context columns, H KV heads, D head_dim, N blocks, b tokens a block.


class PagedCache(KVCache):
    """`num_blocks` blocks of `block_size` tokens, allocated once; NotEnoughMemoryError before.

    One block more, `scratch`, is nobody's: rows that only fill up a batch write there.
    """

    def __init__(
        self,
        shape: ModelShape,
        num_blocks: int,
        block_size: int = 16,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        self.num_blocks = positive_int("num_blocks", num_blocks)
        self.block_size = positive_int("block_size", block_size)
        self.scratch = num_blocks
        slots = (num_blocks + 1) * block_size
        num_bytes = slots * shape.kv_bytes_per_token(element_bytes(dtype))
        what = f"KV cache of {num_blocks} blocks of {block_size} tokens"
        require_bytes(num_bytes, device, what, "Take fewer blocks or a smaller model.")
        super().__init__(shape, 1, slots, dtype, device, check_memory=False)

    def tables(self, rows: Sequence[Sequence[int]], context: int) -> torch.Tensor:
        """Block tables [B, blocks] of C columns; where a row's own table ends, `scratch` follows.

        What is read there lies above the row's last position, where no query looks.
        """
        blocks = -(-context // self.block_size)
        padded = [[*row[:blocks], *[self.scratch] * (blocks - len(row))] for row in rows]
        return torch.tensor(padded, device=self.pool.device)


class PagedRows:
    """Rows whose tokens lie where block tables [B, blocks] say: a KVCache to any forward."""

    def __init__(self, cache: PagedCache, tables: torch.Tensor) -> None:
        self.cache, self.tables = cache, tables
        self.rows, self.length = tables.shape[0], tables.shape[1] * cache.block_size

    def at(self, positions: torch.Tensor, context: int) -> PagedView:
        """The rows as one forward sees them: new tokens at `positions` [B, S], columns 0 .. C - 1.

        The caller keeps B <= rows and every position below C <= length.
        """
        size = self.cache.block_size
        tables = self.tables[: positions.shape[0]]
        slots = tables.gather(1, positions // size) * size + positions % size
        return PagedView(self.cache, slots, context, tables[:, : -(-context // size)])


class PagedView(CacheView):
    """A CacheView whose columns are gathered through block tables [B, blocks]."""

    def __init__(
        self, cache: PagedCache, slots: torch.Tensor, context: int, tables: torch.Tensor
    ) -> None:
        super().__init__(cache, slots, context)
        self.batch, self.blocks = len(tables), tables.flatten()

    def read(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of each row's first C positions, [B, H, C, D] each: one copy of both."""
        pool = self.cache.pool[layer]  # [2H, N b, D]
        blocks = pool.view(pool.shape[0], -1, self.cache.block_size * pool.shape[-1])
        rows = blocks.index_select(1, self.blocks)  # [2H, B blocks, b D]: whole blocks move
        rows = rows.view(pool.shape[0], self.batch, -1, pool.shape[-1])[:, :, : self.context]
        return rows.transpose(0, 1).chunk(2, dim=1)
