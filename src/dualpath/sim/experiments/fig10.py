"""Figure 10: the highest rate at which agents can arrive within the SLO, Basic and DualPath, two models.

The SLO: mean TTFT up to 4 s and mean TPOT up to 50 ms. Agents arrive as a Poisson process and play the 64K
trace. Capacity is the rate at which the first of both limits is reached: between the last rate of the grid
that holds and the first that does not, along a straight line in the logarithm of the share of the limit. A
run lasts 4,500 s and the requests that arrive in its last third count; the rule of the paper, to measure
when averages agree within 5 %, is checked and not used to end a run, so that all runs are alike.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from dualpath.report.chart import Axis, Limit, Line, LineChart
from dualpath.sim.case import Case
from dualpath.sim.experiments.experiment import (
    Check,
    Evaluation,
    Experiment,
    Figure,
    Results,
    Settings,
)
from dualpath.sim.experiments.grid import ds_27b, ds_660b, online_case
from dualpath.sim.plan.load import PAPER_LIMITS_S
from dualpath.sim.setting import Deployment, System
from dualpath.sim.summary import Summary

__all__ = ["EXPERIMENT", "RATES", "SYSTEMS", "capacity", "used_share"]

SYSTEMS = (System.BASIC, System.DUAL)
RATES = {
    "660b": (0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.35, 0.4, 0.45, 0.5, 0.55, 0.6, 0.7, 0.8),
    "27b": (0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.35, 0.4, 0.45, 0.5, 0.55, 0.6, 0.7, 0.8),
}
_NAMES = {"660b": "DS 660B 2P4D", "27b": "DS 27B 1P1D"}


def _deployment(model: str) -> Deployment:
    return ds_660b() if model == "660b" else ds_27b()


def _cases(settings: Settings) -> Sequence[Case]:
    return [
        online_case(settings, _deployment(model), system, rate)
        for model, rates in RATES.items()
        for system in SYSTEMS
        for rate in rates
    ]


def used_share(summary: Summary) -> float:
    """Of the limit that is nearer."""
    return max(
        summary.ttft.mean_s / PAPER_LIMITS_S["ttft"], summary.tpot.mean_s / PAPER_LIMITS_S["tpot"]
    )


def capacity(rates: Sequence[float], shares: Sequence[float]) -> float:
    """The rate at which the share of the limit reaches 1; the grid's ends where it does not within it."""
    over = next((i for i, share in enumerate(shares) if share > 1), None)
    if over is None:
        return rates[-1]
    if over == 0:
        return rates[0]
    low, high = math.log(shares[over - 1]), math.log(shares[over])
    return rates[over - 1] + (rates[over] - rates[over - 1]) * -low / (high - low)


def _evaluate(settings: Settings, results: Results) -> Evaluation:
    rows: list[Sequence[str | float]] = [
        ("model", "system", "rate_aps", "ttft_s", "ttst_s", "tpot_s", "halves_differ", "share")
    ]
    found: dict[tuple[str, System], float] = {}
    charts = []
    for model, rates in RATES.items():
        lines = []
        for slot, system in enumerate(SYSTEMS):
            cases = [online_case(settings, _deployment(model), system, rate) for rate in rates]
            summaries = [results[case] for case in cases]
            shares = [used_share(each) for each in summaries]
            found[model, system] = capacity(rates, shares)
            rows += [
                (
                    _NAMES[model],
                    system.value,
                    rate,
                    each.ttft.mean_s,
                    each.ttst.mean_s,
                    each.tpot.mean_s,
                    each.halves_differ,
                    share,
                )
                for rate, each, share in zip(rates, summaries, shares, strict=True)
            ]
            lines.append(Line(system.value, rates, tuple(shares), slot, slot))
        charts.append(
            LineChart(
                f"{_NAMES[model]}: share of the nearer limit",
                Axis("Agents a second"),
                Axis("Share of the limit", log=True),
                tuple(lines),
                (Limit("SLO", 1.0),),
            )
        )
    gains = {model: found[model, System.DUAL] / found[model, System.BASIC] for model in RATES}
    figures = [
        Figure(
            f"fig10.{model}.capacity",
            gain,
            f"Basic {found[model, System.BASIC]:.3f}, DualPath {found[model, System.DUAL]:.3f} APS",
        )
        for model, gain in gains.items()
    ]
    figures.append(Figure("fig10.mean", sum(gains.values()) / len(gains)))
    checks = [
        Check(f"fig10.{model}", gain > 1, f"{gain:.2f} times Basic's")
        for model, gain in gains.items()
    ]
    return Evaluation(figures, checks, charts, rows=rows)


EXPERIMENT = Experiment(
    "fig10",
    "Online capacity",
    "Agents a second within TTFT <= 4 s and TPOT <= 50 ms; runs of 4,500 s whose last third counts.",
    _cases,
    _evaluate,
    gap="DS 27B: both systems come to the limit on TTFT when their storage NICs are full, and "
    "DualPath on 1P1D has two for Basic's one. So the gain is near 2 whatever a NIC brings "
    "(with 0.8 of its rate instead of the fitted share it is 1.97). That the paper's is 1.67 "
    "asks for something else that holds DualPath back on this model; what, is not known, and "
    "nothing was tuned in for it.",
)
