from __future__ import annotations

import heapq

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dualpath.sim.kernel.heaps import (
    EVENT,
    NONE,
    PAIRING,
    heap_pop,
    heap_push,
    pairing_add,
    pairing_pop,
    tournament_replay,
)
from dualpath.sim.kernel.state import blank

PLACES = 64
TIMES = st.floats(0, 4).map(lambda each: round(each, 1))
"""Few different ones, so that many are equal."""


@given(st.lists(TIMES | st.none(), max_size=PLACES))
def test_the_event_heap_is_a_heapq(pushes: list[float | None]) -> None:
    """A time is pushed, None pops."""
    heap = blank(PLACES, EVENT)
    size = 0
    expected: list[tuple[float, int, int]] = []
    for number, time_s in enumerate([*pushes, *[None] * PLACES]):
        if time_s is not None:
            key = (number * 7919) % 1009
            size = heap_push(heap, size, time_s, key, number)
            heapq.heappush(expected, (time_s, key, number))
        elif expected:
            assert heap[0].item() == heapq.heappop(expected)
            size = heap_pop(heap, size)
        assert size == len(expected)


def test_a_full_event_heap_says_so() -> None:
    heap = blank(1, EVENT)
    assert heap_push(heap, 0, 1.0, 0, 0) == 1
    with pytest.raises(IndexError):
        heap_push(heap, 1, 1.0, 1, 0)


@given(st.lists(TIMES | st.none(), max_size=PLACES))
def test_a_pairing_heap_is_a_heapq(pushes: list[float | None]) -> None:
    nodes = blank(PLACES, PAIRING)
    root = NONE
    expected: list[tuple[float, int]] = []
    for node, key in enumerate([*pushes, *[None] * PLACES]):
        if key is not None:
            root = pairing_add(nodes, root, node, key)
            heapq.heappush(expected, (key, node))
        elif expected:
            assert (nodes[root].key, root) == heapq.heappop(expected)
            root = pairing_pop(nodes, root)
    assert root == NONE


@given(st.lists(st.tuples(st.integers(0, 7), TIMES), max_size=100))
def test_a_tournament_has_the_first_of_all(changes: list[tuple[int, float]]) -> None:
    times = np.full(8, np.inf)
    winners = np.array([0, 0, 0, 4, 0, 2, 4, 6, *range(8)])
    for place, time_s in changes:
        times[place] = time_s
        tournament_replay(times, winners, place)
        assert winners[1] == times.argmin()
