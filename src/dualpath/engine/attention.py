"""The attention function that models of `transformers` call, over a packed ragged batch.

Each request attends to its own rows only. Decoding (one new token) is one call over all its rows.
Prefill is two calls merged by their log-sum-exp: the cached prefix without a mask and with the group
of query heads folded into rows, so no key is ever repeated; and the new tokens causally.
MLA keeps latents: a prefix is expanded to keys and values, or attended to in latent space (the
absorbed form, through the weights of `kv_b_proj`) where that is less work, as in decoding.

The function is registered for attention only, not for masks: then `transformers` builds none.
It knows no requests and no devices beyond the kernel that returns a log-sum-exp there. The CUDA
kernels are written to their documented interface, but no test of this project runs on a GPU.
"""

from __future__ import annotations

import time
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from dualpath.base.errors import UnsupportedModel
from dualpath.engine.packed import STEP_KEYWORD, PackedKV, Segment

__all__ = ["ATTENTION_NAME", "Partial", "attend", "merge", "packed_attention", "register"]

ATTENTION_NAME = "dualpath"

_WINDOW_QUERIES = 256
"""Queries a call in a windowed layer: bounds the mask to 256 x (256 + window)."""

_FOREIGN_KEYWORDS = ("softcap", "position_bias", "alibi", "block_indices", "indices")
"""What some models ask of their attention and this function cannot do."""


class Partial(NamedTuple):
    """Attention over some of the keys. `out` is `[1, heads, queries, dim]`, normalised over them;
    `lse` `[1, heads, queries]`, float32, the natural log of the sum of exponentials."""

    out: Tensor
    lse: Tensor


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    scale: float,
    causal: bool = False,
    bias: Tensor | None = None,
) -> Partial:
    """Attention with its log-sum-exp.

    `query` `[1, H, q, d]`, `key` `[1, H, k, d]`, `value` `[1, H, k, dv]` with dv <= d; only the last
    dimension needs to be contiguous. `causal` needs q = k. `bias` `[q, k]` is added to the scores.
    """
    width = value.shape[-1]
    if query.device.type == "cpu":
        if width != query.shape[-1]:
            value = functional.pad(value, (0, query.shape[-1] - width))
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, 0.0, causal, attn_mask=bias, scale=scale
        )
        return Partial(out[..., :width], lse)
    if bias is None and _cuda_flash_takes(query):
        if width != query.shape[-1]:
            value = functional.pad(value, (0, query.shape[-1] - width))
        found = torch.ops.aten._scaled_dot_product_flash_attention(
            query, key, value, 0.0, causal, False, scale=scale
        )
        return Partial(found[0][..., :width], found[1])
    return _attend_in_full(query, key, value, scale, causal, bias)


def _cuda_flash_takes(query: Tensor) -> bool:
    width = query.shape[-1]
    half = query.dtype in (torch.bfloat16, torch.float16)
    return query.device.type == "cuda" and half and width <= 256 and width % 8 == 0


def _attend_in_full(
    query: Tensor, key: Tensor, value: Tensor, scale: float, causal: bool, bias: Tensor | None
) -> Partial:
    """The definition, with all scores in memory: where no kernel returns a log-sum-exp."""
    scores = (query.float() @ key.float().transpose(-1, -2)) * scale
    if causal:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(later, float("-inf"))
    if bias is not None:
        scores = scores + bias
    lse = torch.logsumexp(scores, dim=-1)
    out = torch.exp(scores - lse.unsqueeze(-1)) @ value.float()
    return Partial(out.to(query.dtype), lse)


def merge(a: Partial, b: Partial) -> Partial:
    """Attention over the union of two disjoint sets of keys."""
    share = torch.sigmoid(a.lse - b.lse).unsqueeze(-1)
    out = torch.lerp(b.out.float(), a.out.float(), share)
    return Partial(out.to(a.out.dtype), torch.logaddexp(a.lse, b.lse))


class _Layer(NamedTuple):
    """What one call of the attention function is about. `sinks` `[heads]`; `window` in tokens."""

    module: Any
    kv: PackedKV
    scale: float
    sinks: Tensor | None
    window: int | None


