"""Batched greedy decoding: one prefill, then one forward per step for all unfinished sequences.

A finished sequence leaves at once and the last row takes its place. None joins: admission is the
business of `decodelab.serve`.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch

from .forward import decode_forward, length_for, rows_for
from .kv_cache import KVCache
from .model import Decoder


class Step(NamedTuple):
    """One forward: its phase ("prefill" or "decode"), the sequences in it, the tokens fed to it."""

    phase: str
    batch: int
    tokens: int


def decode(
    model: Decoder,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int | Sequence[int],
    eos: int | Iterable[int] | None = None,
    on_step: Callable[[Step], object] | None = None,
) -> list[list[int]]:
    """Continue each prompt greedily; returns the new token ids, an EOS that ended them included.

    `max_new_tokens` is one number or one per prompt; `on_step` hears of every forward. Raises
    ValueError on an empty prompt, an id outside the vocabulary, or more than max_context tokens.
    """
    prompts = [_checked_prompt(model, i, prompt) for i, prompt in enumerate(prompts)]
    budgets = _checked_budgets(model, prompts, max_new_tokens)
    ends = frozenset(() if eos is None else eos if isinstance(eos, Iterable) else [eos])
    if not prompts:
        return []
    with torch.inference_mode():
        return _run(model, prompts, budgets, ends, on_step or (lambda step: None))


def _run(
    model: Decoder,
    prompts: list[list[int]],
    budgets: list[int],
    ends: frozenset[int],
    on_step: Callable[[Step], object],
) -> list[list[int]]:
    longest = max(len(prompt) + new for prompt, new in zip(prompts, budgets, strict=True))
    rows, length = rows_for(model, len(prompts)), length_for(model, longest)
    cache = KVCache(model.shape, rows, length, model.dtype, model.device)
    forward = decode_forward(model, cache)

    outputs: list[list[int]] = [[] for _ in prompts]
    live = list(range(len(prompts)))  # which prompt each row of the cache holds
    logits = prefill(model, prompts, cache)
    on_step(Step("prefill", len(live), sum(map(len, prompts))))
    while True:
        for index, token in zip(live, logits.argmax(-1).tolist(), strict=True):
            outputs[index].append(token)
        # Tokens that are in the cache, a row: all but the newest, which the next forward feeds.
        cached = [len(prompts[i]) + len(outputs[i]) - 1 for i in live]
        for row in reversed(range(len(live))):
            output = outputs[live[row]]
            if output[-1] in ends or len(output) == budgets[live[row]]:
                _leave(row, live, cached, cache)
        if not live:
            return outputs
        logits = forward([outputs[i][-1] for i in live], cached, max(cached) + 1)
        on_step(Step("decode", len(live), len(live)))


def prefill(model: Decoder, prompts: Sequence[Sequence[int]], cache: KVCache) -> torch.Tensor:
    """Run all prompts in one forward, padded on the right; logits [B, vocab] after each.

    Padding is written above every real position, where no query looks, and decode overwrites it.
    """
    lengths = [len(prompt) for prompt in prompts]
    longest = max(lengths)
    padded = [[*prompt, *[0] * (longest - len(prompt))] for prompt in prompts]
    tokens = torch.tensor(padded, device=model.device)
    positions = torch.arange(longest, device=model.device).expand_as(tokens)
    last = torch.tensor(lengths, device=model.device) - 1
    return model(tokens, positions, cache.at(positions, longest), last)


def _leave(row: int, live: list[int], cached: list[int], cache: KVCache) -> None:
    """Take a finished row out: the last row moves into its place, so that rows stay dense."""
    last_index, last_cached = live.pop(), cached.pop()
    if row < len(live):
        cache.move(len(live), row, last_cached)
        live[row], cached[row] = last_index, last_cached


def _checked_prompt(model: Decoder, index: int, prompt: Sequence[int]) -> list[int]:
    try:
        ids = [operator.index(token) for token in prompt]
    except TypeError as error:
        raise TypeError(f"Prompt {index} must be a list of token ids, not {prompt!r}.") from error
    if not ids:
        raise ValueError(f"Prompt {index} is empty: give it at least one token, such as BOS.")
    for token in ids:
        if not 0 <= token < model.shape.vocab:
            raise ValueError(
                f"Prompt {index} has token id {token}, outside 0 .. {model.shape.vocab - 1}: was "
                "it made by another model's tokenizer?"
            )
    return ids


def _checked_budgets(
    model: Decoder, prompts: list[list[int]], max_new_tokens: int | Sequence[int]
) -> list[int]:
    alike = not isinstance(max_new_tokens, Iterable)
    budgets = [max_new_tokens] * len(prompts) if alike else list(max_new_tokens)
    if len(budgets) != len(prompts):
        raise ValueError(f"{len(budgets)} numbers in max_new_tokens for {len(prompts)} prompts.")
    limit = model.shape.max_context
    for index, (prompt, new) in enumerate(zip(prompts, budgets, strict=True)):
        if operator.index(new) < 1:
            raise ValueError(f"max_new_tokens must be at least 1, not {new} (prompt {index}).")
        if limit is not None and len(prompt) + new > limit:
            raise ValueError(
                f"Prompt {index} has {len(prompt)} tokens and {new} new ones were asked for: "
                f"more than the {limit} of the model's context."
            )
    return budgets
