"""The tiny model of the tests on real vLLM, calls at the same time, and waiting for servers to be done."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from dualpath.bench.vllm_server import VllmPair, VllmServer


def make_model(directory: Path) -> Path:
    """A Qwen2 of 4 layers; large random weights, so that a wrong KV changes the tokens."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=1024,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=8192,
        initializer_range=0.2,
        bos_token_id=None,
        eos_token_id=None,
    )
    Qwen2ForCausalLM(config).float().save_pretrained(directory)
    return directory


def at_once(calls: list[Any]) -> list[Any]:
    """Run all at the same time; their results in order."""
    with ThreadPoolExecutor(len(calls)) as pool:
        return [each.result() for each in [pool.submit(call) for call in calls]]


def wait_stored(pair: VllmPair) -> None:
    """Until all that was saved is durable: a step of each server reports it."""
    wait_until(lambda: all(_quiet(each) for each in (pair.pe, pair.de)))


def _quiet(server: VllmServer) -> bool:
    server.complete([1, 2, 3], 2)
    return server.metric("vllm:dualpath_slots_in_use") == 0 or _idle(server)


def _idle(server: VllmServer) -> bool:
    """Slots are held for a peer only, since no write is left."""
    names = ("saved_blocks", "written_blocks", "failed_writes")
    before = [server.metric(f"vllm:dualpath_{name}_total") for name in names]
    time.sleep(0.3)
    server.complete([1, 2, 3], 2)
    return before == [server.metric(f"vllm:dualpath_{name}_total") for name in names]


def wait_until(ready: object, timeout_s: float = 30.0) -> None:
    assert callable(ready)
    until_s = time.monotonic() + timeout_s
    while not ready():
        assert time.monotonic() < until_s, "not in time"
        time.sleep(0.1)
