"""Measures how long attention takes here, for the compute quota (paper, intra-engine scheduling).

One layer's attention is timed alone, on random KV, for a few (cached, bsz) shapes, and scaled to all
layers; `AttentionFit` is fitted to that. It takes a second or two, so the result is kept in the cache
directory under the model's fingerprint, the device, the threads and the version of torch.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import numpy as np
import torch
from torch import Tensor

from dualpath.base.errors import UnsupportedModel
from dualpath.engine.attention import packed_attention
from dualpath.engine.model import LoadedModel
from dualpath.engine.model_source import cache_directory, write_note
from dualpath.engine.packed import STEP_KEYWORD, PackedBatch, PackedKV
from dualpath.kv.layout import KVLayout
from dualpath.policy.quota import AttentionFit, pairs

__all__ = [
    "AttentionSample",
    "fit_attention",
    "fit_seconds",
    "measure_attention",
    "profile_attention",
]

_BUDGET_S = 2.0
_REPEATS = 3

_SHAPES: tuple[tuple[tuple[int, int], ...], ...] = (
    ((0, 16),),
    ((256, 1),) * 8,
    ((512, 64),),
    ((0, 256),),
    ((256, 32),) * 4,
    ((2048, 64),),
    ((1024, 256),),
    ((4096, 128),),
)
"""Batches of (cached, bsz), the quick ones first: measuring stops when its time is up."""

_MIN_SHAPES = 4


class AttentionSample(msgspec.Struct, frozen=True):
    """`seconds` of attention over all layers for a batch of `entries` with `pairs` query-key pairs."""

    entries: int
    pairs: int
    seconds: float


class _RandomKV(PackedKV):
    """Rows of any content; nothing is stored."""

    def __init__(self, batch: PackedBatch, layout: KVLayout, device: torch.device) -> None:
        super().__init__(batch, layout)
        longest = max(s.total_tokens for s in batch.segments)
        rows = torch.randn((longest, layout.row_elements), device=device)
        self._rows = rows.to(getattr(torch, layout.dtype))

    def store(self, layer: int, first: Tensor, second: Tensor) -> None:
        pass

    def rows(self, layer: int, index: int) -> Tensor:
        return self._rows[: self.batch.segments[index].total_tokens]


def profile_attention(loaded: LoadedModel) -> AttentionFit:
    """The fit for this model on this device, measured or remembered. Takes about two seconds at most."""
    note = _note(loaded)
    try:
        return msgspec.json.decode(note.read_bytes(), type=AttentionFit)
    except (OSError, msgspec.MsgspecError):
        pass
    fit = fit_attention(measure_attention(loaded))
    write_note(note, msgspec.json.encode(fit).decode())
    return fit


@torch.inference_mode()
def measure_attention(loaded: LoadedModel) -> list[AttentionSample]:
    """Seconds of attention for a few batches; the quickest of some repetitions each."""
    samples: list[AttentionSample] = []
    until = time.perf_counter() + _BUDGET_S
    for shape in _SHAPES:
        if time.perf_counter() > until and len(samples) >= _MIN_SHAPES:
            break
        batch = PackedBatch.of([cached for cached, _ in shape], [bsz for _, bsz in shape])
        call = _layer_call(loaded, batch)
        call()
        seconds = min(_timed(call, loaded.device) for _ in range(_REPEATS))
        samples.append(
            AttentionSample(
                entries=len(shape),
                pairs=sum(pairs(cached, bsz) for cached, bsz in shape),
                seconds=seconds * loaded.layout.n_layers,
            )
        )
    return samples


def fit_attention(samples: Sequence[AttentionSample]) -> AttentionFit:
    """See `fit_seconds`."""
    base_s, per_entry_s, per_pair_s = fit_seconds(
        [(1.0, each.entries, each.pairs) for each in samples], [each.seconds for each in samples]
    )
    return AttentionFit(base_s, per_entry_s, per_pair_s)


def fit_seconds(counts: Sequence[Sequence[float]], seconds: Sequence[float]) -> list[float]:
    """Seconds for each of the columns of `counts`, a row for each measurement.

    Least squares of the relative error, with no negative coefficient: one that would be negative is left
    out and the others are fitted again.
    """
    columns = np.array(counts, dtype=np.float64) / np.array(seconds)[:, None]
    used = list(range(columns.shape[1]))
    found = np.zeros(len(used))
    while used:
        part = np.linalg.lstsq(columns[:, used], np.ones(len(columns)), rcond=None)[0]
        if (part >= 0).all():
            found[used] = part
            break
        del used[int(part.argmin())]
    return [float(each) for each in found]


def _layer_call(loaded: LoadedModel, batch: PackedBatch) -> Callable[[], object]:
    """Attention of one layer over a batch with random content."""
    module = next(
        (m for m in loaded.model.modules() if getattr(m, "layer_idx", None) == 0 and _attends(m)),
        None,
    )
    if module is None:
        raise UnsupportedModel(f"{type(loaded.model).__name__} has no attention module to measure")
    layout, config = loaded.layout, loaded.config
    kv_heads, width, v_width = layout.parts[0].heads, layout.parts[0].dim, layout.parts[1].dim
    if layout.kind == "mla":
        kv_heads = config.num_attention_heads
        width, v_width = config.qk_nope_head_dim + config.qk_rope_head_dim, config.v_head_dim
    heads = config.num_attention_heads
    query, key, value = (
        torch.randn((1, n, batch.new_tokens, dim), device=loaded.device).to(loaded.dtype)
        for n, dim in ((heads, width), (kv_heads, width), (kv_heads, v_width))
    )
    keywords = {STEP_KEYWORD: _RandomKV(batch, layout, loaded.device)}
    return lambda: packed_attention(module, query, key, value, None, **keywords)


def _attends(module: torch.nn.Module) -> bool:
    return hasattr(module, "num_key_value_groups") or hasattr(module, "kv_b_proj")


def _timed(call: Callable[[], object], device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    started = time.perf_counter()
    call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - started


def _note(loaded: LoadedModel) -> Path:
    device = torch.cuda.get_device_name(loaded.device) if loaded.device.type == "cuda" else "cpu"
    label = f"{loaded.fingerprint.hex()} {device} {torch.get_num_threads()} {torch.__version__}"
    return cache_directory() / "attention" / f"{hashlib.sha256(label.encode()).hexdigest()}.json"
