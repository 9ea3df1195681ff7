"""A packed ragged batch, and where its KV lives during one forward pass.

Several requests are laid one after another in a batch of dimension 1: every token has its own
position, and the boundaries travel to the attention function as a keyword of the model call. The
model's layers call `PackedKV.update` with the new tokens' KV and then the attention function, which
reads cached and new rows back through `PackedKV.rows`.

Invariants: segments are adjacent and in order; `rows(layer, i)` has `cached + new` rows of segment i,
in the order of the tokens, as `dualpath.kv.layout` lays them out.
This module knows neither schedulers nor where the cached rows came from.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers.cache_utils import Cache

from dualpath.base.errors import UnsupportedModel
from dualpath.kv.layout import KVLayout

__all__ = ["STEP_KEYWORD", "PackedBatch", "PackedKV", "Segment"]

STEP_KEYWORD = "dualpath_step"
"""Keyword of the model call that carries the `PackedKV` to the attention function."""


@dataclass(frozen=True, slots=True)
class Segment:
    """One request in a packed batch: its new tokens are rows `[start, start + new_tokens)`."""

    start: int
    cached_tokens: int
    new_tokens: int

    @property
    def stop(self) -> int:
        return self.start + self.new_tokens

    @property
    def total_tokens(self) -> int:
        return self.cached_tokens + self.new_tokens


@dataclass(frozen=True, slots=True)
class PackedBatch:
    """The segments of one forward pass. `decoding`: every request has exactly one new token."""

    segments: tuple[Segment, ...]
    decoding: bool

    @classmethod
    def of(cls, cached_tokens: Sequence[int], new_tokens: Sequence[int]) -> PackedBatch:
        """Pack requests in the given order. Every one has at least one new token."""
        segments: list[Segment] = []
        start = 0
        for cached, new in zip(cached_tokens, new_tokens, strict=True):
            if new < 1 or cached < 0:
                raise ValueError(f"{new} new tokens on {cached} cached: need >= 1 and >= 0")
            segments.append(Segment(start, cached, new))
            start += new
        return cls(tuple(segments), all(s.new_tokens == 1 for s in segments))

    @property
    def new_tokens(self) -> int:
        return self.segments[-1].stop if self.segments else 0

    def positions(self) -> list[int]:
        """Position of every packed token in its own request."""
        return [p for s in self.segments for p in range(s.cached_tokens, s.total_tokens)]


class PackedKV(Cache, ABC):
    """The cache object the model sees, for one forward pass.

    `attention_s` accumulates the seconds spent in attention (on the CPU, where calls are blocking).
    """

    def __init__(self, batch: PackedBatch, layout: KVLayout) -> None:
        # Without layers of its own nothing in the base class can be mistaken for stored state.
        super().__init__(layers=[])
        self.batch = batch
        self.layout = layout
        self.attention_s = 0.0

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        layer_idx: int,
        *args: object,
        **kwargs: object,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Called by the model: keep the new rows, hand them back unchanged.

        Shapes `[1, heads, new_tokens, dim]` of the layout's two parts, keys or latents first.
        """
        first, second = self.layout.parts
        if (
            key_states.shape[1] != first.heads
            or key_states.shape[3] != first.dim
            or value_states.shape[1] != second.heads
            or value_states.shape[3] != second.dim
        ):
            raise UnsupportedModel(
                f"layer {layer_idx} caches {tuple(key_states.shape)} and "
                f"{tuple(value_states.shape)}, its configuration promises {self.layout.parts}: "
                "this model keeps KV in a form that is not supported"
            )
        self.store(layer_idx, key_states, value_states)
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Positions are always given, so no model derives them from this."""
        return max((s.cached_tokens for s in self.batch.segments), default=0)

    @abstractmethod
    def store(self, layer: int, first: torch.Tensor, second: torch.Tensor) -> None:
        """Write the new rows of a layer, so that `rows` gives them; shapes as in `update`."""

    @abstractmethod
    def rows(self, layer: int, index: int) -> torch.Tensor:
        """`[cached + new, row_elements]` of segment `index`; the rows are contiguous."""

    def attended(self, layer: int) -> None:
        """Attention of this layer is over: its cached rows are not read again."""
