"""From a Hugging Face `config.json` to a `ModelShape`.

Knows the field names of the architectures it lists and refuses others. A file may have a section `dualpath`
with what such files do not say: how KV and weights are kept where the model is served, and where the numbers
are from; the files of this package all have one.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from enum import StrEnum
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Annotated

import msgspec

from dualpath.base.errors import ConfigError
from dualpath.sim.model import (
    Experts,
    Formats,
    GroupedAttention,
    Indexer,
    LatentAttention,
    ModelShape,
)

__all__ = ["MODEL_TYPES", "ModelSection", "WeightFormat", "load_model", "model_names"]

_GROUPED = ("glm4_moe", "gpt_oss", "llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe")
_LATENT = ("deepseek_v3", "deepseek_v32", "kimi_k2")
MODEL_TYPES = tuple(sorted(_GROUPED + _LATENT))
"""Of `model_type` in a `config.json`, those that are known."""


class WeightFormat(StrEnum):
    """How weights are kept. Embeddings have 16 bits always."""

    BF16 = "bf16"
    """Any 16 bits."""
    FP8 = "fp8"
    """A byte; a scale for each 128 x 128 of them is not counted."""
    MXFP4 = "mxfp4"
    """MLPs in 4 bits with a scale byte for each 32, multiplied in 16 bits; attention in 16 bits."""


_FLAG = f"--weights {'|'.join(WeightFormat)} with what comes nearest"


class ModelSection(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The section `dualpath` of a model file; None is for what the rest of the file says.

    `sources`: where the numbers are from, by field, `config` for the rest of the file.
    """

    name: str
    sources: dict[str, str]
    weights: WeightFormat | None = None
    kv_bytes_per_element: Annotated[float, msgspec.Meta(gt=0)] | None = None
    kv_extra_bytes_layer: Annotated[int, msgspec.Meta(ge=0)] = 0


def model_names() -> list[str]:
    """The model files of this package, by name, sorted."""
    return sorted(
        each.name.removesuffix(".json")
        for each in _shipped().iterdir()
        if each.name.endswith(".json")
    )


def load_model(
    source: str | Path | Mapping[str, object],
    *,
    kv_bytes_per_element: float | None = None,
    weights: WeightFormat | None = None,
) -> ModelShape:
    """The shape of a model in `model_names()`, of a `config.json` (or its directory), or of what is in one.

    A `Path`, and a string with a slash or that ends in `.json`, is a file or directory. `weights`, and
    `kv_bytes_per_element` (which then includes everything), go before what the file says; a file that says
    nothing has both in 16 bits. Raises ConfigError that names file and field.
    """
    if kv_bytes_per_element is not None and kv_bytes_per_element <= 0:
        raise ConfigError(f"KV bytes of an element: expected > 0, got {kv_bytes_per_element}")
    if isinstance(source, Mapping):
        values, name = source, "config"
    else:
        values, name = _read(source), str(source)
    config = _Config(values, f"model {name}")
    kind = config.text("model_type")
    if kind not in MODEL_TYPES:
        raise config.error("model_type", f"one of {', '.join(MODEL_TYPES)}")
    section = config.section()
    said = section.weights if section else None
    formats = _formats(weights or said or config.weights(), section, kv_bytes_per_element)
    name = section.name if section else name
    if kind in _GROUPED:
        return _grouped(config, kind, name, formats)
    return _latent(config, kind, name, formats)


def _read(source: str | Path) -> Mapping[str, object]:
    name = str(source)
    file: Traversable
    if isinstance(source, Path) or os.sep in name or name.endswith(".json"):
        path = Path(source).expanduser()
        file = path / "config.json" if path.is_dir() else path
    else:
        names = model_names()
        if name.lower() not in names:
            raise ConfigError(
                f"model {name!r}: expected one of {', '.join(names)}, or the path of a config.json with a "
                f"model_type of {', '.join(MODEL_TYPES)}"
            )
        file = _shipped() / f"{name.lower()}.json"
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"model {name}: cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"model {name}: expected JSON: {error}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"model {name}: expected a JSON object, got {type(values).__name__}")
    return values


