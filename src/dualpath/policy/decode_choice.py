"""Which decode group and engine take a request (paper, section on scheduling, phases 1 and 2).

The choices are pure. `LeastLoadedGroups` is an index over the groups' tokens, so that phase 1 does not
scan all groups for every request.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping, Sequence

from dualpath.base.errors import InvariantViolation
from dualpath.base.ids import GroupId
from dualpath.policy.cluster import EngineState, GroupState
from dualpath.policy.requests import RequestState

__all__ = ["LeastLoadedGroups", "balance_limit", "choose_decode", "requests_that_fit"]


class LeastLoadedGroups:
    """Phase 1: the decode group with the fewest tokens, its engines' and its private queue's.

    A heap with lazy correction. Invariant: each group has an entry that is not above its tokens; so a
    group whose tokens fell must be `touch`ed, one whose tokens rose need not. Memory is O(groups).
    """

    __slots__ = ("_groups", "_heap")

    def __init__(self, groups: Mapping[GroupId, GroupState]) -> None:
        self._groups = groups
        self._heap: list[tuple[int, GroupId]] = []

    def __len__(self) -> int:
        return len(self._heap)

    def touch(self, group: GroupState) -> None:
        """The group is new, or its tokens fell."""
        heap = self._heap
        if len(heap) > 4 * len(self._groups) + 16:
            heap[:] = [(each.tokens, each.id) for each in self._groups.values()]
            heapq.heapify(heap)
        heapq.heappush(heap, (group.tokens, group.id))

    def least(self, request: RequestState) -> GroupState | None:
        """The group with the fewest tokens, then the lowest id, of those that could hold the request."""
        heap = self._heap
        too_small: list[tuple[int, GroupId]] = []
        found: GroupState | None = None
        while heap:
            tokens, group_id = heap[0]
            group = self._groups.get(group_id)
            if group is None:
                heapq.heappop(heap)
            elif tokens != group.tokens:
                heapq.heapreplace(heap, (group.tokens, group_id))
            elif group.capacity.holds(request.hbm_tokens, request.buffer_tokens):
                found = group
                break
            else:
                too_small.append(heapq.heappop(heap))
        for entry in too_small:
            heapq.heappush(heap, entry)
        return found

    def check(self) -> None:
        """Raises InvariantViolation when a group could be overlooked."""
        lowest: dict[GroupId, int] = {}
        for tokens, group_id in self._heap:
            lowest[group_id] = min(tokens, lowest.get(group_id, tokens))
        for group in self._groups.values():
            if group.id not in lowest or lowest[group.id] > group.tokens:
                raise InvariantViolation(
                    f"group {group.id} with {group.tokens} tokens is indexed at {lowest.get(group.id)}"
                )


def requests_that_fit(queue: Iterable[RequestState], free_hbm_tokens: int) -> list[RequestState]:
    """R: the requests from the head that together fit the group's free device memory.

    Fragmentation over the engines is ignored, as in the paper.
    """
    fitting: list[RequestState] = []
    for request in queue:
        free_hbm_tokens -= request.hbm_tokens
        if free_hbm_tokens < 0:
            break
        fitting.append(request)
    return fitting


def balance_limit(
    requests: Iterable[RequestState], engines: Sequence[EngineState], z_factor: float
) -> float:
    """Z = z_factor * (tokens of the requests + tokens of the engines) / number of engines."""
    total = sum([each.tokens for each in requests]) + sum([each.tokens for each in engines])
    return z_factor * total / len(engines)


def choose_decode(
    engines: Iterable[EngineState], request: RequestState, limit_tokens: float
) -> EngineState | None:
    """Among engines with free device memory: those that stay within Z, the fewest requests first;

    when none does, the fewest tokens. None when no engine has the memory. Ties: fewest tokens
    (requests), then the first in `engines`.
    """
    hbm_tokens, buffer_tokens, tokens = request.hbm_tokens, request.buffer_tokens, request.tokens
    balanced: EngineState | None = None
    lightest: EngineState | None = None
    fewest_requests = balanced_tokens = lightest_tokens = lightest_requests = 0
    for engine in engines:
        count = engine.requests
        if balanced is not None and count > fewest_requests:
            continue
        if engine.free_hbm_tokens < hbm_tokens or engine.buffer_tokens < buffer_tokens:
            continue
        load = engine.tokens
        if load + tokens <= limit_tokens:
            if (
                balanced is None
                or count < fewest_requests
                or (count == fewest_requests and load < balanced_tokens)
            ):
                balanced, fewest_requests, balanced_tokens = engine, count, load
        elif balanced is None and (
            lightest is None
            or load < lightest_tokens
            or (load == lightest_tokens and count < lightest_requests)
        ):
            lightest, lightest_tokens, lightest_requests = engine, load, count
    return balanced if balanced is not None else lightest
