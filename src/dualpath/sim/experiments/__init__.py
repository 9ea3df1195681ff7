"""The paper's evaluation, a commented module a figure or table."""

from __future__ import annotations

from dualpath.sim.experiments import (
    fig7,
    fig8,
    fig9,
    fig10,
    fig11,
    fig12,
    fig13,
    fig14,
    table1,
    table3,
    workingset,
)
from dualpath.sim.experiments.experiment import Experiment

__all__ = ["EXPERIMENTS"]

EXPERIMENTS: dict[str, Experiment] = {
    each.EXPERIMENT.name: each.EXPERIMENT
    for each in (
        table1,
        fig7,
        fig8,
        fig9,
        fig10,
        fig11,
        fig12,
        fig13,
        fig14,
        table3,
        workingset,
    )
}
"""By the name that `dualpath sim reproduce` knows them by, in the order in which they are shown."""
