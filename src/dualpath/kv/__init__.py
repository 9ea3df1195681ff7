"""KV blocks: their layout, their keys, the trie that indexes them, the pools that stage them."""

from __future__ import annotations

from dualpath.kv.chain import (
    BlockIdentity,
    Fingerprint,
    block_chain,
    block_key,
    fingerprint,
    is_root,
    pack_tokens,
    root_key,
)
from dualpath.kv.index import RemovedBlock, TrieIndex
from dualpath.kv.layout import LAYOUT_VERSION, BlockSpan, KVLayout, RowPart, Span
from dualpath.kv.pool import BufferPool, Lease, PoolGeometry

__all__ = [
    "LAYOUT_VERSION",
    "BlockIdentity",
    "BlockSpan",
    "BufferPool",
    "Fingerprint",
    "KVLayout",
    "Lease",
    "PoolGeometry",
    "RemovedBlock",
    "RowPart",
    "Span",
    "TrieIndex",
    "block_chain",
    "block_key",
    "fingerprint",
    "is_root",
    "pack_tokens",
    "root_key",
]
