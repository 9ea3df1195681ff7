"""Figure 11: times to the first and second token and per output token, by rate, DS 660B 2P4D.

The runs of figure 10. The published numbers are of DualPath at 0.4 agents a second. TPOT is of the third
token and later ones, as the second has a time of its own.
"""

from __future__ import annotations

from collections.abc import Sequence

from dualpath.report.chart import Axis, BarChart, Bars, Line, LineChart
from dualpath.sim.case import Case
from dualpath.sim.experiments.experiment import (
    Evaluation,
    Experiment,
    Figure,
    Results,
    Settings,
)
from dualpath.sim.experiments.fig10 import RATES, SYSTEMS
from dualpath.sim.experiments.grid import ds_660b, online_case
from dualpath.sim.setting import System
from dualpath.sim.summary import Spread

__all__ = ["EXPERIMENT", "METRICS", "RATE_APS"]

RATE_APS = 0.4
METRICS = ("ttft", "ttst", "tpot")


def _case(settings: Settings, system: System, rate_aps: float) -> Case:
    return online_case(settings, ds_660b(), system, rate_aps)


def _cases(settings: Settings) -> Sequence[Case]:
    return [_case(settings, system, rate) for system in SYSTEMS for rate in RATES["660b"]]


def _evaluate(settings: Settings, results: Results) -> Evaluation:
    rates = RATES["660b"]
    at = results[_case(settings, System.DUAL, RATE_APS)]
    parts = ", ".join(f"{name} {seconds:.2f}" for name, seconds in at.parts_s.items())
    figures = []
    charts: list[LineChart | BarChart] = []
    rows: list[Sequence[str | float]] = [
        ("system", "rate_aps", "metric", "mean_s", "p50_s", "p90_s", "p99_s")
    ]
    for metric in METRICS:
        note = f"{parts} s" if metric == "ttft" else ""
        figures.append(Figure(f"fig11.{metric}", getattr(at, metric).mean_s, note))
        lines = []
        for slot, system in enumerate(SYSTEMS):
            spreads: list[Spread] = [
                getattr(results[_case(settings, system, rate)], metric) for rate in rates
            ]
            means = tuple(each.mean_s for each in spreads)
            lines.append(Line(system.value, rates, means, slot, slot))
            rows += [
                (system.value, rate, metric, each.mean_s, each.p50_s, each.p90_s, each.p99_s)
                for rate, each in zip(rates, spreads, strict=True)
            ]
        charts.append(
            LineChart(
                f"{metric.upper()}, DS 660B 2P4D",
                Axis("Agents a second"),
                Axis(f"Mean {metric.upper()}", "s", log=True),
                tuple(lines),
            )
        )
    charts.append(_parts(settings, results))
    return Evaluation(figures, charts=charts, rows=rows)


def _parts(settings: Settings, results: Results) -> BarChart:
    rates = [rate for rate in RATES["660b"] if rate <= RATE_APS]
    parts = [results[_case(settings, System.DUAL, rate)].parts_s for rate in rates]
    return BarChart(
        "Parts of TTFT, DualPath",
        tuple(f"{rate:g} APS" for rate in rates),
        Axis("Mean time", "s"),
        tuple(
            Bars(name, tuple(each[name] for each in parts), slot)
            for slot, name in enumerate(parts[0])
        ),
    )


EXPERIMENT = Experiment(
    "fig11",
    "Latencies by rate",
    "TTFT, TTST and TPOT of the runs of figure 10, DS 660B 2P4D.",
    _cases,
    _evaluate,
)
