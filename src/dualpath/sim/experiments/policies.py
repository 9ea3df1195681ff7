"""Policies that are tried here before they become selectable in the product, a module each."""

from __future__ import annotations

from collections.abc import Iterable

from dualpath.base.errors import ConfigError
from dualpath.sim.experiments import (
    policies_hierarchy,
    policies_order,
    policies_roles,
    policies_split,
    policies_thresholds,
)
from dualpath.sim.experiments.trial import Measured, PolicyExperiment, Trial

__all__ = ["POLICIES", "chosen_policies", "play_trial"]

POLICIES: dict[str, PolicyExperiment] = {
    each.EXPERIMENT.name: each.EXPERIMENT
    for each in (
        policies_split,
        policies_order,
        policies_thresholds,
        policies_hierarchy,
        policies_roles,
    )
}
"""By the name that `dualpath sim policies` knows them by."""


def play_trial(trial: Trial) -> Measured:
    return POLICIES[trial.experiment].play(trial)


def chosen_policies(names: Iterable[str]) -> list[PolicyExperiment]:
    """All for none or `all`. Raises ConfigError."""
    wanted = list(names)
    unknown = [each for each in wanted if each != "all" and each not in POLICIES]
    if unknown:
        raise ConfigError(
            f"sim policies: unknown {unknown[0]!r}; expected {', '.join(POLICIES)} or all"
        )
    if not wanted or "all" in wanted:
        return list(POLICIES.values())
    return [POLICIES[each] for each in dict.fromkeys(wanted)]
