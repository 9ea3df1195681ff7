"""The kernel's loop and the entry points that the driver calls.

Time goes from event to event, in a total order: links by (time, number of the link), then other events by
(time, kind, number of the push). A run with the same arrays gives the same arrays. `advance` never passes
`until_s`, so that the driver decides what happens there.
"""

from __future__ import annotations

from collections.abc import Callable

from dualpath.sim.kernel.decode import decode_stepped, join_decode
from dualpath.sim.kernel.events import (
    ARRIVAL_EVENT,
    DECODE_EVENT,
    HAND_OVER_EVENT,
    PREFILL_EVENT,
    READ_EVENT,
    kind_of,
)
from dualpath.sim.kernel.heaps import NONE, heap_pop
from dualpath.sim.kernel.jit import Ints, compiled, entry_point, sources_digest
from dualpath.sim.kernel.links import next_link, take_ended, unserved_bytes
from dualpath.sim.kernel.prefill import (
    begin_hand_over,
    prefill_computed,
    prefill_moved,
    start_prefills,
)
from dualpath.sim.kernel.requests import arrive, assign, begin_read, read_done, release_room
from dualpath.sim.kernel.state import FLOWS, HAND_OVER, READ, State

__all__ = [
    "advance",
    "assign_all",
    "flow_ended",
    "handle",
    "happen",
    "next_event_s",
    "read_queue_tokens",
]


@compiled
def flow_ended(s: State, flow: int) -> None:
    slot, kind = flow // FLOWS, flow % FLOWS
    if kind == READ or kind == READ + 1:
        read_done(s, 2 * slot + kind - READ)
    elif kind == HAND_OVER:
        release_room(s, 2 * slot + 1)
        join_decode(s, slot)
    else:
        prefill_moved(s, slot)


@compiled
def handle(s: State, kind: int, index: int) -> None:
    if kind == READ_EVENT:
        begin_read(s, index)
    elif kind == PREFILL_EVENT:
        prefill_computed(s, index)
    elif kind == HAND_OVER_EVENT:
        if s.slots[index].bypass:
            join_decode(s, index)
        else:
            begin_hand_over(s, index)
    elif kind == DECODE_EVENT:
        decode_stepped(s, index)
    elif kind == ARRIVAL_EVENT:
        arrive(s, index)


@compiled
def next_event_s(s: State) -> float:
    """Infinite when nothing will happen."""
    at_s = s.link_end_s[next_link(s)]
    if s.clock[0].heap_size:
        at_s = min(at_s, s.heap[0].time_s)
    return float(at_s)


@compiled
def happen(s: State) -> None:
    """The next event. There is one."""
    clock = s.clock[0]
    link = next_link(s)
    link_s = s.link_end_s[link]
    clock.events += 1
    if clock.heap_size == 0 or link_s <= s.heap[0].time_s:
        clock.now_s = link_s
        flow = take_ended(s, link, link_s)
        if flow != NONE:
            flow_ended(s, flow)
    else:
        event = s.heap[0]
        clock.now_s = event.time_s
        kind, index = kind_of(event.key), event.index
        clock.heap_size = heap_pop(s.heap, clock.heap_size)
        handle(s, kind, index)


def _entry_points(
    digest: str,
) -> tuple[
    Callable[[State, float, bool], int],
    Callable[[State, Ints], None],
    Callable[[State, int], int],
]:
    """The digest is part of what numba keys its files by."""

    @entry_point
    def advance(s: State, until_s: float, stop_at_log: bool) -> int:
        """Until all events up to `until_s` are handled, or the log is full, or, with `stop_at_log`, has any.

        The number of entries in the log, which the caller takes before the next call; 0 when all is done. The
        clock then is at `until_s`, unless that is infinite.
        """
        assert len(digest) > 0
        clock = s.clock[0]
        clock.log_size = 0
        while clock.log_size < clock.log_full and not (stop_at_log and clock.log_size):
            at_s = next_event_s(s)
            # Whatever else happens at this instant may still join the step.
            if clock.due and at_s > clock.now_s:
                start_prefills(s)
                at_s = next_event_s(s)
            if at_s > until_s or at_s == float("inf"):
                if until_s < float("inf"):
                    clock.now_s = until_s
                break
            happen(s)
        return int(clock.log_size)

    @entry_point
    def assign_all(s: State, rows: Ints) -> None:
        """`assign` for each row, in order: slot, prefill and decode engine, PE side's tokens, bypass."""
        assert len(digest) > 0
        for i in range(rows.shape[0]):
            assign(s, rows[i, 0], rows[i, 1], rows[i, 2], rows[i, 3], rows[i, 4])

    @entry_point
    def read_queue_tokens(s: State, node: int) -> int:
        """Tokens of the node's reads that are planned and not read."""
        assert len(digest) > 0
        each = s.nodes[node]
        flowing = unserved_bytes(s, each.snic, s.clock[0].now_s)
        return int(each.waiting_tokens + flowing / s.parameters[0].kv_bytes_token)

    return advance, assign_all, read_queue_tokens


advance, assign_all, read_queue_tokens = _entry_points(sources_digest())
