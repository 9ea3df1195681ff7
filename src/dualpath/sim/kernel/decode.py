"""Decode steps: the ranks of an instance each give one token to all their sequences, together.

A step takes its fixed time, the largest batch's part, the linear part over all ranks (or reading the
weights), and the largest rank's context. Sequences join at the next step and leave after their last. One
event a step.
"""

from __future__ import annotations

from dualpath.sim.kernel.collectives import leave_nics, with_collectives_s
from dualpath.sim.kernel.events import DECODE_EVENT, push_event
from dualpath.sim.kernel.heaps import NONE, pairing_add, pairing_pop
from dualpath.sim.kernel.jit import compiled
from dualpath.sim.kernel.requests import finish
from dualpath.sim.kernel.state import State

__all__ = ["decode_stepped", "join_decode", "join_step", "start_decode"]


@compiled
def join_decode(s: State, slot: int) -> None:
    """The sequence's KV is on the device: from the next step on."""
    instance = s.engines[s.slots[slot].decode].instance
    group = s.instances[instance]
    s.slots[slot].next_joining = group.joining
    group.joining = slot
    if not group.stepping:
        start_decode(s, instance)


@compiled
def join_step(s: State, instance: int) -> None:
    """Those that wait join the batch; the first token each has is prefill's."""
    group = s.instances[instance]
    slot = group.joining
    group.joined, group.joining = slot, NONE
    while slot != NONE:
        each = s.slots[slot]
        rank = s.engines[each.decode]
        rank.batch += 1
        rank.context_tokens += each.prompt_tokens + 1
        group.batch += 1
        last_step = group.steps + each.output_tokens - 1
        group.first_end = pairing_add(s.ends, group.first_end, slot, last_step)
        slot = each.next_joining


@compiled
def start_decode(s: State, instance: int) -> None:
    p = s.parameters[0]
    group = s.instances[instance]
    join_step(s, instance)
    if group.batch == 0:
        leave_nics(s, instance)
        return
    batch, context = 0, 0
    for engine in range(group.first_engine, group.first_engine + group.engines):
        rank = s.engines[engine]
        batch = max(batch, rank.batch)
        context = max(context, rank.context_tokens)
        rank.context_tokens += rank.batch
    linear_s = max(p.decode_weights_s, p.linear_sequence_s * group.batch / group.engines)
    collective_s = p.decode_collective_s * batch
    own_s = p.decode_base_s + linear_s + p.sequence_s * batch + p.context_token_s * context
    step_s = with_collectives_s(s, instance, own_s - collective_s, collective_s)
    group.stepping = 1
    group.busy_s += step_s
    push_event(s, s.clock[0].now_s + step_s, DECODE_EVENT, instance)


@compiled
def decode_stepped(s: State, instance: int) -> None:
    now_s = s.clock[0].now_s
    group = s.instances[instance]
    group.steps += 1
    group.stepping = 0
    slot = group.joined
    while slot != NONE:
        s.records[s.slots[slot].record].second_token_s = now_s
        slot = s.slots[slot].next_joining
    while group.first_end != NONE and s.ends[group.first_end].key <= group.steps:
        slot = group.first_end
        group.first_end = pairing_pop(s.ends, slot)
        each = s.slots[slot]
        rank = s.engines[each.decode]
        rank.batch -= 1
        rank.context_tokens -= each.prompt_tokens + each.output_tokens
        group.batch -= 1
        finish(s, slot)
    start_decode(s, instance)
