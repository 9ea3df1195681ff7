from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from transfer_kit import filled_pool

from dualpath.kv import BufferPool
from dualpath.kv.pool import PoolGeometry
from dualpath.transfer import RemoteSpan
from dualpath.transfer.lanes import cut_bounds
from dualpath.transfer.spans import (
    MAX_SPANS,
    byte_views,
    check_spans,
    cut_spans,
    cut_views,
    memory_views,
    merged_spans,
    pack_spans,
    span_array,
    unpack_spans,
    why_not_held,
)

SLOT_BYTES = 4096
GEOMETRY = PoolGeometry(n_slots=4, slot_bytes=SLOT_BYTES)


@st.composite
def span_lists(draw: st.DrawFn) -> list[RemoteSpan]:
    """Spans of which many are empty, and many follow one another, also over the end of a slot."""
    spans: list[RemoteSpan] = []
    for _ in range(draw(st.integers(1, 12))):
        slot, offset = draw(st.integers(0, 3)), draw(st.sampled_from([0, 7, 4000, SLOT_BYTES]))
        if spans and draw(st.booleans()):
            end = spans[-1].slot * SLOT_BYTES + spans[-1].offset + spans[-1].length
            slot, offset = min(divmod(end, SLOT_BYTES), (3, SLOT_BYTES))
        spans.append(RemoteSpan(slot, offset, draw(st.integers(0, SLOT_BYTES - offset))))
    return spans


@given(span_lists())
def test_packing_keeps_every_span(spans: list[RemoteSpan]) -> None:
    array = span_array(spans)
    assert check_spans(GEOMETRY, array) == sum(span.length for span in spans)
    assert np.array_equal(unpack_spans(pack_spans(array)), array)


@given(span_lists())
def test_the_memory_of_spans_is_theirs_in_order(spans: list[RemoteSpan]) -> None:
    pool, _ = filled_pool(4, SLOT_BYTES, seed=70)
    expected = b"".join(
        bytes(pool.view(span.slot)[span.offset : span.offset + span.length]) for span in spans
    )
    assert b"".join(memory_views(pool, span_array(spans))) == expected
    pool.close()


def test_spans_that_follow_one_another_are_one() -> None:
    spans = [
        RemoteSpan(1, 0, 100),
        RemoteSpan(1, 100, 0),
        RemoteSpan(1, 100, 3996),
        RemoteSpan(2, 0, 5),
        RemoteSpan(2, 6, 1),
        RemoteSpan(3, 9, 0),
    ]
    start = GEOMETRY.slot_offset(1)
    merged = merged_spans(GEOMETRY, span_array(spans)).tolist()
    assert merged == [[start, SLOT_BYTES + 5], [start + SLOT_BYTES + 6, 1]]
    assert merged_spans(GEOMETRY, span_array(spans[-1:])).tolist() == []


@given(span_lists(), st.data())
def test_cuts_cover_each_byte_once(spans: list[RemoteSpan], data: st.DataObject) -> None:
    array = span_array(spans)
    total = int(array[:, 2].sum())
    memory = np.arange(total, dtype=np.uint32)
    views, position = [], 0
    for span in spans:
        views.append(memoryview(memory.astype(np.uint8))[position : position + span.length])
        position += span.length
    assume(total)
    cuts = data.draw(st.lists(st.integers(1, total), unique=True))
    bounds = [0, *sorted({*cuts, total})]
    flat = [
        (slot, at)
        for slot, offset, length in array.tolist()
        for at in range(offset, offset + length)
    ]
    for start, stop in itertools.pairwise(bounds):
        part = cut_spans(array, start, stop)
        covered = [
            (slot, at)
            for slot, offset, length in part.tolist()
            for at in range(offset, offset + length)
        ]
        assert covered == flat[start:stop]
        into = cut_views(array, views, start, stop)
        assert [view.nbytes for view in into] == part[:, 2].tolist()
        assert b"".join(into) == memory.astype(np.uint8).tobytes()[start:stop]


@given(st.integers(0, 2**34), st.integers(1, 16))
def test_a_pull_is_cut_evenly_and_never_in_tiny_parts(total: int, lanes: int) -> None:
    bounds = cut_bounds(total, lanes)
    sizes = [stop - start for start, stop in itertools.pairwise(bounds)]
    assert (bounds[0], bounds[-1]) == (0, total)
    assert 1 <= len(sizes) <= lanes
    if len(sizes) > 1:
        assert min(sizes) >= 256 * 1024 - 4096
        assert max(sizes) - min(sizes) <= 2 * 4096
    assert len(cut_bounds(lanes * 256 * 1024, lanes)) == lanes + 1


def test_numbers_that_fit_nowhere_are_refused() -> None:
    with pytest.raises(ValueError, match="64 bits"):
        span_array([RemoteSpan(2**70, 0, 1)])
    for span in (RemoteSpan(0, 2**62, 2**62), RemoteSpan(0, 1, -1), RemoteSpan(0, 0, 2**63 - 1)):
        with pytest.raises(ValueError, match="not in a slot"):
            check_spans(GEOMETRY, span_array([span]))
    with pytest.raises(ValueError):
        unpack_spans(bytes(25))


def test_destinations_are_flat_writable_bytes() -> None:
    spans = span_array([RemoteSpan(0, 0, 12)])
    shaped = memoryview(bytearray(12)).cast("I")
    assert byte_views(spans, [shaped])[0].format == "B"
    with pytest.raises(ValueError, match="writable"):
        byte_views(spans, [memoryview(bytes(12))])
    with pytest.raises(ValueError, match="contiguous"):
        byte_views(spans, [memoryview(bytearray(24))[::2]])


def test_spans_are_bounded_in_number() -> None:
    pool = BufferPool(1, 4096)
    most = span_array([RemoteSpan(0, 0, 1)] * MAX_SPANS)
    assert check_spans(pool.geometry, most) == MAX_SPANS
    with pytest.raises(ValueError, match="at most"):
        span_array([RemoteSpan(0, 0, 1)] * (MAX_SPANS + 1))
    with pytest.raises(ValueError, match="at most"):
        check_spans(pool.geometry, np.zeros((MAX_SPANS + 1, 3), dtype=np.int64))
    pool.close()


def test_slots_of_another_lease_are_not_held() -> None:
    pool = BufferPool(4, 4096)
    mine, other = pool.try_lease("mine", 2), pool.try_lease("other", 1)
    assert mine is not None and other is not None
    spans = [RemoteSpan(slot, 0, 1) for slot in mine.slots]
    assert why_not_held(mine, mine.stamp, span_array(spans)) is None
    assert why_not_held(None, mine.stamp, span_array(spans)) is not None
    with_foreign = span_array([*spans, RemoteSpan(other.slots[0], 0, 1)])
    foreign = why_not_held(mine, mine.stamp, with_foreign)
    assert foreign is not None and "mine" in foreign
    mine.release()
    other.release()
    pool.close()
