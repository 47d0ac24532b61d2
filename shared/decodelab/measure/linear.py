"""A linear layer whose weights are stored the way the device reads them fastest.

On a CPU in fp32 that is oneDNN's blocked layout: with plain rows B = 2 takes nearly twice the time
of B = 1, and a batch would seem to save nothing. One layout, one copy: a transposed copy beside it
would save about a tenth of a step, at B = 1 only.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

# The batch that oneDNN picks the layout for. A hint of 1 gives a layout that is slow from B = 4 on
# and no faster at B = 1.
LAYOUT_BATCH = 8


class Linear(nn.Module):
    """y = x W^T + b for x [..., d_in], weight [d_out, d_in], bias [d_out] or None."""

    def __init__(
        self, weight: torch.Tensor, bias: torch.Tensor | None = None, *, pack: bool = True
    ) -> None:
        super().__init__()
        self.packed = packed_weight(weight) if pack else None
        plain = weight if self.packed is None else None
        self.weight = None if plain is None else nn.Parameter(plain, requires_grad=False)
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.packed is None:
            return F.linear(x, self.weight, self.bias)
        return torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, "none", [], "")


def packs(device: torch.device | str, dtype: torch.dtype) -> bool:
    """Whether weights there, of that dtype, get a layout of their own."""
    return torch.device(device).type == "cpu" and dtype == torch.float32


def packed_weight(weight: torch.Tensor) -> torch.Tensor | None:
    """A copy of the weight in oneDNN's layout; None where oneDNN or its private ops are missing."""
    if not packs(weight.device, weight.dtype):
        return None
    try:
        return torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), LAYOUT_BATCH)
    except (AttributeError, RuntimeError):
        return None
