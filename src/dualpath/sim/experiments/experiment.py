"""What an experiment is: the runs it needs, and a pure function from their summaries to what is compared.

One module a figure or table of the paper. Where the paper does not give a setting, the module states ours.
Rate grids, horizons, factors and seeds are fixed, in `grid.py` and the modules; nothing is chosen by
looking at results but where a best is asked for, which is the best of the whole grid.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from dualpath.report.chart import Chart
from dualpath.sim.case import Case
from dualpath.sim.published import CLAIMS, PUBLISHED
from dualpath.sim.setting import Assumptions
from dualpath.sim.summary import FINER, WINDOW, Balance, Summary

__all__ = [
    "ABOUT",
    "Check",
    "Evaluation",
    "Experiment",
    "Figure",
    "Results",
    "Settings",
    "about",
    "balance_note",
    "geometric_mean",
    "grows",
]

ABOUT = 0.1
"""What is called about as fast differs by at most so much, in the geometric mean over a grid."""
_FLAT = 0.02
"""What grows may fall by so much in one step."""

Results = Mapping[Case, Summary]


@dataclass(frozen=True, slots=True)
class Settings:
    """Of all experiments alike. `seed`: of traces and arrivals."""

    assumptions: Assumptions
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Figure:
    """Ours beside `PUBLISHED[id]`. `note`: what to know of it. `simulated` is False of plain arithmetic."""

    id: str
    ours: float
    note: str = ""
    simulated: bool = True

    @property
    def error(self) -> float:
        """By the published value, with its sign."""
        return self.ours / PUBLISHED[self.id].value - 1


@dataclass(frozen=True, slots=True)
class Check:
    """Whether `CLAIMS[id]` holds here. `detail`: by which numbers."""

    id: str
    holds: bool
    detail: str

    def __post_init__(self) -> None:
        assert self.id in CLAIMS, self.id


@dataclass(frozen=True, slots=True)
class Evaluation:
    """`rows`: everything behind the figures, for a CSV file: columns first."""

    figures: Sequence[Figure] = ()
    checks: Sequence[Check] = ()
    charts: Sequence[Chart] = ()
    rows: Sequence[Sequence[str | float]] = ()


@dataclass(frozen=True, slots=True)
class Experiment:
    """`shows`: what, and with which settings, in a sentence or two. `gap`: why its figures are off as far as
    that is known, and what is not known; empty where there is nothing to explain."""

    name: str
    title: str
    shows: str
    cases: Callable[[Settings], Sequence[Case]]
    evaluate: Callable[[Settings, Results], Evaluation]
    gap: str = ""


def geometric_mean(ratios: Sequence[float]) -> float:
    return math.exp(math.fsum(map(math.log, ratios)) / len(ratios))


def about(id: str, what: str, ratios: Sequence[float]) -> Check:
    """That two are about as fast, by the ratios of their times."""
    mean = geometric_mean(ratios)
    holds = 1 / (1 + ABOUT) <= mean <= 1 + ABOUT
    spread = f"{min(ratios):.2f} to {max(ratios):.2f}"
    return Check(id, holds, f"{what}: {mean:.3f} in the mean of {len(ratios)}, {spread}")


def grows(id: str, what: str, values: Sequence[float], *, falls: bool = False) -> Check:
    """From the first to the last, and in no step the other way by much. `falls`: that it does so instead."""
    ordered = list(reversed(values)) if falls else list(values)
    steps = itertools.pairwise(ordered)
    holds = ordered[-1] > ordered[0] and all(b > a * (1 - _FLAT) for a, b in steps)
    return Check(id, holds, f"{what}: {', '.join(f'{each:.3f}' for each in values)}")


def balance_note(balance: Balance) -> str:
    """In which part of the run it was taken, and what shorter windows give."""
    shorter = zip(FINER, balance.finer, strict=True)
    others = ", ".join(f"{value:.2f} over {seconds} s" for seconds, value in shorter)
    return f"windows of {WINDOW} s in {balance.share:.0%} of the run; {others}"
