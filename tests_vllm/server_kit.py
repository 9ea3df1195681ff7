"""The tiny model of the tests on real vLLM, and calls at the same time."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any


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
