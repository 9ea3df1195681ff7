"""One run, or the runs of one capacity search, of one system on one split. What worker processes execute.

Deterministic: the same task gives the same figures, in whatever process and order.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec
import numpy as np

from dualpath.policy.config import PolicyConfig
from dualpath.sim.arrivals import Arrivals
from dualpath.sim.case import COUNTED_FROM
from dualpath.sim.cluster import Cluster
from dualpath.sim.outcome import Outcome
from dualpath.sim.plan.advice import Turns, beta_tokens_for
from dualpath.sim.plan.figures import held_in, mean_latencies_s
from dualpath.sim.plan.load import (
    LOWEST_STEP,
    AtRate,
    Capacity,
    Goal,
    Offline,
    Sessions,
    grid_rate,
    highest_rate,
    nearest_step,
)
from dualpath.sim.plan.result import Figures
from dualpath.sim.plan.splits import Split
from dualpath.sim.setting import Assumptions, Deployment, System, prepare
from dualpath.sim.simulation import Simulation
from dualpath.sim.summary import summary_of
from dualpath.sim.workload import Workload

__all__ = ["Task", "play", "prepared", "simulate"]

_STAGES = (1 / 3, 2 / 3, 1)
"""When a run of a capacity search is looked at."""
_HOPELESS = 2.0
"""It ends early when a mean is more than so many times its limit,"""
_SAFE, _STEADY = 0.5, 0.05
"""or when all are below this share of it, and differ by less than this between the halves of what counts."""
_WINDOWS = 20_000


@dataclass(frozen=True, slots=True, eq=False)
class Task:
    """`seed`: of arrivals at random. Sent to workers, so all of it is data; a task equals itself only."""

    deployment: Deployment
    system: System
    assumptions: Assumptions
    goal: Goal
    sessions: Sessions
    arrivals: Arrivals
    seed: int

    @property
    def split(self) -> Split:
        each = self.deployment
        return Split(
            each.prefill_nodes,
            each.decode_nodes,
            each.prefill_instance_nodes,
            each.decode_instance_nodes,
        )


def prepared(task: Task) -> tuple[Cluster, PolicyConfig]:
    """With beta by the paper's rule. Raises ConfigError when the model does not fit the deployment."""
    cluster, policy = prepare(task.deployment, task.system, task.assumptions)
    beta_tokens = beta_tokens_for(cluster, policy, Turns.of(task.sessions))
    return cluster, msgspec.structs.replace(policy, beta_tokens=beta_tokens)


def play(task: Task) -> Figures:
    """What the goal asks for. Ctrl-C is KeyboardInterrupt, and nothing is given."""
    match task.goal:
        case Offline():
            return _figures(task, simulate(task), None)
        case AtRate(rate_aps=rate_aps):
            return _figures(task, simulate(task, rate_aps), rate_aps)
        case Capacity():
            return _capacity(task, task.goal)


def simulate(task: Task, rate_aps: float | None = None) -> Outcome:
    """The task's run; online with so many agents a second, which an offline goal has no use for."""
    if isinstance(task.goal, Offline):
        work = task.sessions.starting(np.zeros(task.goal.agents))
        return _run(_simulation(task, work), np.inf)
    assert rate_aps is not None
    work = _arriving(task, rate_aps, task.goal.horizon_s)
    return _run(_simulation(task, work), task.goal.horizon_s)


def _arriving(task: Task, rate_aps: float, horizon_s: float) -> Workload:
    start_s = task.arrivals.before(horizon_s, rate_aps, task.seed)
    # A rate so low that nobody comes: one agent does, at the start.
    return task.sessions.starting(start_s if len(start_s) else np.zeros(1))


def _simulation(task: Task, work: Workload) -> Simulation:
    cluster, policy = prepared(task)
    # A run with long delays takes long: it then has wider windows.
    delays_s = np.add.reduceat(work.delay_s, work.first_turn[:-1])
    window_s = max(1.0, 4 * float(delays_s.max()) / _WINDOWS)
    return Simulation(cluster, policy, work, window_s=window_s, windows=_WINDOWS)


def _run(simulation: Simulation, until_s: float) -> Outcome:
    outcome = simulation.run(until_s)
    if outcome.was_interrupted:
        raise KeyboardInterrupt
    return outcome


