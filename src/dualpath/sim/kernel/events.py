"""The kernel's events but those of links: their kinds, and the heap that keeps them in order.

Order is total: time, then kind, then which was pushed first. A kind is also its priority at equal times,
lowest first; links, which have no entry in the heap, come before all.
"""

from __future__ import annotations

from dualpath.sim.kernel.heaps import heap_push
from dualpath.sim.kernel.jit import compiled
from dualpath.sim.kernel.state import State

__all__ = [
    "ARRIVAL_EVENT",
    "DECODE_EVENT",
    "HAND_OVER_EVENT",
    "PREFILL_EVENT",
    "READ_EVENT",
    "event_key",
    "kind_of",
    "push_event",
]

READ_EVENT, PREFILL_EVENT, HAND_OVER_EVENT, DECODE_EVENT, ARRIVAL_EVENT = range(5)
"""A side's read begins (the store's latency is over); an instance has computed a prefill step; a slot's
copy to its decode engine's device begins; an instance has computed a decode step; a slot's next request
arrives."""

_NUMBER_BITS = 48


@compiled
def event_key(kind: int, number: int) -> int:
    """`number`: how many were pushed before."""
    return (kind << _NUMBER_BITS) | number


@compiled
def kind_of(key: int) -> int:
    return key >> _NUMBER_BITS


@compiled
def push_event(s: State, time_s: float, kind: int, index: int) -> None:
    """`index`: of the side, instance or slot that the kind is about."""
    clock = s.clock[0]
    key = event_key(kind, clock.pushed)
    clock.pushed += 1
    clock.heap_size = heap_push(s.heap, clock.heap_size, time_s, key, index)
