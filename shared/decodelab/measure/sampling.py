"""The next token from its logits: the best, or one drawn with a request's own random numbers."""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch

from decodelab.serve import Sampling, Work

NUCLEUS = 1024  # tokens that top_p looks at before it sorts a whole vocabulary


def pick_tokens(logits: torch.Tensor | None, work: Sequence[Work]) -> list[int]:
    """The next token of each row of logits [B, vocab], as its request wants it sampled."""
    tokens = [] if logits is None else logits.argmax(-1).tolist()
    for row, item in enumerate(work):
        if item.sampling.temperature > 0:
            tokens[row] = draw_token(logits[row], item.sampling, item.output_index)
    return tokens


def draw_token(logits: torch.Tensor, sampling: Sampling, index: int) -> int:
    """Draw from softmax(logits [vocab] / temperature), cut to top_k tokens and then to top_p.

    The random number is a function of the request's seed and the token's index alone: neither the
    rest of a batch nor a preemption changes what is drawn.
    """
    logits = logits.double().cpu()
    mass, ids = ((logits - logits.max()) / sampling.temperature).softmax(-1), None
    if sampling.top_k or sampling.top_p < 1:
        mass, ids = _best(mass, sampling.top_k, sampling.top_p)
    edges = mass.cumsum(0)
    number = random.Random(f"{sampling.seed} {index}").random()  # in [0, 1)
    place = int(torch.searchsorted(edges, number * edges[-1], right=True))
    return place if ids is None else int(ids[place])


def _best(mass: torch.Tensor, top_k: int, top_p: float) -> tuple[torch.Tensor, torch.Tensor]:
    """The top_k best tokens, and of these the fewest whose share reaches top_p: mass and ids."""
    best, ids = mass.topk(min(top_k or NUCLEUS, len(mass)))
    if not top_k and best.sum() < top_p:
        best, ids = mass.sort(descending=True)
    total = best.sum() if top_k else mass.sum()
    kept = int((best.cumsum(0) - best < top_p * total).sum())
    return best[:kept], ids[:kept]
