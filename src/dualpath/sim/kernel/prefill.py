"""Prefill steps: the ranks of an instance fill their batches under the quota and wait for each other.

A step takes its fixed time, the attention of the slowest rank, the linear part over all ranks' tokens
(experts are spread over the instance), or reading the weights if that takes longer, and collectives. With
layerwise prefill KV moves while layers are computed, and the step ends when both are done. Without, the
step takes longer: stored KV is copied in before a request's first chunk, computed KV sent after each;
stored KV that the decode engine gets too flows beside the next steps and is not modelled.

A rank's batch is the first `batch` of its ready requests; others become ready behind them.
"""

from __future__ import annotations

from dualpath.policy.quota import largest_that_fits
from dualpath.sim.kernel.collectives import leave_nics, with_collectives_s
from dualpath.sim.kernel.events import HAND_OVER_EVENT, PREFILL_EVENT, push_event
from dualpath.sim.kernel.heaps import NONE
from dualpath.sim.kernel.jit import compiled
from dualpath.sim.kernel.links import start_flow
from dualpath.sim.kernel.log import PREFILL_DONE, tell
from dualpath.sim.kernel.requests import finish, leave, make_due, release_room
from dualpath.sim.kernel.state import COPY_IN, COPY_OUT, FLOWS, HAND_OVER, REMOTE_IN, State

__all__ = [
    "begin_hand_over",
    "end_step",
    "pack_rank",
    "prefill_computed",
    "prefill_done",
    "prefill_moved",
    "start_prefill",
    "start_prefills",
    "start_transfers",
]

_fits = compiled(largest_that_fits)


@compiled
def start_prefills(s: State) -> None:
    """Of all instances that are due, in the order in which they became so."""
    clock = s.clock[0]
    for i in range(clock.due):
        s.instances[s.due[i]].is_due = 0
        start_prefill(s, s.due[i])
    clock.due = 0


@compiled
def start_prefill(s: State, instance: int) -> None:
    """A step; the instance does none, and some request is ready."""
    group = s.instances[instance]
    clock, p = s.clock[0], s.parameters[0]
    total_tokens, copied_tokens, sum_s, max_s = 0, 0, 0.0, 0.0
    window = int(clock.now_s / p.window_s)
    group.stepping = 1
    group.computed = 0
    for engine in range(group.first_engine, group.first_engine + group.engines):
        tokens, copied = pack_rank(s, engine)
        attention_s = s.engines[engine].attention_s
        if window < s.attention_s.shape[1]:
            s.attention_s[engine, window] += attention_s
        total_tokens += tokens
        copied_tokens = max(copied_tokens, copied)
        sum_s += attention_s
        max_s = max(max_s, attention_s)
        if p.layerwise:
            start_transfers(s, engine)
    mean_tokens = total_tokens / group.engines
    linear_s = max(p.prefill_weights_s, p.linear_token_s * mean_tokens)
    own_s = p.prefill_base_s + max_s + linear_s
    step_s = with_collectives_s(s, instance, own_s, p.prefill_collective_s * mean_tokens)
    if not p.layerwise:
        step_s += copied_tokens * p.kv_bytes_token / p.copy_bytes_s
    group.attention_max_s += max_s
    group.attention_mean_s += sum_s / group.engines
    group.steps += 1
    group.step_started_s = clock.now_s
    push_event(s, clock.now_s + step_s, PREFILL_EVENT, instance)


@compiled
def pack_rank(s: State, engine: int) -> tuple[int, int]:
    """The rank's batch, as `dualpath.policy.pack` makes it.

    Its tokens, and the tokens whose KV a step that is not layerwise copies in or out.
    """
    p = s.parameters[0]
    rank = s.engines[engine]
    spent_s, room = p.fit_base_s, p.max_batch_tokens
    rank.attention_s = 0.0
    rank.batch = 0
    tokens, copied = 0, 0
    slot = rank.ready_head
    while slot != NONE:
        each = s.slots[slot]
        left = each.prompt_tokens - each.cached_tokens
        bsz = _fits(
            each.cached_tokens,
            left,
            min(left, room),
            p.fit_entry_s,
            p.fit_pair_s,
            p.fit_token_s,
            spent_s,
            p.quota_s,
            p.block_tokens,
        )
        if bsz == 0 and tokens == 0:
            bsz = min(p.block_tokens, left)
        if bsz == 0:
            break
        pairs = bsz * each.cached_tokens + bsz * (bsz + 1) // 2
        spent_s += p.fit_entry_s + p.fit_token_s * bsz + p.fit_pair_s * pairs
        rank.attention_s += (
            p.attention_entry_s + p.attention_token_s * bsz + p.attention_pair_s * pairs
        )
        room -= bsz
        tokens += bsz
        rank.batch += 1
        each.batch_tokens = bsz
        if not each.bypass:
            copied += bsz
        if each.cached_tokens == each.hit_tokens:
            s.records[each.record].prefill_s = s.clock[0].now_s
            if not each.bypass:
                copied += each.hit_tokens
        if bsz < left or room == 0:
            break
        slot = each.next_ready
    return tokens, copied


