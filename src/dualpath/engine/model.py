"""Loads a model of `transformers` and makes sure that it gives the right tokens here.

No model code of ours: the model's layers call our cache object and our attention function. This module
knows no requests; where the files come from is `model_source`'s.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.utils import logging as transformers_logging

from dualpath.base.errors import ConfigError, UnsupportedModel
from dualpath.engine import attention
from dualpath.engine.linear import prepack
from dualpath.engine.model_source import (
    ModelFiles,
    ModelSpec,
    load_config,
    model_identity,
    resolve_model,
)
from dualpath.engine.self_check import check_model
from dualpath.engine.support import (
    eos_tokens,
    kv_layout,
    max_positions,
    refuse_unsupported,
    resolve_dtype,
)
from dualpath.kv.chain import Fingerprint, fingerprint
from dualpath.kv.layout import KVLayout

__all__ = ["LoadedModel", "adopt_model", "load_model"]


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model on its device, in evaluation mode, with our attention.

    `fingerprint` names the store's directory for this model's KV. `positions`: the longest sequence.
    """

    files: ModelFiles
    model: PreTrainedModel
    config: PretrainedConfig
    layout: KVLayout
    fingerprint: Fingerprint
    device: torch.device
    dtype: torch.dtype
    positions: int
    eos_tokens: tuple[int, ...]
    vocabulary: int


def load_model(spec: ModelSpec) -> LoadedModel:
    """Resolve, load and check MODEL. Sets torch's threads when the spec gives them.

    Raises ConfigError (no such model, unusable files, no such device) or UnsupportedModel (it would
    give wrong tokens here), each with what to change.
    """
    if spec.threads is not None:
        torch.set_num_threads(spec.threads)
    files = resolve_model(spec)
    config = load_config(files)
    refuse_unsupported(config)
    dtype: torch.dtype = getattr(torch, resolve_dtype(config, spec.dtype))
    model = _load_weights(files, dtype, _device(spec.device))
    return adopt_model(
        model,
        files,
        identity=model_identity(files),
        block_tokens=spec.block_tokens,
        check=spec.check,
    )


def adopt_model(
    model: PreTrainedModel, files: ModelFiles, *, identity: str, block_tokens: int, check: bool
) -> LoadedModel:
    """Make a model of `transformers` that is in memory run on the packed path; it is changed for good.

    `identity` stands for its weights in the fingerprint. Raises UnsupportedModel.
    """
    attention.register()
    config = model.config
    refuse_unsupported(config)
    _refuse_model(model)
    layout = kv_layout(config, str(model.dtype).removeprefix("torch."), block_tokens)

    def use_packed_path() -> None:
        model.set_attn_implementation(attention.ATTENTION_NAME)
        prepack(model)

    if check:
        check_model(model, layout, use_packed_path)
    else:
        use_packed_path()
    return LoadedModel(
        files=files,
        model=model.eval(),
        config=config,
        layout=layout,
        fingerprint=fingerprint(identity, "", layout),
        device=model.device,
        dtype=model.dtype,
        positions=max_positions(config),
        eos_tokens=eos_tokens(config, getattr(model, "generation_config", None)),
        vocabulary=int(config.vocab_size),
    )


def _device(name: str) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"no device {name!r}: use cpu, cuda, cuda:N or auto") from error
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"device {name!r} is not supported: use cpu, cuda, cuda:N or auto")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device cuda was asked for, and torch sees no CUDA device")
    return device


def _load_weights(files: ModelFiles, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
    shown = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        model = AutoModelForCausalLM.from_pretrained(files.directory, dtype=dtype)
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"the model in {files.directory} cannot be loaded: {error}") from error
    finally:
        if shown:
            transformers_logging.enable_progress_bar()
    loaded: PreTrainedModel = model.to(device).eval().requires_grad_(False)
    return loaded


def _refuse_model(model: PreTrainedModel) -> None:
    """What only the model's class tells."""
    name = type(model).__name__
    if getattr(model, "_is_stateful", False):
        raise UnsupportedModel(f"{name} keeps a state that is not KV by token")
    if not getattr(model, "_supports_attention_backend", False):
        raise UnsupportedModel(f"{name} does not let its attention function be replaced")
    kind = getattr(getattr(model, "generation_config", None), "cache_implementation", None)
    if kind == "quantized":
        raise UnsupportedModel(f"{name} asks for a quantised KV-cache")