def packed_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The registered function. `query` `[1, H, T, d]`, `key` and `value` of the new tokens only.

    Gives `[1, T, H, dv]`. Raises UnsupportedModel when the model asks for what it cannot do.
    """
    started = time.perf_counter()
    kv = kwargs.get(STEP_KEYWORD)
    if not isinstance(kv, PackedKV):
        raise UnsupportedModel(
            "this model does not pass keywords on to its attention layers, so a packed batch cannot "
            "reach them"
        )
    _refuse_foreign(module, attention_mask, kwargs)
    layer = _Layer(
        module=module,
        kv=kv,
        scale=query.shape[-1] ** -0.5 if scaling is None else scaling,
        sinks=kwargs.get("s_aux"),
        window=kwargs.get("sliding_window"),
    )
    one_segment = _mla_segment if kv.layout.kind == "mla" else _gqa_segment
    index: int = module.layer_idx  # type: ignore[assignment]
    outs = [
        one_segment(
            layer,
            segment,
            kv.rows(index, i),
            query[:, :, segment.start : segment.stop],
            key[:, :, segment.start : segment.stop],
            value[:, :, segment.start : segment.stop],
        )
        for i, segment in enumerate(kv.batch.segments)
    ]
    out = outs[0] if len(outs) == 1 else torch.cat(outs, dim=2)
    kv.attended(index)
    kv.attention_s += time.perf_counter() - started
    return out.transpose(1, 2), None


def _refuse_foreign(module: Any, attention_mask: Tensor | None, kwargs: dict[str, Any]) -> None:
    for name in _FOREIGN_KEYWORDS:
        if kwargs.get(name) is not None:
            raise UnsupportedModel(f"attention with `{name}` is not supported")
    if attention_mask is not None:
        raise UnsupportedModel("this model builds an attention mask of its own")
    if not getattr(module, "is_causal", True) or kwargs.get("is_causal") is False:
        raise UnsupportedModel("this model attends to later tokens")


def _finish(layer: _Layer, found: Partial) -> Tensor:
    """Apply attention sinks: a sink adds exp(sink) to the denominator and nothing to the sum."""
    if layer.sinks is None:
        return found.out
    kept = torch.sigmoid(found.lse - layer.sinks.float()[None, :, None])
    return (found.out.float() * kept.unsqueeze(-1)).to(found.out.dtype)


def _gqa_segment(
    layer: _Layer, segment: Segment, rows: Tensor, query: Tensor, key: Tensor, value: Tensor
) -> Tensor:
    """One request of a GQA or MHA layer; gives `[1, H, T, d]`."""
    key_part, value_part = layer.kv.layout.parts
    columns = key_part.heads * key_part.dim
    keys = rows[:, :columns].view(-1, key_part.heads, key_part.dim).transpose(0, 1)[None]
    values = rows[:, columns:].view(-1, value_part.heads, value_part.dim).transpose(0, 1)[None]
    window = layer.window
    if window is not None and window < segment.total_tokens:
        return _windowed(layer, segment, query, keys, values, window)
    if segment.new_tokens == 1:
        return _finish(layer, _folded(query, keys, values, layer.scale))
    group = query.shape[1] // key_part.heads
    found = attend(
        query,
        key.repeat_interleave(group, dim=1),
        value.repeat_interleave(group, dim=1),
        scale=layer.scale,
        causal=True,
    )
    if segment.cached_tokens:
        cached = segment.cached_tokens
        prefix = _folded(query, keys[:, :, :cached], values[:, :, :cached], layer.scale)
        found = merge(prefix, found)
    return _finish(layer, found)


def _folded(
    query: Tensor, keys: Tensor, values: Tensor, scale: float, bias: Tensor | None = None
) -> Partial:
    """All queries against all keys, the query heads of a group as rows of their key head.

    `query` `[1, H, T, d]`, `keys` and `values` `[1, Hk, n, .]`; gives `[1, H, T, dv]`.
    """
    heads, tokens, kv_heads = query.shape[1], query.shape[2], keys.shape[1]
    group = heads // kv_heads
    folded = query.reshape(1, kv_heads, group * tokens, query.shape[3])
    if bias is not None:
        bias = bias.repeat(group, 1)
    found = attend(folded, keys, values, scale=scale, bias=bias)
    return Partial(
        found.out.reshape(1, heads, tokens, values.shape[3]), found.lse.reshape(1, heads, tokens)
    )


def _windowed(
    layer: _Layer, segment: Segment, query: Tensor, keys: Tensor, values: Tensor, window: int
) -> Tensor:
    """Queries see the `window` last keys, themselves included."""
    outs: list[Tensor] = []
    for start in range(0, segment.new_tokens, _WINDOW_QUERIES):
        stop = min(segment.new_tokens, start + _WINDOW_QUERIES)
        first = max(0, segment.cached_tokens + start - window + 1)
        last = segment.cached_tokens + stop
        at = torch.arange(segment.cached_tokens + start, last, device=query.device)[:, None]
        to = torch.arange(first, last, device=query.device)[None, :]
        hidden = (to > at) | (to <= at - window)
        bias = torch.zeros(hidden.shape, dtype=query.dtype, device=query.device)
        bias.masked_fill_(hidden, float("-inf"))
        found = _folded(
            query[:, :, start:stop],
            keys[:, :, first:last],
            values[:, :, first:last],
            layer.scale,
            bias,
        )
        outs.append(_finish(layer, found))
    return torch.cat(outs, dim=2)


def _mla_segment(
    layer: _Layer, segment: Segment, rows: Tensor, query: Tensor, key: Tensor, value: Tensor
) -> Tensor:
    """One request of an MLA layer; `key` and `value` are the expanded new tokens."""
    latent, _ = layer.kv.layout.parts
    absorbable = isinstance(getattr(layer.module, "kv_b_proj", None), torch.nn.Linear)
    if absorbable and segment.new_tokens == 1:
        return _finish(layer, _absorbed(layer, query, rows))
    found = attend(query, key, value, scale=layer.scale, causal=True)
    if segment.cached_tokens:
        cached = rows[: segment.cached_tokens]
        if absorbable and _absorbing_is_less(layer, segment.new_tokens, query, value):
            prefix = _absorbed(layer, query, cached)
        else:
            keys, values = layer.module.expand_kv(
                cached[None, None, :, : latent.dim], cached[None, None, :, latent.dim :]
            )
            prefix = attend(query, keys, values, scale=layer.scale)
        found = merge(prefix, found)
    return _finish(layer, found)


def _absorbing_is_less(layer: _Layer, new_tokens: int, query: Tensor, value: Tensor) -> bool:
    """Whether attending in latent space takes fewer products a cached token and head.

    Expanding costs rank * (nope + v) once and nope + rope + v a query; absorbing 2 * rank + rope.
    """
    latent, rope = layer.kv.layout.parts
    width, v_width = query.shape[3], value.shape[3]
    expanding = latent.dim * (width - rope.dim + v_width) + new_tokens * (width + v_width)
    return new_tokens * (2 * latent.dim + rope.dim) < expanding


def _absorbed(layer: _Layer, query: Tensor, rows: Tensor) -> Partial:
    """Attention in latent space: rows are keys and, without their rotary part, values too."""
    latent, rope = layer.kv.layout.parts
    heads, tokens = query.shape[1], query.shape[2]
    nope = query.shape[3] - rope.dim
    weights = layer.module.kv_b_proj.weight.view(heads, -1, latent.dim)
    to_latent, from_latent = weights[:, :nope], weights[:, nope:]
    absorbed = torch.cat((query[0, :, :, :nope] @ to_latent, query[0, :, :, nope:]), dim=-1)
    # All heads share the rows. Kernels run in parallel over heads, so leave them as many as there are
    # threads; their keys are the same memory.
    lanes = torch.get_num_threads() if heads % torch.get_num_threads() == 0 else 1
    folded = absorbed.reshape(1, lanes, heads // lanes * tokens, absorbed.shape[-1])
    shared = rows[None, None].expand(1, lanes, -1, -1)
    found = attend(folded, shared, shared, scale=layer.scale)
    out = found.out.reshape(heads, tokens, -1)[..., : latent.dim] @ from_latent.transpose(1, 2)
    return Partial(out[None], found.lse.reshape(1, heads, tokens))


def register() -> None:
    """Make the function known to `transformers`. Idempotent."""
    ALL_ATTENTION_FUNCTIONS.register(ATTENTION_NAME, packed_attention)
