"""Seconds of one step that mixes chunks of prompts with decodes, and of a whole prefill."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache

from .checks import positive_int
from .deployment import Deployment
from .quantization import KV_FORMATS, streamed_bytes


class MixedStep:
    """The least time for a step of any rows on a tensor-parallel group; pure decode: its `step`.

    Constants are worked out once, since a simulation asks for a hundred thousand steps.
    """

    def __init__(self, deployment: Deployment) -> None:
        self.shape = shape = deployment.shape
        gpus = deployment.tensor_parallel
        self.peak = deployment.hardware.peak(deployment.dtype) * gpus
        self.bandwidth = deployment.hardware.bandwidth * gpus
        copies = gpus * shape.layer_kv_bytes(1, gpus) / shape.layer_kv_bytes(1)
        self.per_cached = KV_FORMATS[deployment.kv_format] * copies
        self.head = shape.vocab * shape.hidden
        self.body = shape.matmul_parameters - self.head
        self.weight_bytes = cache(
            lambda tokens: streamed_bytes(shape, deployment.weight_format, tokens)
        )

    def seconds(self, rows: Iterable[tuple[int, int]]) -> float:
        """max(W/BW, FLOPs/peak) + max(KV/BW, attention FLOPs/peak) of `rows` (start, count).

        A row computes `count` tokens from position `start` on. W is read once for all of them; a
        row reads the KV of its context once, and only its last token meets the LM head.
        """
        shape, rows = self.shape, list(rows)
        tokens = sum(count for _, count in rows)
        contexts = [start + count for start, count in rows]
        # All of a chunk at the context of its middle token: exact without a window.
        attended = [count * (start + (count + 1) // 2) for start, count in rows]
        if shape.windows is None:  # both terms grow as the context: one call does for all rows
            cached = shape.kv_bytes(sum(contexts), self.per_cached)
            flops = shape.attention_flops(sum(attended))
        else:
            cached = sum(shape.kv_bytes(context, self.per_cached) for context in contexts)
            middles = ((start + (count + 1) // 2, count) for start, count in rows)
            flops = sum(count * shape.attention_flops(middle) for middle, count in middles)
        products = 2 * (tokens * self.body + len(rows) * self.head)
        linear = max(self.weight_bytes(tokens) / self.bandwidth, products / self.peak)
        return linear + max(cached / self.bandwidth, flops / self.peak)


def prefill_seconds(deployment: Deployment, prompt: int) -> float:
    """The least time for a prompt of `prompt` tokens alone, in chunks of `deployment.chunk`.

    Dividing `prompt` by it gives the tokens per second at which input is read.
    """
    positive_int("prompt", prompt)
    step, chunk = MixedStep(deployment), deployment.chunk
    return sum(
        step.seconds([(start, min(chunk, prompt - start))]) for start in range(0, prompt, chunk)
    )
