"""The driver of the router: executes the policy's instructions for requests that other servers run.

`Seating` joins and loses servers for the pure scheduler, reports their load, and turns `Assign` into
`Seats` that a `Ticket` waits for. It sends nothing itself: whoever holds the ticket talks to the servers
and says what came of it.

A server's load is what this router gave it: unfinished requests, their tokens, and the tokens of their
planned reads until the prefill ended, since a router does not see reads end before. All prefill servers are
one group and all decode servers another, as one process knows them all; a storage queue is that of a host.

A decode server that says how much KV it holds is given prompts for so much, but always one; what it cannot
take waits here, where it can still go anywhere. Its own queue holds what an estimate got wrong.

A server that must get nothing new reports that it is full. When no prefill server can take a request, a
stand-in joins that takes all at once: its requests are prefilled where they are decoded. It is what serves
with `--server`.

Invariants: a request known to the scheduler has a ticket here; one event loop calls everything; times are
in seconds of that loop's clock.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from dualpath.base.errors import InvariantViolation, RequestError
from dualpath.base.ids import EngineId, GroupId, NodeId, RequestId, Role, Side
from dualpath.monitor.metrics import Metrics
from dualpath.policy import (
    Assign,
    AttemptFailed,
    EngineJoined,
    EngineLost,
    EngineReport,
    Event,
    GroupFetched,
    Instruction,
    Interrupted,
    PolicyConfig,
    PrefillDone,
    ReadProgressed,
    Reject,
    RejectReason,
    RequestAborted,
    RequestArrived,
    RequestFinished,
    Scheduler,
)
from dualpath.router.ticket import Seats, Ticket
from dualpath.router.upstream import Upstream

__all__ = ["Seating"]

log = logging.getLogger(__name__)

_STAND_IN = EngineId("stand-in")
_GROUPS = {Role.PREFILL: GroupId("prefill"), Role.DECODE: GroupId("decode")}
_STAND_IN_GROUP = GroupId("stand-in")
_ENDLESS_TOKENS = 2**62
"""Of a server that does not say what it holds. No prompt is too long: lengths are estimates here."""


class _Member:
    """A server that is up. `tokens` of its unfinished requests by name; `seen`: assignments since it
    joined."""

    __slots__ = ("held", "seen", "upstream")

    def __init__(self, upstream: Upstream) -> None:
        self.upstream = upstream
        self.seen = 0
        self.held: dict[RequestId, int] = {}


class Seating:
    """One a router. `clock` is the event loop's."""

    def __init__(self, config: PolicyConfig, metrics: Metrics, clock: Callable[[], float]) -> None:
        self._block_tokens = config.block_tokens
        self._scheduler = Scheduler(config)
        self._metrics = metrics
        self._clock = clock
        self._members: dict[Role, dict[EngineId, _Member]] = {role: {} for role in Role}
        self._stand_in_seen: int | None = None
        """Assignments of the stand-in, while there is one."""
        self._tickets: dict[RequestId, Ticket] = {}
        self._reads: dict[NodeId, int] = {}
        self._fetch_scheduled = False
        self._servers: list[Upstream] = []

    # Servers.

    def joined(self, upstream: Upstream) -> None:
        """It is up, and takes requests from now on. One that does both is a decode server for the
        policy."""
        role = upstream.role or Role.DECODE
        self._members[role][upstream.name] = _Member(upstream)
        self._metrics.engine_joined(upstream.name, role)
        self._apply(self._join(upstream.name, _GROUPS[role], role, upstream.node))
        self.changed()

    def lost(self, upstream: Upstream) -> None:
        """It is gone; its requests' exchanges are cut. Idempotent."""
        role = upstream.role or Role.DECODE
        if self._members[role].pop(upstream.name, None) is not None:
            self._metrics.engine_lost(upstream.name, role)
            self._apply(EngineLost(upstream.name, self._clock()))
            self.changed()

    def changed(self) -> None:
        """A server may now take requests that could not before, or the other way round."""
        needed = not self._open(Role.PREFILL)
        if needed and self._stand_in_seen is None:
            self._stand_in_seen = 0
            # A node of its own: nothing is read there, as its requests have no plan.
            node = NodeId(_STAND_IN)
            self._apply(self._join(_STAND_IN, _STAND_IN_GROUP, Role.PREFILL, node))
        elif not needed and self._stand_in_seen is not None:
            self._stand_in_seen = None
            self._apply(EngineLost(_STAND_IN, self._clock()))
        self._fetch_soon()

    def _join(self, name: EngineId, group: GroupId, role: Role, node: NodeId) -> EngineJoined:
        return EngineJoined(
            engine=name,
            group=group,
            role=role,
            hbm_tokens=_ENDLESS_TOKENS,
            buffer_tokens=_ENDLESS_TOKENS,
            now_s=self._clock(),
            node=node,
        )

    def _open(self, role: Role) -> list[_Member]:
        """Servers that may be given requests: those in doubt only when there is no other to decode."""
        now_s = self._clock()
        usable = [each for each in self._members[role].values() if not each.upstream.draining]
        trusted = [each for each in usable if not each.upstream.in_doubt(now_s)]
        return trusted or (usable if role is Role.DECODE else [])

    # Requests.

    @contextmanager
    def ticket(self, name: RequestId, prompt_tokens: int, hit_tokens: int) -> Iterator[Ticket]:
        """A request's stay with the scheduler, from arrival to its end; it ended well only if `finished`
        was called. RequestError when no server could take it."""
        if name in self._tickets:
            raise InvariantViolation(f"request {name} arrived twice")
        ticket = Ticket(name, prompt_tokens, self._whole_blocks(prompt_tokens, hit_tokens))
        self._tickets[name] = ticket
        self._metrics.prefix_lookup(queried_tokens=prompt_tokens, hit_tokens=ticket.hit_tokens)
        try:
            self._check_open()
            self._apply(
                RequestArrived(
                    request=name,
                    prompt_tokens=prompt_tokens,
                    hit_tokens=ticket.hit_tokens,
                    new_tokens=0,
                    now_s=self._clock(),
                )
            )
            self._fetch_soon()
            yield ticket
        finally:
            self._close(ticket)

    def prefilled(self, ticket: Ticket) -> None:
        """The prefill server is done with this attempt, or was not needed. Idempotent in an attempt."""
        seats = ticket.seats
        if seats is None or ticket.prefill_done:
            return
        self._prefill_over(ticket, seats)
        now_s, name, attempt = self._clock(), ticket.name, ticket.attempt
        for side, tokens in ((Side.PE, seats.pe_tokens), (Side.DE, seats.de_tokens)):
            if tokens:
                self._apply(ReadProgressed(name, attempt, side, tokens, now_s))
        self._apply(PrefillDone(name, attempt, now_s))
        self._fetch_soon()

    def failed(self, ticket: Ticket, cause: str, *, hit_tokens: int) -> None:
        """This attempt failed, and nothing of its answer has reached the client: `ticket.wait` gives the
        next seats, or says that there are none."""
        self._metrics.attempt_retried(cause)
        attempt = ticket.attempt
        self._leave_seats(ticket)
        ticket.next_attempt(self._whole_blocks(ticket.prompt_tokens, hit_tokens))
        try:
            self._check_open()
        except RequestError as error:
            ticket.reject(error)
            return
        self._apply(
            AttemptFailed(
                request=ticket.name,
                attempt=attempt,
                prompt_tokens=ticket.prompt_tokens,
                hit_tokens=ticket.hit_tokens,
                new_tokens=0,
                now_s=self._clock(),
            )
        )
        self._fetch_soon()

    def _whole_blocks(self, prompt_tokens: int, hit_tokens: int) -> int:
        """One token at least is always computed."""
        most = max(0, min(hit_tokens, prompt_tokens - 1))
        return most - most % self._block_tokens

    def _check_open(self) -> None:
        if not self._open(Role.DECODE):
            raise self._no_server()

    def _no_server(self) -> RequestError:
        states = "; ".join(f"{each.name}: {each.detail}" for each in self._servers)
        return RequestError(
            f"no server can take requests now ({states}); try again later",
            status=503,
            code="no_engine",
        )

    def watch(self, servers: Iterable[Upstream]) -> None:
        """All servers there could be, for messages."""
        self._servers = list(servers)

    def _close(self, ticket: Ticket) -> None:
        del self._tickets[ticket.name]
        self._leave_seats(ticket)
        if ticket.finished:
            self._apply(RequestFinished(ticket.name, self._clock()))
        else:
            self._apply(RequestAborted(ticket.name, self._clock()))
        self._fetch_soon()

    def _leave_seats(self, ticket: Ticket) -> None:
        seats = ticket.seats
        if seats is not None:
            self._prefill_over(ticket, seats)
            self._release(Role.DECODE, seats.decode, ticket.name)

    def _prefill_over(self, ticket: Ticket, seats: Seats) -> None:
        if ticket.prefill_done:
            return
        ticket.prefill_done = True
        if seats.prefill is not None:
            self._release(Role.PREFILL, seats.prefill, ticket.name)
            self._count_reads(seats.prefill.node, -seats.pe_tokens)
        self._count_reads(seats.decode.node, -seats.de_tokens)

    def _release(self, role: Role, upstream: Upstream, name: RequestId) -> None:
        member = self._members[role].get(upstream.name)
        if member is not None:
            member.held.pop(name, None)

    def _count_reads(self, node: NodeId, tokens: int) -> None:
        if tokens:
            left = self._reads.get(node, 0) + tokens
            if left:
                self._reads[node] = left
            else:
                self._reads.pop(node, None)

    # Events in, instructions out.

    def _apply(self, event: Event) -> None:
        for instruction in self._scheduler.handle(event):
            self._execute(instruction)

    def _execute(self, instruction: Instruction) -> None:
        match instruction:
            case Assign():
                self._assign(instruction)
            case Interrupted(request=request):
                self._tickets[request].interrupt()
            case Reject(request=request, reason=reason):
                self._tickets[request].reject(self._rejection(reason))
            case _:
                # StartPrefill and Release: the servers of an attempt learn all of it from the exchanges that
                # the ticket's holder opens and closes.
                pass

    def _assign(self, assign: Assign) -> None:
        ticket = self._tickets[assign.request]
        decode = self._members[Role.DECODE][assign.decode]
        decode.seen += 1
        decode.held[ticket.name] = ticket.prompt_tokens
        prefill = None
        if assign.prefill == _STAND_IN:
            assert self._stand_in_seen is not None
            self._stand_in_seen += 1
        else:
            member = self._members[Role.PREFILL][assign.prefill]
            member.seen += 1
            member.held[ticket.name] = ticket.prompt_tokens
            prefill = member.upstream
            self._count_reads(prefill.node, assign.plan.pe_tokens)
        self._count_reads(decode.upstream.node, assign.plan.de_tokens)
        self._metrics.attempt_started()
        ticket.seat(Seats(prefill, decode.upstream, assign.plan.pe_tokens, assign.plan.de_tokens))

    def _rejection(self, reason: RejectReason) -> RequestError:
        if reason is RejectReason.TOO_MANY_ATTEMPTS:
            return RequestError("every attempt failed", status=502, code="attempts_failed")
        return self._no_server()

    # Fetches: the router holds a standing one for each group.

    def _fetch_soon(self) -> None:
        """Once for all that happened in this turn of the loop."""
        if not self._fetch_scheduled:
            self._fetch_scheduled = True
            asyncio.get_running_loop().call_soon(self._fetch_all)

    def _fetch_all(self) -> None:
        self._fetch_scheduled = False
        # Decode first: what a prefill server then takes is assigned at once, and can be reported as seen.
        for role in (Role.DECODE, Role.PREFILL):
            if self._members[role]:
                self._fetch(role)
        if self._stand_in_seen is not None:
            self._fetch_stand_in()

    def _fetch(self, role: Role) -> None:
        open_names = {each.upstream.name for each in self._open(role)}
        reports = tuple(
            self._report(member, role, full=name not in open_names)
            for name, member in self._members[role].items()
        )
        self._apply(GroupFetched(_GROUPS[role], reports, 0, self._clock()))

    def _report(self, member: _Member, role: Role, *, full: bool) -> EngineReport:
        overloaded = full and role is Role.PREFILL
        return EngineReport(
            engine=member.upstream.name,
            seen=member.seen,
            requests=len(member.held),
            tokens=_ENDLESS_TOKENS if overloaded else sum(member.held.values()),
            free_hbm_tokens=-1 if full else self._free_tokens(member, role),
            read_queue_tokens=self._reads.get(member.upstream.node, 0),
        )

    def _free_tokens(self, member: _Member, role: Role) -> int:
        capacity_tokens = member.upstream.kv_capacity_tokens
        if role is Role.PREFILL or capacity_tokens is None:
            return _ENDLESS_TOKENS
        if member.held:
            return capacity_tokens - sum(member.held.values())
        waiting = [each.prompt_tokens for each in self._tickets.values() if each.seats is None]
        return max(capacity_tokens, *waiting, 0)

    def _fetch_stand_in(self) -> None:
        """Until it has taken all that waits: it never has enough."""
        waiting = self._scheduler.waiting().prefill
        while True:
            assert self._stand_in_seen is not None
            report = EngineReport(_STAND_IN, self._stand_in_seen, 0, 0, _ENDLESS_TOKENS)
            self._apply(GroupFetched(_STAND_IN_GROUP, (report,), 0, self._clock()))
            left = self._scheduler.waiting().prefill
            if not 0 < left < waiting:
                return
            waiting = left

    # For supervision.

    @property
    def waiting(self) -> int:
        """Requests that have no seats."""
        return sum(each.seats is None for each in self._tickets.values())

    def observe(self) -> None:
        """Set the gauges that no event sets, and look for leaks when idle. Raises InvariantViolation."""
        waiting = self.waiting
        self._metrics.queues(running=len(self._tickets) - waiting, waiting=waiting)
        for members in self._members.values():
            for name, member in members.items():
                self._metrics.engine_load(
                    name, requests=len(member.held), tokens=sum(member.held.values())
                )
        nodes = {m.upstream.node for members in self._members.values() for m in members.values()}
        for node in nodes:
            self._metrics.read_queue(GroupId(node), self._reads.get(node, 0))
        if not self._tickets:
            self.check_idle()

    def check_idle(self) -> None:
        """Without requests nothing may be left of any. Raises InvariantViolation."""
        self._scheduler.validate()
        left = sum(self._scheduler.stats().phases.values())
        held = sum(len(m.held) for members in self._members.values() for m in members.values())
        if left or held or self._reads:
            raise InvariantViolation(
                f"no request is left, but {left} in the scheduler, {held} on servers, reads {self._reads}"
            )
