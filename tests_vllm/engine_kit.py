"""One vLLM engine in the test's own process."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dualpath.bench.vllm_server import BLOCK_TOKENS

os.environ.update(VLLM_TARGET_DEVICE="cpu", VLLM_ENABLE_V1_MULTIPROCESSING="0")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")


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
