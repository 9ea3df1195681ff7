"""What adapting alpha, beta and the compute quota at run time could gain.

An upper bound, from fixed values: each a quarter to four times what the paper's rule gives. Where no fixed
value does better than that rule, and the load changes during a run as it does offline, from all agents to the
last one, there is nothing for a rule to find that moves between those values.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from msgspec.structs import replace

from dualpath.policy.config import PolicyConfig
from dualpath.sim.case import Case
from dualpath.sim.experiments.experiment import Settings
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

__all__ = ["EXPERIMENT"]

_NAME = "thresholds"
_RULE = "rule"
_FACTORS = (0.25, 0.5, 2.0, 4.0)


def _variants() -> dict[str, tuple[str, float]]:
    named = ("alpha", "alpha_tokens"), ("beta", "beta_tokens"), ("quota", "quota_s")
    return {f"{name} x{f:g}": (field, f) for name, field in named for f in _FACTORS}


def _cases(settings: Settings) -> list[Case]:
    online = online_case(settings, ds_660b(), System.SPLIT, 0.5)
    return [
        offline_case(settings, ds_660b(), System.SPLIT, "32k", 1024),
        offline_case(settings, ds_27b(2, 1), System.SPLIT, "64k", 512),
        dataclasses.replace(online, load=AtRate(0.5, 2400.0)),
    ]


def _trials(settings: Settings) -> list[Trial]:
    variants = (_RULE, *_variants())
    return [Trial(_NAME, variant, case) for case in _cases(settings) for variant in variants]


def _play(trial: Trial) -> Measured:
    if trial.variant == _RULE:
        return play_with(trial.case)
    field, factor = _variants()[trial.variant]
    return play_with(trial.case, configure=lambda config: _scaled(config, field, factor))


def _scaled(config: PolicyConfig, field: str, factor: float) -> PolicyConfig:
    value = getattr(config, field) * factor
    return replace(config, **{field: int(value) if field.endswith("_tokens") else value})


def _evaluate(settings: Settings, results: Results) -> Mapping[str, Value]:
    found: dict[str, Value] = {}
    for case in _cases(settings):
        rule = results[Trial(_NAME, _RULE, case)].summary
        rows: dict[str, Value] = {}
        for variant in (_RULE, *_variants()):
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
