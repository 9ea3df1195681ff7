"""How waiting requests get their engines when a group fetches: DualPath's way, and the baselines'.

A placement takes requests from the queues, makes them hold an engine, and yields each as it is placed,
so that the scheduler can plan its reads before the next one is chosen. It knows no events.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from dualpath.base.ids import Role
from dualpath.policy.cluster import EngineState, GroupState
from dualpath.policy.config import PolicyConfig, SchedulerKind
from dualpath.policy.decode_choice import (
    LeastLoadedGroups,
    balance_limit,
    choose_decode,
    requests_that_fit,
)
from dualpath.policy.membership import Membership
from dualpath.policy.prefill_choice import choose_prefill
from dualpath.policy.requests import ArrivalQueue, RequestState
from dualpath.policy.splitmix import SplitMix64

__all__ = [
    "BlindPlacement",
    "DualPathPlacement",
    "EngineOrder",
    "InTurn",
    "Placement",
    "Queues",
    "Uniform",
    "make_placement",
]


class Queues:
    """The two global queues: requests without a prefill engine, requests without a decode group."""

    __slots__ = ("decode", "prefill")

    def __init__(self) -> None:
        self.prefill = ArrivalQueue()
        self.decode = ArrivalQueue()


class Placement(Protocol):
    """Chooses engines. `place_*` is called with the group that fetched, after its reports were taken in."""

    def place_prefill(self, group: GroupState) -> Iterator[RequestState]: ...

    def place_decode(self, group: GroupState) -> Iterator[RequestState]: ...

    def touch(self, group: GroupState) -> None:
        """A decode group is new, or its tokens may have fallen."""

    def check(self) -> None:
        """Raises InvariantViolation when an index of its own is wrong."""


class DualPathPlacement:
    """The paper's algorithm: see `prefill_choice` and `decode_choice`.

    One rule is ours. A request that comes back (a failed attempt) is older than requests that already
    hold one engine and wait for the other; two such requests could each hold what the other needs.
    So an older request that finds no room takes back what younger ones of the group only hold without
    being assigned: no engine has heard of it yet.
    """

    def __init__(self, config: PolicyConfig, members: Membership, queues: Queues) -> None:
        self._config = config
        self._queues = queues
        self._groups = LeastLoadedGroups(members.groups[Role.DECODE])

    def touch(self, group: GroupState) -> None:
        self._groups.touch(group)

    def check(self) -> None:
        self._groups.check()

    def place_prefill(self, group: GroupState) -> Iterator[RequestState]:
        queue = self._queues.prefill
        alpha_tokens, beta_tokens = self._config.alpha_tokens, self._config.beta_tokens
        while (request := queue.head()) is not None:
            engine = choose_prefill(
                group.engines,
                request.buffer_tokens,
                alpha_tokens=alpha_tokens,
                beta_tokens=beta_tokens,
            )
            if engine is not None:
                queue.remove(request)
                engine.take(request)
                yield request
            elif not (request.returned and self._take_back_prefill(group, request)):
                return

    def place_decode(self, group: GroupState) -> Iterator[RequestState]:
        self._distribute()
        engines, queue = group.engines, group.queue
        while queue:
            free_hbm_tokens = sum([max(0, each.free_hbm_tokens) for each in engines])
            fitting = requests_that_fit(queue, free_hbm_tokens)
            limit_tokens = balance_limit(fitting, engines, self._config.z_factor)
            for request in fitting:
                engine = choose_decode(engines, request, limit_tokens)
                if engine is None:
                    break
                group.dequeue(request)
                engine.take(request)
                yield request
            head = queue.head()
            if head is None or not (head.returned and self._take_back_decode(group, head)):
                return

    def _distribute(self) -> None:
        """Phase 1: drain the global queue into the groups' private queues."""
        queue = self._queues.decode
        while (request := queue.head()) is not None:
            group = self._groups.least(request)
            if group is None:
                return
            queue.remove(request)
            group.enqueue(request)

    def _take_back_prefill(self, group: GroupState, request: RequestState) -> bool:
        """Whether any younger request lost its prefill engine of this group."""
        younger = _younger_pending(group, request)
        for each in younger:
            if each.prefill is not None:
                each.prefill.drop(each)
                each.returned = True
                self._queues.prefill.push(each)
        return bool(younger)

    def _take_back_decode(self, group: GroupState, request: RequestState) -> bool:
        """Whether any younger request lost its decode engine of this group, and is in its queue again."""
        younger = _younger_pending(group, request)
        for each in younger:
            if each.decode is not None:
                each.decode.drop(each)
                group.enqueue(each)
        return bool(younger)


