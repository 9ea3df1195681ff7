"""Figure 12: what each part of DualPath adds, offline, DS 660B 2P4D.

Basic, + layerwise prefill, + dual path (sides and engines in turn), + scheduling (the whole of DualPath).
The paper's trace and number of agents are not known: ours are the 64K trace and 1,024 agents, which it names
for its scaling of appends, and whose speed-ups (1.82 and more) hold the ablation's (1.84). Errors are of the
completion time by Basic's.
"""

from __future__ import annotations

from collections.abc import Sequence

from dualpath.report.chart import Axis, BarChart, Bars
from dualpath.sim.case import Case
from dualpath.sim.experiments.experiment import (
    Check,
    Evaluation,
    Experiment,
    Figure,
    Results,
    Settings,
)
from dualpath.sim.experiments.grid import ds_660b, offline_case
from dualpath.sim.setting import System

__all__ = ["AGENTS", "EXPERIMENT", "LENGTH", "STEPS", "ablation_case"]

LENGTH, AGENTS = "64k", 1024
STEPS = {
    "basic": System.BASIC,
    "layerwise": System.LAYERWISE,
    "dual-path": System.BLIND,
    "scheduling": System.DUAL,
}
"""Each adds to the one before it."""


def ablation_case(settings: Settings, system: System) -> Case:
    return offline_case(settings, ds_660b(), system, LENGTH, AGENTS)


def _cases(settings: Settings) -> Sequence[Case]:
    return [ablation_case(settings, system) for system in STEPS.values()]


def _evaluate(settings: Settings, results: Results) -> Evaluation:
    times = {name: results[ablation_case(settings, each)].jct_s for name, each in STEPS.items()}
    basic_s = times["basic"]
    figures, checks = [], []
    for before, name in zip(list(STEPS)[:-1], list(STEPS)[1:], strict=True):
        share = times[name] / basic_s
        figures.append(Figure(f"fig12.{name}", share, f"{100 * (share - 1):+.2f} %"))
        detail = f"{times[name]:.0f} s, before {times[before]:.0f} s"
        checks.append(Check(f"fig12.{name}", times[name] < times[before], detail))
    chart = BarChart(
        f"DS 660B 2P4D, {LENGTH}, {AGENTS:,} agents",
        tuple(STEPS),
        Axis("Job completion time", "s"),
        (Bars("JCT", tuple(times.values()), 0),),
    )
    rows: list[Sequence[str | float]] = [("step", "jct_s", "by_basic")]
    rows += [(name, seconds, seconds / basic_s) for name, seconds in times.items()]
    return Evaluation(figures, checks, (chart,), rows=rows)


EXPERIMENT = Experiment(
    "fig12",
    "Ablation",
    "Basic, layerwise prefill, dual path and scheduling, each added to the one before; 64K, 1,024 agents.",
    _cases,
    _evaluate,
)
