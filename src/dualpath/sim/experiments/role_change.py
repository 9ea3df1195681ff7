"""Nodes that change their role at run time: when to, and a scheduler that does it in a simulation. Pure.

A unit, nodes that form an instance, serves one role. To change, it drains: it gets no new requests, and
those that were chosen for it but not assigned go back to their queues; it finishes what it has, leaves,
and joins as the other role after a switching time. No request is interrupted.

The simulated cluster has each unit twice, as prefill and as decode nodes. The scheduler lets at most one
of the two serve, so what nodes can do is never counted twice; a simulation's figures of utilisation,
which are per simulated node, mean nothing here.

When to change: a request waits for one role alone when it has its engine of the other. As long as some
share of all requests waits for one role, and hardly any for the other, the first is starved. Enough for
hysteresis: both shares are means over a while, a change is followed by a rest, and one back by a longer
one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from dualpath.base.ids import EngineId, GroupId, Role
from dualpath.policy.cluster import GroupState
from dualpath.policy.config import PolicyConfig
from dualpath.policy.events import EngineJoined, EngineReport, Event, GroupFetched, Instruction
from dualpath.policy.requests import Phase
from dualpath.policy.scheduler import Scheduler

__all__ = ["RoleBalance", "RoleChangingScheduler"]

_SAMPLE_S = 1.0
_OTHER = {Role.PREFILL: Role.DECODE, Role.DECODE: Role.PREFILL}


class RoleBalance:
    """Says which role needs another unit, from shares of all requests, sampled every second."""

    STARVED, SATISFIED = 0.1, 0.03
    """Above and below which a role is so."""
    WINDOW_S, REST_S, BEFORE_BACK_S = 30.0, 60.0, 600.0

    def __init__(self) -> None:
        self._waiting = dict.fromkeys(Role, 0.0)
        self._rests_until_s = self.WINDOW_S
        self._last: Role | None = None
        self._last_s = 0.0

    def sample(self, now_s: float, waiting: dict[Role, float]) -> Role | None:
        """`waiting`: of the requests, the share that waits for an engine of this role alone."""
        for role, share in waiting.items():
            self._waiting[role] += _SAMPLE_S / self.WINDOW_S * (share - self._waiting[role])
        if now_s < self._rests_until_s:
            return None
        for role, other in _OTHER.items():
            if self._waiting[role] > self.STARVED and self._waiting[other] < self.SATISFIED:
                back = self._last is other and now_s < self._last_s + self.BEFORE_BACK_S
                return None if back else role
        return None

    def changed(self, now_s: float, role: Role) -> None:
        """A unit has begun to serve it."""
        self._last, self._last_s = role, now_s
        self._rests_until_s = now_s + self.REST_S


@dataclass(slots=True)
class _Face:
    """A unit's nodes in one role. `joins`: what its engines say when they begin to serve.

    `seen`: assignments that they saw while they served before, which their reports go on counting.
    `draining`: groups that still have requests.
    """

    joins: dict[GroupId, list[EngineJoined]] = field(default_factory=dict)
    seen: dict[EngineId, int] = field(default_factory=dict)
    draining: dict[GroupId, GroupState] = field(default_factory=dict)


class RoleChangingScheduler(Scheduler):
    """`roles`: of each unit at the start. The nodes of a role join in the order of their units."""

    def __init__(
        self, config: PolicyConfig, roles: Sequence[Role], *, unit_nodes: int, switch_s: float
    ) -> None:
        super().__init__(config)
        self.changes = 0
        self._roles: list[Role | None] = list(roles)
        self._faces = [{role: _Face() for role in Role} for _ in roles]
        self._of_group: dict[GroupId, tuple[int, Role]] = {}
        self._joined_groups = dict.fromkeys(Role, 0)
        self._unit_nodes = unit_nodes
        self._switch_s = switch_s
        self._balance = RoleBalance()
        self._next_sample_s = 0.0
        self._changing: tuple[int, Role] | None = None
        self._ready_s: float | None = None

    def handle(self, event: Event) -> list[Instruction]:
        if isinstance(event, EngineJoined):
            return self._first_joined(event)
        if isinstance(event, GroupFetched):
            return self._watched_fetch(event)
        return super().handle(event)

    def _first_joined(self, event: EngineJoined) -> list[Instruction]:
        if event.group not in self._of_group:
            unit = self._joined_groups[event.role] // self._unit_nodes
            self._joined_groups[event.role] += 1
            self._of_group[event.group] = unit, event.role
        unit, role = self._of_group[event.group]
        self._faces[unit][role].joins.setdefault(event.group, []).append(event)
        return super().handle(event) if self._roles[unit] is role else []

    def _watched_fetch(self, event: GroupFetched) -> list[Instruction]:
        out: list[Instruction] = []
        if event.now_s >= self._next_sample_s:
            self._next_sample_s = event.now_s + _SAMPLE_S
            out = self._watch(event.now_s)
        unit, role = self._of_group[event.group]
        face = self._faces[unit][role]
        if self._roles[unit] is role:
            return out + super().handle(_since_it_serves(event, face.seen))
        if event.group in face.draining and not any(each.requests for each in event.reports):
            face.seen.update((each.engine, each.seen) for each in event.reports)
            self._forget(face.draining.pop(event.group))
            if not face.draining:
                self._ready_s = event.now_s + self._switch_s
        return out

    def _watch(self, now_s: float) -> list[Instruction]:
        needed = self._balance.sample(now_s, self._waiting_shares())
        if self._changing is not None:
            return self._begin_to_serve(now_s)
        if needed is not None:
            giving = [unit for unit, role in enumerate(self._roles) if role is _OTHER[needed]]
            if len(giving) > 1:
                self._drain_unit(min(giving, key=self._held_tokens), needed)
        return []

    def _waiting_shares(self) -> dict[Role, float]:
        waiting = dict.fromkeys(Role, 0)
        for request in self._requests.values():
            if request.phase is Phase.WAITING:
                waiting[Role.PREFILL] += request.decode is not None
                waiting[Role.DECODE] += request.prefill is not None
        return {role: count / max(1, len(self._requests)) for role, count in waiting.items()}

    def _held_tokens(self, unit: int) -> int:
        role = self._roles[unit]
        assert role is not None
        groups = self._members.groups[role]
        return sum(groups[each].tokens for each in self._faces[unit][role].joins)

    def _begin_to_serve(self, now_s: float) -> list[Instruction]:
        if self._changing is None or self._ready_s is None or now_s < self._ready_s:
            return []
        unit, role = self._changing
        self._changing = self._ready_s = None
        self._roles[unit] = role
        self._balance.changed(now_s, role)
        self.changes += 1
        joins = [each for group in self._faces[unit][role].joins.values() for each in group]
        return [instruction for each in joins for instruction in Scheduler.handle(self, each)]

    def _drain_unit(self, unit: int, needed: Role) -> None:
        self._changing = unit, needed
        self._roles[unit] = None
        face = self._faces[unit][_OTHER[needed]]
        face.draining = {each: self._stop_choosing(each, _OTHER[needed]) for each in face.joins}

    def _stop_choosing(self, group_id: GroupId, role: Role) -> GroupState:
        """Nobody finds the group any more; its engines stay known to requests that have them."""
        members = self._members
        group = members.groups[role].pop(group_id)
        for engine in group.engines:
            members.by_role[role].remove(engine)
            members.capacity[role].remove(engine)
        members._count_nodes(role)
        for request in list(group.queue):
            group.dequeue(request)
            request.returned = True
            self._queues.decode.push(request)
        for engine in group.engines:
            for request in list(engine.pending.values()):
                self._unplace(request, role)
        return group

    def _forget(self, group: GroupState) -> None:
        members = self._members
        for engine in group.engines:
            del members.engines[engine.id]
            engine.node.engines -= 1
            if not engine.node.engines:
                del members.nodes[engine.node.id]


def _since_it_serves(event: GroupFetched, seen: dict[EngineId, int]) -> GroupFetched:
    if not seen:
        return event
    reports = tuple(
        EngineReport(
            each.engine,
            each.seen - seen[each.engine],
            each.requests,
            each.tokens,
            each.free_hbm_tokens,
        )
        for each in event.reports
    )
    return GroupFetched(event.group, reports, event.read_queue_tokens, event.now_s)
