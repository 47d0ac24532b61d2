"""A step-time model fitted to this machine: weights + KV + arithmetic + overhead.

The roofline is a bound; these terms add up instead, as they do where loads and arithmetic hardly
overlap. Fit it on a few corner cells and judge it on the others. Three fitted numbers predict well
without each being a property of the hardware: do not read them as one.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from decodelab.predict import ModelShape

from .calibrate import Calibration
from .steps import StepTiming


@dataclass(frozen=True, kw_only=True)
class StepTimeModel:
    """t(B, S) = weights + overhead + B * KV(S) / kv_bandwidth + B * arithmetic, in seconds.

    `weight_seconds` is not fitted: bytes of weights over the calibrated bandwidth.
    """

    shape: ModelShape
    element_bytes: float
    weight_seconds: float
    overhead_seconds: float
    seconds_per_kv_byte: float
    seconds_per_sequence: float

    @classmethod
    def fit(
        cls,
        shape: ModelShape,
        cells: Iterable[StepTiming],
        calibration: Calibration,
        element_bytes: float,
    ) -> StepTimeModel:
        """Least squares on relative errors, no coefficient below 0.

        Needs two batches and two contexts, or the terms can't be told apart: ValueError.
        """
        cells = list(cells)
        if len({c.batch for c in cells}) < 2 or len({c.context for c in cells}) < 2:
            raise ValueError("Fit needs cells of at least two batches and two contexts.")
        rows = [(1.0, c.batch * shape.kv_bytes(c.context, element_bytes), c.batch) for c in cells]
        seconds = np.array([c.seconds for c in cells])
        relative = np.array(rows) / seconds[:, None]
        constant, per_kv_byte, per_sequence = non_negative_fit(relative, np.ones(len(cells)))
        weights = shape.streamed_parameters * element_bytes / calibration.bandwidth
        return cls(
            shape=shape,
            element_bytes=element_bytes,
            weight_seconds=min(weights, constant),  # a fit below the roofline: the constant rules
            overhead_seconds=max(0.0, constant - weights),
            seconds_per_kv_byte=per_kv_byte,
            seconds_per_sequence=per_sequence,
        )

    @property
    def kv_bandwidth(self) -> float:
        """Bytes/s at which KV is read: the slope of step time in B x S. inf without a slope."""
        return 1 / self.seconds_per_kv_byte if self.seconds_per_kv_byte else math.inf

    def terms(self, batch: int, context: int) -> dict[str, float]:
        """Seconds of each part of one step; they add up to `predict`."""
        kv_bytes = batch * self.shape.kv_bytes(context, self.element_bytes)
        return {
            "weights": self.weight_seconds,
            "KV": kv_bytes * self.seconds_per_kv_byte,
            "arithmetic": batch * self.seconds_per_sequence,
            "overhead": self.overhead_seconds,
        }

    def predict(self, batch: int, context: int) -> float:
        """Seconds of one decode step."""
        return sum(self.terms(batch, context).values())

    def errors(self, cells: Iterable[StepTiming]) -> list[float]:
        """Predicted / measured - 1 of each cell; score it on cells that `fit` never saw."""
        return [self.predict(c.batch, c.context) / c.seconds - 1 for c in cells]


def non_negative_fit(rows: np.ndarray, target: np.ndarray) -> list[float]:
    """The x >= 0 that minimises |rows x - target|, by trying every set of nonzero columns.

    Exact, and fine for a handful of columns: the best x solves plain least squares on its own set.
    """
    scale = np.abs(rows).max(axis=0)
    count = rows.shape[1]
    best, least = np.zeros(count), np.linalg.norm(target)
    for chosen in itertools.product((False, True), repeat=count):
        columns = np.flatnonzero(chosen)
        if not columns.size:
            continue
        solution = np.linalg.lstsq(rows[:, columns] / scale[columns], target, rcond=None)[0]
        x = np.zeros(count)
        x[columns] = solution / scale[columns]
        miss = np.linalg.norm(rows @ x - target)
        if (solution >= 0).all() and miss < least:
            best, least = x, miss
    return best.tolist()
