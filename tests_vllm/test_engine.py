"""One vLLM engine with the connector or the scheduler class: preemption, failed loads, the quota."""

from __future__ import annotations

import importlib
import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from dualpath.bench.vllm_server import BLOCK_TOKENS

os.environ.update(VLLM_TARGET_DEVICE="cpu", VLLM_ENABLE_V1_MULTIPROCESSING="0")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")

QUOTA_PAIRS = 400_000


def prompts_of(seed: int, sizes: tuple[int, ...]) -> list[list[int]]:
    draw = random.Random(seed)
    return [[draw.randrange(1000) for _ in range(n)] for n in sizes]


@contextmanager
def engine(model: Path, **settings: Any) -> Iterator[Any]:
    from vllm import LLM

    llm = LLM(
        str(model),
        skip_tokenizer_init=True,
        dtype="float32",
        enforce_eager=True,
        max_num_batched_tokens=2048,
        block_size=BLOCK_TOKENS,
        disable_log_stats=False,
        **{"max_model_len": 8192, "kv_cache_memory_bytes": 128 << 20, **settings},
    )
    try:
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()


def generate(llm: Any, prompts: list[list[int]], n_tokens: int) -> list[list[int]]:
    from vllm import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=n_tokens, ignore_eos=True, detokenize=False)
    outputs = llm.generate([{"prompt_token_ids": each} for each in prompts], params, use_tqdm=False)
    return [list(each.outputs[0].token_ids) for each in outputs]


def counter(llm: Any, name: str) -> float:
    return sum(each.value for each in llm.get_metrics() if each.name == name)


def connector(store: Path, policy: str = "recompute", **names: str) -> Any:
    from vllm.config import KVTransferConfig

    return KVTransferConfig(
        kv_connector=names.get("kv_connector", "DualPathConnector"),
        kv_connector_module_path=names.get("path", "dualpath.vllm.connector"),
        kv_role="kv_both",
        kv_load_failure_policy=policy,
        kv_connector_extra_config={"store": str(store), "buffer_bytes": 256 << 20},
    )


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
    from recording_scheduler import STEPS, RecordingScheduler

    from dualpath.policy.quota import pairs

    prompts = prompts_of(3, (3000, 100, 2000, 50, 700, 1500, 6000, 10, 900))
    with engine(model, enable_prefix_caching=False) as plain:
        wants = generate(plain, prompts, 12)
    quota = {"dualpath": {"quota_s": QUOTA_PAIRS, "per_pair_s": 1}}
    cls = RecordingScheduler
    with engine(
        model, scheduler_cls=cls, additional_config=quota, enable_prefix_caching=False
    ) as llm:
        assert generate(llm, prompts, 12) == wants
    spent = [sum(pairs(*entry) for entry in step) for step in STEPS if step]
    alone = [len(step) == 1 and step[0][1] == 1 for step in STEPS if step]
    violations = [s for s, one in zip(spent, alone, strict=True) if s > QUOTA_PAIRS and not one]
    assert violations == []
    assert max(spent) > 0.99 * QUOTA_PAIRS
    assert any(len(step) > 1 for step in STEPS)
