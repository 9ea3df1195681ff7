"""When an online run may end: the server is overloaded, or what is measured changes no more.

The paper's rule (section 7, online serving): a run ends when the time to the first token exceeds its limit,
or when the averages over the sliding window agree within 5 %. Pure: times come with the observations. Time
is cut into slices, `SLICES` a window; each verdict is about the last window of whole slices.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

__all__ = ["SLICES", "SteadyRule", "SteadyState", "Verdict"]

SLICES = 10
"""Slices of a window; each of its halves has five."""


class Verdict(StrEnum):
    """As `Run.ended` names it; CONTINUE: not yet."""

    CONTINUE = "continue"
    STEADY = "steady state"
    TTFT_LIMIT = "ttft limit"
    ERRORS = "errors"


@dataclass(frozen=True, slots=True, kw_only=True)
class SteadyRule:
    """`window_s`: the sliding window. `steady_ends`: whether a run ends for being steady; the limits hold
    in any case. `tolerance`: how much the means of the window's halves may differ, by the larger.
    `ttft_limit_s`: the mean time to the first token over the window may not exceed it; None: no limit.
    `min_requests`: in each half, before it is called steady. `max_error_share`: of the requests that ended
    in the window."""

    window_s: float = 120.0
    steady_ends: bool = True
    tolerance: float = 0.05
    ttft_limit_s: float | None = None
    min_requests: int = 10
    max_error_share: float = 0.5

    @property
    def slice_s(self) -> float:
        return self.window_s / SLICES


@dataclass(slots=True)
class _Slice:
    requests: int = 0
    failed: int = 0
    ttft_s: float = 0.0
    tpot_s: float = 0.0
    tpot_requests: int = 0


class SteadyState:
    """Takes observations in order of time, and judges the last whole window when told that time has passed.
    Times start at 0. A verdict other than CONTINUE stays."""

    def __init__(self, rule: SteadyRule) -> None:
        self._rule = rule
        self._ended: deque[_Slice] = deque(maxlen=SLICES)
        self._now = _Slice()
        self._number = 0
        self._judged = 0
        self._verdict = Verdict.CONTINUE
        self._from_s = 0.0

    @property
    def from_s(self) -> float:
        """Where the window of the verdict starts."""
        return self._from_s

    def observe(self, at_s: float, ttft_s: float, tpot_s: float | None) -> None:
        """A request ended well."""
        self._pass_time(at_s)
        self._now.requests += 1
        self._now.ttft_s += ttft_s
        if tpot_s is not None:
            self._now.tpot_s += tpot_s
            self._now.tpot_requests += 1

    def observe_failure(self, at_s: float) -> None:
        """A request failed."""
        self._pass_time(at_s)
        self._now.failed += 1

    def look(self, at_s: float, waiting_s: Sequence[float] = ()) -> Verdict:
        """Judge. `waiting_s`: for how long each request waits that has no first token yet; a server that
        answers nothing any more is found out by them."""
        self._pass_time(at_s)
        if self._verdict is Verdict.CONTINUE and self._number > max(self._judged, SLICES - 1):
            self._judged = self._number
            self._from_s = (self._number - SLICES) * self._rule.slice_s
            self._verdict = self._judge(waiting_s)
        return self._verdict

    def _pass_time(self, at_s: float) -> None:
        number = math.floor(at_s / self._rule.slice_s)
        while self._number < number:
            self._ended.append(self._now)
            self._now = _Slice()
            self._number += 1

    def _judge(self, waiting_s: Sequence[float]) -> Verdict:
        rule = self._rule
        window = _total(self._ended)
        if window.failed > rule.max_error_share * max(window.requests + window.failed, 1):
            return Verdict.ERRORS
        if rule.ttft_limit_s is not None:
            # The mean of those that ended, and what the mean of all will be at least.
            at_least = (window.ttft_s + sum(waiting_s)) / max(window.requests + len(waiting_s), 1)
            mean = window.ttft_s / max(window.requests, 1)
            if max(mean, at_least) > rule.ttft_limit_s:
                return Verdict.TTFT_LIMIT
        halves = list(self._ended)
        first, second = _total(halves[: SLICES // 2]), _total(halves[SLICES // 2 :])
        if not rule.steady_ends or min(first.requests, second.requests) < rule.min_requests:
            return Verdict.CONTINUE
        agree = _agree(
            first.ttft_s / first.requests, second.ttft_s / second.requests, rule.tolerance
        )
        if first.tpot_requests and second.tpot_requests:
            agree = agree and _agree(
                first.tpot_s / first.tpot_requests,
                second.tpot_s / second.tpot_requests,
                rule.tolerance,
            )
        return Verdict.STEADY if agree else Verdict.CONTINUE


def _total(slices: Iterable[_Slice]) -> _Slice:
    total = _Slice()
    for each in slices:
        total.requests += each.requests
        total.failed += each.failed
        total.ttft_s += each.ttft_s
        total.tpot_s += each.tpot_s
        total.tpot_requests += each.tpot_requests
    return total


def _agree(first: float, second: float, tolerance: float) -> bool:
    return abs(first - second) <= tolerance * max(first, second)
