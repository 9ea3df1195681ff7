"""Figure 14: how evenly the ranks of an expert-parallel group compute attention, with and without compute
quota.

The rank with the most attention time by the mean of the group's ranks; `summary` says over what. The runs
of figure 12: with scheduling, whose batches are under the quota, and before it.
"""

from __future__ import annotations

from collections.abc import Sequence

from dualpath.report.chart import Axis, Line, LineChart
from dualpath.sim.case import Case
from dualpath.sim.experiments.experiment import (
    Check,
    Evaluation,
    Experiment,
    Figure,
    Results,
    Settings,
    balance_note,
)
from dualpath.sim.experiments.fig12 import ablation_case
from dualpath.sim.setting import System
from dualpath.sim.summary import POINTS

__all__ = ["EXPERIMENT"]

_COMPARED = {"without quota": System.BLIND, "scheduled": System.DUAL}


def _cases(settings: Settings) -> Sequence[Case]:
    return [ablation_case(settings, system) for system in _COMPARED.values()]


def _evaluate(settings: Settings, results: Results) -> Evaluation:
    found = {name: results[ablation_case(settings, each)] for name, each in _COMPARED.items()}
    without, scheduled = (each.attention_balance.max_mean for each in found.values())
    note = balance_note(found["scheduled"].attention_balance)
    figure = Figure("fig14.scheduled", scheduled, f"without quota {without:.3f}; {note}")
    detail = f"{scheduled:.3f}, without quota {without:.3f}"
    check = Check("fig14.balance", scheduled < without, detail)
    rows: list[Sequence[str | float]] = [("system", "time_s", "max_by_mean")]
    lines = []
    for slot, (name, each) in enumerate(found.items()):
        times_s = tuple((i + 0.5) * each.until_s / POINTS for i in range(POINTS))
        lines.append(Line(name, times_s, each.attention_balance.series, slot, slot))
        rows += [
            (name, *values) for values in zip(times_s, each.attention_balance.series, strict=True)
        ]
    chart = LineChart(
        "Attention time of the busiest rank by the mean",
        Axis("Time", "s"),
        Axis("Most by mean", from_zero=False),
        tuple(lines),
    )
    return Evaluation((figure,), (check,), (chart,), rows=rows)


EXPERIMENT = Experiment(
    "fig14",
    "Balance of attention",
    "Rank with the most attention time by the mean of its group, in the runs of figure 12.",
    _cases,
    _evaluate,
)
