"""Plays many cases, each once however often it is asked for, in worker processes.

Long ones start first, so that workers end together. Ctrl-C gives what has ended so far.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from dualpath.sim.case import Case, play
from dualpath.sim.plan.load import Offline
from dualpath.sim.progress import Watch
from dualpath.sim.summary import Summary
from dualpath.sim.workers import each_in_workers

__all__ = ["Sweep", "distinct", "sweep"]


@dataclass(slots=True)
class Sweep:
    """`results`: of the cases that ended, all of them if it was not interrupted."""

    results: dict[Case, Summary] = field(default_factory=dict)
    was_interrupted: bool = False

    def has(self, cases: Iterable[Case]) -> bool:
        """Whether all of these ended."""
        return all(each in self.results for each in cases)


def distinct(cases: Iterable[Case]) -> list[Case]:
    """Each once, in the order in which they are played."""
    return sorted(dict.fromkeys(cases), key=lambda case: -case.agents)


def sweep(cases: Iterable[Case], *, workers: int, watch: Watch) -> Sweep:
    """Raises ConfigError when a model does not fit a case's deployment."""
    found = Sweep()
    tasks = distinct(cases)
    watch.expect(len(tasks))
    try:
        for case, summary in each_in_workers(play, tasks, workers):
            found.results[case] = summary
            watch.ended(_sentence(case, summary))
    except KeyboardInterrupt:
        found.was_interrupted = True
    return found


def _sentence(case: Case, summary: Summary) -> str:
    deployment = case.deployment
    nodes = f"{deployment.prefill_nodes}P{deployment.decode_nodes}D"
    what = f"{deployment.model.name} {nodes} {case.system.value} {case.trace}"
    if (case.append, case.output) != (1.0, 1.0):
        what += f" append x{case.append:g} output x{case.output:g}"
    if isinstance(case.load, Offline):
        return f"{what} {case.load.agents} agents: JCT {summary.jct_s:.0f} s"
    return f"{what} {case.load.rate_aps:g} APS: TTFT {summary.ttft.mean_s:.2f} s"
