"""Whether nodes should change their role when the mix of requests does, and what that can gain at most.

Two mixes, made of the 64K trace: appends four times as long with half the output, and appends half as
long with four times the output. Offline, on all divisions of some nodes.

- Bound: each mix alone. If each had its best division, against the best single division for both: by the
  sum of the times until all agents have ended.
- Change: the agents of one mix start at 0, those of the other when nearly all turns of the first have
  ended. Fixed divisions, and nodes that change (`role_change`), starting from some of these divisions.

DS 660B with instances of two nodes, the fewest that hold it, which are what changes its role; the bound
also for DS 27B, node by node.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from dualpath.base.ids import Role
from dualpath.sim.case import Case, workload_of
from dualpath.sim.experiments.experiment import Settings
from dualpath.sim.experiments.grid import ds_27b, ds_660b, offline_case
from dualpath.sim.experiments.role_change import RoleChangingScheduler
from dualpath.sim.experiments.trial import (
    Measured,
    PolicyExperiment,
    Results,
    Trial,
    Value,
    measured_of,
    play_with,
    ratio,
)
from dualpath.sim.setting import Deployment, System, prepare
from dualpath.sim.simulation import Simulation
from dualpath.sim.workload import Workload

__all__ = ["EXPERIMENT", "one_after_other"]

_NAME = "roles"
_LENGTH = "64k"
_APPENDS, _GENERATIONS = "appends", "generations"
_MIXES = {_APPENDS: (4.0, 0.5), _GENERATIONS: (0.5, 4.0)}
"""Factors on appends and outputs."""
_UNIT_NODES, _NODES = 2, 12
_SWITCH_S = 30.0
"""To load the weights again, and all else that a change takes once a unit is drained."""


@dataclass(frozen=True, slots=True)
class _Order:
    """`second` starts at `at_s`. `changing_from`: prefill nodes at the start of runs with changes."""

    first: str
    second: str
    at_s: float
    changing_from: tuple[int, ...]


_ORDERS = {
    "appends first": _Order(_APPENDS, _GENERATIONS, 1500.0, (6, 2)),
    "generations first": _Order(_GENERATIONS, _APPENDS, 3500.0, (2, 6)),
}
_AGENTS = 1024
_FIXED = (2, 4, 6)
_27B_AGENTS, _27B_NODES = 2048, 6
_ALONE, _STAYS, _CHANGES = "alone", "fixed", "changing"


def _divided(prefill_nodes: int) -> Deployment:
    return replace(
        ds_660b(),
        prefill_nodes=prefill_nodes,
        decode_nodes=_NODES - prefill_nodes,
        prefill_instance_nodes=_UNIT_NODES,
        decode_instance_nodes=_UNIT_NODES,
    )


_BOUNDS = {
    "deepseek-v3.2": (_AGENTS, [_divided(each) for each in range(2, _NODES, _UNIT_NODES)]),
    "ds-27b": (_27B_AGENTS, [ds_27b(each, _27B_NODES - each) for each in range(1, _27B_NODES)]),
}


def _alone(settings: Settings, mix: str, deployment: Deployment, agents: int) -> Trial:
    append, output = _MIXES[mix]
    case = offline_case(
        settings, deployment, System.SPLIT, _LENGTH, agents, append=append, output=output
    )
    return Trial(_NAME, _ALONE, case)


def _in_order(settings: Settings, order: str, kind: str, prefill_nodes: int) -> Trial:
    """The case is that of its first mix."""
    append, output = _MIXES[_ORDERS[order].first]
    case = offline_case(
        settings,
        _divided(prefill_nodes),
        System.SPLIT,
        _LENGTH,
        _AGENTS,
        append=append,
        output=output,
    )
    return Trial(_NAME, f"{order}, {kind}", case)


def _trials(settings: Settings) -> list[Trial]:
    alone = [
        _alone(settings, mix, deployment, agents)
        for agents, deployments in _BOUNDS.values()
        for deployment in deployments
        for mix in _MIXES
    ]
    both = [
        _in_order(settings, name, kind, nodes)
        for name, order in _ORDERS.items()
        for kind, starts in ((_STAYS, _FIXED), (_CHANGES, order.changing_from))
        for nodes in starts
    ]
    return alone + both


def one_after_other(first: Workload, second: Workload, at_s: float) -> Workload:
    """Both, the second one's agents starting so much later; the first one's must have started by then."""
    turns, sessions = len(first.prompt_tokens), len(first.first_turn) - 1
    return Workload(
        prompt_tokens=np.concatenate((first.prompt_tokens, second.prompt_tokens)),
        reused_tokens=np.concatenate((first.reused_tokens, second.reused_tokens)),
        output_tokens=np.concatenate((first.output_tokens, second.output_tokens)),
        delay_s=np.concatenate((first.delay_s, second.delay_s)),
        first_turn=np.concatenate((first.first_turn, second.first_turn[1:] + turns)),
        trajectory=np.concatenate((first.trajectory, second.trajectory + np.int32(sessions))),
        first_round_tokens=np.concatenate((first.first_round_tokens, second.first_round_tokens)),
        start_s=np.concatenate((first.start_s, second.start_s + at_s)),
    )


def _play(trial: Trial) -> Measured:
    case = trial.case
    if trial.variant == _ALONE:
        return play_with(case)
    name, kind = trial.variant.split(", ")
    order = _ORDERS[name]
    append, output = _MIXES[order.second]
    second = replace(case, append=append, output=output)
    work = one_after_other(workload_of(case), workload_of(second), order.at_s)
    simulation = _changing(case, work) if kind == _CHANGES else _fixed(case, work)
    return measured_of(case, simulation.run())


def _fixed(case: Case, work: Workload) -> Simulation:
    cluster, policy = prepare(case.deployment, case.system, case.assumptions)
    return Simulation(cluster, policy, work)


def _changing(case: Case, work: Workload) -> Simulation:
    """On a cluster that has every node in both roles."""
    twice = replace(case.deployment, prefill_nodes=_NODES, decode_nodes=_NODES)
    cluster, policy = prepare(twice, case.system, case.assumptions)
    prefill = case.deployment.prefill_nodes // _UNIT_NODES
    roles = [Role.PREFILL] * prefill + [Role.DECODE] * (_NODES // _UNIT_NODES - prefill)
    scheduler = RoleChangingScheduler(policy, roles, unit_nodes=_UNIT_NODES, switch_s=_SWITCH_S)
    return Simulation(cluster, policy, work, scheduler=scheduler)


def _evaluate(settings: Settings, results: Results) -> Mapping[str, Value]:
    return {
        "bound": {model: _bound(settings, results, model) for model in _BOUNDS},
        "change": {order: _change(settings, results, order) for order in _ORDERS},
    }


def _bound(settings: Settings, results: Results, model: str) -> Mapping[str, Value]:
    agents, deployments = _BOUNDS[model]
    jct_s = {
        mix: {
            _split(each): round(results[_alone(settings, mix, each, agents)].summary.jct_s, 1)
            for each in deployments
        }
        for mix in _MIXES
    }
    best_each_s = sum(min(times.values()) for times in jct_s.values())
    both_s = {split: sum(times[split] for times in jct_s.values()) for split in jct_s[_APPENDS]}
    best = min(both_s, key=lambda split: both_s[split])
    return {
        "jct_s": jct_s,
        "best_single": best,
        "best_single_s": round(both_s[best], 1),
        "best_each_s": round(best_each_s, 1),
        "gain": ratio(both_s[best] / best_each_s),
    }


def _change(settings: Settings, results: Results, name: str) -> Mapping[str, Value]:
    order = _ORDERS[name]
    found: dict[str, Value] = {}
    for kind, starts in ((_STAYS, _FIXED), (_CHANGES, order.changing_from)):
        for nodes in starts:
            trial = _in_order(settings, name, kind, nodes)
            summary = results[trial].summary
            found[f"{kind} {_split(trial.case.deployment)}"] = {
                "jct_s": round(summary.jct_s, 1),
                "request_s": ratio(summary.request.mean_s),
                "ttft_mean_s": ratio(summary.ttft.mean_s),
                "ttft_p99_s": ratio(summary.ttft.p99_s),
            }
    return found


def _split(deployment: Deployment) -> str:
    return f"{deployment.prefill_nodes}P{deployment.decode_nodes}D"


EXPERIMENT = PolicyExperiment(_NAME, "Nodes that change their role", _trials, _play, _evaluate)
