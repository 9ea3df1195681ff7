"""Which rule divides a read between both sides best, and what dividing gives against the shorter queue.

Offline, the grids of figures 7 and 9: time until all agents end. It ends with the last agent, and so moves by
a percent or two for no reason: each case is played with SEEDS traces, and its gain is their geometric mean.
Online, time to the first token: DS 660B 2P4D at 0.4 agents a second, and DS 27B 1P1D at 0.5. Balance of the
storage NICs in these, and with 1,024 agents at once. Other rules are tried on three cases.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from dualpath.base.ids import Role
from dualpath.policy.cluster import NodeState
from dualpath.policy.config import PolicyConfig
from dualpath.policy.events import ReadPlan
from dualpath.policy.membership import Membership
from dualpath.policy.read_plan import STEADY
from dualpath.policy.scheduler import Scheduler
from dualpath.sim.case import Case
from dualpath.sim.experiments import fig7, fig9
from dualpath.sim.experiments.experiment import Settings, geometric_mean
from dualpath.sim.experiments.grid import ds_27b, ds_660b, offline_case, online_case
from dualpath.sim.experiments.trial import (
    Measured,
    PolicyExperiment,
    Results,
    Trial,
    Value,
    name_of,
    play_with,
    ratio,
)
from dualpath.sim.plan.load import AtRate
from dualpath.sim.setting import System

__all__ = ["EXPERIMENT", "RULES", "SEEDS"]

SEEDS = 5

_NAME = "split"
_DUAL, _SPLIT = System.DUAL.value, System.STEADY.value

Rule = Callable[[int, int, int, NodeState, NodeState], float]
"""Tokens for the PE side, from the nodes of each role, the hit, and the two nodes."""


def _together(prefill: int, decode: int, hit: int, pe: NodeState, de: NodeState) -> float:
    return (hit + de.read_queue_tokens - pe.read_queue_tokens) / 2


def _together_unread(prefill: int, decode: int, hit: int, pe: NodeState, de: NodeState) -> float:
    return (hit + de.unread_tokens - pe.unread_tokens) / 2


def _fixed(prefill: int, decode: int, hit: int, pe: NodeState, de: NodeState) -> float:
    return hit * prefill / (prefill + decode)


def _halves(prefill: int, decode: int, hit: int, pe: NodeState, de: NodeState) -> float:
    return hit / 2 + (de.unread_tokens - pe.unread_tokens) / (2 * STEADY)


def _by_factor(prefill: int, decode: int, hit: int, pe: NodeState, de: NodeState) -> float:
    pe_weight = prefill * (de.unread_tokens + 8 * hit)
    de_weight = decode * (pe.unread_tokens + 8 * hit)
    return hit * pe_weight / (pe_weight + de_weight)


RULES: Mapping[str, Rule] = {
    "together": _together,
    "together, unread": _together_unread,
    "fixed": _fixed,
    "halves": _halves,
    "by factor": _by_factor,
}
"""Both sides end together, by reported queues and by what is unread; shares as nodes, blind to queues;
halves, and a difference evened out as in `split`; shares as nodes, times the other side's load."""


class _Planner:
    def __init__(self, rule: Rule, members: Membership, block_tokens: int) -> None:
        self._rule = rule
        self._nodes = members.role_nodes
        self._block_tokens = block_tokens

    def plan(self, hit_tokens: int, pe_node: NodeState, de_node: NodeState) -> ReadPlan:
        prefill, decode = self._nodes[Role.PREFILL], self._nodes[Role.DECODE]
        if hit_tokens == 0:
            return ReadPlan(0, 0)
        tokens = self._rule(prefill, decode, hit_tokens, pe_node, de_node)
        blocks = round(tokens / self._block_tokens)
        pe_tokens = min(max(0, blocks * self._block_tokens), hit_tokens)
        return ReadPlan(pe_tokens, hit_tokens - pe_tokens)


class _Trying(Scheduler):
    """The scheduler with another rule."""

    def __init__(self, config: PolicyConfig, rule: Rule) -> None:
        super().__init__(config)
        self._planner = _Planner(rule, self._members, config.block_tokens)


