"""The scheduler's invariants, recomputed from scratch: for tests, and for a driver that is idle."""

from __future__ import annotations

from collections.abc import Mapping

from dualpath.base.errors import InvariantViolation
from dualpath.base.ids import EngineId, NodeId, RequestId, Role
from dualpath.policy.cluster import EngineState, GroupState
from dualpath.policy.config import PolicyConfig
from dualpath.policy.membership import Membership
from dualpath.policy.placement import Queues
from dualpath.policy.requests import ArrivalQueue, Phase, RequestState

__all__ = ["check_invariants"]


def check_invariants(
    config: PolicyConfig,
    members: Membership,
    queues: Queues,
    requests: Mapping[RequestId, RequestState],
) -> None:
    """Raises InvariantViolation with the ids, what was expected and what is."""
    groups = [group for by_id in members.groups.values() for group in by_id.values()]
    private = [group.queue for group in groups]
    for queue in (queues.prefill, queues.decode, *private):
        _check_queue(queue, requests)
    arrivals = [each.arrival for each in requests.values()]
    _expect(arrivals == sorted(set(arrivals)), "requests are not in order of arrival")
    for request in requests.values():
        _check_request(request, config, members, queues, groups)
    taken: dict[EngineId, list[RequestState]] = {each: [] for each in members.engines}
    for request in requests.values():
        for engine in (request.prefill, request.decode):
            if engine is not None:
                current = members.engines.get(engine.id)
                _expect(current is engine, f"{request.id} is on the lost engine {engine.id}")
                taken[engine.id].append(request)
    for engine in members.engines.values():
        _check_engine(engine, taken[engine.id])
    for group in groups:
        _check_group(group)
    _check_membership(members, groups)
    _check_unread(members, requests)


def _expect(condition: bool, message: str) -> None:
    if not condition:
        raise InvariantViolation(message)


def _check_queue(queue: ArrivalQueue, requests: Mapping[RequestId, RequestState]) -> None:
    arrivals = [each.arrival for each in queue]
    _expect(arrivals == sorted(set(arrivals)), f"a queue is not in order of arrival: {arrivals}")
    for request in queue:
        _expect(requests.get(request.id) is request, f"{request.id} is queued but unknown or old")


def _check_request(
    request: RequestState,
    config: PolicyConfig,
    members: Membership,
    queues: Queues,
    groups: list[GroupState],
) -> None:
    story = f"request {request.id} attempt {request.attempt} ({request.phase})"
    waiting = request.phase is Phase.WAITING
    needs_prefill = waiting and request.prefill is None
    needs_decode = waiting and request.decode is None
    in_groups = [group for group in groups if request in group.queue]
    _expect((request in queues.prefill) == needs_prefill, f"{story}: wrong about the prefill queue")
    _expect(
        (request in queues.decode) + len(in_groups) == int(needs_decode),
        f"{story}: in {len(in_groups)} private queues, global queue: {request in queues.decode}",
    )
    _expect(
        in_groups == ([] if request.group is None else [request.group]), f"{story}: wrong group"
    )
    _expect(not (waiting and request.prefill and request.decode), f"{story}: placed, not assigned")
    active = request.phase in (Phase.READING, Phase.PREFILLING)
    _expect((request.prefill is not None) or not active, f"{story}: without prefill engine")
    _expect(
        (request.decode is not None) or not (active or request.phase is Phase.DECODING),
        f"{story}: without decode engine",
    )
    ended_on_prefill = request.phase in (Phase.DECODING, Phase.INTERRUPTED)
    _expect(not (ended_on_prefill and request.prefill), f"{story}: still on its prefill engine")
    unread = (request.pe_unread_tokens, request.de_unread_tokens)
    _expect(min(unread) >= 0, f"{story}: read too much, {unread} left")
    _expect(
        (sum(unread) > 0) or request.phase is not Phase.READING, f"{story}: nothing left to read"
    )
    for role, needs in ((Role.PREFILL, needs_prefill), (Role.DECODE, needs_decode)):
        capacity = members.capacity[role]
        hbm_tokens = request.hbm_tokens if role is Role.DECODE else 0
        if needs and (capacity or config.reject_without_engines):
            _expect(
                capacity.holds(hbm_tokens, request.buffer_tokens),
                f"{story}: waits for a {role} engine, and fits none",
            )
    for group in in_groups:
        _expect(
            group.capacity.holds(request.hbm_tokens, request.buffer_tokens),
            f"{story}: in the private queue of {group.id}, and fits none of its engines",
        )