def _shipped() -> Traversable:
    return resources.files("dualpath.sim") / "model_files"


class _Config:
    """The fields of a config, checked when they are asked for."""

    def __init__(self, values: Mapping[str, object], where: str) -> None:
        self._values = values
        self._where = where

    def error(self, field: str, expected: str) -> ConfigError:
        got = self._values.get(field, "nothing")
        return ConfigError(f"{self._where}: {field}: expected {expected}, got {got!r}")

    def has(self, field: str) -> bool:
        return field in self._values

    def text(self, field: str) -> str:
        value = self._values.get(field)
        if not isinstance(value, str):
            raise self.error(field, "a string")
        return value

    def flag(self, field: str) -> bool:
        return bool(self._values.get(field, False))

    def count(self, field: str, default: int | None = None, *, least: int = 1) -> int:
        """A whole number; the default also stands for null."""
        value = self._values.get(field)
        if value is None and default is not None:
            return default
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise self.error(field, f"a whole number >= {least}")
        return value

    def sequence(self, field: str) -> list[object] | None:
        value = self._values.get(field)
        if value is not None and not isinstance(value, list):
            raise self.error(field, "a list")
        return value

    def section(self) -> ModelSection | None:
        if "dualpath" not in self._values:
            return None
        try:
            return msgspec.convert(self._values["dualpath"], ModelSection)
        except msgspec.ValidationError as error:
            raise ConfigError(f"{self._where}: dualpath: {error}") from error

    def weights(self) -> WeightFormat:
        """From `quantization_config`, else from the type of the tensors."""
        quantised = self._values.get("quantization_config")
        if quantised is None:
            kind = self._values.get("dtype", self._values.get("torch_dtype", "bfloat16"))
            if kind not in ("bfloat16", "float16"):
                raise self.error("torch_dtype", f"bfloat16 or float16, or {_FLAG}")
            return WeightFormat.BF16
        method = quantised.get("quant_method") if isinstance(quantised, Mapping) else None
        if method not in (WeightFormat.FP8, WeightFormat.MXFP4):
            raise self.error("quantization_config", f"quant_method fp8 or mxfp4, or {_FLAG}")
        return WeightFormat(method)


def _formats(
    weights: WeightFormat, section: ModelSection | None, kv_bytes_per_element: float | None
) -> Formats:
    extra_bytes = 0
    if kv_bytes_per_element is None and section is not None:
        kv_bytes_per_element = section.kv_bytes_per_element
        extra_bytes = section.kv_extra_bytes_layer
    attention, mlp = {
        WeightFormat.BF16: (2.0, 2.0),
        WeightFormat.FP8: (1.0, 1.0),
        WeightFormat.MXFP4: (2.0, 0.5 + 1 / 32),
    }[weights]
    return Formats(
        kv_bytes_per_element=kv_bytes_per_element or 2.0,
        kv_extra_bytes_layer=extra_bytes,
        attention_weight_bytes=attention,
        mlp_weight_bytes=mlp,
        fp8_products=weights is WeightFormat.FP8,
    )