def _offline(settings: Settings) -> list[Case]:
    every = [*fig7.EXPERIMENT.cases(settings), *fig9.EXPERIMENT.cases(settings)]
    return list(dict.fromkeys(each for each in every if each.system is System.DUAL))


def _seeded(case: Case) -> list[Case]:
    return [replace(case, seed=case.seed + number) for number in range(SEEDS)]


def _online(settings: Settings) -> list[Case]:
    return [
        online_case(settings, ds_660b(), System.DUAL, 0.4),
        online_case(settings, ds_27b(), System.DUAL, 0.5),
    ]


def _tried(settings: Settings) -> list[Case]:
    large = online_case(settings, ds_660b(), System.DUAL, 0.4)
    return [
        replace(large, load=AtRate(0.4, 2400.0)),
        offline_case(settings, ds_27b(), System.DUAL, "64k", 512),
        offline_case(settings, ds_27b(2, 1), System.DUAL, "64k", 1024),
    ]


def _trials(settings: Settings) -> list[Trial]:
    offline = [seeded for case in _offline(settings) for seeded in _seeded(case)]
    compared = dict.fromkeys([*_online(settings), *_tried(settings), *offline])
    trials = [Trial(_NAME, variant, case) for case in compared for variant in (_DUAL, _SPLIT)]
    trials += [Trial(_NAME, rule, case) for case in _tried(settings) for rule in RULES]
    return trials


def _play(trial: Trial) -> Measured:
    if trial.variant == _DUAL:
        return play_with(trial.case)
    case = replace(trial.case, system=System.STEADY)
    if trial.variant == _SPLIT:
        return play_with(case)
    rule = RULES[trial.variant]
    return play_with(case, schedule=lambda config: _Trying(config, rule))


def _evaluate(settings: Settings, results: Results) -> Mapping[str, Value]:
    def of(variant: str, case: Case) -> Measured:
        return results[Trial(_NAME, variant, case)]

    gains = {
        name_of(case): [
            of(_DUAL, each).summary.jct_s / of(_SPLIT, each).summary.jct_s for each in _seeded(case)
        ]
        for case in _offline(settings)
    }
    offline = {name: ratio(geometric_mean(each)) for name, each in gains.items()}
    online = {
        name_of(case): ratio(
            of(_DUAL, case).summary.ttft.p50_s / of(_SPLIT, case).summary.ttft.p50_s
        )
        for case in _online(settings)
    }
    balance = {
        name_of(case): {variant: ratio(of(variant, case).balance) for variant in (_DUAL, _SPLIT)}
        for case in _balanced(settings)
    }
    return {
        "split_jct_gain": min(offline.values()),
        "split_ttft_gain": min(online.values()),
        "split_balance": max(each[_SPLIT] for each in balance.values()),
        "jct_gains": offline,
        "jct_gains_by_seed": {name: [ratio(each) for each in row] for name, row in gains.items()},
        "ttft_p50_gains": online,
        "balances": balance,
        "rules": {
            name_of(case): {variant: _row(of(variant, case)) for variant in (_DUAL, _SPLIT, *RULES)}
            for case in _tried(settings)
        },
    }


def _balanced(settings: Settings) -> Sequence[Case]:
    """Where storage NICs are loaded: online, and the paper's 1,024 agents."""
    return [
        *_online(settings),
        offline_case(settings, ds_660b(), System.DUAL, "64k", 1024),
        offline_case(settings, ds_27b(), System.DUAL, "64k", 1024),
    ]


def _row(measured: Measured) -> Mapping[str, Value]:
    summary = measured.summary
    return {
        "jct_s": round(summary.jct_s, 1),
        "ttft_p50_s": ratio(summary.ttft.p50_s),
        "ttft_mean_s": ratio(summary.ttft.mean_s),
        "ttft_p99_s": ratio(summary.ttft.p99_s),
        "balance": ratio(measured.balance),
    }


EXPERIMENT = PolicyExperiment(_NAME, "Reads divided between both sides", _trials, _play, _evaluate)
