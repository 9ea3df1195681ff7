"""Rooflines: by hand on round numbers, and what must hold for every model and GPU."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dualpath.base.errors import ConfigError
from dualpath.policy.quota import pairs
from dualpath.sim.costs import (
    DecodeCosts,
    Efficiency,
    Parallelism,
    PrefillCosts,
    attention_fit,
    decode_costs,
    gpu_weight_bytes,
    kv_capacity_tokens,
    layerwise_batch_factor,
    prefill_costs,
)
from dualpath.sim.hardware import GpuSpec, Hardware, NodeSpec, hardware_names, load_hardware
from dualpath.sim.model import (
    Experts,
    Formats,
    GroupedAttention,
    Indexer,
    LatentAttention,
    ModelShape,
)
from dualpath.sim.model_config import load_model, model_names

ROUND = Hardware(
    GpuSpec(name="round", bf16_flop_s=1e9, fp8_flop_s=2e9, hbm_bytes=100_000, hbm_bytes_s=1e6),
    NodeSpec(gpus=4, cnic_bytes_s=1e5, nvlink_bytes_s=1e6),
)
IDEAL = Efficiency(linear=1, attention=1, memory=1, network=1, launch_s=0)
HALF = Efficiency(linear=0.5, attention=0.5, memory=0.5, network=0.5, launch_s=0.25, entry_s=0.125)

DENSE = ModelShape(
    name="dense",
    layers=2,
    hidden=8,
    vocabulary=16,
    tied_embeddings=False,
    attention=GroupedAttention(heads=4, kv_heads=2, head_dim=2),
    dense_layers=2,
    dense_width=32,
)
SPARSE = ModelShape(
    name="sparse",
    layers=3,
    hidden=8,
    vocabulary=16,
    tied_embeddings=False,
    attention=LatentAttention(
        heads=4,
        q_rank=4,
        kv_rank=6,
        nope_dim=2,
        rope_dim=2,
        value_dim=2,
        indexer=Indexer(heads=2, head_dim=4, top_tokens=32),
    ),
    dense_layers=1,
    dense_width=32,
    experts=Experts(routed=8, active=2, width=4, shared_width=4),
    formats=Formats(
        kv_bytes_per_element=1, attention_weight_bytes=1, mlp_weight_bytes=1, fp8_products=True
    ),
)
ATTENTION, MLP, HEAD = 2 * 192, 2 * 768, 128
"""Parameters of DENSE."""


def test_prefill_of_a_dense_model_by_hand() -> None:
    costs = prefill_costs(DENSE, ROUND, Parallelism(1), IDEAL)
    assert costs == PrefillCosts(
        attention_entry_s=0,
        attention_token_s=2 * ATTENTION / 1e9,
        attention_pair_s=2 * (4 * 4 * 2) / 1e9,
        linear_token_s=2 * MLP / 1e9,
        weights_s=2 * (ATTENTION + MLP + 2 * HEAD) / 1e6,
        collective_s_token=0,
        base_s=0,
    )


def test_decode_of_a_dense_model_by_hand() -> None:
    costs = decode_costs(DENSE, ROUND, Parallelism(1), IDEAL)
    assert costs == DecodeCosts(
        base_s=0,
        sequence_s=2 * ATTENTION / 1e9 + 2 * HEAD / 1e9,
        linear_sequence_s=2 * MLP / 1e9,
        weights_s=2 * (ATTENTION + MLP + 2 * HEAD) / 1e6,
        context_token_s=2 * 16 / 1e6,  # 16 B of KV a layer in 16 us; its 32 FLOP are quicker.
    )
    slow = Hardware(
        GpuSpec(name="slow", bf16_flop_s=1e6, fp8_flop_s=0, hbm_bytes=1, hbm_bytes_s=1e6),
        ROUND.node,
    )
    # Bound by its 32 FLOP.
    assert decode_costs(DENSE, slow, Parallelism(1), IDEAL).context_token_s == 2 * 32 / 1e6


def test_efficiencies_and_overheads() -> None:
    peak = prefill_costs(DENSE, ROUND, Parallelism(8), IDEAL)
    half = prefill_costs(DENSE, ROUND, Parallelism(8), HALF)
    for field in ("attention_token_s", "attention_pair_s", "linear_token_s", "weights_s"):
        assert getattr(half, field) == pytest.approx(2 * getattr(peak, field))
    assert half.collective_s_token == pytest.approx(2 * peak.collective_s_token)
    assert (half.attention_entry_s, half.base_s) == (0.125, 2 * 0.25)
    assert decode_costs(DENSE, ROUND, Parallelism(8), HALF).base_s == 2 * 0.25


def test_sparse_attention_costs_by_token_and_its_indexer_by_context() -> None:
    attention = SPARSE.attention
    assert isinstance(attention, LatentAttention) and attention.indexer is not None
    pair, indexing = 2 * 4 * (6 + 6 + 2), 2 * 2 * 4
    prefill = prefill_costs(SPARSE, ROUND, Parallelism(1), IDEAL)
    projections = 2 * SPARSE.attention_parameters / 2e9  # In FP8, as the indexer; attention is not.
    assert prefill.attention_token_s == pytest.approx(projections + 3 * 32 * pair / 1e9)
    assert prefill.attention_pair_s == pytest.approx(3 * indexing / 2e9)
    decode = decode_costs(SPARSE, ROUND, Parallelism(1), IDEAL)
    chosen_s = 3 * 32 * 8 / 1e6  # Latent and rotary part of the chosen tokens, 8 B.
    logits_s = 2 * HEAD / 1e9
    assert decode.sequence_s == pytest.approx(projections + logits_s + chosen_s)
    assert decode.context_token_s == pytest.approx(3 * 4 / 1e6)  # The indexer's keys.


def test_without_fp8_the_gpu_computes_in_16_bits() -> None:
    h100, a100 = load_hardware("h100"), load_hardware("a100")
    model = load_model("deepseek-v3.2")
    fast, slow = (prefill_costs(model, each, Parallelism(16), IDEAL) for each in (h100, a100))
    ratio = slow.linear_token_s / fast.linear_token_s
    assert ratio == pytest.approx(h100.gpu.fp8_flop_s / a100.gpu.bf16_flop_s)


def test_windows_cost_by_token() -> None:
    windows = ModelShape(
        **{name: getattr(DENSE, name) for name in DENSE.__struct_fields__}
        | {"window_layers": 1, "window_tokens": 10}
    )
    full, half = (prefill_costs(each, ROUND, Parallelism(1), IDEAL) for each in (DENSE, windows))
    assert half.attention_pair_s == full.attention_pair_s / 2
    assert half.attention_token_s == pytest.approx(full.attention_token_s + 10 * 32 / 1e9)
    full_d, half_d = (decode_costs(each, ROUND, Parallelism(1), IDEAL) for each in (DENSE, windows))
    assert half_d.context_token_s == full_d.context_token_s / 2
    assert half_d.sequence_s == pytest.approx(full_d.sequence_s + 10 * 16 / 1e6)


def test_weights_are_spread_over_ranks_and_shared_in_a_rank() -> None:
    assert gpu_weight_bytes(DENSE, Parallelism(4)) == 2 * (ATTENTION + MLP / 4 + 2 * HEAD)
    assert gpu_weight_bytes(DENSE, Parallelism(1, 4)) == 2 * (ATTENTION + MLP + 2 * HEAD) / 4
    routed = 2 * 8 * 3 * 8 * 4
    assert SPARSE.routed_parameters == routed
    local = SPARSE.attention_parameters + SPARSE.unrouted_mlp_parameters
    # Embeddings have 16 bits.
    assert gpu_weight_bytes(SPARSE, Parallelism(4)) == local + routed / 4 + 2 * 2 * HEAD


def test_collectives_by_hand() -> None:
    def spread_s(model: ModelShape, ranks: int, efficiency: Efficiency = IDEAL) -> float:
        return prefill_costs(model, ROUND, Parallelism(ranks), efficiency).collective_s_token

    # In a node: a token visits one or both of two ranks with equal chance for either expert.
    there_and_back = 8 * (1 + 2)
    assert spread_s(SPARSE, 2) == pytest.approx(2 * there_and_back * (1 - 0.25) / 1e6)
    # Two nodes: 0.75 times over the NIC, which is ten times slower than 7 x (1 - (7/8)^2) over NVLink.
    assert spread_s(SPARSE, 8) == pytest.approx(2 * there_and_back * 0.75 / 1e5)
    assert spread_s(SPARSE, 8, Efficiency(network=1, overlap=0.75)) == pytest.approx(
        spread_s(SPARSE, 8) / 4
    )
    # A dense model's MLP is everywhere.
    assert spread_s(DENSE, 4) == pytest.approx(2 * 8 * (2 + 2) * 3 / 1e6)
    assert spread_s(SPARSE, 1) == spread_s(DENSE, 1) == 0
    # All-reduces of a rank: two a layer, each moves an activation 2 x 1/2 times.
    tensor = prefill_costs(DENSE, ROUND, Parallelism(1, 2), IDEAL)
    assert tensor.collective_s_token == pytest.approx(2 * 2 * (8 * 2) / 1e6)


def test_tensor_parallelism_divides_a_rank() -> None:
    one, two = (prefill_costs(DENSE, ROUND, Parallelism(2, tensor), IDEAL) for tensor in (1, 2))
    for field in ("attention_token_s", "attention_pair_s", "linear_token_s", "weights_s"):
        assert getattr(two, field) == pytest.approx(getattr(one, field) / 2)

    def context_s(model: ModelShape, tensor: int) -> float:
        return decode_costs(model, ROUND, Parallelism(1, tensor), IDEAL).context_token_s

    # KV no further than by its heads, of which a latent has one.
    assert context_s(DENSE, 2) == context_s(DENSE, 4) == context_s(DENSE, 1) / 2
    assert context_s(SPARSE, 4) == context_s(SPARSE, 1)
    with pytest.raises(ConfigError, match="within a node of 4"):
        prefill_costs(DENSE, ROUND, Parallelism(1, 5), IDEAL)


def test_steps() -> None:
    prefill = PrefillCosts(
        attention_entry_s=1,
        attention_token_s=1,
        attention_pair_s=1,
        linear_token_s=2,
        weights_s=10,
        collective_s_token=0.5,
        base_s=100,
    )
    assert prefill.step_s(7, 4) == 100 + 7 + 10 + 2
    assert prefill.step_s(7, 6) == 100 + 7 + 12 + 3
    decode = DecodeCosts(
        base_s=100, sequence_s=3, linear_sequence_s=2, weights_s=10, context_token_s=0.5
    )
    assert decode.step_s(6, 4, 1000) == 100 + 10 + 18 + 500
    assert decode.step_s(6, 5.5, 1000) == 100 + 11 + 18 + 500


def test_the_quota_goes_by_attention() -> None:
    costs = prefill_costs(load_model("gpt-oss-120b"), load_hardware("h100"), Parallelism(8), HALF)
    fit = attention_fit(costs)
    expected_s = (
        costs.attention_entry_s
        + costs.attention_token_s * 50
        + costs.attention_pair_s * pairs(1000, 50)
    )
    assert fit.base_s == 0
    assert fit.entry_s(1000, 50) == pytest.approx(expected_s)


def test_kv_that_fits() -> None:
    weights = gpu_weight_bytes(DENSE, Parallelism(1))
    free = 100_000 * 0.9 - weights
    assert kv_capacity_tokens(DENSE, ROUND, Parallelism(1), 0.1) == free // 32
    shared = 100_000 * 0.9 - weights / 4
    # Two KV heads on four GPUs: each GPU has one of them.
    assert kv_capacity_tokens(DENSE, ROUND, Parallelism(1, 4), 0.1) == shared // 16
    assert layerwise_batch_factor(DENSE) == 2
    h800 = load_hardware("h800")
    # 671e9 bytes need more than one node of 80 GB.
    with pytest.raises(ConfigError, match=r"DeepSeek-V3\.2 on .*use more GPUs"):
        kv_capacity_tokens(load_model("deepseek-v3.2"), h800, Parallelism(8), 0.1)
    two, four = (
        kv_capacity_tokens(load_model("deepseek-v3.2"), h800, Parallelism(ranks), 0.1)
        for ranks in (16, 32)
    )
    assert 0 < two < four
    with pytest.raises(ConfigError, match="reserved share"):
        kv_capacity_tokens(DENSE, ROUND, Parallelism(1), 1.0)


@pytest.mark.parametrize(
    "values",
    [{"linear": 0}, {"attention": 1.5}, {"memory": -1}, {"overlap": 1.1}, {"launch_s": -1e-6}],
)
def test_efficiencies_out_of_range(values: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=next(iter(values))):
        Efficiency(**values)


def test_no_ranks() -> None:
    with pytest.raises(ConfigError, match="one rank or more"):
        Parallelism(0)


@given(
    model=st.sampled_from(model_names()).map(load_model),
    hardware=st.sampled_from(hardware_names()).map(load_hardware),
    ranks=st.integers(1, 64),
    tensor=st.sampled_from([1, 2, 4, 8]),
)
def test_more_of_anything_takes_no_less(
    model: ModelShape, hardware: Hardware, ranks: int, tensor: int
) -> None:
    parallelism, efficiency = Parallelism(ranks, tensor), Efficiency()
    prefill = prefill_costs(model, hardware, parallelism, efficiency)
    assert 0 < prefill.step_s(0.1, 100) <= prefill.step_s(0.1, 5_000) < prefill.step_s(0.2, 5_000)
    decode = decode_costs(model, hardware, parallelism, efficiency)
    step_s = decode.step_s(20, 10, 200_000)
    assert 0 < step_s < decode.step_s(20, 10, 300_000) < decode.step_s(30, 10, 300_000)
    # A better peak is never slower, and a rank with fewer peers reads no fewer weights.
    assert (
        prefill.linear_token_s >= prefill_costs(model, hardware, parallelism, IDEAL).linear_token_s
    )
    assert gpu_weight_bytes(model, Parallelism(1, tensor)) >= gpu_weight_bytes(model, parallelism)
