"""What alpha, beta and the compute quota do, and what adapting them at run time gains.

Fixed values, each a quarter to four times what the paper's rule gives, say what a value is good for; and a
rule that moves them between the same bounds (`adaptive_thresholds`), one at a time and all together, says
how much of that can be had without knowing the load. Where the rule's source names no direction, both are
tried.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping

from msgspec.structs import replace

from dualpath.policy.config import PolicyConfig
from dualpath.sim.case import Case, workload_of
from dualpath.sim.experiments.adaptive_thresholds import EVERY_S, AdaptiveScheduler, Threshold
from dualpath.sim.experiments.experiment import Settings
from dualpath.sim.experiments.grid import ds_27b, ds_660b, offline_case, online_case
from dualpath.sim.experiments.trial import (
    Measured,
    PolicyExperiment,
    Results,
    Trial,
    Value,
    measured_of,
    name_of,
    play_with,
    ratio,
)
from dualpath.sim.plan.load import AtRate
from dualpath.sim.setting import System, prepare
from dualpath.sim.simulation import Simulation

__all__ = ["EXPERIMENT"]

_NAME = "thresholds"
_RULE = "rule"
_FACTORS = (0.25, 0.5, 2.0, 4.0)
_FIELDS = {
    Threshold.ALPHA: "alpha_tokens",
    Threshold.BETA: "beta_tokens",
    Threshold.QUOTA: "quota_s",
}
_FIXED = {f"{name} x{f:g}": (field, f) for name, field in _FIELDS.items() for f in _FACTORS}
_ADAPTIVE = {
    "alpha less when busy": {Threshold.ALPHA: False},
    "beta less when busy": {Threshold.BETA: False},
    "beta more when busy": {Threshold.BETA: True},
    "quota less when busy": {Threshold.QUOTA: False},
    "quota more when busy": {Threshold.QUOTA: True},
    "all less when busy": dict.fromkeys(Threshold, False),
}
_VARIANTS = (_RULE, *_FIXED, *_ADAPTIVE)


def _cases(settings: Settings) -> list[Case]:
    online = online_case(settings, ds_660b(), System.SPLIT, 0.5)
    return [
        offline_case(settings, ds_660b(), System.SPLIT, "32k", 1024),
        offline_case(settings, ds_27b(2, 1), System.SPLIT, "64k", 512),
        dataclasses.replace(online, load=AtRate(0.5, 2400.0)),
    ]


def _trials(settings: Settings) -> list[Trial]:
    return [Trial(_NAME, variant, case) for case in _cases(settings) for variant in _VARIANTS]


def _play(trial: Trial) -> Measured:
    if trial.variant == _RULE:
        return play_with(trial.case)
    if trial.variant in _ADAPTIVE:
        return _play_adaptive(trial.case, _ADAPTIVE[trial.variant])
    field, factor = _FIXED[trial.variant]
    return play_with(trial.case, configure=lambda config: _scaled(config, field, factor))


def _play_adaptive(case: Case, grow_when_busy: Mapping[Threshold, bool]) -> Measured:
    """In stretches, after each of which the ranks get the quota."""
    cluster, policy = prepare(case.deployment, case.system, case.assumptions)
    scheduler = AdaptiveScheduler(policy, grow_when_busy)
    simulation = Simulation(cluster, policy, workload_of(case), scheduler=scheduler)
    for stretch in itertools.count(1):
        until_s = min(stretch * EVERY_S, case.until_s)
        outcome = simulation.run(until_s)
        ended = not outcome.unfinished_agents or until_s == case.until_s
        if outcome.was_interrupted or ended:
            break
        simulation.set_quota_s(scheduler.quota_s)
    return measured_of(case, outcome)


def _scaled(config: PolicyConfig, field: str, factor: float) -> PolicyConfig:
    value = getattr(config, field) * factor
    return replace(config, **{field: int(value) if field.endswith("_tokens") else value})


def _evaluate(settings: Settings, results: Results) -> Mapping[str, Value]:
    found: dict[str, Value] = {}
    for case in _cases(settings):
        rule = results[Trial(_NAME, _RULE, case)].summary
        rows: dict[str, Value] = {}
        for variant in _VARIANTS:
            each = results[Trial(_NAME, variant, case)].summary
            rows[variant] = {
                "jct_gain": ratio(rule.jct_s / each.jct_s),
                "ttft_gain": ratio(rule.ttft.mean_s / each.ttft.mean_s),
                "ttft_p99_gain": ratio(rule.ttft.p99_s / each.ttft.p99_s),
                "attention_balance": ratio(each.attention_balance.max_mean),
            }
        found[name_of(case)] = rows
    return {"thresholds": found}


EXPERIMENT = PolicyExperiment(_NAME, "Alpha, beta and the compute quota", _trials, _play, _evaluate)
