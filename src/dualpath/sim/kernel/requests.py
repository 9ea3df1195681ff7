"""The life of a request in the kernel: arrival, assignment, admission, reads, and its end.

Admission is first come, first served on each engine, in order of assignment; the oldest request that has
not ended is therefore always admitted in the end. A request is ready when both of its engines have admitted
it and both sides have read.

An engine's queues of sides (admission, and then reads in order) are lists through `next`.
"""

from __future__ import annotations

from dualpath.sim.kernel.events import ARRIVAL_EVENT, READ_EVENT, push_event
from dualpath.sim.kernel.heaps import NONE
from dualpath.sim.kernel.jit import compiled
from dualpath.sim.kernel.links import start_flow
from dualpath.sim.kernel.log import FINISHED, READ_ON_DE, READ_ON_PE, tell, tell_arrival
from dualpath.sim.kernel.state import FLOWS, READ, State

__all__ = [
    "admit",
    "arrive",
    "assign",
    "begin_read",
    "finish",
    "leave",
    "make_due",
    "read",
    "read_done",
    "read_next",
    "release_room",
    "side_done",
    "take",
]


@compiled
def arrive(s: State, slot: int) -> None:
    """The slot's next request."""
    clock = s.clock[0]
    each = s.slots[slot]
    block = s.parameters[0].block_tokens
    if each.turn < s.first_turn[each.trajectory]:
        each.prompt_tokens, each.hit_tokens, each.output_tokens = each.first_round_tokens, 0, 1
    else:
        own = each.first_round_tokens
        each.prompt_tokens = s.prompt_tokens[each.turn] + own
        reused = s.reused_tokens[each.turn] + own
        each.hit_tokens = min(reused, each.prompt_tokens - 1) // block * block
        each.output_tokens = s.output_tokens[each.turn]
    each.cached_tokens = each.hit_tokens
    each.record = clock.records
    clock.records += 1
    clock.live += 1
    record = s.records[each.record]
    record.agent = slot
    record.turn = each.turn - s.first_turn[each.trajectory]
    record.prompt_tokens = each.prompt_tokens
    record.hit_tokens = each.hit_tokens
    record.output_tokens = each.output_tokens
    record.arrived_s = clock.now_s - s.parameters[0].front_end_s
    tell_arrival(s, slot)


