"""One vLLM engine with the connector or the scheduler class: preemption, failed loads, the quota."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
from engine_kit import connector, counter, engine, generate, prompts_of

from dualpath.bench.vllm_quota import Step, over_quota, recording

QUOTA_PAIRS = 400_000


@pytest.mark.parametrize("name", ["connector", "connector_stats", "scheduler"])
def test_public_names(name: str) -> None:
    module = importlib.import_module(f"dualpath.vllm.{name}")
    assert all(hasattr(module, each) for each in module.__all__)


def test_preempted_requests_go_on_from_the_store(model: Path, tmp_path: Path) -> None:
    """Room for 40 blocks, and seven requests that grow to 11 each."""
    prompts = prompts_of(1, (1000,) * 7)
    with engine(model, enable_prefix_caching=False) as plain:
        wants = generate(plain, prompts, 400)
    small = {"max_model_len": 2048, "kv_cache_memory_bytes": 20 << 20}
    config = connector(tmp_path / "store")
    with engine(model, kv_transfer_config=config, **small) as llm:
        assert generate(llm, prompts, 400) == wants
        assert counter(llm, "vllm:num_preemptions") > 0
        assert counter(llm, "vllm:kv_cache_usage_perc") == 0
        assert counter(llm, "vllm:dualpath_slots_in_use") == 0
        assert counter(llm, "vllm:dualpath_read_blocks") > 0


@pytest.mark.parametrize("policy", ["recompute", "fail"])
def test_blocks_that_cannot_be_loaded(model: Path, tmp_path: Path, policy: str) -> None:
    """A connector that loses every third staging: recomputed, or an error, never a wrong token."""
    prompts = prompts_of(2, (900, 1500, 300, 2000, 700, 1200))
    names = {"kv_connector": "LosingConnector", "path": "losing_connector"}
    config = connector(tmp_path / "store", policy, **names)
    with engine(model, kv_transfer_config=config, enable_prefix_caching=False) as llm:
        wants = generate(llm, prompts, 20)
        answers = [generate(llm, prompts, 20) for _ in range(3)]
        if policy == "recompute":
            assert answers == [wants] * 3
        else:
            told = [
                (answer, want)
                for each in answers
                for answer, want in zip(each, wants, strict=True)
                if answer != want
            ]
            assert told, "some failed"
            assert all(answer == want[: len(answer)] for answer, want in told)
        assert counter(llm, "vllm:kv_cache_usage_perc") == 0


def test_no_step_exceeds_the_quota(model: Path) -> None:
    """Nine requests at once, in pairs of queries and keys, which vLLM's own output tells."""
    from dualpath.vllm.scheduler import DualPathScheduler

    prompts = prompts_of(3, (3000, 100, 2000, 50, 700, 1500, 6000, 10, 900))
    with engine(model, enable_prefix_caching=False) as plain:
        wants = generate(plain, prompts, 12)
    quota = {"dualpath": {"quota_s": QUOTA_PAIRS, "per_pair_s": 1}}
    steps: list[Step] = []
    cls = recording(DualPathScheduler, steps)
    with engine(
        model, scheduler_cls=cls, additional_config=quota, enable_prefix_caching=False
    ) as llm:
        assert generate(llm, prompts, 12) == wants
    seen = over_quota(steps, QUOTA_PAIRS)
    assert seen.violations == 0
    assert seen.largest_share > 0.99
    assert any(len(step) > 1 for step in steps)
