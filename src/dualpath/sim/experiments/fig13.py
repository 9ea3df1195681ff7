"""Figure 13: how evenly the storage NICs of the cluster read, scheduled and in turn.

The busiest NIC by the mean of all, over windows of ten seconds in which storage is busy;
`summary` says what that is. The runs of figure 12: with scheduling, and before it, where sides take turns.

Also how much the NICs are used, which articles about the paper give and the paper does not.
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
from dualpath.sim.summary import POINTS, Summary

__all__ = ["EXPERIMENT"]

_COMPARED = {"round-robin": System.BLIND, "scheduled": System.DUAL}


def _cases(settings: Settings) -> Sequence[Case]:
    systems = (System.BASIC, *_COMPARED.values())
    return [ablation_case(settings, system) for system in systems]


def _evaluate(settings: Settings, results: Results) -> Evaluation:
    found = {name: results[ablation_case(settings, each)] for name, each in _COMPARED.items()}
    basic = results[ablation_case(settings, System.BASIC)]
    figures = [
        Figure(f"fig13.{name}", each.snic_balance.max_mean, balance_note(each.snic_balance))
        for name, each in found.items()
    ]
    uses = {
        "basic": basic,
        "round-robin": found["round-robin"],
        "dual": found["scheduled"],
        "dual-64k": found["scheduled"],
    }
    figures += [
        Figure(f"fig13.use.{name}", each.snic_utilization, "of what reads can reach")
        for name, each in uses.items()
    ]
    turns, scheduled = (each.snic_balance.max_mean for each in found.values())
    check = Check("fig13.balance", scheduled < turns, f"{scheduled:.3f}, in turn {turns:.3f}")
    rows: list[Sequence[str | float]] = [("system", "time_s", "max_by_mean", "prefill", "decode")]
    for name, each in found.items():
        columns = each.snic_balance.series, each.prefill_snic, each.decode_snic
        rows += [(name, *values) for values in zip(_times_s(each), *columns, strict=True)]
    lines = tuple(
        Line(name, _times_s(each), each.snic_balance.series, slot, slot)
        for slot, (name, each) in enumerate(found.items())
    )
    chart = LineChart(
        "Busiest storage NIC by the mean",
        Axis("Time", "s"),
        Axis("Most by mean", from_zero=False),
        lines,
    )
    return Evaluation(figures, (check,), (chart, *_use(found)), rows=rows)


def _use(found: dict[str, Summary]) -> list[LineChart]:
    return [
        LineChart(
            f"Use of storage NICs, {name}",
            Axis("Time", "s"),
            Axis("Utilisation", share=True),
            (
                Line("prefill nodes", _times_s(each), each.prefill_snic, 0, 0),
                Line("decode nodes", _times_s(each), each.decode_snic, 1, 1),
            ),
        )
        for name, each in found.items()
    ]


def _times_s(summary: Summary) -> tuple[float, ...]:
    """The middle of each stretch of the series."""
    return tuple((i + 0.5) * summary.until_s / POINTS for i in range(POINTS))


EXPERIMENT = Experiment(
    "fig13",
    "Balance of storage NICs",
    "Busiest NIC by the mean of all while storage is saturated, in the runs of figure 12.",
    _cases,
    _evaluate,
    gap="Storage NICs in use: the articles say neither over which part of a run nor of which "
    "load. Ours is over the whole run, with its beginning and the tail in which few agents "
    "are left (see the charts), and of the rate that reads can reach.",
)
