"""Spans of a pull as one array: checked, cut, merged and packed without a Python step for each.

An array of spans has the shape (n, 3), of int64: slot, offset and length of each. Pure; it knows no
sockets, pulls or leases beyond their slots.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain

import msgspec
import numpy as np
import numpy.typing as npt

from dualpath.base.ids import KiB
from dualpath.kv.pool import BufferPool, Lease, PoolGeometry
from dualpath.transfer.contract import RemoteSpan

__all__ = [
    "MAX_SPANS",
    "SpanArray",
    "byte_views",
    "check_spans",
    "copy_bytes",
    "cut_spans",
    "cut_views",
    "memory_views",
    "merged_spans",
    "pack_spans",
    "span_array",
    "unpack_spans",
    "why_not_held",
]

MAX_SPANS = 65_536

SpanArray = npt.NDArray[np.int64]
"""(n, 3): slot, offset, length."""

_WIRE = np.dtype("<i8")
# numpy copies without the interpreter lock, at 1-2 us a call; smaller spans are faster with it.
_SMALL_BYTES = 32 * KiB


def span_array(spans: Sequence[RemoteSpan]) -> SpanArray:
    """The spans as an array. Raises ValueError for too many, or for numbers beyond 64 bits."""
    if len(spans) > MAX_SPANS:
        raise ValueError(f"{len(spans)} spans in one pull: at most {MAX_SPANS}")
    numbers = chain.from_iterable(map(msgspec.structs.astuple, spans))
    try:
        return np.fromiter(numbers, np.int64, 3 * len(spans)).reshape(-1, 3)
    except OverflowError:
        raise ValueError("a span that lies in no pool: its numbers exceed 64 bits") from None


def check_spans(geometry: PoolGeometry, spans: SpanArray) -> int:
    """The bytes the spans name. Raises ValueError for one outside its slot, or for too many."""
    if len(spans) > MAX_SPANS:
        raise ValueError(f"{len(spans)} spans in one pull: at most {MAX_SPANS}")
    slots, offsets, lengths = spans.T
    foreign = (slots < 0) | (slots >= geometry.n_slots)
    if foreign.any():
        raise ValueError(f"slot {slots[foreign][0]} is not in [0, {geometry.n_slots})")
    outside = (offsets < 0) | (lengths < 0) | (offsets > geometry.slot_bytes - lengths)
    if outside.any():
        start, length = int(offsets[outside][0]), int(lengths[outside][0])
        raise ValueError(
            f"bytes [{start}, {start + length}) are not in a slot of {geometry.slot_bytes}"
        )
    return int(lengths.sum())


def byte_views(spans: SpanArray, into: Sequence[memoryview]) -> list[memoryview]:
    """The destinations as flat bytes. Raises ValueError unless they are writable and fit the spans."""
    if len(spans) != len(into):
        raise ValueError(f"{len(spans)} spans but {len(into)} destinations")
    views: list[memoryview] = []
    for length, view in zip(spans[:, 2].tolist(), into, strict=True):
        if view.nbytes != length:
            raise ValueError(f"a span of {length} bytes but a destination of {view.nbytes}")
        if view.readonly or not view.c_contiguous:
            raise ValueError("a destination must be writable and contiguous")
        if length and (view.ndim != 1 or view.format != "B"):
            view = view.cast("B")
        views.append(view)
    return views


def why_not_held(lease: Lease | None, stamp: int, spans: SpanArray) -> str | None:
    """Why these slots cannot be read under the stamp whose live lease is given; None if they can."""
    if lease is None:
        return f"stamp {stamp} is of no live lease"
    foreign = set(np.unique(spans[:, 0]).tolist()).difference(lease.slots)
    if foreign:
        return f"slot {min(foreign)} is not in the lease of {lease.owner}"
    return None


def pack_spans(spans: SpanArray) -> bytes:
    """For the wire: 24 bytes a span."""
    return spans.astype(_WIRE, copy=False).tobytes()


def unpack_spans(packed: bytes) -> SpanArray:
    """Read-only. Raises ValueError for what `pack_spans` never makes."""
    return np.frombuffer(packed, _WIRE).astype(np.int64, copy=False).reshape(-1, 3)


def cut_spans(spans: SpanArray, start: int, stop: int) -> SpanArray:
    """The spans of the bytes [start, stop) of all that the spans name, in order."""
    ends = np.cumsum(spans[:, 2])
    first = int(np.searchsorted(ends, start, side="right"))
    last = int(np.searchsorted(ends, stop, side="left"))
    cut = spans[first : last + 1].copy()
    skipped = start - (int(ends[first]) - int(cut[0, 2]))
    cut[0, 1] += skipped
    cut[0, 2] -= skipped
    cut[-1, 2] -= int(ends[last]) - stop
    return cut


def cut_views(
    spans: SpanArray, views: Sequence[memoryview], start: int, stop: int
) -> list[memoryview]:
    """The destinations of the bytes [start, stop); `views` fit `spans`."""
    ends = np.cumsum(spans[:, 2])
    first = int(np.searchsorted(ends, start, side="right"))
    last = int(np.searchsorted(ends, stop, side="left"))
    cut = list(views[first : last + 1])
    beyond = int(ends[last]) - stop
    if beyond:
        cut[-1] = cut[-1][:-beyond]
    cut[0] = cut[0][start - (int(ends[first]) - int(spans[first, 2])) :]
    return cut


def merged_spans(geometry: PoolGeometry, spans: SpanArray) -> npt.NDArray[np.int64]:
    """(m, 2): file offset and length of the memory that the spans name, in order.

    Spans that follow one another in the memory file are one, and empty ones are gone.
    """
    spans = spans[spans[:, 2] > 0]
    starts = geometry.table_bytes + spans[:, 0] * geometry.slot_bytes + spans[:, 1]
    lengths = spans[:, 2]
    if not len(spans):
        return np.empty((0, 2), dtype=np.int64)
    heads = np.flatnonzero(np.append(True, starts[1:] != starts[:-1] + lengths[:-1]))
    return np.column_stack((starts[heads], np.add.reduceat(lengths, heads)))


def memory_views(pool: BufferPool, spans: SpanArray) -> Iterator[memoryview]:
    """The spans' bytes in the pool, made as they are asked for."""
    memory = pool.memory
    for start, length in merged_spans(pool.geometry, spans).tolist():
        yield memory[start : start + length]


def copy_bytes(target: memoryview, source: memoryview) -> None:
    """Both flat, and of one length."""
    if target.nbytes < _SMALL_BYTES:
        target[:] = source
    else:
        np.copyto(np.frombuffer(target, dtype=np.uint8), np.frombuffer(source, dtype=np.uint8))
