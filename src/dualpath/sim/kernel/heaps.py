"""Three priority queues for compiled code, in arrays: nothing is allocated after the start.

All are total orders, so that what leaves them depends on nothing but what went in: the event heap by (time,
key), pairing heaps by (key, index of the node), the tournament by (time, place).
"""

from __future__ import annotations

import numpy as np

from dualpath.sim.kernel.jit import Floats, Ints, Record, Records, compiled

__all__ = [
    "EVENT",
    "NONE",
    "PAIRING",
    "before",
    "heap_pop",
    "heap_push",
    "pairing_add",
    "pairing_meld",
    "pairing_pop",
    "put",
    "tournament_replay",
]

NONE = -1
"""Instead of an index."""

EVENT = np.dtype([("time_s", "f8"), ("key", "i8"), ("index", "i8")])
"""Of the event heap."""
PAIRING = np.dtype([("key", "f8"), ("child", "i4"), ("sibling", "i4")])
"""Of pairing heaps."""


@compiled
def heap_push(heap: Records, size: int, time_s: float, key: int, index: int) -> int:
    """The new size. `key` breaks ties of time and is unique. IndexError when the heap is full."""
    if size >= heap.shape[0]:
        raise IndexError("the event heap is full")
    at = size
    while at > 0:
        parent = (at - 1) >> 1
        above = heap[parent]
        if above.time_s < time_s or (above.time_s == time_s and above.key < key):
            break
        put(heap, at, above.time_s, above.key, above.index)
        at = parent
    put(heap, at, time_s, key, index)
    return size + 1


@compiled
def heap_pop(heap: Records, size: int) -> int:
    """Remove the first event; its fields are read at index 0 before. The new size."""
    size -= 1
    last = heap[size]
    time_s, key, index = last.time_s, last.key, last.index
    at = 0
    while True:
        child = 2 * at + 1
        if child >= size:
            break
        if child + 1 < size and before(heap[child + 1], heap[child].time_s, heap[child].key):
            child += 1
        below = heap[child]
        if not before(below, time_s, key):
            break
        put(heap, at, below.time_s, below.key, below.index)
        at = child
    put(heap, at, time_s, key, index)
    return size


@compiled
def before(event: Record, time_s: float, key: int) -> bool:
    return bool(event.time_s < time_s or (event.time_s == time_s and event.key < key))


@compiled
def put(heap: Records, at: int, time_s: float, key: int, index: int) -> None:
    event = heap[at]
    event.time_s = time_s
    event.key = key
    event.index = index


@compiled
def pairing_meld(nodes: Records, a: int, b: int) -> int:
    """The root of both heaps together. A new node is a heap of its own: no child, no sibling."""
    if a == NONE:
        return b
    if b == NONE:
        return a
    if nodes[b].key < nodes[a].key or (nodes[b].key == nodes[a].key and b < a):
        a, b = b, a
    nodes[b].sibling = nodes[a].child
    nodes[a].child = b
    return a


@compiled
def pairing_add(nodes: Records, root: int, node: int, key: float) -> int:
    """The root with a new node."""
    each = nodes[node]
    each.key = key
    each.child = NONE
    each.sibling = NONE
    return pairing_meld(nodes, root, node)


@compiled
def pairing_pop(nodes: Records, root: int) -> int:
    """The root of what is left without `root`."""
    rest = nodes[root].child
    paired = NONE
    while rest != NONE:
        a = rest
        b = nodes[a].sibling
        nodes[a].sibling = NONE
        if b == NONE:
            rest = NONE
        else:
            rest = nodes[b].sibling
            nodes[b].sibling = NONE
            a = pairing_meld(nodes, a, b)
        nodes[a].sibling = paired
        paired = a
    merged = NONE
    while paired != NONE:
        following = nodes[paired].sibling
        nodes[paired].sibling = NONE
        merged = pairing_meld(nodes, merged, paired)
        paired = following
    return merged


@compiled
def tournament_replay(times: Floats, winners: Ints, place: int) -> None:
    """`times[place]` changed: `winners[1]` is the place of the first time again.

    A binary tree over n places, n a power of two, as long as `times`: `winners[n + place]` is the place
    itself, `winners[k]` the earlier of `winners[2 * k]` and `winners[2 * k + 1]`.
    """
    at = (times.shape[0] + place) >> 1
    while at:
        left, right = winners[2 * at], winners[2 * at + 1]
        winner = right if times[right] < times[left] else left
        if winners[at] == winner and winner != place:
            return
        winners[at] = winner
        at >>= 1
