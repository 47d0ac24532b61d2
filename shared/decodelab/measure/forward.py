"""One decode forward: called as Python on a CPU, replayed as a CUDA graph on a GPU.

A GPU finishes a small kernel sooner than Python can launch the next; a graph launches a whole step
at once, at fixed addresses and sizes. Hence the buckets of batch and context.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from .kv_cache import KVCache
from .model import Decoder

MIN_CONTEXT = 64  # so that a mask's rows stay aligned, and short contexts share one graph
WARMUPS = 3  # cuBLAS and SDPA choose kernels and allocate on first calls, which no graph may hold

# (tokens, positions, context) -> logits [rows, vocab], valid until the next call.
Forward = Callable[[Sequence[int], Sequence[int], int], torch.Tensor]


def decode_forward(model: Decoder, cache: KVCache) -> Forward:
    """The fastest way this device has to run one decode step over the first rows of `cache`."""
    if model.device.type == "cuda":
        return GraphForward(model, cache)
    return EagerForward(model, cache)


def rows_for(model: Decoder, batch: int) -> int:
    """Rows that a cache needs so that `batch` sequences can decode, bucket included."""
    return bucket(batch) if model.device.type == "cuda" else batch


def length_for(model: Decoder, context: int) -> int:
    """Tokens a row needs so that `context` columns can be read, bucket included."""
    return max(MIN_CONTEXT, bucket(context)) if model.device.type == "cuda" else context


def bucket(number: int) -> int:
    """The smallest 2^k or 3 * 2^k that is >= number: at most half again as much."""
    power = 1 << max(0, number - 1).bit_length()
    return power * 3 // 4 if power >= 4 and number <= power * 3 // 4 else power


class EagerForward:
    """Runs the model as it is."""

    def __init__(self, model: Decoder, cache: KVCache) -> None:
        self.model, self.cache = model, cache

    def __call__(
        self, tokens: Sequence[int], positions: Sequence[int], context: int
    ) -> torch.Tensor:
        ids = torch.tensor([tokens, positions], device=self.model.device)[..., None]  # [2, B, 1]
        return self.model(ids[0], ids[1], self.cache.at(ids[1], context))


class GraphForward:
    """One CUDA graph per bucket of batch and context, captured on first use.

    Rows beyond the batch compute too: they sit at position 0 of rows that no sequence holds.
    """

    def __init__(self, model: Decoder, cache: KVCache) -> None:
        self.model, self.cache = model, cache
        self.graphs: dict[tuple[int, int], Graph] = {}
        self.pool = torch.cuda.graph_pool_handle()  # graphs never run at once: they share memory

    def __call__(
        self, tokens: Sequence[int], positions: Sequence[int], context: int
    ) -> torch.Tensor:
        batch = len(tokens)
        rows = min(bucket(batch), self.cache.rows)
        columns = min(max(MIN_CONTEXT, bucket(context)), self.cache.length)
        padding = [0] * (rows - batch)
        ids = torch.tensor([[*tokens, *padding], [*positions, *padding]])[..., None]
        if (rows, columns) not in self.graphs:
            self.graphs[rows, columns] = Graph(self.model, self.cache, ids, columns, self.pool)
        graph = self.graphs[rows, columns]
        graph.ids.copy_(ids)
        graph.graph.replay()
        self.model.forwards += 1  # a replay runs no Python, so the model can't count it
        return graph.logits[:batch]


class Graph:
    """A captured forward with its fixed inputs `ids` [2, rows, 1] and output `logits`."""

    def __init__(
        self, model: Decoder, cache: KVCache, ids: torch.Tensor, columns: int, pool: tuple
    ) -> None:
        # Real ids from the start: warm-up and capture write to the cache, and so write what the
        # first replay will write again.
        self.ids = ids.to(model.device)
        count = model.forwards
        side = torch.cuda.Stream(model.device)
        side.wait_stream(torch.cuda.current_stream(model.device))
        with torch.cuda.stream(side):
            for _ in range(WARMUPS):
                self._run(model, cache, columns)
        torch.cuda.current_stream(model.device).wait_stream(side)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, pool=pool):
            self.logits = self._run(model, cache, columns)
        model.forwards = count  # neither warm-up nor capture is a step

    def _run(self, model: Decoder, cache: KVCache, columns: int) -> torch.Tensor:
        return model(self.ids[0], self.ids[1], cache.at(self.ids[1], columns))
