from __future__ import annotations

import argparse

import msgspec
import pytest
from plan_kit import small_question, some_figures

from dualpath.base.config_cli import add_config_arguments, config_from_args
from dualpath.base.ids import GiB, MiB
from dualpath.policy.config import PolicyConfig, ReadPlanKind
from dualpath.policy.quota import pairs
from dualpath.serve.config import ServeConfig
from dualpath.sim.hardware import NodeSpec
from dualpath.sim.model_config import load_model
from dualpath.sim.plan.advice import (
    Turns,
    advise,
    beta_tokens_for,
    block_tokens_for,
    decode_tokens_s,
    loads_of,
    quota_s_for,
    serve_arguments,
    staging_bytes_for,
)
from dualpath.sim.plan.result import Held
from dualpath.sim.plan.splits import Split
from dualpath.sim.setting import Deployment, System, prepare


def small_cluster():
    question = small_question()
    deployment = Deployment(
        model=question.model, hardware=question.hardware, prefill_nodes=1, decode_nodes=2
    )
    return prepare(deployment, System.SPLIT, question.assumptions)


def test_the_papers_range_of_ratios():
    loads = loads_of(NodeSpec(), 2, 4)
    assert loads.in_range
    assert loads.ratios is not None
    assert (loads.ratios.low, loads.ratios.high) == pytest.approx((1 / 7, 7 / 2))
    assert loads.ratios.low_resource == "PE CNIC write"
    assert loads.shares[loads.fullest] == max(loads.shares.values()) < 1
    outside = loads_of(NodeSpec(), 4, 1)
    assert not outside.in_range and outside.shares[outside.fullest] > 1


def test_no_ratio_is_free_of_bottlenecks():
    loads = loads_of(NodeSpec(snic_bytes_s=500e9), 1, 1)
    assert loads.ratios is None and not loads.in_range


@pytest.mark.parametrize(
    ("mean", "tokens"), [(100, 64), (16_383, 64), (16_384, 128), (65_535, 128), (65_536, 256)]
)
def test_block_size(mean, tokens):
    assert block_tokens_for(mean) == tokens


def test_quota():
    assert quota_s_for(None) == 0.3
    assert quota_s_for(4.0) == 0.3
    assert quota_s_for(1.0) == pytest.approx(0.1)
    assert [f"{quota_s_for(ttft_s)}" for ttft_s in (0.1, 0.3, 1 / 3)] == ["0.01", "0.03", "0.0333"]


def test_staging_that_is_simulated():
    deepseek, qwen = load_model("deepseek-v3.2"), load_model("qwen2.5-32b")
    short, long = (Turns(1e4, 500.0, longest) for longest in (16_384, 65_536))
    assert staging_bytes_for(deepseek, NodeSpec(), short) == 80e9
    assert staging_bytes_for(deepseek, NodeSpec(), long) == 4 * 8 * 65_536 * 42_944
    assert staging_bytes_for(qwen, NodeSpec(), long) == 0.2 * NodeSpec().memory_bytes


def test_turns_are_means_over_turns():
    turns = Turns.of(small_question().sessions)
    prompts = [[3000 + turn * (200 + 10 * number + 20) for turn in range(5)] for number in range(6)]
    assert turns.prompt_tokens == pytest.approx(sum(map(sum, prompts)) / 30)
    assert turns.longest_tokens == prompts[5][4] + 20
    assert turns.append_tokens == pytest.approx((3000 + 4 * 225) / 5)


def test_beta_is_what_an_engine_processes_in_five_seconds():
    cluster, policy = small_cluster()
    costs = cluster.prefill
    attention_s = (
        costs.attention_entry_s
        + costs.attention_token_s * 500
        + costs.attention_pair_s * pairs(9_500, 500)
    )
    expected = 5.0 * 10_000 / costs.step_s(attention_s, 500)
    turns = Turns(prompt_tokens=10_000.0, append_tokens=500.0, longest_tokens=12_000)
    assert beta_tokens_for(cluster, policy, turns) == pytest.approx(expected, rel=1e-4)


def test_an_engine_generates_with_its_device_full():
    cluster, _ = small_cluster()
    turns = Turns(prompt_tokens=10_000.0, append_tokens=500.0, longest_tokens=12_000)
    batch = cluster.decode_hbm_tokens / 10_000
    step_s = cluster.decode.step_s(batch, batch, cluster.decode_hbm_tokens)
    assert decode_tokens_s(cluster, turns) == pytest.approx(batch / step_s)


def parsed(arguments):
    parser = argparse.ArgumentParser()
    add_config_arguments(parser, ServeConfig)
    return config_from_args(ServeConfig, parser.parse_args(["MODEL", *arguments]), env={})


def test_serve_takes_the_flags_and_means_the_same():
    config = ServeConfig(
        model="MODEL", prefill=4, read_path=ReadPlanKind.SHORTER, pe_buffer=3 * MiB, quota_s=0.25
    )
    arguments = serve_arguments(config)
    assert arguments == (
        "--prefill", "4", "--read-path", "shorter", "--quota-s", "0.25", "--pe-buffer", "3MiB",
    )  # fmt: skip
    assert parsed(arguments) == config
    assert serve_arguments(ServeConfig(model="MODEL")) == ()


def test_advice():
    cluster, policy = small_cluster()
    question = small_question()
    turns = Turns.of(question.sessions)
    best = some_figures(Split(1, 2, 1, 1), "split", jct_s=10.0)
    advice = advise(cluster, policy, question.hardware, turns, best, ttft_s=None)
    kv_bytes = cluster.kv_bytes_token
    assert kv_bytes == 16 * 2 * 8 * 128 * 2
    # A quarter more than was used, whole MiB below a GiB and whole GiB above.
    assert advice.pe_buffer_bytes == -(-12_500 * kv_bytes // MiB) * MiB
    assert advice.de_buffer_bytes == -(-25_000 * kv_bytes // GiB) * GiB
    assert advice.node_buffer_bytes == 2 * advice.de_buffer_bytes
    assert advice.layer_block_bytes == 64 * kv_bytes // 16
    assert advice.max_running == 12
    assert advice.alpha_tokens == policy.alpha_tokens
    config = parsed(advice.serve)
    assert (config.prefill, config.decode, config.engines_per_group) == (2, 4, 2)
    assert config.policy().alpha_tokens == policy.alpha_tokens
    assert config.read_path is ReadPlanKind.SPLIT
    assert set(advice.reasons) == {
        "read_path", "block_tokens", "buffers", "kv_device", "alpha_tokens", "beta_tokens", "quota_s",
        "max_running",
    }  # fmt: skip


def test_a_buffer_holds_the_longest_request_and_not_more_than_was_simulated():
    cluster, policy = small_cluster()
    question = small_question()
    best = msgspec.structs.replace(
        some_figures(Split(1, 2, 1, 1), "split", jct_s=10.0),
        held=Held(pe_staging_tokens=0, de_staging_tokens=1 << 40, decoding=1),
    )
    turns = Turns(prompt_tokens=1e4, append_tokens=500.0, longest_tokens=9_000)
    advice = advise(cluster, policy, question.hardware, turns, best, ttft_s=None)
    assert advice.pe_buffer_bytes >= 9_000 * cluster.kv_bytes_token
    assert advice.de_buffer_bytes < cluster.decode_buffer_tokens * cluster.kv_bytes_token + GiB
    assert "a decode engine used all of the" in advice.reasons["buffers"]


def test_the_defaults_of_the_policy_are_those_of_the_rules():
    assert PolicyConfig().alpha_s == 3.0 and PolicyConfig().beta_s == 5.0