@compiled
def start_transfers(s: State, engine: int) -> None:
    """Beside the step: cached KV of the batch's entries in, layer by layer, and their computed KV out.

    The decode engine's buffer holds the whole prompt in the end, so at first it gets what was read on this
    side.
    """
    now_s, kv_bytes = s.clock[0].now_s, s.parameters[0].kv_bytes_token
    pe = s.engines[engine]
    group = s.instances[pe.instance]
    pe_memory = s.nodes[pe.node].memory
    slot = pe.ready_head
    for _ in range(pe.batch):
        each = s.slots[slot]
        if not each.bypass:
            de = s.engines[each.decode]
            de_memory = s.nodes[de.node].memory
            own = s.sides[2 * slot].read_tokens
            remote = each.cached_tokens - own
            out = each.batch_tokens
            if each.cached_tokens == each.hit_tokens:
                out += own
            flow = slot * FLOWS
            group.transfers += (own > 0) + (remote > 0) + 1
            if own:
                size = own * kv_bytes
                start_flow(s, flow + COPY_IN, size, pe_memory, pe.nic_out, pe.nic_in, now_s)
            if remote:
                size = remote * kv_bytes
                start_flow(s, flow + REMOTE_IN, size, de_memory, de.nic_out, pe.nic_in, now_s)
            size = out * kv_bytes
            start_flow(s, flow + COPY_OUT, size, pe.nic_out, de.nic_in, de_memory, now_s)
        slot = each.next_ready


@compiled
def prefill_moved(s: State, slot: int) -> None:
    """One of a step's flows has ended."""
    instance = s.engines[s.slots[slot].prefill].instance
    s.instances[instance].transfers -= 1
    end_step(s, instance)


@compiled
def prefill_computed(s: State, instance: int) -> None:
    s.instances[instance].computed = 1
    leave_nics(s, instance)
    end_step(s, instance)


@compiled
def end_step(s: State, instance: int) -> None:
    """When both computing and moving are done. Only the last of a rank's entries may still not be
    complete."""
    group = s.instances[instance]
    if not group.computed or group.transfers:
        return
    group.stepping = 0
    group.busy_s += s.clock[0].now_s - group.step_started_s
    for engine in range(group.first_engine, group.first_engine + group.engines):
        rank = s.engines[engine]
        for _ in range(rank.batch):
            slot = rank.ready_head
            each = s.slots[slot]
            each.cached_tokens += each.batch_tokens
            if each.cached_tokens < each.prompt_tokens:
                break
            rank.ready_head = each.next_ready
            if rank.ready_head == NONE:
                rank.ready_tail = NONE
            group.ready -= 1
            prefill_done(s, slot)
        rank.batch = 0
    make_due(s, instance)


@compiled
def prefill_done(s: State, slot: int) -> None:
    """The first token is there. Others are decoded once the KV is copied to the device, which is submitted
    now."""
    clock, p = s.clock[0], s.parameters[0]
    each = s.slots[slot]
    s.records[each.record].first_token_s = clock.now_s
    leave(s, 2 * slot)
    release_room(s, 2 * slot)
    tell(s, PREFILL_DONE, slot, each.prompt_tokens)
    if each.output_tokens == 1:
        release_room(s, 2 * slot + 1)
        finish(s, slot)
    else:
        submit_s = 0.0
        if not each.bypass:
            submit_s = -(-each.prompt_tokens // p.block_tokens) * p.layers * p.submit_s
        push_event(s, clock.now_s + submit_s, HAND_OVER_EVENT, slot)


@compiled
def begin_hand_over(s: State, slot: int) -> None:
    """The prompt's KV flows into the decode engine's device."""
    each = s.slots[slot]
    engine = s.engines[each.decode]
    memory = s.nodes[engine.node].memory
    size = each.prompt_tokens * s.parameters[0].kv_bytes_token
    flow = slot * FLOWS + HAND_OVER
    start_flow(s, flow, size, memory, engine.nic_out, engine.nic_in, s.clock[0].now_s)
