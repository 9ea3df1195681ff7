"""What a plan is made for: agents at once, agents that arrive at a rate, or as many as hold objectives. Pure.

Also how long such a run lasts and which part of it counts. The paper ends an online run when the means over
a sliding window agree (section 7). A planner compares many runs, so all of one plan last equally long
instead: 2.25 times what a session takes when every latency is at its limit, by when sessions leave as
often as they come; the last third counts. Knows no cluster and no policy.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import msgspec
import numpy as np

from dualpath.sim.workload import Float64, Workload, offline
from dualpath.traces import Trace

__all__ = [
    "HIGHEST_STEP",
    "LOWEST_STEP",
    "PAPER_LIMITS_S",
    "RATE_STEPS",
    "AtRate",
    "Capacity",
    "Goal",
    "Offline",
    "Sessions",
    "grid_rate",
    "highest_rate",
    "nearest_step",
    "steady_horizon_s",
]

PAPER_LIMITS_S = {"ttft": 4.0, "tpot": 0.05}
"""The paper's objectives (section 7, online serving)."""
RATE_STEPS = 40
"""Rates that are tried, a decade: 10 ** (k / 40), which are 6 % apart."""
_LIFETIMES = 2.25
"""For the paper's 64K trace and objectives that makes about 4,500 s; shorter runs flatter."""
LOWEST_STEP, HIGHEST_STEP = -4 * RATE_STEPS, 6 * RATE_STEPS
"""The grid's ends."""


class Offline(msgspec.Struct, frozen=True, tag="offline"):
    """`agents` start at once; less time until all have ended is better."""

    agents: int


class AtRate(msgspec.Struct, frozen=True, tag="rate"):
    """`rate_aps` agents arrive a second; less time for a request, on average, is better."""

    rate_aps: float
    horizon_s: float


class Capacity(msgspec.Struct, frozen=True, tag="capacity"):
    """The highest rate at which each metric's mean is at most its limit; more is better."""

    limits_s: dict[str, float]
    horizon_s: float


Goal = Offline | AtRate | Capacity


@dataclass(frozen=True, slots=True)
class Sessions:
    """A trace as `Workload` has it: `count` sessions, then a copy of each with a synthetic first round."""

    work: Workload
    count: int

    @classmethod
    def of(cls, trace: Trace) -> Sessions:
        count = len(trace.sessions)
        return cls(offline(trace, 2 * count), count)

    def starting(self, start_s: Float64) -> Workload:
        """An agent for each start, in order; they play what those of `workload.online` do."""
        agents = np.arange(len(start_s))
        played = np.where(agents < self.count, agents, self.count + agents % self.count)
        return replace(
            self.work,
            trajectory=self.work.trajectory[played],
            first_round_tokens=self.work.first_round_tokens[played],
            start_s=start_s,
        )


def steady_horizon_s(work: Workload, limits_s: dict[str, float]) -> float:
    """How long an online run lasts: see the module."""
    limits_s = PAPER_LIMITS_S | limits_s
    seconds = work.delay_s + limits_s["ttft"] + limits_s["tpot"] * work.output_tokens
    sessions = len(work.first_turn) - 1
    return _LIFETIMES * float(seconds.sum()) / sessions


def grid_rate(step: int) -> float:
    """Agents per second; rounded, as it is said to people."""
    return float(f"{10 ** (step / RATE_STEPS):.3g}")


def nearest_step(rate_aps: float) -> int:
    return int(np.clip(round(RATE_STEPS * np.log10(rate_aps)), LOWEST_STEP, HIGHEST_STEP))


def highest_rate(first_step: int, holds: Callable[[int], bool]) -> int | None:
    """The highest step of the grid that holds, when all below it do; None: none does.

    Doubles or halves the rate from `first_step` until the highest is bracketed, then bisects. No step is
    asked for twice. Of the grid's ends, the upper one is the answer when all hold.
    """
    stride = round(RATE_STEPS * np.log10(2))
    low, high = LOWEST_STEP - 1, HIGHEST_STEP + 1
    step = first_step
    while low < step < high:
        if holds(step):
            low = step
            step = min(step + stride, high) if high > HIGHEST_STEP else (low + high) // 2
        else:
            high = step
            step = max(step - stride, low) if low < LOWEST_STEP else (low + high) // 2
        if step in (low, high) and high - low > 1:
            step = (low + high) // 2
    return low if low >= LOWEST_STEP else None
