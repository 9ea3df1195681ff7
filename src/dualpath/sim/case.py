"""One simulated run as data, and running it. Cases that are equal are the same run, so one result serves
both.

Deterministic: a case gives the same summary in whatever process and order. What counts of a run: all of it
where agents start at once, its last third where they keep arriving.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from dualpath.base.errors import ConfigError
from dualpath.sim.arrivals import POISSON, open_arrivals
from dualpath.sim.outcome import Outcome
from dualpath.sim.paper_traces import paper_trace
from dualpath.sim.plan.load import AtRate, Offline, Sessions
from dualpath.sim.plan.settings import PAPER_PREFIX
from dualpath.sim.setting import Assumptions, Deployment, System, prepare
from dualpath.sim.simulation import Simulation
from dualpath.sim.summary import Summary, summary_of
from dualpath.sim.workload import Workload, scaled
from dualpath.traces import open_trace
from dualpath.traces.generated import parse_length

__all__ = [
    "COUNTED_FROM",
    "Case",
    "play",
    "simulate",
    "summarise",
    "workload_of",
]

COUNTED_FROM = 2 / 3
"""Of the horizon of an online run."""

Progress = Callable[[float, int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """`trace`: `paper:64k` and the like, or anything that `open_trace` knows. `append`, `output`: factors
    on the lengths of the paper's traces. `arrivals`: online, of `open_arrivals`. `seed`: of what is
    generated of the trace, and of arrivals at random."""

    deployment: Deployment
    system: System
    assumptions: Assumptions
    trace: str
    load: Offline | AtRate
    append: float = 1.0
    output: float = 1.0
    arrivals: str = POISSON
    seed: int = 0

    @property
    def agents(self) -> float:
        """About how many play: what a run costs grows with it."""
        load = self.load
        return load.agents if isinstance(load, Offline) else load.rate_aps * load.horizon_s

    @property
    def until_s(self) -> float:
        return self.load.horizon_s if isinstance(self.load, AtRate) else math.inf


def play(case: Case) -> Summary:
    """Ctrl-C is KeyboardInterrupt, and nothing is given. Raises ConfigError."""
    outcome = simulate(case)
    if outcome.was_interrupted:
        raise KeyboardInterrupt
    return summarise(case, outcome)


def summarise(case: Case, outcome: Outcome) -> Summary:
    if isinstance(case.load, Offline):
        return summary_of(outcome)
    horizon_s = case.load.horizon_s
    return summary_of(outcome, COUNTED_FROM * horizon_s, horizon_s)


def simulate(case: Case, progress: Progress | None = None) -> Outcome:
    """The run with all its records; Ctrl-C gives what there is."""
    cluster, policy = prepare(case.deployment, case.system, case.assumptions)
    return Simulation(cluster, policy, workload_of(case)).run(case.until_s, progress)


def workload_of(case: Case) -> Workload:
    sessions = _sessions(case.trace, case.append, case.output, case.seed)
    if isinstance(case.load, Offline):
        return sessions.starting(np.zeros(case.load.agents))
    horizon_s = case.load.horizon_s
    start_s = open_arrivals(case.arrivals).before(horizon_s, case.load.rate_aps, case.seed)
    if not len(start_s):
        raise ConfigError(
            f"no agent arrives within {horizon_s:g} s at {case.load.rate_aps:g} a second: raise the rate"
        )
    return sessions.starting(start_s)


@lru_cache(maxsize=16)
def _sessions(name: str, append: float, output: float, seed: int) -> Sessions:
    """Kept in the process: many cases share them."""
    if not name.startswith(PAPER_PREFIX):
        if (append, output) != (1.0, 1.0):
            raise ConfigError(f"{name}: only the paper's traces can be scaled")
        return Sessions.of(open_trace(name, seed=seed))
    length = name.removeprefix(PAPER_PREFIX)
    trace = paper_trace(length, seed=seed)
    if (append, output) != (1.0, 1.0):
        trace = scaled(trace, max_tokens=parse_length(length), append=append, output=output)
    return Sessions.of(trace)
