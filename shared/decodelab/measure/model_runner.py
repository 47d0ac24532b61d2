"""The real runner: all decode rows and prefill chunks of a step in one forward, on a paged cache.

What runs, and in which blocks, is decided by `decodelab.serve`; this runs it and reads the clock.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence

import torch

from decodelab.serve import Result, Work

from .forward import bucket, decode_forward
from .kv_cache import CacheView
from .layer import attend
from .model import Decoder
from .paged import PagedCache, PagedRows
from .sampling import pick_tokens

# T tokens of a step; B rows of S new tokens each; H query heads, D head_dim.


class ModelRunner:
    """Runs a Decoder for `decodelab.serve.Engine` on `num_blocks` of KV cache, allocated once.

    Raises ValueError on a pool of no blocks, NotEnoughMemoryError on one that doesn't fit.
    """

    real_time = True

    def __init__(self, model: Decoder, num_blocks: int, block_size: int = 16) -> None:
        self.model = model
        self.cache = PagedCache(model.shape, num_blocks, block_size, model.dtype, model.device)
        self.num_blocks, self.block_size = self.cache.num_blocks, self.cache.block_size
        self.vocab, self.max_context = model.shape.vocab, model.shape.max_context
        self._reserve_rows(1)

    @torch.inference_mode()
    def run(self, work: Sequence[Work]) -> Result:
        """One forward for all of `work`: the tokens of those that sample (else None), seconds."""
        begin = time.perf_counter()
        # Decode rows first: they are the shortest, and attention takes rows of one length together.
        order = sorted(range(len(work)), key=lambda index: row_length(work[index]))
        rows = [work[index] for index in order]
        if row_length(rows[-1]) == 1 and all(map(has_logits, rows)):
            logits = self._decode(rows)
        else:
            logits = self._mixed(rows)
        picked = iter(pick_tokens(logits, [row for row in rows if has_logits(row)]))
        tokens: list[int | None] = [None] * len(work)
        for index, row in zip(order, rows, strict=True):
            token = next(picked) if has_logits(row) else None
            tokens[index] = token if row.sample else None
        return Result(tokens=tokens, seconds=time.perf_counter() - begin)

    def _decode(self, rows: Sequence[Work]) -> torch.Tensor:
        """Logits [B, vocab] where every row has one token: the step of `decode`, over tables."""
        if len(rows) > self.paged.rows:
            self._reserve_rows(len(rows))
        positions = [row.start for row in rows]
        context = max(positions) + 1
        # The rows that a graph adds to fill its bucket write to scratch, not where others did.
        spare = [()] * (self.paged.rows - len(rows))
        tables = self.cache.tables([*(row.table for row in rows), *spare], context)
        self.paged.tables[:, : tables.shape[1]] = tables
        return self.forward([padded(row)[0] for row in rows], positions, context)

    def _reserve_rows(self, batch: int) -> None:
        """Block tables at an address that stays, since CUDA graphs remember it."""
        columns = self.max_context or self.num_blocks * self.block_size
        self.paged = PagedRows(self.cache, self.cache.tables([()] * bucket(batch), columns))
        self.forward = decode_forward(self.model, self.paged)

    def _mixed(self, rows: Sequence[Work]) -> torch.Tensor | None:
        """Logits [n, vocab] of the rows that have any, after one pass over all T tokens.

        Norms and matrices see one row of T tokens, attention sees a group at a time.
        """
        by_length = itertools.groupby(rows, row_length)
        groups = [Group(self.model, self.cache, list(alike)) for _, alike in by_length]
        tokens, positions, slots = (
            torch.cat([getattr(group, name).flatten() for group in groups])[None]
            for name in ("tokens", "positions", "slots")
        )
        x, rope = self.model.embed(tokens), self.model.rope(positions)
        new = CacheView(self.cache, slots, 0)
        for index, layer in enumerate(self.model.layers):
            q, kv = layer.project(x, rope)
            new.write(index, kv)
            parts = q[0].split([group.tokens.numel() for group in groups])
            attended = [g.attend(part, index) for g, part in zip(groups, parts, strict=True)]
            x = layer.finish(x, torch.cat(attended)[None])
        ends = itertools.accumulate(map(row_length, rows))
        last = [
            end - 1 - (row.padding if row.tokens else 0)
            for row, end in zip(rows, ends, strict=True)
            if has_logits(row)
        ]
        return self.model.logits(x[0, last, None]) if last else None


class Group:
    """Rows of a step with S new tokens each: their attention is one call."""

    def __init__(self, model: Decoder, cache: PagedCache, rows: Sequence[Work]) -> None:
        self.tokens = torch.tensor([padded(row) for row in rows], device=model.device)  # [B, S]
        starts = torch.tensor([[row.start] for row in rows], device=model.device)
        self.positions = starts + torch.arange(self.tokens.shape[1], device=model.device)
        context = max(row.start for row in rows) + self.tokens.shape[1]
        tables = cache.tables([row.table for row in rows], context)
        self.view = PagedRows(cache, tables).at(self.positions, context)
        self.slots = self.view.slots
        self.masks = model.masks(self.positions, self.view)

    def attend(self, q: torch.Tensor, layer: int) -> torch.Tensor:
        """Attention of q [B S, H, D] over the cache: [B S, H D]."""
        q = q.unflatten(0, self.positions.shape)
        return attend(q, *self.view.read(layer), self.masks[layer]).flatten(0, 1)


def row_length(row: Work) -> int:
    """Tokens that a row computes, its padding included."""
    return len(row.tokens) + row.padding


def padded(row: Work) -> list[int]:
    """A row's tokens and then its padding, written above all real positions of its own blocks."""
    return [*row.tokens, *[0] * row.padding]


def has_logits(row: Work) -> bool:
    """Whether a row goes through the LM head: padding alone does, as in any padded batch."""
    return row.sample or not row.tokens
