"""Refuse bad numbers with a sentence that names them."""

from __future__ import annotations

import math
import operator


def positive_int(name: str, value: object) -> int:
    """Return `value` as a plain int >= 1; NumPy integers pass, True and 8.0 do not."""
    try:
        number = operator.index(value)
    except TypeError:
        number = 0
    if number < 1 or isinstance(value, bool):
        raise ValueError(f"{name} must be a positive whole number, not {value!r}.")
    return number


def positive_number(name: str, value: object) -> float:
    """Return `value` unchanged if it is a finite number > 0."""
    try:
        good = not isinstance(value, bool) and math.isfinite(value) and value > 0
    except TypeError:
        good = False
    if not good:
        raise ValueError(f"{name} must be a finite number above 0, not {value!r}.")
    return value


def gigabytes(num_bytes: float) -> str:
    """Write bytes in GB = 10^9, the unit of every message of this package."""
    return f"{num_bytes / 1e9:.1f} GB"
