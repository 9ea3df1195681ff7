"""The highest arrival rate that a server sustains, by doubling and bisection.

Pure: says which rate to try next, and is told how that went. Knows no server and no objective. Invariants:
no rate is tried twice; every rate tried lies between the highest that was sustained and the lowest that was
not.
"""

from __future__ import annotations

import math

from dualpath.base.errors import InvariantViolation

__all__ = ["RateSearch"]

_WIDEST = 2.0**12
"""The search goes this much above and below where it starts."""


class RateSearch:
    """`start`: agents per second to begin with. `precision`: the search ends when the lowest rate that was
    not sustained exceeds the highest that was by no more than this share. `ceiling`: a rate that cannot be
    sustained for a reason known before, such as the rate of a NIC; above `start`."""

    def __init__(
        self, start: float, precision: float = 0.05, *, ceiling: float | None = None
    ) -> None:
        if not (start > 0 and precision > 0):
            raise ValueError(f"start and precision are above 0, got {start} and {precision}")
        if ceiling is not None and not ceiling > start:
            raise ValueError(f"the ceiling is above the start {start}, got {ceiling}")
        self._start = start
        self._precision = precision
        self._sustained: float | None = None
        self._exceeded = ceiling
        self._ceiling = ceiling

    @property
    def best(self) -> float | None:
        """The highest rate that was sustained; None: none was."""
        return self._sustained

    @property
    def bounded(self) -> bool:
        """Whether a rate was found that is not sustained; otherwise the server may do more than `best`."""
        return self._exceeded is not None and self._exceeded != self._ceiling

    def next_rate(self) -> float | None:
        """None: the search has ended."""
        low, high = self._sustained, self._exceeded
        if low is None and high == self._ceiling:
            return self._start
        if high is None:
            assert low is not None
            return low * 2 if low < self._start * _WIDEST else None
        if low is None:
            return high / 2 if high > self._start / _WIDEST else None
        if high <= low * (1 + self._precision):
            return None
        return math.sqrt(low * high)

    def observe(self, rate: float, sustained: bool) -> None:
        """How `next_rate()` went."""
        if rate != self.next_rate():
            raise InvariantViolation(f"rate {rate} was not asked for, {self.next_rate()} was")
        if sustained:
            self._sustained = rate
        else:
            self._exceeded = rate
