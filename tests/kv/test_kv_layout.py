"""Layer Blocks and Full Blocks (paper, section 4)."""

from __future__ import annotations

from itertools import pairwise

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dualpath.kv import BlockSpan, KVLayout, RowPart, Span


def gqa(n_layers: int, block_tokens: int, heads: int, dim: int, item_bytes: int = 2) -> KVLayout:
    parts = (RowPart("key", heads, dim), RowPart("value", heads, dim))
    return KVLayout("gqa", n_layers, block_tokens, parts, "bfloat16", item_bytes)


def mla(n_layers: int, block_tokens: int, latent: int, rope: int, item_bytes: int = 2) -> KVLayout:
    parts = (RowPart("latent", 1, latent), RowPart("rope", 1, rope))
    return KVLayout("mla", n_layers, block_tokens, parts, "bfloat16", item_bytes)


sizes = st.integers(1, 9)
layouts = st.one_of(
    st.builds(gqa, sizes, sizes, sizes, sizes, st.sampled_from([1, 2, 4])),
    st.builds(mla, sizes, sizes, sizes, sizes, st.sampled_from([1, 2, 4])),
)


@pytest.mark.parametrize(
    ("layout", "row_bytes", "full_block_bytes"),
    [
        # Qwen2.5-0.5B: 24 layers, 2 KV heads of 64.
        (gqa(24, 64, 2, 64), 512, 24 * 64 * 512),
        # MHA is GQA with as many KV heads as heads: 32 of 128.
        (gqa(32, 64, 32, 128), 16384, 32 * 64 * 16384),
        # DeepSeek-V3: latent of 512 and rotary key of 64, 61 layers.
        (mla(61, 64, 512, 64), 1152, 61 * 64 * 1152),
        (gqa(30, 64, 3, 64, 4), 1536, 30 * 64 * 1536),
    ],
)
def test_sizes_of_known_models(layout: KVLayout, row_bytes: int, full_block_bytes: int) -> None:
    assert layout.row_bytes == row_bytes
    assert layout.layer_block_bytes == 64 * row_bytes
    assert layout.full_block_bytes == full_block_bytes


def test_slot_is_whole_pages() -> None:
    assert gqa(1, 1, 1, 1).slot_bytes == 4096
    assert gqa(2, 64, 1, 8).slot_bytes == 4096  # exactly one page
    assert gqa(2, 64, 1, 9).slot_bytes == 8192


@given(layouts)
def test_layer_spans_tile_the_full_block(layout: KVLayout) -> None:
    stop = 0
    for layer in range(layout.n_layers):
        span = layout.layer_span(layer)
        assert span.offset == stop
        assert span.length == layout.layer_block_bytes
        stop = span.stop
    assert stop == layout.full_block_bytes


@given(layouts, st.data())
def test_token_spans_tile_the_layer_block(layout: KVLayout, data: st.DataObject) -> None:
    layer = data.draw(st.integers(0, layout.n_layers - 1))
    cuts = data.draw(st.lists(st.integers(0, layout.block_tokens)))
    edges = [0, *sorted(cuts), layout.block_tokens]
    stop = layout.layer_span(layer).offset
    for first, last in pairwise(edges):
        span = layout.layer_span(layer, first, last)
        assert span.offset == stop
        assert span.length == (last - first) * layout.row_bytes
        stop = span.stop
    assert stop == layout.layer_span(layer).stop


@given(layouts)
def test_full_block_is_the_concatenation_of_its_layer_blocks(layout: KVLayout) -> None:
    rng = np.random.default_rng(7)
    shape = (layout.n_layers, layout.block_tokens, layout.row_bytes)
    rows = rng.integers(0, 256, shape, dtype=np.uint8)
    full = rows.tobytes()
    spans = [layout.layer_span(layer) for layer in range(layout.n_layers)]
    pieces = [full[span.offset : span.stop] for span in spans]
    assert pieces == [rows[layer].tobytes() for layer in range(layout.n_layers)]
    assert b"".join(pieces) == full


@pytest.mark.parametrize(
    ("layer", "first", "stop"), [(-1, 0, 1), (2, 0, 1), (0, -1, 1), (0, 3, 2), (0, 0, 5)]
)
def test_span_outside_the_block_is_refused(layer: int, first: int, stop: int) -> None:
    with pytest.raises(ValueError, match="not in"):
        gqa(2, 4, 1, 8).layer_span(layer, first, stop)


@pytest.mark.parametrize(("tokens", "blocks"), [(0, 0), (1, 1), (64, 1), (65, 2), (128, 2)])
def test_blocks_for(tokens: int, blocks: int) -> None:
    assert gqa(2, 64, 1, 8).blocks_for(tokens) == blocks


def test_layout_without_bytes_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        gqa(0, 64, 1, 8)
    with pytest.raises(ValueError, match="at least 1"):
        KVLayout("gqa", 1, 64, (), "bfloat16", 2)


def test_layout_survives_the_wire() -> None:
    layout = mla(3, 64, 512, 64)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(layout), type=KVLayout) == layout


@given(layouts, st.integers(0, 40), st.integers(0, 40), st.data())
def test_the_spans_of_a_range_of_tokens_cover_each_of_them_once(
    layout: KVLayout, first: int, n: int, data: st.DataObject
) -> None:
    layer = data.draw(st.integers(0, layout.n_layers - 1))
    base = layout.layer_span(layer).offset
    tokens = [
        part.block * layout.block_tokens + (at - base) // layout.row_bytes
        for part in layout.layer_spans(layer, first, first + n)
        for at in range(part.span.offset, part.span.stop, layout.row_bytes)
    ]
    assert tokens == list(range(first, first + n))


def test_spans_begin_and_end_inside_blocks() -> None:
    layout = gqa(n_layers=2, block_tokens=4, heads=1, dim=1)
    row, layer_1 = layout.row_bytes, layout.layer_block_bytes
    assert list(layout.layer_spans(1, 3, 9)) == [
        BlockSpan(0, Span(layer_1 + 3 * row, row)),
        BlockSpan(1, Span(layer_1, 4 * row)),
        BlockSpan(2, Span(layer_1, row)),
    ]
    assert list(layout.layer_spans(0, 5, 5)) == []