def _figures(
    task: Task, outcome: Outcome, rate_aps: float | None, nearest_aps: float | None = None
) -> Figures:
    goal = task.goal
    if isinstance(goal, Offline):
        summary = summary_of(outcome)
    else:
        summary = summary_of(outcome, COUNTED_FROM * goal.horizon_s, goal.horizon_s)
    return Figures(
        split=task.split,
        system=task.system.value,
        rate_aps=rate_aps,
        run=summary,
        held=held_in(outcome, task.deployment.block_tokens),
        nearest_aps=nearest_aps,
    )


def _capacity(task: Task, goal: Capacity) -> Figures:
    """The search is by verdicts that may come early; the rate it finds then has to hold to the end, or the
    next lower one that does is taken. Where none holds, the run is of the rate that came nearest."""
    highest: dict[int, Simulation] = {}
    excesses: dict[int, float] = {}

    def holds(step: int) -> bool:
        simulation = _simulation(task, _arriving(task, grid_rate(step), goal.horizon_s))
        for share in _STAGES:
            at_s = share * goal.horizon_s
            outcome = _run(simulation, at_s)
            verdict = _verdict(outcome, goal, at_s, is_end=share == 1)
            if verdict is not None:
                break
        excesses[step] = _excess(outcome, goal, at_s)
        if verdict:
            highest.clear()
            highest[step] = simulation
        return bool(verdict)

    step = highest_rate(nearest_step(_first_rate(task)), holds)
    while step is not None:
        simulation = highest.pop(step, None)
        if simulation is None:
            work = _arriving(task, grid_rate(step), goal.horizon_s)
            simulation = _simulation(task, work)
        outcome = _run(simulation, goal.horizon_s)
        if _verdict(outcome, goal, goal.horizon_s, is_end=True):
            return _figures(task, outcome, grid_rate(step))
        step = step - 1 if step > LOWEST_STEP else None
    nearest = min(excesses, key=lambda each: excesses[each])
    if excesses[nearest] == np.inf:
        return _figures(task, simulate(task, grid_rate(LOWEST_STEP)), 0.0)
    return _figures(task, simulate(task, grid_rate(nearest)), 0.0, grid_rate(nearest))


def _excess(outcome: Outcome, goal: Capacity, at_s: float) -> float:
    """The largest mean as a share of its limit; infinite without a request that counts."""
    means_s = mean_latencies_s(outcome, COUNTED_FROM * at_s, at_s)
    return max(
        (means_s[each] / goal.limits_s[each] for each in goal.limits_s if means_s), default=np.inf
    )


def _verdict(outcome: Outcome, goal: Capacity, at_s: float, *, is_end: bool) -> bool | None:
    """Whether the objectives are held; None: too early to say.

    Before the end they are missed when a mean is far beyond its limit, and held when all are far within and
    do not change any more.
    """
    from_s = COUNTED_FROM * at_s
    means_s = mean_latencies_s(outcome, from_s, at_s)
    limits_s = goal.limits_s
    if is_end:
        return bool(means_s) and all(means_s[each] <= limits_s[each] for each in limits_s)
    if any(means_s[each] > _HOPELESS * limits_s[each] for each in limits_s if means_s):
        return False
    half_s = (from_s + at_s) / 2
    before_s = mean_latencies_s(outcome, from_s, half_s)
    after_s = mean_latencies_s(outcome, half_s, at_s)
    steady = bool(before_s and after_s) and all(
        means_s[each] <= _SAFE * limit_s
        and abs(after_s[each] - before_s[each]) <= _STEADY * limit_s
        for each, limit_s in limits_s.items()
    )
    return True if steady else None


def _first_rate(task: Task) -> float:
    """Half of what all storage NICs could read, or 0.1 agents a second where little is read: any would do."""
    cluster, _ = prepared(task)
    sessions = task.sessions
    tokens = float(sessions.work.reused_tokens.sum()) / (len(sessions.work.first_turn) - 1)
    read_s = tokens * cluster.kv_bytes_token / (cluster.snic_bytes_s * cluster.nodes)
    return min(0.5 / read_s, 10.0) if read_s else 0.1
