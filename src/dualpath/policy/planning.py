"""Read plans for placed requests, by scheduler kind. `read_plan` has the arithmetic."""

from __future__ import annotations

from typing import Final, Protocol

from dualpath.base.ids import NodeId, Role, Side
from dualpath.policy.cluster import NodeState
from dualpath.policy.config import PolicyConfig, ReadPlanKind, SchedulerKind
from dualpath.policy.events import ReadPlan
from dualpath.policy.membership import Membership
from dualpath.policy.read_plan import plan_reads, side_that_read_less
from dualpath.policy.splitmix import SplitMix64

__all__ = [
    "AlternatingSides",
    "Bypass",
    "PlannedByQueues",
    "RandomSides",
    "ReadPlanner",
    "make_planner",
]

_NOTHING: Final = ReadPlan(0, 0)
_STEADY: Final = ReadPlanKind.STEADY
_PREFILL: Final = Role.PREFILL
_DECODE: Final = Role.DECODE


class ReadPlanner(Protocol):
    """Plans the reads of one request whose engines, and so nodes, are known."""

    def plan(self, hit_tokens: int, pe_node: NodeState, de_node: NodeState) -> ReadPlan: ...


class PlannedByQueues:
    """One of the `ReadPlanKind`s, by the nodes' read queues."""

    def __init__(self, config: PolicyConfig, members: Membership, kind: ReadPlanKind) -> None:
        self._members = members
        self._kind = kind
        self._pe_read_rate = config.pe_read_rate
        self._de_read_rate = config.de_read_rate
        self._block_tokens = config.block_tokens
        self._decode_turns: set[tuple[NodeId, NodeId]] = set()
        """The pairs of nodes whose DE side has its turn."""

    def plan(self, hit_tokens: int, pe_node: NodeState, de_node: NodeState) -> ReadPlan:
        if hit_tokens == 0:
            return _NOTHING
        members, steady = self._members, self._kind is _STEADY
        return plan_reads(
            self._kind,
            hit_tokens,
            pe_queue_tokens=pe_node.unread_tokens if steady else pe_node.read_queue_tokens,
            de_queue_tokens=de_node.unread_tokens if steady else de_node.read_queue_tokens,
            pe_read_rate=self._pe_read_rate,
            de_read_rate=self._de_read_rate,
            pe_nodes=members.role_nodes[_PREFILL],
            de_nodes=members.role_nodes[_DECODE],
            unread_tokens=members.unread_tokens,
            block_tokens=self._block_tokens,
            tie=side_that_read_less(pe_node, de_node),
            turn=self._turn(pe_node, de_node) if steady else Side.PE,
        )

    def _turn(self, pe_node: NodeState, de_node: NodeState) -> Side:
        """Of each pair by itself: nodes are asked in turn, too, and one might always get the larger parts."""
        pair, turns = (pe_node.id, de_node.id), self._decode_turns
        if pair in turns:
            turns.remove(pair)
            return Side.DE
        if len(turns) >= self._members.role_nodes[_PREFILL] * self._members.role_nodes[_DECODE]:
            turns.clear()  # Of nodes that are gone.
        turns.add(pair)
        return Side.PE


def _one_side(side: Side, hit_tokens: int) -> ReadPlan:
    return ReadPlan(hit_tokens, 0) if side is Side.PE else ReadPlan(0, hit_tokens)


class AlternatingSides:
    """Round robin: PE side, DE side, PE side, ... over the requests that have something to read."""

    def __init__(self) -> None:
        self._next = Side.PE

    def plan(self, hit_tokens: int, pe_node: NodeState, de_node: NodeState) -> ReadPlan:
        if hit_tokens == 0:
            return _NOTHING
        side = self._next
        self._next = Side.DE if side is Side.PE else Side.PE
        return _one_side(side, hit_tokens)


class RandomSides:
    """A fair coin for each request that has something to read."""

    def __init__(self, numbers: SplitMix64) -> None:
        self._numbers = numbers

    def plan(self, hit_tokens: int, pe_node: NodeState, de_node: NodeState) -> ReadPlan:
        if hit_tokens == 0:
            return _NOTHING
        return _one_side(Side.DE if self._numbers.below(2) else Side.PE, hit_tokens)


class Bypass:
    """Oracle: the stored KV is there without being read; named as the PE side's."""

    def plan(self, hit_tokens: int, pe_node: NodeState, de_node: NodeState) -> ReadPlan:
        return ReadPlan(hit_tokens, 0, bypass=True)


def make_planner(config: PolicyConfig, members: Membership) -> ReadPlanner:
    """The planner that the configured scheduler uses."""
    match config.scheduler:
        case SchedulerKind.DUALPATH:
            return PlannedByQueues(config, members, config.read_plan)
        case SchedulerKind.BASIC:
            return PlannedByQueues(config, members, ReadPlanKind.PE)
        case SchedulerKind.ROUND_ROBIN:
            return AlternatingSides()
        case SchedulerKind.RANDOM:
            # Not the stream that engines are drawn from: the next numbers of a neighbouring seed.
            return RandomSides(SplitMix64(config.seed + 1))
        case SchedulerKind.ORACLE:
            return Bypass()
