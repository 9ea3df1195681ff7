"""How much a few figures move when a fitted value does: each by a fifth, up and down, one at a time.

The figures are those of five runs: the four steps of the ablation, and DualPath at 0.4 agents a second.
Shares do not go above 1.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from dualpath.sim.calibration import FITTED, value_of, with_value
from dualpath.sim.case import Case
from dualpath.sim.experiments.experiment import Results, Settings
from dualpath.sim.experiments.fig11 import METRICS, RATE_APS
from dualpath.sim.experiments.fig12 import STEPS, ablation_case
from dualpath.sim.experiments.grid import ds_660b, online_case
from dualpath.sim.experiments.table3 import batch_case
from dualpath.sim.setting import System

__all__ = ["BY", "FIGURES", "Moved", "Variation", "moved", "sensitivity_cases", "variations"]

BY = 0.2
FIGURES = (
    "table3.2p4d.jct",
    *(f"fig12.{step}" for step in STEPS if step != "basic"),
    *(f"fig11.{metric}" for metric in METRICS),
)
"""Published ids."""


@dataclass(frozen=True, slots=True)
class Variation:
    """A value of `Assumptions`, other than it is."""

    name: str
    value: float

    def of(self, settings: Settings) -> Settings:
        return replace(
            settings, assumptions=with_value(settings.assumptions, self.name, self.value)
        )


@dataclass(frozen=True, slots=True)
class Moved:
    """`changes`: of each figure, relative to what it is with nothing varied."""

    variation: Variation
    changes: Mapping[str, float]


def variations(settings: Settings) -> list[Variation]:
    """Of each fitted value, first less, then more."""
    found = []
    for each in FITTED:
        value = value_of(settings.assumptions, each.name)
        most = 1.0 if each.name.endswith("_share") else float("inf")
        found += [Variation(each.name, min(most, value * by)) for by in (1 - BY, 1 + BY)]
    return found


def sensitivity_cases(settings: Settings) -> list[Case]:
    """With nothing varied first."""
    every = [settings, *(each.of(settings) for each in variations(settings))]
    return [case for each in every for case in _cases(each)]


def moved(settings: Settings, results: Results) -> list[Moved]:
    """Of the variations whose runs all ended."""
    if not all(case in results for case in _cases(settings)):
        return []
    base = _figures(settings, results)
    found = []
    for variation in variations(settings):
        varied = variation.of(settings)
        if all(case in results for case in _cases(varied)):
            figures = _figures(varied, results)
            found.append(Moved(variation, {id: figures[id] / base[id] - 1 for id in FIGURES}))
    return found


def _cases(settings: Settings) -> list[Case]:
    ablation = [ablation_case(settings, system) for system in STEPS.values()]
    online = online_case(settings, ds_660b(), System.DUAL, RATE_APS)
    return [*ablation, batch_case(settings), online]


def _figures(settings: Settings, results: Results) -> dict[str, float]:
    *ablation, batch, online = (results[case] for case in _cases(settings))
    times = dict(zip(STEPS, (each.jct_s for each in ablation), strict=True))
    steps = {f"fig12.{step}": times[step] / times["basic"] for step in STEPS if step != "basic"}
    latencies = {f"fig11.{metric}": getattr(online, metric).mean_s for metric in METRICS}
    return {"table3.2p4d.jct": batch.jct_s, **steps, **latencies}
