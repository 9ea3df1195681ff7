"""Quantiles of the gaps between tokens in bounded memory, however many there are.

Counts in bins that grow by 1 %, one histogram a slice of time, so that a warm-up that is found out only at
the end can be left out. Knows no requests. Invariant: a quantile is within 1 % of the exact one, between 1
us and 3 hours; shorter gaps (tokens that came in one piece) count as 0.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

__all__ = ["QUANTILES", "GapHistogram"]

QUANTILES = 101
"""0 %, 1 %, ..., 100 %."""

_SHORTEST_S = 1e-6
_LOG_STEP = math.log(1.01)
_BINS = 2325  # 1.01 ** 2323 * 1 us is more than 3 hours.


class GapHistogram:
    """`slice_s`: how fine the time is by which gaps can be left out. A slice takes 9 KB."""

    def __init__(self, slice_s: float) -> None:
        self._slice_s = slice_s
        self._slices: dict[int, NDArray[np.uint32]] = {}

    def add(self, at_s: float, gaps_s: Sequence[float]) -> None:
        """Gaps of a request that was due at `at_s`."""
        if not gaps_s:
            return
        number = int(at_s // self._slice_s)
        counts = self._slices.get(number)
        if counts is None:
            counts = self._slices[number] = np.zeros(_BINS, np.uint32)
        gaps = np.asarray(gaps_s, np.float64)
        logs = np.log(np.maximum(gaps, _SHORTEST_S) / _SHORTEST_S) / _LOG_STEP
        bins = np.minimum(np.ceil(logs), _BINS - 1).astype(np.intp)
        np.add.at(counts, bins, np.uint32(1))

    def quantiles(self, from_s: float = 0.0) -> list[float]:
        """Seconds at 0 %, 1 %, ..., 100 %, of the slices that start at `from_s` or later; [] without
        gaps."""
        total = np.zeros(_BINS, np.int64)
        for number, counts in self._slices.items():
            if number * self._slice_s >= from_s - 1e-9:
                total += counts
        cumulated = np.cumsum(total)
        if not cumulated[-1]:
            return []
        ranks = np.linspace(0, 1, QUANTILES) * (cumulated[-1] - 1)
        found = np.searchsorted(cumulated, np.floor(ranks), side="right")
        # The middle of the bin, by its logarithm.
        seconds = _SHORTEST_S * np.exp((found - 0.5) * _LOG_STEP)
        return [float(each) for each in np.where(found == 0, 0.0, seconds)]
