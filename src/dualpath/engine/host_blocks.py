"""One request's KV as Full Blocks in host memory: a source of cached rows and a sink of new ones.

Layer Blocks are copied at once, in the caller's thread: for memory that is near, a thread would cost
more. The memory is the caller's; it knows no requests, leases or peers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future

import numpy as np

from dualpath.kv.layout import KVLayout

__all__ = ["HostBlocks"]


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
        start = 0
        for piece in self._pieces(layer, 0, len(rows) // self.layout.row_bytes):
            stop = start + len(piece)
            np.copyto(rows[start:stop], np.frombuffer(piece, dtype=np.uint8))
            start = stop
        done: Future[int] = Future()
        done.set_result(len(rows))
        return done

    def hand_over(self, layer: int, first_token: int, rows: memoryview) -> None:
        """Keep the rows of tokens from `first_token` on."""
        source = np.frombuffer(rows, dtype=np.uint8)
        stop_token = first_token + len(source) // self.layout.row_bytes
        start = 0
        for piece in self._pieces(layer, first_token, stop_token):
            stop = start + len(piece)
            np.copyto(np.frombuffer(piece, dtype=np.uint8), source[start:stop])
            start = stop

    def _pieces(self, layer: int, first_token: int, stop_token: int) -> Iterator[memoryview]:
        """The bytes of these tokens, block by block."""
        for part in self.layout.layer_spans(layer, first_token, stop_token):
            yield self.blocks[part.block][part.span.offset : part.span.stop]
