"""The attention function against its definition: merging, folding, windows, sinks, latent space."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from engine_kit import Loader
from torch import Tensor

from dualpath.base.errors import UnsupportedModel
from dualpath.engine import attention
from dualpath.engine.attention import Partial, attend, merge, packed_attention
from dualpath.engine.packed import STEP_KEYWORD, PackedBatch, PackedKV
from dualpath.kv.layout import KVLayout, RowPart


def layout_of(heads: int, dim: int, dtype: str = "float32") -> KVLayout:
    parts = (RowPart("key", heads, dim), RowPart("value", heads, dim))
    return KVLayout("gqa", 1, 16, parts, dtype, 4 if dtype == "float32" else 2)


class GivenKV(PackedKV):
    """Rows that a test chose."""

    def __init__(self, batch: PackedBatch, layout: KVLayout, rows: list[Tensor]) -> None:
        super().__init__(batch, layout)
        self._given = rows

    def store(self, layer: int, first: Tensor, second: Tensor) -> None:
        raise AssertionError("nothing is stored here")

    def rows(self, layer: int, index: int) -> Tensor:
        return self._given[index]


def defined(
    query: Tensor,
    rows: Tensor,
    cached: int,
    heads: int,
    scale: float,
    *,
    window: int | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """`query` `[H, T, d]`, `rows` `[cached + T, 2 * heads * d]` to `[T, H, d]`, in float64."""
    total, dim = rows.shape[0], query.shape[2]
    keys = rows[:, : heads * dim].view(total, heads, dim).transpose(0, 1).double()
    values = rows[:, heads * dim :].view(total, heads, dim).transpose(0, 1).double()
    group = query.shape[0] // heads
    keys, values = (x.repeat_interleave(group, dim=0) for x in (keys, values))
    scores = query.double() @ keys.transpose(1, 2) * scale
    at = torch.arange(cached, total)[:, None]
    to = torch.arange(total)[None, :]
    hidden = to > at
    if window is not None:
        hidden |= to <= at - window
    scores = scores.masked_fill(hidden, float("-inf"))
    if sinks is not None:
        extra = sinks.double()[:, None, None].expand(-1, scores.shape[1], 1)
        weights = torch.cat((scores, extra), dim=2).softmax(-1)[:, :, :-1]
    else:
        weights = scores.softmax(-1)
    return (weights @ values).transpose(0, 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (6, 2), (5, 1)])
@pytest.mark.parametrize("window", [None, 7, 300])
@pytest.mark.parametrize("with_sinks", [False, True])
def test_a_packed_batch(
    dtype: torch.dtype, heads: int, kv_heads: int, window: int | None, with_sinks: bool
) -> None:
    torch.manual_seed(0)
    shapes = [(0, 5), (40, 1), (33, 20), (0, 1), (10, 300)]
    batch = PackedBatch.of([c for c, _ in shapes], [n for _, n in shapes])
    dim = 16
    name = str(dtype).removeprefix("torch.")
    rows = [torch.randn(c + n, 2 * kv_heads * dim).to(dtype) for c, n in shapes]
    query = torch.randn(1, batch.new_tokens, heads, dim).to(dtype).transpose(1, 2)
    new = torch.cat([r[c:] for r, (c, _) in zip(rows, shapes, strict=True)])
    key, value = (
        part.reshape(1, -1, kv_heads, dim).transpose(1, 2) for part in new.chunk(2, dim=1)
    )
    sinks = torch.randn(heads) if with_sinks else None
    kv = GivenKV(batch, layout_of(kv_heads, dim, name), rows)
    module: Any = SimpleNamespace(layer_idx=0, is_causal=True)
    keywords: dict[str, Any] = {STEP_KEYWORD: kv, "s_aux": sinks, "sliding_window": window}
    out, weights = packed_attention(module, query, key, value, None, scaling=0.3, **keywords)
    assert weights is None
    assert out.shape == (1, batch.new_tokens, heads, dim)
    tolerance = 1e-5 if dtype == torch.float32 else 0.03
    for i, segment in enumerate(batch.segments):
        expected = defined(
            query[0, :, segment.start : segment.stop],
            rows[i],
            segment.cached_tokens,
            kv_heads,
            0.3,
            window=window,
            sinks=sinks,
        )
        torch.testing.assert_close(
            out[0, segment.start : segment.stop].double(), expected, rtol=tolerance, atol=tolerance
        )


def test_merging_parts_is_attention_over_all_keys() -> None:
    torch.manual_seed(1)
    query, key, value = (torch.randn(1, 2, n, 8) for n in (4, 10, 10))
    whole = attend(query, key, value, scale=0.5)
    a = attend(query, key[:, :, :3], value[:, :, :3], scale=0.5)
    b = attend(query, key[:, :, 3:], value[:, :, 3:], scale=0.5)
    for found in (merge(a, b), merge(b, a)):
        torch.testing.assert_close(found.out, whole.out)
        torch.testing.assert_close(found.lse, whole.lse)


def test_the_definition_agrees_with_the_kernel() -> None:
    torch.manual_seed(2)
    query, key, value = torch.randn(1, 2, 6, 8), torch.randn(1, 2, 6, 8), torch.randn(1, 2, 6, 5)
    bias = torch.randn(6, 6)
    for keywords in ({"causal": True, "bias": None}, {"causal": False, "bias": bias}):
        full = attention._attend_in_full(query, key, value, 0.4, **keywords)
        kernel = attend(query, key, value, scale=0.4, **keywords)
        assert isinstance(kernel, Partial)
        torch.testing.assert_close(full.out, kernel.out)
        torch.testing.assert_close(full.lse, kernel.lse)


@pytest.mark.parametrize("new", [1, 3, 200])
@pytest.mark.parametrize("threads", [1, 2])
def test_latent_attention_is_the_same_absorbed_and_expanded(
    new: int, threads: int, load: Loader, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = load("tiny-mla")
    module = next(m for m in loaded.model.modules() if hasattr(m, "expand_kv"))
    config, layout = loaded.config, loaded.layout
    batch = PackedBatch.of([30], [new])
    torch.manual_seed(3)
    rows = torch.randn(30 + new, layout.row_elements)
    width = config.qk_nope_head_dim + config.qk_rope_head_dim
    query = torch.randn(1, config.num_attention_heads, new, width)
    latent = layout.parts[0].dim
    key, value = module.expand_kv(rows[None, None, 30:, :latent], rows[None, None, 30:, latent:])
    keywords: dict[str, Any] = {STEP_KEYWORD: GivenKV(batch, layout, [rows])}
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    outs = []
    for less in (True, False):
        monkeypatch.setattr(attention, "_absorbing_is_less", lambda *_, less=less: less)
        outs.append(packed_attention(module, query, key, value, None, scaling=0.2, **keywords)[0])
    torch.testing.assert_close(outs[0], outs[1], rtol=1e-4, atol=1e-5)
    keys, values = module.expand_kv(rows[None, None, :, :latent], rows[None, None, :, latent:])
    scores = query @ keys.transpose(2, 3) * 0.2
    hidden = torch.arange(30 + new)[None, :] > torch.arange(30, 30 + new)[:, None]
    expected = scores.masked_fill(hidden, float("-inf")).softmax(-1) @ values
    torch.testing.assert_close(outs[0], expected.transpose(1, 2), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("keywords", "mask", "reason"),
    [
        ({"softcap": 30.0}, None, "softcap"),
        ({"position_bias": torch.zeros(1)}, None, "position_bias"),
        ({"is_causal": False}, None, "later tokens"),
        ({}, torch.zeros(1, 1, 1, 1), "mask of its own"),
    ],
)
def test_what_it_cannot_do_it_refuses(
    keywords: dict[str, Any], mask: Tensor | None, reason: str
) -> None:
    batch = PackedBatch.of([0], [1])
    kv = GivenKV(batch, layout_of(1, 8), [torch.zeros(1, 16)])
    one = torch.zeros(1, 1, 1, 8)
    module: Any = SimpleNamespace(layer_idx=0, is_causal=True)
    with pytest.raises(UnsupportedModel, match=reason):
        packed_attention(module, one, one, one, mask, **{STEP_KEYWORD: kv, **keywords})


def test_without_its_keyword_it_refuses() -> None:
    one = torch.zeros(1, 1, 1, 8)
    module: Any = SimpleNamespace(layer_idx=0)
    with pytest.raises(UnsupportedModel, match="does not pass keywords"):
        packed_attention(module, one, one, one, None)


def test_batches_need_new_tokens() -> None:
    with pytest.raises(ValueError, match="0 new tokens"):
        PackedBatch.of([4], [0])
    assert PackedBatch.of([4, 0], [2, 3]).positions() == [4, 5, 0, 1, 2]
