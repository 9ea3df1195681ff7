"""One request's KV as Full Blocks in host memory: a source of cached rows and a sink of new ones.

Layer Blocks are copied at once, in the caller's thread: for memory that is near, a thread would cost
more. The memory is the caller's; it knows no requests, leases or peers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

import numpy as np

from dualpath.kv.layout import KVLayout

__all__ = ["HostBlocks"]


@dataclass(frozen=True, slots=True)
class _Piece:
    """Rows of one block: `[first, stop)` of the request's tokens and where their bytes lie."""

    first: int
    stop: int
    block: memoryview


class HostBlocks:
    """A `LayerSource` and `LayerSink` over blocks that hold tokens in order from token 0 on.

    Each block is writable and at least one Full Block long.
    """

    def __init__(self, layout: KVLayout, blocks: Sequence[memoryview]) -> None:
        self.layout = layout
        self.blocks = list(blocks)

    @classmethod
    def allocate(cls, layout: KVLayout, tokens: int) -> HostBlocks:
        """Zeroed memory of its own, for `tokens` tokens."""
        count = layout.blocks_for(tokens)
        return cls(layout, [memoryview(bytearray(layout.full_block_bytes)) for _ in range(count)])

    def start_load(self, layer: int, into: memoryview) -> Future[int]:
        """Fill `into` with the rows of the first tokens, as many as it holds; done on return."""
        rows = np.frombuffer(into, dtype=np.uint8)
        for piece in self._pieces(layer, 0, len(rows) // self.layout.row_bytes):
            start, stop = (at * self.layout.row_bytes for at in (piece.first, piece.stop))
            np.copyto(rows[start:stop], np.frombuffer(piece.block, dtype=np.uint8))
        done: Future[int] = Future()
        done.set_result(len(rows))
        return done

    def hand_over(self, layer: int, first_token: int, rows: memoryview) -> None:
        """Keep the rows of tokens from `first_token` on."""
        source = np.frombuffer(rows, dtype=np.uint8)
        count = len(source) // self.layout.row_bytes
        for piece in self._pieces(layer, first_token, first_token + count):
            start, stop = (
                (at - first_token) * self.layout.row_bytes for at in (piece.first, piece.stop)
            )
            np.copyto(np.frombuffer(piece.block, dtype=np.uint8), source[start:stop])

    def _pieces(self, layer: int, first: int, stop: int) -> Iterator[_Piece]:
        size = self.layout.block_tokens
        while first < stop:
            until = min(stop, first - first % size + size)
            span = self.layout.layer_span(layer, first % size, until - (first - first % size))
            block = self.blocks[first // size]
            yield _Piece(first, until, block[span.offset : span.stop])
            first = until
