"""Cells under a chooser: one cell is today's scheduler; with several, a request stays in one."""

from __future__ import annotations

import signal
from functools import partial

import pytest
from kernel_kit import POLICY, cluster, many

from dualpath.base.ids import EngineId, Role
from dualpath.policy.events import Assign, Event, Instruction
from dualpath.policy.scheduler import Scheduler
from dualpath.sim.case import Case
from dualpath.sim.experiments import policies_hierarchy
from dualpath.sim.experiments.experiment import Settings
from dualpath.sim.experiments.grid import ds_27b
from dualpath.sim.experiments.policies_hierarchy import (
    EXPERIMENT,
    CellScheduler,
    better_of_two,
    in_turn,
    least,
    striped,
    whole,
)
from dualpath.sim.plan.load import Offline
from dualpath.sim.setting import Assumptions, System
from dualpath.sim.simulation import Simulation

CELLS = 3
LARGER = cluster(prefill_nodes=3, decode_nodes=6)
Log = list[tuple[Event, list[Instruction]]]


def run(scheduler: Scheduler) -> Log:
    log: Log = []
    one = Simulation(
        LARGER,
        POLICY,
        many(40, 5, seed=3),
        log=lambda event, instructions: log.append((event, list(instructions))),
        scheduler=scheduler,
    )
    assert one.run().unfinished_agents == 0
    scheduler.validate()
    return log


def cells(count: int, choose: object) -> CellScheduler:
    return CellScheduler(POLICY, count, choose, partial(striped, count))  # type: ignore[arg-type]


@pytest.mark.parametrize("choose", [least, in_turn])
def test_one_cell_gives_the_scheduler_s_own_instructions(choose: object) -> None:
    assert run(cells(1, choose)) == run(Scheduler(POLICY))


@pytest.mark.parametrize("choose", [least, better_of_two, in_turn])
def test_every_request_is_assigned_once_and_stays_in_a_cell(choose: object) -> None:
    scheduler = cells(CELLS, choose)
    assigned = [x for _, out in run(scheduler) for x in out if isinstance(x, Assign)]
    assert len({each.request for each in assigned}) == len(assigned) == 40 * 5
    for each in assigned:
        assert _node(each.prefill) % CELLS == _node(each.decode) % CELLS
    used = {_node(each.prefill) % CELLS for each in assigned}
    assert used == set(range(CELLS))
    assert scheduler.unfinished_tokens == [0] * CELLS


def test_the_better_of_two_are_two() -> None:
    """With two cells both are always drawn, so the one with fewer tokens is always taken."""
    scheduler = cells(2, better_of_two)
    scheduler.reported_tokens = [5, 4]
    assert {better_of_two(scheduler) for _ in range(20)} == {1}


def test_whole_cells_are_of_consecutive_nodes() -> None:
    prefill = [whole(12, Role.PREFILL, number) for number in range(24)]
    decode = [whole(12, Role.DECODE, number) for number in range(48)]
    assert prefill == [cell for cell in range(12) for _ in range(2)]
    assert decode == [cell for cell in range(12) for _ in range(4)]


def test_the_experiment_has_a_global_scheduler_in_each_case() -> None:
    from dualpath.sim.experiments.experiment import Settings
    from dualpath.sim.setting import Assumptions

    trials = EXPERIMENT.trials(Settings(Assumptions()))
    assert len(set(trials)) == len(trials)
    for case in {each.case for each in trials}:
        assert "global" in {each.variant for each in trials if each.case == case}


def _node(engine: EngineId) -> int:
    return int(engine[1:].split(".")[0])


def test_ctrl_c_while_costs_are_measured_gives_no_costs(monkeypatch):
    case = Case(
        deployment=ds_27b(2, 1),
        system=System.SPLIT,
        assumptions=Assumptions(),
        trace="generated:2k",
        load=Offline(6),
    )
    monkeypatch.setattr(policies_hierarchy, "_offline", lambda settings: case)
    monkeypatch.setattr(
        Simulation, "_fetch", lambda self, group: signal.raise_signal(signal.SIGINT)
    )
    with pytest.raises(KeyboardInterrupt):
        policies_hierarchy._cpu_us_a_request(Settings(Assumptions()), "global")
