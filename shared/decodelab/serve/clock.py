"""The engine's two clocks: one told how long a step takes, one that looks."""

from __future__ import annotations

import time


class VirtualClock:
    """Seconds since the start, advanced by what each step is said to take."""

    def __init__(self) -> None:
        self.now = 0.0

    def advance(self, seconds: float) -> None:
        """A step took so long."""
        self.now += seconds

    def skip_to(self, moment: float) -> None:
        """Pass over time in which nothing happens."""
        self.now = max(self.now, moment)


class WallClock:
    """Seconds since the start; idle time is skipped, not slept."""

    def __init__(self) -> None:
        self._zero = time.perf_counter()

    @property
    def now(self) -> float:
        """Seconds, skipped ones included."""
        return time.perf_counter() - self._zero

    def advance(self, seconds: float) -> None:
        """It has advanced by itself."""

    def skip_to(self, moment: float) -> None:
        """Pass over time in which nothing happens."""
        self._zero -= max(0.0, moment - self.now)
