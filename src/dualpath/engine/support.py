"""Which models give the right tokens here, and how their KV lies: from the configuration alone.

What the configuration cannot tell (a model that ignores our attention function, or computes something
else) is found by the self-check when the model is loaded. This module imports no torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from dualpath.base.errors import UnsupportedModel
from dualpath.kv.layout import KVLayout, RowPart

if TYPE_CHECKING:
    from transformers import PretrainedConfig

__all__ = [
    "DTYPE_BYTES",
    "eos_tokens",
    "kv_layout",
    "max_positions",
    "refuse_unsupported",
    "resolve_dtype",
]

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}

_WINDOWED_FAMILIES = ("gpt_oss",)
"""Families whose windows were tested against `transformers`."""

_NO_TOKEN_KV = "it keeps a state instead of KV by token"
_INDEXER = "it uses sparse attention with an indexer, whose own cache is not stored"

_FORBIDDEN = (
    ("index_topk", _INDEXER),
    ("index_n_heads", _INDEXER),
    ("attention_chunk_size", "it uses chunked attention"),
    ("attn_logit_softcapping", "it soft-caps attention logits"),
    ("num_kv_shared_layers", "its layers share the KV of others"),
    ("alibi", "it uses ALiBi position biases"),
    ("ssm_cfg", _NO_TOKEN_KV),
    ("state_size", _NO_TOKEN_KV),
    ("lru_width", _NO_TOKEN_KV),
    ("linear_attn_config", _NO_TOKEN_KV),
    ("linear_conv_kernel_dim", _NO_TOKEN_KV),
    ("cross_attention_layers", "it uses cross-attention layers"),
)
"""Attributes of a configuration that, when set, mean what this engine cannot do."""

_FORBIDDEN_FAMILIES = {
    "bloom": "it uses ALiBi position biases",
    "mpt": "it uses ALiBi position biases",
    "rwkv": _NO_TOKEN_KV,
    "xlstm": _NO_TOKEN_KV,
}

_LAYER_REASONS = {
    "sliding_attention": "sliding windows",
    "chunked_attention": "chunked attention",
    "linear_attention": "linear attention, which keeps a state instead of KV by token",
    "mamba": "state-space layers, which keep a state instead of KV by token",
    "conv": "convolution layers, which keep a state instead of KV by token",
}


def refuse_unsupported(config: PretrainedConfig) -> None:
    """Raises UnsupportedModel, with the reason, for what would give wrong tokens here."""
    family = str(config.model_type)
    if getattr(config, "is_encoder_decoder", False):
        _refuse(family, "it is an encoder-decoder model, and only decoder-only models are served")
    if getattr(config, "vision_config", None) is not None or hasattr(config, "audio_config"):
        _refuse(family, "it is multi-modal, and only text models are served")
    if family in _FORBIDDEN_FAMILIES:
        _refuse(family, _FORBIDDEN_FAMILIES[family])
    for attribute, reason in _FORBIDDEN:
        if getattr(config, attribute, None):
            _refuse(family, reason)
    if getattr(config, "is_causal", True) is False or getattr(
        config, "use_bidirectional_attention", None
    ):
        _refuse(family, "it attends to later tokens")
    if getattr(config, "position_embedding_type", None) == "alibi":
        _refuse(family, "it uses ALiBi position biases")
    quantization = getattr(config, "quantization_config", None) or {}
    if isinstance(quantization, dict) and quantization.get("kv_cache_scheme"):
        _refuse(family, "it asks for a quantised KV-cache")
    _refuse_windows(config, family)
    if not getattr(config, "num_attention_heads", None):
        _refuse(family, "it has no attention heads, so no KV to store by token")


def _refuse_windows(config: PretrainedConfig, family: str) -> None:
    types: Sequence[str] | None = getattr(config, "layer_types", None)
    for kind in types or ():
        if kind == "full_attention" or (
            kind == "sliding_attention" and family in _WINDOWED_FAMILIES
        ):
            continue
        _refuse(
            family, f"it uses {_LAYER_REASONS.get(kind, 'unknown layers')} (layer type {kind!r})"
        )
    window = getattr(config, "sliding_window", None)
    in_use = getattr(config, "use_sliding_window", True) is not False
    if types is None and window and in_use and window < max_positions(config):
        _refuse(family, f"it uses sliding windows (sliding_window = {window})")


def _refuse(family: str, reason: str) -> None:
    raise UnsupportedModel(f"this {family} model cannot be served: {reason}")


def max_positions(config: PretrainedConfig) -> int:
    """The longest sequence, prompt and generated tokens together."""
    return int(getattr(config, "max_position_embeddings", None) or 2048)


def eos_tokens(config: PretrainedConfig, generation_config: Any = None) -> tuple[int, ...]:
    """The tokens that end a text: the generation configuration's, else the model's."""
    for source in (generation_config, config):
        found = getattr(source, "eos_token_id", None)
        if found is not None:
            return tuple(found) if isinstance(found, list | tuple) else (int(found),)
    return ()


def resolve_dtype(config: PretrainedConfig, requested: str) -> str:
    """The torch name of the type that weights and KV have: the model's own for "auto"."""
    own = str(getattr(config, "dtype", None) or "float32").removeprefix("torch.")
    dtype = own if requested == "auto" else requested
    if dtype not in DTYPE_BYTES:
        raise UnsupportedModel(f"dtype {dtype!r} is not supported: use {', '.join(DTYPE_BYTES)}")
    return dtype


def kv_layout(config: PretrainedConfig, dtype: str, block_tokens: int) -> KVLayout:
    """Layout of the model's KV. `dtype` as `resolve_dtype` gives it."""
    latent_dim = getattr(config, "kv_lora_rank", None)
    if latent_dim:
        kind = "mla"
        parts = (RowPart("latent", 1, latent_dim), RowPart("rope", 1, config.qk_rope_head_dim))
    else:
        kind = "gqa"
        heads = config.num_attention_heads
        kv_heads = getattr(config, "num_key_value_heads", None) or heads
        dim = getattr(config, "head_dim", None) or config.hidden_size // heads
        parts = (RowPart("key", kv_heads, dim), RowPart("value", kv_heads, dim))
    return KVLayout(
        kind=kind,
        n_layers=config.num_hidden_layers,
        block_tokens=block_tokens,
        parts=parts,
        dtype=dtype,
        item_bytes=DTYPE_BYTES[dtype],
    )
