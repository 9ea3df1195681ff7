"""How KV bytes lie in a block (paper, section 4: Layer Blocks and Full Blocks).

With `row_bytes` = KV bytes of one token in one layer:

- a Layer Block is `[1, block_tokens, row_bytes]`: one layer of `block_tokens` tokens;
- a Full Block is `[n_layers, block_tokens, row_bytes]`: the concatenation of its Layer Blocks,
  so nothing is ever converted between storage, network and device.

A row is the concatenation of its parts. GQA and MHA: all key heads, then all value heads.
MLA: the compressed latent, then the shared rotary key. This module does no I/O.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from dualpath.base.ids import PAGE_BYTES

__all__ = ["LAYOUT_VERSION", "BlockSpan", "KVLayout", "RowPart", "Span"]

LAYOUT_VERSION = 1
"""Part of every fingerprint: a change of the byte layout makes old stores a miss (case 21)."""


class Span(msgspec.Struct, frozen=True):
    """Half-open byte range `[offset, offset + length)`."""

    offset: int
    length: int

    @property
    def stop(self) -> int:
        return self.offset + self.length


class BlockSpan(msgspec.Struct, frozen=True):
    """Bytes inside the Full Block that is the `block`-th of a sequence."""

    block: int
    span: Span


class RowPart(msgspec.Struct, frozen=True):
    """One tensor of a row: `heads` x `dim` elements."""

    name: str
    heads: int
    dim: int


class KVLayout(msgspec.Struct, frozen=True):
    """Shape of the KV of one model.

    `kind` is "gqa" (also MHA; parts `key`, `value`) or "mla" (parts `latent`, `rope`).
    `dtype` is the torch name ("bfloat16", "float16", "float32"); `item_bytes` its size.
    """

    kind: str
    n_layers: int
    block_tokens: int
    parts: tuple[RowPart, ...]
    dtype: str
    item_bytes: int

    def __post_init__(self) -> None:
        sizes = [self.n_layers, self.block_tokens, self.item_bytes]
        sizes += [size for part in self.parts for size in (part.heads, part.dim)]
        if not self.parts or min(sizes) < 1:
            raise ValueError(f"every size of a KV layout must be at least 1: {self}")

    @property
    def row_elements(self) -> int:
        """Elements of one token in one layer."""
        return sum(part.heads * part.dim for part in self.parts)

    @property
    def row_bytes(self) -> int:
        """KV bytes of one token in one layer (the paper's `bytes`)."""
        return self.row_elements * self.item_bytes

    @property
    def layer_block_bytes(self) -> int:
        return self.block_tokens * self.row_bytes

    @property
    def full_block_bytes(self) -> int:
        return self.n_layers * self.layer_block_bytes

    @property
    def slot_bytes(self) -> int:
        """Size of a pool slot: a Full Block rounded up to pages, so that O_DIRECT can fill it."""
        return -(-self.full_block_bytes // PAGE_BYTES) * PAGE_BYTES

    def layer_span(self, layer: int, first_token: int = 0, stop_token: int | None = None) -> Span:
        """Bytes of tokens `[first_token, stop_token)` of one layer, inside a Full Block."""
        stop = self.block_tokens if stop_token is None else stop_token
        if not 0 <= layer < self.n_layers:
            raise ValueError(f"layer {layer} is not in [0, {self.n_layers})")
        if not 0 <= first_token <= stop <= self.block_tokens:
            raise ValueError(f"tokens [{first_token}, {stop}) are not in [0, {self.block_tokens})")
        base = layer * self.layer_block_bytes
        return Span(base + first_token * self.row_bytes, (stop - first_token) * self.row_bytes)

    def layer_spans(self, layer: int, first_token: int, stop_token: int) -> Iterator[BlockSpan]:
        """Where tokens `[first_token, stop_token)` of a sequence lie in one layer, block by block."""
        if first_token >= stop_token:
            return
        for block in range(first_token // self.block_tokens, self.blocks_for(stop_token)):
            start = block * self.block_tokens
            first = max(first_token - start, 0)
            stop = min(stop_token - start, self.block_tokens)
            yield BlockSpan(block, self.layer_span(layer, first, stop))

    def blocks_for(self, tokens: int) -> int:
        """Blocks that hold `tokens` tokens, the last one perhaps partly filled."""
        return -(-tokens // self.block_tokens)
