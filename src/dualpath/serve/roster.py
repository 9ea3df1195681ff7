"""The engines that serve now, and what each of them said last."""

from __future__ import annotations

from dataclasses import dataclass

from dualpath.base.ids import EngineId, GroupId, Role
from dualpath.monitor.metrics import EngineSample
from dualpath.policy.events import EngineReport, GroupFetched
from dualpath.serve.messages import EngineStatus, Hello

__all__ = ["EngineRoster", "sample_of"]

_FRESH_S = 2.0
"""Several heartbeats: what an engine said before that says nothing about it now."""


@dataclass(slots=True, eq=False)
class _Member:
    hello: Hello
    heard_s: float
    status: EngineStatus | None = None


@dataclass(slots=True)
class _Reads:
    """What a node has read, at the time of the last look, and the best rate between two looks."""

    at_s: float
    read_bytes: int
    best_rate: float = 0.0


class EngineRoster:
    """Engines by id. Pure: times come from the caller, in seconds from any origin."""

    def __init__(self) -> None:
        self._members: dict[EngineId, _Member] = {}
        self._reads: dict[GroupId, _Reads] = {}

    def __contains__(self, engine: object) -> bool:
        return engine in self._members

    @property
    def engines(self) -> list[EngineId]:
        return list(self._members)

    @property
    def groups(self) -> list[GroupId]:
        return sorted({member.hello.group for member in self._members.values()})

    @property
    def by_load(self) -> list[GroupId]:
        """All groups, those with the fewest unfinished tokens an engine first, by their last reports.

        What a group fetches is its own until it has enough: were the order fixed, the first would get all.
        """
        tokens: dict[GroupId, list[int]] = {}
        for member in self._members.values():
            reported = 0 if member.status is None else member.status.tokens
            tokens.setdefault(member.hello.group, []).append(reported)
        return sorted(tokens, key=lambda group: (sum(tokens[group]) / len(tokens[group]), group))

    @property
    def statuses(self) -> dict[EngineId, EngineStatus]:
        """The last report of each engine that gave one."""
        return {
            name: member.status
            for name, member in self._members.items()
            if member.status is not None
        }

    @property
    def read_queues(self) -> dict[GroupId, int]:
        """Tokens waiting to be read, by node."""
        queues: dict[GroupId, int] = dict.fromkeys(self.groups, 0)
        for member in self._members.values():
            if member.status is not None:
                queues[member.hello.group] += member.status.read_queue_tokens
        return queues

    def read_utilization(self, now_s: float) -> dict[GroupId, float]:
        """Each node's read bandwidth since the last call, by the highest it has reached between two."""
        found: dict[GroupId, float] = {}
        for group in self.groups:
            read_bytes = sum(
                member.status.read_bytes
                for member in self._members.values()
                if member.hello.group == group and member.status is not None
            )
            seen = self._reads.setdefault(group, _Reads(now_s, read_bytes))
            if now_s > seen.at_s:
                # An engine that was started again counts from 0.
                rate = max(0, read_bytes - seen.read_bytes) / (now_s - seen.at_s)
                seen.at_s, seen.read_bytes = now_s, read_bytes
                seen.best_rate = max(seen.best_rate, rate)
                found[group] = rate / seen.best_rate if seen.best_rate else 0.0
        return found

    def join(self, hello: Hello, now_s: float) -> None:
        self._members[hello.engine] = _Member(hello, now_s)

    def leave(self, engine: EngineId) -> Hello | None:
        """What it said when it joined; None when it is unknown or left already."""
        member = self._members.pop(engine, None)
        return None if member is None else member.hello

    def hello(self, engine: EngineId) -> Hello:
        return self._members[engine].hello

    def newly_read_bytes(self, engine: EngineId, status: EngineStatus) -> int:
        """What it has read from storage since the report before; ask before `heard`."""
        before = self._members[engine].status
        return status.read_bytes - (before.read_bytes if before is not None else 0)

    def heard(self, engine: EngineId, now_s: float, status: EngineStatus | None) -> None:
        """It said something; `status` if that was a report."""
        member = self._members[engine]
        member.heard_s = now_s
        member.status = status or member.status

    def count(self, role: Role) -> int:
        """Engines of the role that serve now."""
        return sum(member.hello.role is role for member in self._members.values())

    def silent(self, longer_than_s: float, now_s: float) -> list[EngineId]:
        """Engines that have not been heard of for so long: hung, whatever their process says."""
        limit = now_s - longer_than_s
        return [name for name, member in self._members.items() if member.heard_s < limit]

    def fetch(self, group: GroupId, now_s: float) -> GroupFetched | None:
        """The group's fetch, from its members' last reports.

        None while a member has not reported, or all hang: an engine that hangs would look idle, so
        nothing is assigned until it is heard.
        """
        members = [m for m in self._members.values() if m.hello.group == group]
        reported = [(m.hello.engine, m.status) for m in members if m.status is not None]
        if len(reported) < len(members) or all(m.heard_s < now_s - _FRESH_S for m in members):
            return None
        reports = tuple(
            EngineReport(
                engine=engine,
                seen=status.seen,
                requests=status.requests,
                tokens=status.tokens,
                free_hbm_tokens=status.free_hbm_tokens,
            )
            for engine, status in reported
        )
        read_queue_tokens = sum(status.read_queue_tokens for _, status in reported)
        return GroupFetched(group, reports, read_queue_tokens, now_s)


def sample_of(status: EngineStatus) -> EngineSample:
    """A report as the metrics want it."""
    return EngineSample(
        requests=status.requests,
        tokens=status.tokens,
        busy_s=status.busy_s,
        flops=status.flops,
        bubble_s=status.bubble_s,
        loads=status.loads,
        late_loads=status.late_loads,
        fragmentation=status.fragmentation,
        pool_slots=status.pool_slots,
        pool_free_slots=status.pool_free_slots,
        hbm_tokens=status.hbm_tokens,
        free_hbm_tokens=status.free_hbm_tokens,
        written_bytes=status.written_bytes,
        transferred_bytes=status.pulled_bytes,
        dropped_blocks=status.dropped_blocks,
        traffic=None if status.traffic is None else dict(status.traffic),
    )