def _check_engine(engine: EngineState, taken: list[RequestState]) -> None:
    counted = [each for each in taken if engine.counts(each)]
    hbm_tokens = sum(each.hbm_tokens for each in counted) if engine.decodes else 0
    figures = {
        "tokens": (engine.unseen_tokens, sum(each.tokens for each in counted)),
        "requests": (engine.unseen_requests, len(counted)),
        "hbm_tokens": (engine.unseen_hbm_tokens, hbm_tokens),
    }
    for name, (kept, recomputed) in figures.items():
        _expect(
            kept == recomputed, f"engine {engine.id}: unseen {name} {kept}, expected {recomputed}"
        )
    pending = {each.arrival for each in taken if each.phase is Phase.WAITING}
    _expect(set(engine.pending) == pending, f"engine {engine.id}: pending {set(engine.pending)}")
    for each in engine.unseen:
        _expect(
            not engine.counts(each) or each in counted,
            f"engine {engine.id}: counts an ended attempt of {each.id}",
        )


def _check_group(group: GroupState) -> None:
    tokens = sum(each.tokens for each in group.engines) + sum(each.tokens for each in group.queue)
    _expect(group.tokens == tokens, f"group {group.id}: {group.tokens} tokens, expected {tokens}")
    ids = [each.id for each in group.engines]
    _expect(bool(ids) and ids == sorted(set(ids)), f"group {group.id}: engines {ids}")


def _check_membership(members: Membership, groups: list[GroupState]) -> None:
    grouped = {each.id for group in groups for each in group.engines}
    _expect(grouped == set(members.engines), "groups and engines differ")
    by_role = {each.id for engines in members.by_role.values() for each in engines}
    _expect(by_role == set(members.engines), "roles and engines differ")
    unseen: dict[NodeId, int] = dict.fromkeys(members.nodes, 0)
    for engine in members.engines.values():
        _expect(members.nodes.get(engine.node.id) is engine.node, f"node of {engine.id} is unknown")
        unseen[engine.node.id] += sum(
            engine.read_tokens(each) for each in engine.unseen if engine.counts(each)
        )
    for node in members.nodes.values():
        _expect(
            node.unseen_read_tokens == unseen[node.id],
            f"node {node.id}: {node.unseen_read_tokens} unseen read tokens, expected {unseen[node.id]}",
        )
        engines = sum(each.node is node for each in members.engines.values())
        _expect(
            node.engines == engines, f"node {node.id}: {node.engines} engines, expected {engines}"
        )
    for role, engines_of_role in members.by_role.items():
        nodes = len({each.node.id for each in engines_of_role})
        _expect(members.role_nodes[role] == nodes, f"{role} nodes: {members.role_nodes[role]}")


def _check_unread(members: Membership, requests: Mapping[RequestId, RequestState]) -> None:
    unread: dict[NodeId, int] = dict.fromkeys(members.nodes, 0)
    for request in requests.values():
        sides = (
            (request.prefill, request.pe_unread_tokens),
            (request.decode, request.de_unread_tokens),
        )
        for engine, tokens in sides:
            if engine is not None:
                unread[engine.node.id] += tokens
    total = sum(unread.values())
    _expect(members.unread_tokens == total, f"{members.unread_tokens} unread, expected {total}")
    for node in members.nodes.values():
        _expect(
            node.unread_tokens == unread[node.id],
            f"node {node.id}: {node.unread_tokens} unread tokens, expected {unread[node.id]}",
        )
