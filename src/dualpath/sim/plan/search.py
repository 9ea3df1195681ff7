"""The search: every split by every system, the best of them, and what one more part would give it.

Runs are independent, so they go to worker processes; what the plan says does not depend on how many there
are. Ctrl-C gives the plan of the runs that have ended.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from dualpath.report.chart import shown
from dualpath.sim.plan.advice import Turns, advise, loads_of
from dualpath.sim.plan.load import Capacity, Goal
from dualpath.sim.plan.premises import premises
from dualpath.sim.plan.question import Question
from dualpath.sim.plan.result import Advice, Extra, Figures, Loads, Plan, WhatIf, gain, measure_name
from dualpath.sim.plan.runs import Task, play, prepared, simulate
from dualpath.sim.plan.splits import InstanceNodes, Split, splits
from dualpath.sim.plan.verdict import best_among, verdict_of
from dualpath.sim.progress import Watch
from dualpath.sim.setting import Deployment, System
from dualpath.sim.timeline import write_timeline
from dualpath.sim.workers import each_in_workers

__all__ = ["SYSTEMS", "best_of", "make_plan", "task_of", "write_best_timeline"]

SYSTEMS = (System.BASIC, System.DUAL, System.SPLIT, System.ORACLE)
"""What is compared, in this order."""
_ADVISED = (System.SPLIT, System.DUAL)
"""What can be advised; on a tie the first."""


def make_plan(question: Question, *, workers: int, watch: Watch) -> Plan:
    """Raises ConfigError when the model fits no split of the nodes."""
    roles = question.prefill_instance, question.decode_instance
    found_splits = splits(question.nodes, *roles, question.most_splits)
    tasks = [task_of(question, split, system) for split in found_splits for system in SYSTEMS]
    found: dict[int, Figures] = {}
    changes: dict[Task, _Change] = {}
    extras: dict[Task, WhatIf] = {}
    interrupted = False
    try:
        watch.expect(len(tasks))
        places = {task: place for place, task in enumerate(tasks)}
        for task, figures in each_in_workers(play, tasks, workers):
            found[places[task]] = figures
            watch.ended(_sentence(question.goal, figures))
        best = best_of(question.goal, [found[place] for place in range(len(tasks))])
        if best is not None:
            changes = {each.task: each for each in _extra_tasks(question, best)}
            watch.expect(len(changes))
            for task, figures in each_in_workers(play, [*changes], workers):
                extras[task] = changes[task].result(question.goal, best, figures)
                watch.ended(_sentence(question.goal, figures))
    except KeyboardInterrupt:
        interrupted = True
    measured = tuple(found[place] for place in sorted(found))
    best = best_of(question.goal, measured)
    loads, advice = (None, None) if best is None else _advice(question, best)
    return Plan(
        goal=question.goal,
        figures=measured,
        best=best,
        verdict=verdict_of(question.goal, measured, best, was_interrupted=interrupted),
        loads=loads,
        advice=advice,
        what_if=tuple(extras[task] for task in changes if task in extras),
        was_interrupted=interrupted,
        setup=question.setup(),
        premises=premises(question),
    )


def write_best_timeline(path: Path, question: Question, best: Figures) -> None:
    """Of the best's run once more, which is the same; of a capacity, of the one at that rate."""
    task = task_of(question, best.split, System(best.system))
    cluster, _ = prepared(task)
    outcome = simulate(task, best.rate_aps)
    title = f"{question.model.name}, {best.system} on {best.split.name}, {question.trace_name}"
    write_timeline(path, cluster, outcome, title=title)


def best_of(goal: Goal, figures: Sequence[Figures]) -> Figures | None:
    """The best of what can be advised; None: there is none."""
    return best_among(goal, figures, [each.value for each in _ADVISED])


def task_of(question: Question, split: Split, system: System) -> Task:
    deployment = Deployment(
        model=question.model,
        hardware=question.hardware,
        prefill_nodes=split.prefill_nodes,
        decode_nodes=split.decode_nodes,
        prefill_instance_nodes=split.prefill_instance_nodes,
        decode_instance_nodes=split.decode_instance_nodes,
        block_tokens=question.block_tokens,
    )
    return Task(
        deployment,
        system,
        question.assumptions,
        question.goal,
        question.sessions,
        question.arrivals,
        question.seed,
    )


def _sentence(goal: Goal, figures: Figures) -> str:
    return (
        f"{figures.split.name} {figures.system}: {measure_name(goal)} {shown(figures.score(goal))}"
    )


@dataclass(frozen=True, slots=True)
class _Change:
    extra: Extra
    added: int
    task: Task

    def result(self, goal: Goal, best: Figures, figures: Figures) -> WhatIf:
        return WhatIf(
            extra=self.extra, added=self.added, figures=figures, gain=gain(goal, best, figures)
        )


def _extra_tasks(question: Question, best: Figures) -> list[_Change]:
    """A storage NIC for each node; of each role the fewest nodes that can be added."""
    system = System(best.system)
    now = best.split
    node = question.hardware.node
    wider = msgspec.structs.replace(
        node, snic_bytes_s=node.snic_bytes_s * (question.snics + 1) / question.snics
    )
    hardware = msgspec.structs.replace(question.hardware, node=wider)
    changes = [
        _Change("storage NIC", 1, task_of(replace(question, hardware=hardware), now, system))
    ]
    added, nodes = _grown(question.prefill_instance, now.prefill_nodes)
    more = msgspec.structs.replace(
        now, prefill_nodes=now.prefill_nodes + added, prefill_instance_nodes=nodes
    )
    changes.append(_Change("prefill nodes", added, task_of(question, more, system)))
    added, nodes = _grown(question.decode_instance, now.decode_nodes)
    more = msgspec.structs.replace(
        now, decode_nodes=now.decode_nodes + added, decode_instance_nodes=nodes
    )
    changes.append(_Change("decode nodes", added, task_of(question, more, system)))
    return changes


def _grown(role: InstanceNodes, nodes: int) -> tuple[int, int]:
    """The fewest nodes to add, and the nodes of an instance then."""
    added = 1
    while (instance := role.of(nodes + added)) is None:
        added += 1
    return added, instance


def _advice(question: Question, best: Figures) -> tuple[Loads, Advice]:
    split = best.split
    cluster, policy = prepared(task_of(question, split, System(best.system)))
    loads = loads_of(question.hardware.node, split.prefill_nodes, split.decode_nodes)
    limits_s = question.goal.limits_s if isinstance(question.goal, Capacity) else {}
    turns = Turns.of(question.sessions)
    return loads, advise(cluster, policy, question.hardware, turns, best, limits_s.get("ttft"))