def _grouped(config: _Config, kind: str, name: str, formats: Formats) -> ModelShape:
    layers, hidden = config.count("num_hidden_layers"), config.count("hidden_size")
    heads = config.count("num_attention_heads")
    width = config.count("intermediate_size")
    dense_layers, experts = layers, None
    if kind == "qwen3_moe":
        experts = Experts(
            routed=config.count("num_experts"),
            active=config.count("num_experts_per_tok"),
            width=config.count("moe_intermediate_size"),
        )
        every, dense = (
            config.count("decoder_sparse_step", 1),
            config.sequence("mlp_only_layers") or [],
        )
        dense_layers = sum(n in dense or (n + 1) % every != 0 for n in range(layers))
    elif kind == "glm4_moe":
        dense_layers, experts = _first_dense(config, layers), _experts_and_shared(config)
    elif kind in ("mixtral", "gpt_oss"):
        experts = Experts(
            routed=config.count("num_local_experts"),
            active=config.count("num_experts_per_tok"),
            width=width,
        )
        dense_layers = 0
    window_layers, window_tokens = _windows(config, kind, layers)
    return ModelShape(
        name=name,
        layers=layers,
        hidden=hidden,
        vocabulary=config.count("vocab_size"),
        tied_embeddings=config.flag("tie_word_embeddings"),
        attention=GroupedAttention(
            heads=heads,
            kv_heads=config.count("num_key_value_heads", heads),
            head_dim=config.count("head_dim", hidden // heads),
        ),
        dense_layers=dense_layers,
        dense_width=width,
        experts=experts,
        window_layers=window_layers,
        window_tokens=window_tokens,
        formats=formats,
    )


def _windows(config: _Config, kind: str, layers: int) -> tuple[int, int]:
    """How many layers have a window, and its tokens."""
    if kind == "mistral" and not config.has("sliding_window"):
        raise config.error("sliding_window", "tokens or null: without it such a model has a window")
    tokens = config.count("sliding_window", 0, least=0)
    if kind.startswith("qwen") and not config.flag("use_sliding_window"):
        tokens = 0
    types = config.sequence("layer_types")
    if types is not None:
        if not all(each in ("full_attention", "sliding_attention") for each in types):
            raise config.error("layer_types", "full_attention and sliding_attention only")
        windows = types.count("sliding_attention")
        if windows and not tokens:
            raise config.error("sliding_window", "the tokens of the windows in layer_types")
    elif not tokens:
        windows = 0
    elif kind == "gpt_oss":
        windows = (layers + 1) // 2  # Alternating, a window first.
    elif kind.startswith("qwen"):
        windows = max(0, layers - config.count("max_window_layers", layers, least=0))
    else:
        windows = layers if kind in ("mistral", "mixtral") else 0
    if windows == layers:
        raise config.error("sliding_window", "at least one layer that sees the whole context")
    return windows, tokens if windows else 0


def _latent(config: _Config, kind: str, name: str, formats: Formats) -> ModelShape:
    layers = config.count("num_hidden_layers")
    if config.count("moe_layer_freq", 1) != 1:
        raise config.error("moe_layer_freq", "1")
    indexer = None
    if kind == "deepseek_v32":
        indexer = Indexer(
            heads=config.count("index_n_heads"),
            head_dim=config.count("index_head_dim"),
            top_tokens=config.count("index_topk"),
        )
    return ModelShape(
        name=name,
        layers=layers,
        hidden=config.count("hidden_size"),
        vocabulary=config.count("vocab_size"),
        tied_embeddings=config.flag("tie_word_embeddings"),
        attention=LatentAttention(
            heads=config.count("num_attention_heads"),
            q_rank=config.count("q_lora_rank", 0) or None,
            kv_rank=config.count("kv_lora_rank"),
            nope_dim=config.count("qk_nope_head_dim"),
            rope_dim=config.count("qk_rope_head_dim"),
            value_dim=config.count("v_head_dim"),
            indexer=indexer,
        ),
        dense_layers=_first_dense(config, layers),
        dense_width=config.count("intermediate_size"),
        experts=_experts_and_shared(config),
        formats=formats,
    )


def _first_dense(config: _Config, layers: int) -> int:
    return min(layers, config.count("first_k_dense_replace", least=0))


def _experts_and_shared(config: _Config) -> Experts:
    width = config.count("moe_intermediate_size")
    return Experts(
        routed=config.count("n_routed_experts"),
        active=config.count("num_experts_per_tok"),
        width=width,
        shared_width=config.count("n_shared_experts", least=0) * width,
    )
