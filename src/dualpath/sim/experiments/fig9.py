"""Figure 9: three ratios of prefill to decode nodes, on DS 27B.

1P1D, 2P1D and 1P2D, Basic and DualPath, over the grid of figure 7: all lengths, 512 and 1,024 agents. The
mean speed-up is over all of it.
"""

from __future__ import annotations

from collections.abc import Sequence

from dualpath.report.chart import Axis, Line, LineChart
from dualpath.sim.case import Case
from dualpath.sim.experiments.experiment import (
    Evaluation,
    Experiment,
    Figure,
    Results,
    Settings,
    about,
)
from dualpath.sim.experiments.grid import AGENTS, LENGTHS, ds_27b, offline_case
from dualpath.sim.setting import System

__all__ = ["EXPERIMENT"]

SPLITS = {"1P1D": (1, 1), "2P1D": (2, 1), "1P2D": (1, 2)}
SYSTEMS = (System.BASIC, System.DUAL)
_POINTS = [(length, agents) for length in LENGTHS for agents in AGENTS]


def _case(settings: Settings, split: str, system: System, length: str, agents: int) -> Case:
    return offline_case(settings, ds_27b(*SPLITS[split]), system, length, agents)


def _cases(settings: Settings) -> Sequence[Case]:
    return [
        _case(settings, split, system, *point)
        for split in SPLITS
        for system in SYSTEMS
        for point in _POINTS
    ]


def _evaluate(settings: Settings, results: Results) -> Evaluation:
    times = {
        (split, system): [results[_case(settings, split, system, *each)].jct_s for each in _POINTS]
        for split in SPLITS
        for system in SYSTEMS
    }

    def ratios(over: tuple[str, System], under: tuple[str, System]) -> list[float]:
        return [a / b for a, b in zip(times[over], times[under], strict=True)]

    basic, dual = SYSTEMS
    speedups = {split: ratios((split, basic), (split, dual)) for split in SPLITS}
    every = [value for each in speedups.values() for value in each]
    means = ", ".join(
        f"{split} {sum(each) / len(each):.2f} (best {max(each):.2f})"
        for split, each in speedups.items()
    )
    figures = (
        Figure("fig9.mean", sum(every) / len(every), means),
        Figure("fig9.best", max(every)),
    )
    checks = (
        about("fig9.basic", "JCT of 1P2D by 1P1D", ratios(("1P2D", basic), ("1P1D", basic))),
        about(
            "fig9.one-more",
            "JCT of DualPath 1P1D by Basic 2P1D",
            ratios(("1P1D", dual), ("2P1D", basic)),
        ),
        about("fig9.dual", "JCT of 2P1D by 1P2D", ratios(("2P1D", dual), ("1P2D", dual))),
    )
    rows: list[Sequence[str | float]] = [("split", "trace", "agents", "system", "jct_s")]
    rows += [
        (split, *point, system.value, seconds)
        for (split, system), seconds_of in times.items()
        for point, seconds in zip(_POINTS, seconds_of, strict=True)
    ]
    return Evaluation(figures, checks, _charts(times), rows=rows)


def _charts(times: dict[tuple[str, System], list[float]]) -> list[LineChart]:
    charts = []
    for length in LENGTHS:
        at = [i for i, point in enumerate(_POINTS) if point[0] == length]
        lines = tuple(
            Line(
                f"{system.value} {split}",
                tuple(map(float, AGENTS)),
                tuple(times[split, system][i] for i in at),
                slot,
                SYSTEMS.index(system),
            )
            for slot, (split, system) in enumerate(times)
        )
        charts.append(
            LineChart(f"DS 27B, {length}", Axis("Agents"), Axis("Job completion time", "s"), lines)
        )
    return charts


EXPERIMENT = Experiment(
    "fig9",
    "Ratios of prefill to decode nodes",
    "DS 27B on 1P1D, 2P1D and 1P2D, Basic and DualPath, over the lengths and agents of figure 7.",
    _cases,
    _evaluate,
)
