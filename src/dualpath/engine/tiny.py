"""Built-in models: small, random, made on first use and the same on every machine.

They need no download: for tests, demonstrations and the first request. Every family whose KV or
attention differs has one. The tokenizer has one token a byte, three special tokens and a chat template;
the model's words mean nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dualpath.base.errors import ConfigError
from dualpath.engine.model_source import cache_directory, publish_directory

__all__ = ["BUILT_IN", "EOS_TOKEN", "write_built_in", "write_random_model"]

_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
EOS_TOKEN = 258
"""`<|im_end|>`, the last of the 256 bytes and three special tokens."""

_VERSION = "v1"
_SEED = 20260221

_CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

_COMMON: dict[str, Any] = {
    "vocab_size": 259,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 32768,
    "tie_word_embeddings": False,
    "bos_token_id": 256,
    "eos_token_id": EOS_TOKEN,
    "pad_token_id": 256,
    # Wide enough that logits differ clearly and texts do not fall into a loop at once.
    "initializer_range": 0.12,
}

BUILT_IN: Mapping[str, Mapping[str, Any]] = {
    "tiny": {"model_type": "qwen2", "num_key_value_heads": 2},
    "tiny-qwen3": {"model_type": "qwen3", "num_key_value_heads": 2, "head_dim": 32},
    "tiny-mha": {"model_type": "llama", "num_key_value_heads": 4},
    "tiny-mla": {
        "model_type": "deepseek_v3",
        "num_key_value_heads": 4,
        "q_lora_rank": 48,
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 24,
        "qk_rope_head_dim": 16,
        "v_head_dim": 20,
        "moe_intermediate_size": 64,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "n_group": 2,
        "topk_group": 1,
        "first_k_dense_replace": 1,
    },
    "tiny-gpt-oss": {
        "model_type": "gpt_oss",
        "num_key_value_heads": 2,
        "head_dim": 32,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 24,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    },
}
"""Configuration of each built-in model, over what all share."""


def write_built_in(name: str) -> Path:
    """The directory of a built-in model, in the cache directory. Raises ConfigError."""
    if name not in BUILT_IN:
        raise ConfigError(f"no built-in model {name!r}: there are {', '.join(BUILT_IN)}")
    target = cache_directory() / "models" / f"{name}-{_VERSION}"
    return publish_directory(
        target, lambda directory: write_random_model(BUILT_IN[name], directory)
    )


def write_random_model(config: Mapping[str, Any], directory: Path) -> None:
    """Fill `directory` with a model of this configuration (over the shared one), float32, seeded."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils import logging

    fields = {**_COMMON, **config}
    made = AutoConfig.for_model(fields.pop("model_type"), **fields)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(_SEED)
        model = AutoModelForCausalLM.from_config(made, dtype=torch.float32)
        _randomise(model)
    logging.disable_progress_bar()
    model.save_pretrained(directory)
    _write_tokenizer(directory)


def _randomise(model: Any) -> None:
    """Give the parameters that initialisation leaves at 0 or 1 values, so that they are tested."""
    import torch

    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias") or "sinks" in name:
                parameter.normal_(0.0, 0.5)
            elif "norm" in name:
                parameter.uniform_(0.8, 1.2)


def _write_tokenizer(directory: Path) -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(letters)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in _SPECIAL])
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=_SPECIAL[0],
        pad_token=_SPECIAL[0],
        eos_token=_SPECIAL[2],
        chat_template=_CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    ).save_pretrained(directory)
