"""Merging descriptors: the same bytes to the same places, in fewer pieces."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from dualpath.base.ids import KiB
from dualpath.kv.layout import KVLayout, RowPart
from dualpath.traffic.pieces import coalesced, pieces_array

PIECE = st.tuples(st.integers(0, 3), st.integers(0, 40), st.integers(0, 6), st.integers(0, 200))


def moves(pieces: np.ndarray) -> list[tuple[int, int, int]]:
    """(slot, byte, place) of every byte."""
    return sorted(
        (slot, offset + i, place + i)
        for slot, offset, length, place in pieces.tolist()
        for i in range(length)
    )


@given(st.lists(st.lists(PIECE, max_size=12), min_size=1, max_size=4))
def test_each_byte_goes_where_it_went_before(
    lists: list[list[tuple[int, int, int, int]]],
) -> None:
    arrays = [pieces_array(pieces) for pieces in lists]
    merged = coalesced(arrays)
    assert moves(merged) == moves(np.concatenate(arrays))
    assert len(merged) <= sum(len(pieces) for pieces in lists)
    assert (merged[:, 2] > 0).all()


def layers_of(layout: KVLayout, layers: range, tokens: int) -> list[np.ndarray]:
    """A pull for each layer, of blocks that lie in slots 5, 6, ... there and 0, 1, ... here."""
    return [
        pieces_array(
            (
                5 + part.block,
                part.span.offset,
                part.span.length,
                part.block * layout.full_block_bytes + part.span.offset,
            )
            for part in layout.layer_spans(layer, 0, tokens)
        )
        for layer in layers
    ]


def test_layers_of_a_block_that_wait_together_become_one_descriptor_of_64_kib_and_more() -> None:
    layout = KVLayout("gqa", 8, 64, (RowPart("key", 1, 64), RowPart("value", 1, 64)), "bfloat16", 2)
    assert layout.layer_block_bytes == 16 * KiB
    merged = coalesced(layers_of(layout, range(2, 6), tokens=3 * 64))
    assert merged[:, 2].tolist() == [64 * KiB] * 3
    assert merged[:, 0].tolist() == [5, 6, 7]


def test_a_block_that_is_partly_filled_is_not_merged_over_its_gap() -> None:
    layout = KVLayout("gqa", 4, 4, (RowPart("key", 1, 2), RowPart("value", 1, 2)), "float16", 2)
    merged = coalesced(layers_of(layout, range(4), tokens=6))
    assert merged[:, 2].tolist() == [layout.full_block_bytes] + [2 * layout.row_bytes] * 4


def test_rows_that_came_in_two_chunks_become_one_piece() -> None:
    assert coalesced([pieces_array([(1, 0, 40, 0)]), pieces_array([(1, 40, 24, 40)])]).tolist() == [
        [1, 0, 64, 0]
    ]


def test_neighbours_in_the_slot_only_are_kept_apart() -> None:
    pieces = pieces_array([(1, 0, 8, 0), (1, 8, 8, 100)])
    assert coalesced([pieces]).tolist() == pieces.tolist()
