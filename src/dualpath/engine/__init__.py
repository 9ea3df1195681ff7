"""Runs models: layerwise prefill, continuous decoding, sampling, through `transformers`.

Knows neither the scheduler, HTTP, stores nor transports. Names are imported on first use, so that a
process that only needs parameters of sampling or a model's files does not import torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dualpath.engine.decode import DecodedToken, DecodeEngine
    from dualpath.engine.host_blocks import HostBlocks
    from dualpath.engine.model import LoadedModel, adopt_model, load_model
    from dualpath.engine.model_source import (
        ModelFiles,
        ModelSpec,
        cache_directory,
        load_config,
        load_tokenizer,
        model_identity,
        resolve_model,
    )
    from dualpath.engine.prefill import (
        ChunkResult,
        LayerSink,
        LayerSource,
        LayerwisePrefill,
        PrefillChunk,
    )
    from dualpath.engine.profile import profile_attention
    from dualpath.engine.sampling import (
        FinishReason,
        Sampled,
        SamplingParams,
        TokenLogprob,
        TokenLogprobs,
        finish_reason,
        sample,
    )
    from dualpath.engine.support import kv_layout, refuse_unsupported, resolve_dtype
    from dualpath.engine.tiny import BUILT_IN

__all__ = [
    "BUILT_IN",
    "ChunkResult",
    "DecodeEngine",
    "DecodedToken",
    "FinishReason",
    "HostBlocks",
    "LayerSink",
    "LayerSource",
    "LayerwisePrefill",
    "LoadedModel",
    "ModelFiles",
    "ModelSpec",
    "PrefillChunk",
    "Sampled",
    "SamplingParams",
    "TokenLogprob",
    "TokenLogprobs",
    "adopt_model",
    "cache_directory",
    "finish_reason",
    "kv_layout",
    "load_config",
    "load_model",
    "load_tokenizer",
    "model_identity",
    "profile_attention",
    "refuse_unsupported",
    "resolve_dtype",
    "resolve_model",
    "sample",
]

_HOMES = {
    "decode": ("DecodeEngine", "DecodedToken"),
    "host_blocks": ("HostBlocks",),
    "model": ("LoadedModel", "adopt_model", "load_model"),
    "model_source": (
        "ModelFiles",
        "ModelSpec",
        "cache_directory",
        "load_config",
        "load_tokenizer",
        "model_identity",
        "resolve_model",
    ),
    "prefill": ("ChunkResult", "LayerSink", "LayerSource", "LayerwisePrefill", "PrefillChunk"),
    "profile": ("profile_attention",),
    "sampling": (
        "FinishReason",
        "Sampled",
        "SamplingParams",
        "TokenLogprob",
        "TokenLogprobs",
        "finish_reason",
        "sample",
    ),
    "support": ("kv_layout", "refuse_unsupported", "resolve_dtype"),
    "tiny": ("BUILT_IN",),
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> object:
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME_OF[name]}"), name)
