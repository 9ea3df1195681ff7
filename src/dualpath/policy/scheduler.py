"""The inter-engine scheduler: `Scheduler(config).handle(event) -> instructions` (paper, scheduling).

A pure state machine. It does no I/O, reads no clock and draws no random number that is not seeded by its
configuration: the same events give the same instructions, in the simulator and in the product.

A request enters the global prefill queue and the global decode queue when it arrives, and leaves each
when a group of that role fetches. When both of its engines are known it gets a read plan and is assigned;
when both sides have read their parts, the prefill engine may start.

Engine loss. `EngineLost` starts no attempt: requests that were assigned to the engine are released on the
other one and become `Interrupted`, because only the driver knows what was generated and is still good.
Its `AttemptFailed` queues them again, in the order of their arrival ahead of all younger ones. A request
that was only chosen for the lost engine, and not assigned, goes back to its queue in the same attempt.

Invariants (`validate` checks them): a waiting request is in exactly the queues it needs; every queue is in
order of arrival; an engine's figures are its report plus what it has not seen; a queued request fits some
engine of each role that has any; what ended has left no trace.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from dualpath.base.errors import InvariantViolation
from dualpath.base.ids import RequestId, Role, Side
from dualpath.policy.cluster import EngineState
from dualpath.policy.compiled import mypyc_attr
from dualpath.policy.config import PolicyConfig
from dualpath.policy.events import (
    Assign,
    AttemptFailed,
    EngineJoined,
    EngineLost,
    Event,
    GroupFetched,
    Instruction,
    Interrupted,
    PrefillDone,
    ReadProgressed,
    Reject,
    RejectReason,
    Release,
    RequestAborted,
    RequestArrived,
    RequestFinished,
    StartPrefill,
)
from dualpath.policy.invariants import check_invariants
from dualpath.policy.membership import Membership
from dualpath.policy.placement import Queues, make_placement
from dualpath.policy.planning import make_planner
from dualpath.policy.requests import TRANSITIONS, Phase, RequestState, Trigger
from dualpath.policy.stats import SchedulerStats, Totals, Waiting

__all__ = ["Scheduler"]

# Attribute access on an Enum class is several times slower than on a module.
_PE: Final = Side.PE
_PREFILL: Final = Role.PREFILL
_DECODE: Final = Role.DECODE
_WAITING: Final = Phase.WAITING
_READING: Final = Phase.READING
_PREFILLING: Final = Phase.PREFILLING
_ASSIGNED: Final = Trigger.ASSIGNED
_ASSIGNED_WITHOUT_READS: Final = Trigger.ASSIGNED_WITHOUT_READS
_READS_COMPLETE: Final = Trigger.READS_COMPLETE
_PREFILL_DONE: Final = Trigger.PREFILL_DONE
_FINISHED: Final = Trigger.FINISHED


@mypyc_attr(allow_interpreted_subclasses=True)
class Scheduler:
    """One per cluster; not thread-safe. Raises InvariantViolation on an event that no driver may send."""

    def __init__(self, config: PolicyConfig) -> None:
        self._config = config
        self._block_tokens = config.block_tokens
        self._members = Membership()
        self._prefill_capacity = self._members.capacity[_PREFILL]
        self._decode_capacity = self._members.capacity[_DECODE]
        self._queues = Queues()
        # In order of arrival: a new attempt takes the place of its predecessor.
        self._requests: dict[RequestId, RequestState] = {}
        self._placement = make_placement(config, self._members, self._queues)
        self._planner = make_planner(config, self._members)
        self._totals = Totals()
        self._next_arrival = 0
        self._handlers: dict[type[Event], Callable[[Any], list[Instruction]]] = {
            EngineJoined: self._joined,
            EngineLost: self._lost,
            RequestArrived: self._arrived,
            GroupFetched: self._fetched,
            ReadProgressed: self._read_progressed,
            PrefillDone: self._prefill_done,
            RequestFinished: self._finished,
            RequestAborted: self._aborted,
            AttemptFailed: self._attempt_failed,
        }

    def handle(self, event: Event) -> list[Instruction]:
        """The instructions that follow from the event, in the order in which they must be executed."""
        return self._handlers[type(event)](event)

    def waiting(self) -> Waiting:
        """Queue lengths now; O(decode groups)."""
        private = {group.id: len(group.queue) for group in self._members.groups[_DECODE].values()}
        return Waiting(
            prefill=len(self._queues.prefill),
            decode_global=len(self._queues.decode),
            decode_private=private,
        )

    def stats(self) -> SchedulerStats:
        """For metrics: requests by phase, engines by role, totals since the start; O(requests)."""
        phases: dict[Phase, int] = {each: 0 for each in Phase if each is not Phase.ENDED}
        for request in self._requests.values():
            phases[request.phase] += 1
        return SchedulerStats(
            phases=phases,
            engines={role: len(engines) for role, engines in self._members.by_role.items()},
            totals=self._totals.snapshot(),
        )

    def validate(self) -> None:
        """Check every invariant, at a cost of O(everything); raises InvariantViolation."""
        check_invariants(self._config, self._members, self._queues, self._requests)
        self._placement.check()

    # Engines

    def _joined(self, event: EngineJoined) -> list[Instruction]:
        first_of_role = not self._members.capacity[event.role]
        engine = self._members.join(event)
        if event.role is _DECODE:
            self._placement.touch(engine.group)
        return self._reject_unservable(event.role) if first_of_role else []

    def _lost(self, event: EngineLost) -> list[Instruction]:
        engine = self._members.engines.get(event.engine)
        if engine is None:
            return []
        out: list[Instruction] = []
        for request in list(self._requests.values()):
            if request.prefill is engine or request.decode is engine:
                self._engine_lost_under(request, engine, out)
        role, group = engine.group.role, engine.group
        self._members.lose(event.engine)
        for request in list(group.queue):
            if not group.capacity.holds(request.hbm_tokens, request.buffer_tokens):
                group.dequeue(request)
                request.returned = True
                self._queues.decode.push(request)
        if group.engines and role is _DECODE:
            self._placement.touch(group)
        out.extend(self._reject_unservable(role))
        return out

    def _engine_lost_under(
        self, request: RequestState, engine: EngineState, out: list[Instruction]
    ) -> None:
        if request.phase is _WAITING:
            self._unplace(request, engine.group.role)
            return
        survivors = tuple(
            each.id
            for each in (request.prefill, request.decode)
            if each is not None and each is not engine
        )
        self._drop_engines(request)
        request.move(Trigger.ENGINE_LOST)
        self._totals.interrupted += 1
        if survivors:
            out.append(Release(request.id, request.attempt, survivors))
        out.append(Interrupted(request.id, request.attempt))

    def _unplace(self, request: RequestState, role: Role) -> None:
        """Back into the queue of this role; no engine has heard of the request."""
        request.returned = True
        if role is _PREFILL:
            self._drop_prefill(request)
            self._queues.prefill.push(request)
        else:
            self._drop_decode(request)
            self._queues.decode.push(request)

    def _fetched(self, event: GroupFetched) -> list[Instruction]:
        group = self._members.find_group(event.group)
        if group is None:
            return []
        tokens = group.tokens
        self._members.report(group, event)
        out: list[Instruction] = []
        if group.role is _PREFILL:
            for request in self._placement.place_prefill(group):
                if request.decode is not None:
                    self._assign(request, out)
        else:
            if group.tokens < tokens:
                self._placement.touch(group)
            for request in self._placement.place_decode(group):
                if request.prefill is not None:
                    self._assign(request, out)
        return out

    # Requests

    def _arrived(self, event: RequestArrived) -> list[Instruction]:
        if event.request in self._requests:
            raise InvariantViolation(f"request {event.request} arrived twice")
        arrival = self._next_arrival
        self._next_arrival = arrival + 1
        self._totals.arrived += 1
        return self._enqueue(
            event.request, arrival, 0, event.prompt_tokens, event.hit_tokens, event.new_tokens
        )

    def _enqueue(
        self,
        request_id: RequestId,
        arrival: int,
        attempt: int,
        prompt_tokens: int,
        hit_tokens: int,
        new_tokens: int,
    ) -> list[Instruction]:
        block_tokens = self._block_tokens
        if not 0 <= hit_tokens < prompt_tokens or hit_tokens % block_tokens or new_tokens < 0:
            raise InvariantViolation(
                f"request {request_id}: {hit_tokens} hit tokens of {prompt_tokens} (and {new_tokens} new); "
                f"the hit must be a multiple of {block_tokens} and leave a token to compute"
            )
        request = RequestState(
            request_id,
            arrival,
            attempt,
            prompt_tokens,
            hit_tokens,
            prompt_tokens + new_tokens,
            -(-prompt_tokens // block_tokens) * block_tokens,
        )
        reason = self._refusal(request)
        if reason is not None:
            self._requests.pop(request_id, None)
            self._totals.rejected += 1
            return [Reject(request_id, reason)]
        self._requests[request_id] = request
        self._queues.prefill.push(request)
        self._queues.decode.push(request)
        return []

    def _refusal(self, request: RequestState) -> RejectReason | None:
        """Why no engine can serve it. A role without engines cannot say: the request waits for one."""
        hbm_tokens, buffer_tokens = request.hbm_tokens, request.buffer_tokens
        if self._decode_capacity.holds(hbm_tokens, buffer_tokens) and self._prefill_capacity.holds(
            0, buffer_tokens
        ):
            return None
        for role, capacity in self._members.capacity.items():
            if not capacity:
                if self._config.reject_without_engines:
                    return RejectReason.NO_ENGINE
                continue
            if not capacity.holds(0 if role is _PREFILL else hbm_tokens, buffer_tokens):
                return RejectReason.TOO_LONG
        return None

    def _reject_unservable(self, role: Role) -> list[Instruction]:
        """The engines of the role changed: waiting requests that need one, and fit none, cannot stay."""
        out: list[Instruction] = []
        for request in list(self._requests.values()):
            engine = request.prefill if role is _PREFILL else request.decode
            if request.phase is not _WAITING or engine is not None:
                continue
            reason = self._refusal(request)
            if reason is not None:
                self._withdraw(request)
                request.move(Trigger.REJECTED)
                del self._requests[request.id]
                self._totals.rejected += 1
                out.append(Reject(request.id, reason))
        return out

    def _assign(self, request: RequestState, out: list[Instruction]) -> None:
        pe, de = request.prefill, request.decode
        assert pe is not None and de is not None
        plan = self._planner.plan(request.hit_tokens, pe.node, de.node)
        out.append(Assign(request.id, request.attempt, pe.id, de.id, plan))
        self._totals.assigned += 1
        if plan.bypass or request.hit_tokens == 0:
            pe.assign(request)
            de.assign(request)
            request.move(_ASSIGNED_WITHOUT_READS)
            out.append(StartPrefill(request.id, request.attempt, pe.id))
            return
        request.pe_read_tokens = request.pe_unread_tokens = plan.pe_tokens
        request.de_read_tokens = request.de_unread_tokens = plan.de_tokens
        self._members.unread_tokens += request.hit_tokens
        pe.assign(request)
        de.assign(request)
        request.move(_ASSIGNED)

    def _read_progressed(self, event: ReadProgressed) -> list[Instruction]:
        request = self._requests.get(event.request)
        if request is None or request.phase is not _READING or request.attempt != event.attempt:
            return []
        prefill, decode = request.prefill, request.decode
        assert prefill is not None and decode is not None
        tokens = event.tokens
        if event.side is _PE:
            request.pe_unread_tokens -= tokens
            node = prefill.node
        else:
            request.de_unread_tokens -= tokens
            node = decode.node
        node.done_tokens += tokens
        node.unread_tokens -= tokens
        self._members.unread_tokens -= tokens
        pe_unread, de_unread = request.pe_unread_tokens, request.de_unread_tokens
        if tokens < 0 or pe_unread < 0 or de_unread < 0:
            raise InvariantViolation(
                f"request {event.request} attempt {event.attempt}: {tokens} tokens read on the "
                f"{event.side} side leave {pe_unread} (pe) and {de_unread} (de) of its plan"
            )
        if pe_unread or de_unread:
            return []
        request.move(_READS_COMPLETE)
        return [StartPrefill(request.id, request.attempt, prefill.id)]

    def _prefill_done(self, event: PrefillDone) -> list[Instruction]:
        request = self._requests.get(event.request)
        if request is None or request.attempt != event.attempt or not request.move(_PREFILL_DONE):
            return []
        self._drop_prefill(request)
        return []

    def _finished(self, event: RequestFinished) -> list[Instruction]:
        request = self._requests.pop(event.request, None)
        if request is None:
            return []
        # The decode engine is done with it. A prefill engine that has not said so yet is told.
        prefill = request.prefill if request.phase is not _WAITING else None
        self._withdraw(request)
        request.move(_FINISHED)
        self._totals.finished += 1
        if prefill is None:
            return []
        return [Release(request.id, request.attempt, (prefill.id,))]

    def _aborted(self, event: RequestAborted) -> list[Instruction]:
        request = self._requests.pop(event.request, None)
        if request is None:
            return []
        out = self._release(request)
        self._withdraw(request)
        request.move(Trigger.ABORTED)
        self._totals.aborted += 1
        return out

    def _attempt_failed(self, event: AttemptFailed) -> list[Instruction]:
        request = self._requests.get(event.request)
        if (
            request is None
            or request.attempt != event.attempt
            or (request.phase, Trigger.ATTEMPT_FAILED) not in TRANSITIONS
        ):
            return []
        out = self._release(request)
        request.move(Trigger.ATTEMPT_FAILED)
        self._drop_engines(request)
        self._totals.failed_attempts += 1
        attempt = request.attempt + 1
        if attempt >= self._config.max_attempts:
            del self._requests[request.id]
            self._totals.rejected += 1
            return [*out, Reject(request.id, RejectReason.TOO_MANY_ATTEMPTS)]
        out.extend(
            self._enqueue(
                request.id,
                request.arrival,
                attempt,
                event.prompt_tokens,
                event.hit_tokens,
                event.new_tokens,
            )
        )
        return out

    # What requests take of engines

    def _release(self, request: RequestState) -> list[Instruction]:
        """`Release` for the engines that were told of this attempt and have not given it back."""
        if request.phase is _WAITING:
            return []
        engines = tuple(each.id for each in (request.prefill, request.decode) if each is not None)
        return [Release(request.id, request.attempt, engines)] if engines else []

    def _withdraw(self, request: RequestState) -> None:
        """Out of every queue, and off every engine."""
        if request.phase is _WAITING:
            if request.prefill is None:
                self._queues.prefill.remove(request)
            if request.group is not None:
                group = request.group
                group.dequeue(request)
                self._placement.touch(group)
            elif request.decode is None:
                self._queues.decode.remove(request)
        self._drop_engines(request)

    def _drop_engines(self, request: RequestState) -> None:
        prefill, decode = request.prefill, request.decode
        if prefill is not None and decode is not None:
            prefill.node.unread_tokens -= request.pe_unread_tokens
            decode.node.unread_tokens -= request.de_unread_tokens
            self._members.unread_tokens -= request.pe_unread_tokens + request.de_unread_tokens
        self._drop_prefill(request)
        self._drop_decode(request)

    def _drop_prefill(self, request: RequestState) -> None:
        if request.prefill is not None:
            request.prefill.drop(request)

    def _drop_decode(self, request: RequestState) -> None:
        engine = request.decode
        if engine is not None and engine.drop(request):
            self._placement.touch(engine.group)
