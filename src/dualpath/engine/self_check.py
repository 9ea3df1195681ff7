"""Compares a loaded model's packed path with plain `transformers`, before it serves anyone.

A model may ignore our attention function, ask for what it cannot do, or keep KV in another form; the
configuration does not tell. Right tokens come first: what differs is refused.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from transformers import PreTrainedModel

from dualpath.base.errors import UnsupportedModel
from dualpath.engine.forward import forward_packed
from dualpath.engine.packed import PackedBatch, PackedKV
from dualpath.kv.layout import KVLayout

__all__ = ["check_model"]

_TOLERANCE = {"float32": 2e-3, "bfloat16": 0.25, "float16": 0.1}
"""Largest difference of logits, in standard deviations of the logits."""

_CHECK_TOKENS = 24


class _ResidentKV(PackedKV):
    """All layers of a small batch in memory; cached rows are copied from an earlier pass."""

    def __init__(self, batch: PackedBatch, layout: KVLayout, device: torch.device) -> None:
        super().__init__(batch, layout)
        self._rows = [
            torch.zeros(
                (layout.n_layers, s.total_tokens, layout.row_elements),
                dtype=getattr(torch, layout.dtype),
                device=device,
            )
            for s in batch.segments
        ]
        self.attended_layers: set[int] = set()

    def adopt(self, index: int, earlier: _ResidentKV, earlier_index: int) -> None:
        """Take the first cached rows of a segment from an earlier pass over the same tokens."""
        cached = self.batch.segments[index].cached_tokens
        self._rows[index][:, :cached].copy_(earlier._rows[earlier_index][:, :cached])

    def store(self, layer: int, first: Tensor, second: Tensor) -> None:
        packed = torch.cat([part[0].transpose(0, 1).flatten(1) for part in (first, second)], dim=1)
        for rows, s in zip(self._rows, self.batch.segments, strict=True):
            rows[layer, s.cached_tokens :].copy_(packed[s.start : s.stop])

    def rows(self, layer: int, index: int) -> Tensor:
        return self._rows[index][layer]

    def attended(self, layer: int) -> None:
        self.attended_layers.add(layer)


def check_model(
    model: PreTrainedModel, layout: KVLayout, use_packed_path: Callable[[], None]
) -> None:
    """`use_packed_path` changes the plain model. Raises UnsupportedModel when its logits change too.

    Two prompts packed without a prefix, then the end of the first as a chunk of several tokens and of
    the second as a single one, on the cached rest: the four ways attention is computed here.
    """
    window = getattr(model.config, "sliding_window", None) or 0
    limit = min(2048, getattr(model.config, "max_position_embeddings", 2048))
    long = max(_CHECK_TOKENS, min(limit, window + _CHECK_TOKENS))
    spread = torch.Generator().manual_seed(1)
    prompts = [
        torch.randint(0, model.config.vocab_size, (n,), generator=spread).tolist()
        for n in (long, _CHECK_TOKENS // 2)
    ]
    expected = _plain_logits(model, prompts)
    use_packed_path()
    try:
        found = _packed_logits(model, layout, prompts)
    except UnsupportedModel:
        raise
    except (TypeError, ValueError, AttributeError, RuntimeError) as error:
        raise UnsupportedModel(
            f"{type(model).__name__} fails in the packed path: {type(error).__name__}: {error}"
        ) from error
    tolerance = _TOLERANCE[layout.dtype] * float(expected.std())
    for how, logits in found.items():
        worst = float((logits - expected).abs().max())
        if not worst <= tolerance:
            raise UnsupportedModel(
                f"{type(model).__name__} would give wrong tokens here: logits of {how} differ from "
                f"plain transformers by {worst:.3g}, {tolerance:.3g} is allowed"
            )


@torch.inference_mode()
def _plain_logits(model: PreTrainedModel, prompts: list[list[int]]) -> Tensor:
    """Logits after each prompt `[prompts, vocabulary]`, one at a time, without any cache."""
    rows = []
    for prompt in prompts:
        ids = torch.tensor([prompt], device=model.device)
        out = model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False)
        rows.append(out.logits[0, -1].float())
    return torch.stack(rows)


def _packed_logits(
    model: PreTrainedModel, layout: KVLayout, prompts: list[list[int]]
) -> dict[str, Tensor]:
    lengths = [len(p) for p in prompts]
    whole = _ResidentKV(PackedBatch.of([0, 0], lengths), layout, model.device)
    tokens = [token for prompt in prompts for token in prompt]
    found = {"a whole prefill": forward_packed(model, tokens, whole, [0, 1])}
    if whole.attended_layers != set(range(layout.n_layers)):
        raise UnsupportedModel(
            f"{type(model).__name__} does not attend through its registered function in every layer"
        )
    chunk = [lengths[0] // 3, 1]
    cached = [n - c for n, c in zip(lengths, chunk, strict=True)]
    rest = _ResidentKV(PackedBatch.of(cached, chunk), layout, model.device)
    for index in range(2):
        rest.adopt(index, whole, index)
    tokens = [t for p, c in zip(prompts, cached, strict=True) for t in p[c:]]
    found["a chunk on cached KV"] = forward_packed(model, tokens, rest, [0, 1])
    return found
