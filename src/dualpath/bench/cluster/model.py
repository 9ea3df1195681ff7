"""The model of benchmarks on a testbed: random, and with so much KV that reading it is what takes the time.

Storage limits prefill where reading a turn's KV takes longer than computing the turn. That ratio is
(KV bytes a FLOP) * (FLOP a second of the prefill engines) / (bytes a second of their storage NIC).
The paper's node has about 80,000 FLOP for each byte of its NIC, a core of a CPU about 600 for each of a NIC
of 400 Mb/s. So for the same ratio the model must have more KV for its FLOPs than published ones, by that
factor. `arithmetic` gives the numbers to compare.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from dualpath.engine.model_source import ModelFiles, cache_directory, publish_directory
from dualpath.engine.tiny import write_random_model
from dualpath.kv.layout import KVLayout

__all__ = [
    "RANDOM",
    "Arithmetic",
    "arithmetic",
    "random_model",
    "weight_count",
]

RANDOM = "random"
"""What --model calls it."""

_VERSION = "v1"
_CONFIG: Mapping[str, object] = {
    "model_type": "llama",
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "head_dim": 64,
}
"""64 KiB of KV a token in float32. Many layers, so that loading a layer overlaps with computing others."""


@dataclass(frozen=True, slots=True)
class Arithmetic:
    """Of one turn: `cached_tokens` read, `append_tokens` computed. GB = 1e9 bytes, PFLOP = 1e15."""

    kv_bytes_token: int
    flop_token: float
    """Of one appended token, its attention to the cached ones included."""
    gb_pflop: float


def random_model() -> Path:
    """Its directory, made on first use."""
    target = cache_directory() / "models" / f"bench-kv-{_VERSION}"
    return publish_directory(target, lambda directory: write_random_model(_CONFIG, directory))


def weight_count(files: ModelFiles) -> int:
    """Weights that a token is multiplied with: matrices without embeddings, with the head."""
    from safetensors import safe_open

    found: dict[str, int] = {}
    for path in sorted(files.directory.glob("*.safetensors")):
        with safe_open(path, framework="np") as tensors:
            for name in tensors.keys():  # noqa: SIM118 - no dictionary
                shape = tensors.get_slice(name).get_shape()
                if len(shape) > 1:
                    found[name] = math.prod(shape)
    embeddings = sum(size for name, size in found.items() if "embed_tokens" in name)
    headless = not any("lm_head" in name for name in found)
    # A head that is tied to the embeddings is not stored, and has their size.
    return sum(found.values()) - (0 if headless else embeddings)


def arithmetic(
    layout: KVLayout,
    *,
    weights: int,
    query_width: int,
    cached_tokens: int,
    append_tokens: int,
) -> Arithmetic:
    """As the table of published models is computed: two FLOPs a weight, and 4 L H d c of attention (GQA).

    `weights`: without embeddings, with the head. `query_width`: query heads times their size.
    """
    kv_bytes = layout.row_bytes * layout.n_layers
    flop = 2.0 * weights + 4.0 * layout.n_layers * query_width * cached_tokens
    return Arithmetic(kv_bytes, flop, 1e6 * kv_bytes * cached_tokens / (append_tokens * flop))
