"""Model arithmetic: the paper's KV sizes, parameters and cache-compute ratios, and small ones by hand."""

from __future__ import annotations

import pytest

from dualpath.policy.quota import pairs
from dualpath.sim.model import (
    Experts,
    Formats,
    GroupedAttention,
    Indexer,
    LatentAttention,
    ModelShape,
)
from dualpath.sim.model_config import load_model

APPEND = 429
CACHED = (16_384, 65_536)

ARITHMETIC = {
    # KV bytes of a token, active parameters, GB/PFLOP at the two ends.
    "qwen2.5-32b": (262_144, 31.98e9, (117.2, 267.2)),
    "gpt-oss-120b": (18_432, 5.13e9, (46.9, 95.2)),
    "qwen3-235b": (96_256, 21.57e9, (39.3, 60.0)),
    "deepseek-v3": (40_016, 36.62e9, (4.35, 5.15)),
    "deepseek-v3.2": (42_944, 37.48e9, (13.0, 37.4)),
}

PAPER = {
    "qwen2.5-32b": (117, 267),
    "gpt-oss-120b": (47, 95),
    "qwen3-235b": (39, 60),
    "deepseek-v3": (4.8, 5.8),
    "deepseek-v3.2": (13, 36),
}


@pytest.mark.parametrize("name", ARITHMETIC)
def test_kv_parameters_and_ratios(name: str) -> None:
    model = load_model(name)
    kv_bytes, active, ratios = ARITHMETIC[name]
    assert model.kv_bytes_token == kv_bytes
    assert model.active_parameters == pytest.approx(active, rel=0.001)
    for cached, ratio in zip(CACHED, ratios, strict=True):
        assert model.cache_compute_ratio(cached, APPEND) == pytest.approx(ratio, rel=0.005)


@pytest.mark.parametrize("name", ["qwen2.5-32b", "gpt-oss-120b", "qwen3-235b"])
def test_the_papers_ratios_with_grouped_attention(name: str) -> None:
    model = load_model(name)
    for cached, ratio in zip(CACHED, PAPER[name], strict=True):
        assert model.cache_compute_ratio(cached, APPEND) == pytest.approx(ratio, rel=0.01)


@pytest.mark.parametrize("name", ["deepseek-v3", "deepseek-v3.2"])
def test_the_papers_ratios_with_latent_attention(name: str) -> None:
    # The paper does not say what FLOPs it counts for latent attention; these are of absorbed projections.
    model = load_model(name)
    for cached, ratio in zip(CACHED, PAPER[name], strict=True):
        assert model.cache_compute_ratio(cached, APPEND) == pytest.approx(ratio, rel=0.12)


def test_total_parameters_are_those_that_the_models_are_named_by() -> None:
    totals = {
        "deepseek-v3": 671.0e9,
        "ds-27b": 27.0e9,
        "gpt-oss-120b": 116.8e9,
        "qwen2.5-32b": 32.76e9,
        "qwen3-235b": 235.1e9,
    }
    for name, total in totals.items():
        assert load_model(name).total_parameters == pytest.approx(total, rel=0.005)
    # V3.2 is V3 and an indexer in each layer.
    indexer = 1536 * 64 * 128 + 7168 * (128 + 64)
    v3, v32 = load_model("deepseek-v3"), load_model("deepseek-v3.2")
    assert v32.total_parameters - v3.total_parameters == 61 * indexer


SMALL = ModelShape(
    name="small",
    layers=3,
    hidden=8,
    vocabulary=10,
    tied_embeddings=False,
    attention=GroupedAttention(heads=4, kv_heads=2, head_dim=5),
    dense_layers=1,
    dense_width=7,
    experts=Experts(routed=6, active=2, width=3, shared_width=4),
    window_layers=1,
    window_tokens=16,
)


def test_parameters_by_hand() -> None:
    attention = 8 * 20 + 2 * 8 * 10 + 20 * 8  # Queries; keys and values; output.
    assert SMALL.attention_parameters == 3 * attention
    expert = 3 * 8 * 3
    assert SMALL.routed_parameters == 2 * 6 * expert
    assert SMALL.active_routed_parameters == 2 * 2 * expert
    assert SMALL.unrouted_mlp_parameters == 3 * 8 * 7 + 2 * (3 * 8 * 4 + 8 * 6)
    assert SMALL.mlp_parameters == SMALL.unrouted_mlp_parameters + 2 * 6 * expert
    assert SMALL.active_parameters == 3 * attention + SMALL.active_mlp_parameters + 80
    assert SMALL.total_parameters == 3 * attention + SMALL.mlp_parameters + 160


def test_kv_of_windows_stops_growing() -> None:
    assert SMALL.kv_bytes_layer == 2 * 2 * 5 * 2
    assert (SMALL.kv_bytes_token, SMALL.window_kv_bytes_token) == (80, 40)
    assert SMALL.kv_bytes(10) == 80 * 10 + 40 * 10
    assert SMALL.kv_bytes(100) == 80 * 100 + 40 * 16


def test_attention_flops_by_hand() -> None:
    flops = SMALL.attention_flops
    assert (flops.per_pair, flops.indexer_per_pair) == (2 * 4 * 4 * 5, 0)
    assert flops.per_token == 16 * 4 * 4 * 5
    assert flops.of(100, 3) == flops.per_token * 3 + flops.per_pair * pairs(100, 3)


def test_sparse_latent_attention_by_hand() -> None:
    indexer = Indexer(heads=2, head_dim=6, top_tokens=32)
    attention = LatentAttention(
        heads=4, q_rank=9, kv_rank=10, nope_dim=3, rope_dim=2, value_dim=5, indexer=indexer
    )
    queries = 8 * 9 + 9 * 4 * 5
    latent = 8 * 12 + 10 * 4 * 3 + 10 * 4 * 5
    indexing = 9 * 2 * 6 + 8 * 6 + 8 * 2  # Queries from their latent, one key, weights of heads.
    assert attention.parameters(8) == queries + latent + 4 * 5 * 8 + indexing
    model = ModelShape(
        name="latent",
        layers=2,
        hidden=8,
        vocabulary=10,
        tied_embeddings=True,
        attention=attention,
        dense_layers=2,
        dense_width=7,
        formats=Formats(kv_bytes_per_element=1, kv_extra_bytes_layer=3),
    )
    assert (model.kv_bytes_layer, model.indexer_bytes_layer) == (10 + 2 + 6 + 3, 6)
    flops = model.attention_flops
    assert flops.per_token == 2 * 32 * 2 * 4 * (10 + 10 + 2)  # Scores over 12, values over 10.
    assert (flops.per_pair, flops.indexer_per_pair) == (0, 2 * 2 * 2 * 6)
    assert model.embedding_parameters == 80
    assert (model.routed_parameters, model.active_routed_parameters) == (0, 0)


def test_the_ratio_by_hand() -> None:
    # 8,000 B of KV before windows, 640 B in them; 100 keys seen in two layers, 16 in the third.
    attention = 160 * 100 + 1280
    compute = 5 * (2 * SMALL.active_parameters + attention)
    assert SMALL.cache_compute_ratio(100, 5) == pytest.approx(1e6 * (8_000 + 640) / compute)