def _younger_pending(group: GroupState, request: RequestState) -> list[RequestState]:
    return [
        each
        for engine in group.engines
        for each in engine.pending.values()
        if each.arrival > request.arrival
    ]


class EngineOrder(Protocol):
    """Which engine a load-blind baseline takes next."""

    def first_that_fits(
        self, engines: list[EngineState], hbm_tokens: int, buffer_tokens: int
    ) -> EngineState | None: ...


def _fits(engine: EngineState, hbm_tokens: int, buffer_tokens: int) -> bool:
    return engine.free_hbm_tokens >= hbm_tokens and engine.buffer_tokens >= buffer_tokens


class InTurn:
    """Engines in order of their ids, round and round; one without memory is passed over."""

    def __init__(self) -> None:
        self._next = 0

    def first_that_fits(
        self, engines: list[EngineState], hbm_tokens: int, buffer_tokens: int
    ) -> EngineState | None:
        count = len(engines)
        for offset in range(count):
            engine = engines[(self._next + offset) % count]
            if _fits(engine, hbm_tokens, buffer_tokens):
                self._next = (self._next + offset + 1) % count
                return engine
        return None


class Uniform:
    """Uniform over the engines with the memory."""

    _TRIES = 8

    def __init__(self, numbers: SplitMix64) -> None:
        self._numbers = numbers

    def first_that_fits(
        self, engines: list[EngineState], hbm_tokens: int, buffer_tokens: int
    ) -> EngineState | None:
        if not engines:
            return None
        # Rejection is uniform as well, and seldom needs the list of those that fit.
        for _ in range(self._TRIES):
            engine = engines[self._numbers.below(len(engines))]
            if _fits(engine, hbm_tokens, buffer_tokens):
                return engine
        fitting = [each for each in engines if _fits(each, hbm_tokens, buffer_tokens)]
        return fitting[self._numbers.below(len(fitting))] if fitting else None


class BlindPlacement:
    """The baselines: whichever group fetches, the queue's head goes to the next engine of the order.

    Prefill engines take any number of requests; decode engines only what their memory holds, and the
    head that finds none waits.
    """

    def __init__(
        self, members: Membership, queues: Queues, prefill: EngineOrder, decode: EngineOrder
    ) -> None:
        self._members = members
        self._queues = queues
        self._prefill = prefill
        self._decode = decode

    def touch(self, group: GroupState) -> None:
        return None

    def check(self) -> None:
        return None

    def place_prefill(self, group: GroupState) -> Iterator[RequestState]:
        queue, engines = self._queues.prefill, self._members.by_role[Role.PREFILL]
        while (request := queue.head()) is not None:
            engine = self._prefill.first_that_fits(engines, 0, request.buffer_tokens)
            if engine is None:
                return
            queue.remove(request)
            engine.take(request)
            yield request

    def place_decode(self, group: GroupState) -> Iterator[RequestState]:
        queue, engines = self._queues.decode, self._members.by_role[Role.DECODE]
        while (request := queue.head()) is not None:
            engine = self._decode.first_that_fits(
                engines, request.hbm_tokens, request.buffer_tokens
            )
            if engine is None:
                return
            queue.remove(request)
            engine.take(request)
            yield request


def make_placement(config: PolicyConfig, members: Membership, queues: Queues) -> Placement:
    """The placement that the configured scheduler uses."""
    if config.scheduler is SchedulerKind.ROUND_ROBIN:
        return BlindPlacement(members, queues, InTurn(), InTurn())
    if config.scheduler is SchedulerKind.RANDOM:
        order = Uniform(SplitMix64(config.seed))
        return BlindPlacement(members, queues, order, order)
    return DualPathPlacement(config, members, queues)
