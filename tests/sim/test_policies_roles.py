"""Nodes that change their role: when; that no request is lost, and that no node serves twice at once."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from kernel_kit import POLICY, cluster, many, work

from dualpath.base.ids import EngineId, Role
from dualpath.policy.events import Assign, Event, Instruction
from dualpath.policy.scheduler import Scheduler
from dualpath.sim.experiments.policies_roles import one_after_other
from dualpath.sim.experiments.role_change import RoleBalance, RoleChangingScheduler
from dualpath.sim.simulation import Simulation

UNITS = 4
SWITCH_S = 2.0
# So little device memory that requests wait for it in the queues of decode groups.
TWICE = cluster(prefill_nodes=UNITS, decode_nodes=UNITS, decode_hbm_tokens=500)
ROLES = [Role.PREFILL] * 2 + [Role.DECODE] * 2
P, D = Role.PREFILL, Role.DECODE


def waiting(prefill: float = 0.0, decode: float = 0.0) -> dict[Role, float]:
    return {P: prefill, D: decode}


def first_change(balance: RoleBalance, start_s: int, shares: dict[Role, float]) -> int | None:
    """Seconds from `start_s` until it says a role, within 2,000."""
    for second in range(2000):
        if balance.sample(float(start_s + second), shares) is not None:
            return second
    return None


@pytest.mark.parametrize("role", Role)
def test_a_starved_role_needs_a_unit_after_a_while(role: Role) -> None:
    shares = dict.fromkeys(Role, 0.0) | {role: 0.2}
    balance = RoleBalance()
    assert first_change(balance, 0, shares) == RoleBalance.WINDOW_S
    assert balance.sample(31.0, shares) is role


@pytest.mark.parametrize("shares", [waiting(0.09), waiting(0.5, 0.05), waiting(0.5, 0.5)])
def test_none_does_when_few_wait_or_when_both_roles_are_short(shares: dict[Role, float]) -> None:
    assert first_change(RoleBalance(), 0, shares) is None


def test_a_change_is_followed_by_a_rest_and_one_back_by_a_longer_one() -> None:
    balance = RoleBalance()
    balance.changed(0.0, P)
    assert first_change(balance, 0, waiting(0.5)) == RoleBalance.REST_S
    balance = RoleBalance()
    balance.changed(0.0, P)
    assert first_change(balance, 0, waiting(0.0, 0.5)) == RoleBalance.BEFORE_BACK_S


class At(RoleBalance):
    """Says what the script says, from the time on that it names."""

    def __init__(self, *script: tuple[float, Role]) -> None:
        super().__init__()
        self.script = list(script)

    def sample(self, now_s: float, waiting: dict[Role, float]) -> Role | None:
        assert all(0 <= each <= 1 for each in waiting.values())
        if self.script and now_s >= self.script[0][0]:
            return self.script[0][1]
        return None

    def changed(self, now_s: float, role: Role) -> None:
        self.script.pop(0)


class Recorded:
    """A run with assignments by time: (time, engine)."""

    def __init__(self, *script: tuple[float, Role]) -> None:
        self.scheduler = RoleChangingScheduler(POLICY, ROLES, unit_nodes=1, switch_s=SWITCH_S)
        self.scheduler._balance = At(*script)
        self.given: list[tuple[float, EngineId]] = []
        self.serving: list[tuple[float, tuple[Role | None, ...]]] = []
        run = Simulation(
            TWICE, POLICY, many(40, 12, seed=5), log=self._log, scheduler=self.scheduler
        )
        self.outcome = run.run()

    def _log(self, event: Event, instructions: list[Instruction]) -> None:
        now_s = event.now_s
        self.serving.append((now_s, tuple(self.scheduler._roles)))
        for each in instructions:
            if isinstance(each, Assign):
                self.given += [(now_s, each.prefill), (now_s, each.decode)]

    def validate(self) -> None:
        self.scheduler.validate()
        assert not self.scheduler._requests


def test_without_a_change_it_is_the_scheduler_on_the_serving_nodes() -> None:
    one = Recorded()
    one.validate()
    assert one.scheduler.changes == 0
    plain = Simulation(
        replace(TWICE, prefill_nodes=2, decode_nodes=2), POLICY, many(40, 12, seed=5)
    ).run()
    # Nodes that do not serve fetch too, so leaders fetch at other times.
    assert one.outcome.jct_s == pytest.approx(plain.jct_s, rel=0.1)
    engines = {each[0] + each[1] for _, each in one.given}
    assert engines == {"p0", "p1", "d2", "d3"}


@pytest.mark.parametrize("there", Role)
def test_a_unit_drains_changes_and_changes_back(there: Role) -> None:
    back = D if there is P else P
    one = Recorded((2.0, there), (6.0, back))
    one.validate()
    assert one.outcome.unfinished_agents == 0
    assert (one.outcome.records.finished_s > 0).all()
    assert one.scheduler.changes == 2
    for now_s, engine in one.given:
        role = P if engine.startswith("p") else D
        roles = next(roles for at_s, roles in reversed(one.serving) if at_s <= now_s)
        assert roles[int(engine[1])] is role, f"{engine} got a request at {now_s} s"
    changing_s = [b - a for (a, roles), (b, _) in pairwise(one.serving) if None in roles]
    assert sum(changing_s) > 2 * SWITCH_S
    assert sorted(one.scheduler._roles, key=str) == sorted(ROLES, key=str)


def test_the_last_unit_of_a_role_stays() -> None:
    one = Recorded((1.0, P), (2.0, P), (3.0, P))
    one.validate()
    assert one.scheduler.changes == 1
    assert one.scheduler._roles.count(D) == 1


def test_agents_of_the_second_mix_play_their_own_turns_later() -> None:
    first = work([(10, 2, 0.0), (20, 3, 1.0)], [(30, 4, 0.0)])
    second = work([(50, 5, 0.0)], [(60, 6, 0.0), (70, 7, 2.0)])
    both = one_after_other(first, second, 9.0)
    assert both.start_s.tolist() == [0, 0, 9, 9]
    turns = [
        both.output_tokens[both.first_turn[each] : both.first_turn[each + 1]].tolist()
        for each in both.trajectory
    ]
    assert turns == [[2, 3], [4], [5], [6, 7]]
    assert both.requests == first.requests + second.requests
    assert both.trajectory.dtype == np.int32
    assert Simulation(cluster(), POLICY, both, scheduler=Scheduler(POLICY)).run().jct_s > 9
