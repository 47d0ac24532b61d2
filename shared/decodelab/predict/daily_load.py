"""A day of load on replicas: what stands idle is paid for all the same."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from .capacity import fraction
from .checks import positive_int, positive_number

HOURS = 24


@dataclass(frozen=True, kw_only=True)
class Day:
    """Tokens per second wanted in each of 24 hours, and the replicas that are on.

    `tokens_per_second` and `usd_per_hour` are of one replica at full load.
    """

    loads: tuple[float, ...]
    replicas: tuple[int, ...]
    tokens_per_second: float
    usd_per_hour: float

    @property
    def served(self) -> tuple[float, ...]:
        """Tokens per second made in each hour: those wanted, as far as the replicas can."""
        most = (replicas * self.tokens_per_second for replicas in self.replicas)
        return tuple(map(min, self.loads, most))

    @property
    def tokens(self) -> float:
        """Tokens made in the day."""
        return 3600 * sum(self.served)

    @property
    def unserved(self) -> float:
        """Tokens wanted and not made."""
        return 3600 * sum(self.loads) - self.tokens

    @property
    def usd(self) -> float:
        """What the replicas cost, idle or not."""
        return self.usd_per_hour * sum(self.replicas)

    @property
    def utilization(self) -> float:
        """Tokens made over what the replicas could have made while they were on.

        Not the mean of the hours' own utilizations: an hour with more replicas counts for more.
        """
        return sum(self.served) / (self.tokens_per_second * sum(self.replicas))

    @property
    def usd_per_million_tokens(self) -> float:
        """Dollars of the day over its tokens."""
        return self.usd * 1e6 / self.tokens


def day(
    loads: Iterable[float],
    tokens_per_second: float,
    usd_per_hour: float,
    replicas: int | None = None,
    target: float = 1.0,
) -> Day:
    """`replicas` on all day, or, without a number, in each hour as many as its load needs.

    Those are ceil(load / (target x tokens_per_second)), `target` being the utilization aimed at:
    below 1 it leaves room for bursts within an hour.
    """
    loads = tuple(loads)
    positive_number("tokens_per_second", tokens_per_second)
    positive_number("usd_per_hour", usd_per_hour)
    if len(loads) != HOURS or not all(0 <= load < math.inf for load in loads) or not any(loads):
        raise ValueError(
            f"A day has {HOURS} loads in tokens per second, none negative and one at least above "
            f"0, not {loads}."
        )
    if replicas is None:
        aim = fraction("target", target) * tokens_per_second
        # Rounded first, lest 2.1 / 0.7 need a fourth replica.
        on = tuple(math.ceil(round(load / aim, 9)) for load in loads)
    else:
        on = (positive_int("replicas", replicas),) * HOURS
    return Day(
        loads=loads, replicas=on, tokens_per_second=tokens_per_second, usd_per_hour=usd_per_hour
    )
