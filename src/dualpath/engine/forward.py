"""One forward pass over a packed batch.

Invariant: positions, boundaries and the cache object are always given, so the model derives nothing
from shapes. This module knows neither where cached rows come from nor what becomes of the logits.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from dualpath.engine.packed import STEP_KEYWORD, PackedKV

__all__ = ["forward_packed"]


@torch.inference_mode()
def forward_packed(
    model: PreTrainedModel, token_ids: Sequence[int], kv: PackedKV, logits_of: Sequence[int]
) -> Tensor:
    """Run the new tokens of `kv.batch` through the model.

    `token_ids`: the new tokens of all segments, in order. `logits_of`: the segments whose last token's
    logits are wanted. Gives `[len(logits_of), vocabulary]`, float32, on the model's device.
    Whatever `kv` raises comes through.
    """
    batch = kv.batch
    if len(token_ids) != batch.new_tokens:
        raise ValueError(f"{len(token_ids)} tokens for a batch of {batch.new_tokens}")
    device = model.device
    last_rows = [batch.segments[i].stop - 1 for i in logits_of]
    keywords = {STEP_KEYWORD: kv}
    out = model(
        input_ids=torch.tensor([list(token_ids)], device=device),
        position_ids=torch.tensor([batch.positions()], device=device),
        cache=kv,
        use_cache=True,
        logits_to_keep=torch.tensor(last_rows, dtype=torch.long, device=device),
        **keywords,
    )
    logits: Tensor = out.logits[0].float()
    return logits
