"""Which engines, groups and nodes there are now, and what they could hold.

Knows nothing of requests: `lose` hands the lost engine to the caller, who looks after its requests.
"""

from __future__ import annotations

from dualpath.base.errors import InvariantViolation
from dualpath.base.ids import EngineId, GroupId, NodeId, Role
from dualpath.policy.cluster import Capacity, EngineState, GroupState, NodeState
from dualpath.policy.events import EngineJoined, GroupFetched

__all__ = ["Membership"]


class Membership:
    """Engines by id, by role (in order of their ids) and by group. Groups and nodes live with engines.

    `role_nodes`: how many nodes have engines of a role. `unread_tokens`: of all nodes.
    """

    __slots__ = ("by_role", "capacity", "engines", "groups", "nodes", "role_nodes", "unread_tokens")

    def __init__(self) -> None:
        self.engines: dict[EngineId, EngineState] = {}
        self.groups: dict[Role, dict[GroupId, GroupState]] = {role: {} for role in Role}
        self.by_role: dict[Role, list[EngineState]] = {role: [] for role in Role}
        self.capacity: dict[Role, Capacity] = {role: Capacity() for role in Role}
        self.nodes: dict[NodeId, NodeState] = {}
        self.role_nodes: dict[Role, int] = dict.fromkeys(Role, 0)
        self.unread_tokens = 0

    def join(self, event: EngineJoined) -> EngineState:
        """Raises InvariantViolation when the engine is there already, or its group has the other role."""
        if event.engine in self.engines:
            raise InvariantViolation(f"engine {event.engine} joined twice without being lost")
        for role, groups in self.groups.items():
            if role is not event.role and event.group in groups:
                raise InvariantViolation(
                    f"{event.role} engine {event.engine} joined {event.group}, a group of {role} engines"
                )
        group = self.groups[event.role].setdefault(event.group, GroupState(event.group, event.role))
        node_id = NodeId(event.group) if event.node is None else event.node
        node = self.nodes.setdefault(node_id, NodeState(node_id))
        # Prefill engines keep no KV beyond their buffer: device memory never bounds what they take.
        hbm_tokens = event.hbm_tokens if event.role is Role.DECODE else 0
        engine = EngineState(event.engine, group, node, hbm_tokens, event.buffer_tokens)
        node.engines += 1
        group.add(engine)
        self.engines[engine.id] = engine
        self.by_role[event.role].append(engine)
        self.by_role[event.role].sort(key=lambda each: each.id)
        self.capacity[event.role].add(engine)
        self._count_nodes(event.role)
        return engine

    def lose(self, engine_id: EngineId) -> EngineState | None:
        """None when it is not there. A group or node without engines is forgotten.

        The caller has dropped every request from the engine before.
        """
        engine = self.engines.pop(engine_id, None)
        if engine is None:
            return None
        group, node = engine.group, engine.node
        group.remove(engine)
        self.by_role[group.role].remove(engine)
        self.capacity[group.role].remove(engine)
        node.engines -= 1
        if not node.engines:
            del self.nodes[node.id]
        if not group.engines:
            del self.groups[group.role][group.id]
        self._count_nodes(group.role)
        return engine

    def _count_nodes(self, role: Role) -> None:
        self.role_nodes[role] = len({each.node.id for each in self.by_role[role]})

    def find_group(self, group_id: GroupId) -> GroupState | None:
        for groups in self.groups.values():
            group = groups.get(group_id)
            if group is not None:
                return group
        return None

    def report(self, group: GroupState, event: GroupFetched) -> None:
        """Take in a fetch's reports; those of engines that are not in the group any more mean nothing."""
        queues: dict[NodeId, int] = {}
        engines = self.engines
        for report in event.reports:
            engine = engines.get(report.engine)
            if engine is None or engine.group is not group:
                continue
            engine.report(report)
            if report.read_queue_tokens is not None:
                queues[engine.node.id] = report.read_queue_tokens
        for node in group.nodes:
            node.report(queues.get(node.id, event.read_queue_tokens))