@compiled
def assign(s: State, slot: int, prefill: int, decode: int, pe_tokens: int, bypass: int) -> None:
    """The policy's `Assign`: both engines know of it from now on, and admit it in turn.

    A prefill engine makes room for what it reads, or with whole-request prefill for all; a decode engine
    always for all, rounded up to blocks. A bypass needs no room and reads nothing.
    """
    p = s.parameters[0]
    each = s.slots[slot]
    record = s.records[each.record]
    record.prefill, record.decode, record.pe_tokens = prefill, decode, pe_tokens
    record.assigned_s = s.clock[0].now_s
    each.prefill, each.decode, each.bypass = prefill, decode, bypass
    each.pending = 2
    s.engines[decode].free_hbm_tokens -= each.prompt_tokens + each.output_tokens
    if bypass:
        take(s, 2 * slot, prefill, 0, 0)
        take(s, 2 * slot + 1, decode, 0, 0)
    else:
        whole = -(-each.prompt_tokens // p.block_tokens) * p.block_tokens
        take(s, 2 * slot, prefill, pe_tokens, pe_tokens if p.layerwise else whole)
        take(s, 2 * slot + 1, decode, each.hit_tokens - pe_tokens, whole)


@compiled
def take(s: State, side: int, engine: int, read_tokens: int, need_tokens: int) -> None:
    """The engine has the request, and will read and make room for so many tokens."""
    rank = s.engines[engine]
    rank.seen += 1
    rank.requests += 1
    rank.tokens += s.slots[side // 2].prompt_tokens
    s.nodes[rank.node].waiting_tokens += read_tokens
    own = s.sides[side]
    own.engine = engine
    own.read_tokens = read_tokens
    own.need_tokens = need_tokens
    own.next = NONE
    if need_tokens == 0:
        side_done(s, side // 2)
        return
    if rank.admit_tail == NONE:
        rank.admit_head = side
    else:
        s.sides[rank.admit_tail].next = side
    rank.admit_tail = side
    admit(s, engine)


@compiled
def admit(s: State, engine: int) -> None:
    """Whoever fits, in order. What is larger than the whole room is admitted alone."""
    rank = s.engines[engine]
    while rank.admit_head != NONE:
        side = rank.admit_head
        own = s.sides[side]
        if rank.used_tokens and rank.used_tokens + own.need_tokens > rank.room_tokens:
            return
        rank.used_tokens += own.need_tokens
        rank.admit_head = own.next
        if rank.admit_head == NONE:
            rank.admit_tail = NONE
        if own.read_tokens:
            push_event(s, s.clock[0].now_s + s.parameters[0].read_latency_s, READ_EVENT, side)
        else:
            side_done(s, side // 2)


@compiled
def begin_read(s: State, side: int) -> None:
    """The store's latency is over. With reads in order, after those that the engine began before."""
    if not s.parameters[0].reads_in_order:
        read(s, side)
        return
    own = s.sides[side]
    rank = s.engines[own.engine]
    own.next = NONE
    if rank.read_tail == NONE:
        rank.read_head = side
        read(s, side)
    else:
        s.sides[rank.read_tail].next = side
    rank.read_tail = side


@compiled
def read_next(s: State, engine: int) -> None:
    """The first of its reads in order is done."""
    rank = s.engines[engine]
    rank.read_head = s.sides[rank.read_head].next
    if rank.read_head == NONE:
        rank.read_tail = NONE
    else:
        read(s, rank.read_head)


@compiled
def read(s: State, side: int) -> None:
    """Its bytes flow."""
    own = s.sides[side]
    node = s.nodes[s.engines[own.engine].node]
    node.waiting_tokens -= own.read_tokens
    flow = side // 2 * FLOWS + READ + side % 2
    size = own.read_tokens * s.parameters[0].kv_bytes_token
    start_flow(s, flow, size, node.snic, node.memory, NONE, s.clock[0].now_s)


@compiled
def read_done(s: State, side: int) -> None:
    if s.parameters[0].reads_in_order:
        read_next(s, s.sides[side].engine)
    kind = READ_ON_DE if side % 2 else READ_ON_PE
    tell(s, kind, side // 2, s.sides[side].read_tokens)
    side_done(s, side // 2)


@compiled
def side_done(s: State, slot: int) -> None:
    """Admitted and read on one side; when both are, into the prefill engine's queue."""
    each = s.slots[slot]
    each.pending -= 1
    if each.pending:
        return
    s.records[each.record].read_s = s.clock[0].now_s
    engine = s.engines[each.prefill]
    each.next_ready = NONE
    if engine.ready_tail == NONE:
        engine.ready_head = slot
    else:
        s.slots[engine.ready_tail].next_ready = slot
    engine.ready_tail = slot
    s.instances[engine.instance].ready += 1
    make_due(s, engine.instance)


@compiled
def make_due(s: State, instance: int) -> None:
    """Have the prefill instance start a step once all of this instant has happened, if it can."""
    group = s.instances[instance]
    if group.is_due or group.stepping or group.ready == 0:
        return
    clock = s.clock[0]
    group.is_due = 1
    s.due[clock.due] = instance
    clock.due += 1


@compiled
def leave(s: State, side: int) -> None:
    """The engine has no more to do for the request; its room it gave back."""
    rank = s.engines[s.sides[side].engine]
    rank.requests -= 1
    rank.tokens -= s.slots[side // 2].prompt_tokens


@compiled
def release_room(s: State, side: int) -> None:
    own = s.sides[side]
    s.engines[own.engine].used_tokens -= own.need_tokens
    admit(s, own.engine)


@compiled
def finish(s: State, slot: int) -> None:
    """All tokens are there. The agent asks for its next turn after its delay."""
    clock = s.clock[0]
    each = s.slots[slot]
    leave(s, 2 * slot + 1)
    s.engines[each.decode].free_hbm_tokens += each.prompt_tokens + each.output_tokens
    s.records[each.record].finished_s = clock.now_s
    clock.live -= 1
    tell(s, FINISHED, slot, each.output_tokens)
    each.turn += 1
    if each.turn < s.first_turn[each.trajectory + 1]:
        arrives_s = clock.now_s + s.delay_s[each.turn] + s.parameters[0].front_end_s
        push_event(s, arrives_s, ARRIVAL_EVENT, slot)
    else:
        clock.unfinished_agents -= 1
