"""The keys of blocks: a SHA-256 chain over (fingerprint, tenant salt, tokens).

A key names a token prefix under one model, layout and tenant. It is the same in every process and
after every restart (case 14), 64-bit collisions cannot occur (case 15), and no two tenants share a
key (case 16). Only full blocks have keys (case 4).
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence

import msgspec

from dualpath.base.ids import BlockKey
from dualpath.kv.layout import LAYOUT_VERSION, KVLayout

__all__ = [
    "BlockIdentity",
    "Fingerprint",
    "block_chain",
    "block_key",
    "fingerprint",
    "is_root",
    "pack_tokens",
    "root_key",
]

Fingerprint = bytes
"""32 bytes: model identity, revision, layout and block size; names the store's directory."""

_ROOT_TAG = bytes(4)


class BlockIdentity(msgspec.Struct, frozen=True):
    """What a stored block must prove to be before its bytes are used (case 2)."""

    key: BlockKey
    parent: BlockKey
    tokens: tuple[int, ...]


def fingerprint(model: str, revision: str, layout: KVLayout, parallel: str = "tp1") -> Fingerprint:
    """Identity of everything that decides the bytes of a block, except tokens and tenant.

    `model` and `revision` identify the weights' content, not a path.
    """
    fields = ("dualpath", str(LAYOUT_VERSION), model, revision, parallel)
    digest = hashlib.sha256()
    for field in (*(f.encode() for f in fields), msgspec.json.encode(layout)):
        digest.update(len(field).to_bytes(4, "little") + field)
    return digest.digest()


def root_key(fp: Fingerprint, cache_salt: str) -> BlockKey:
    """Parent of a prompt's first block; holds the tenant's salt ("" for none).

    It starts with four zero bytes, so that an index rebuilt from storage, which knows no salts, can
    tell a first block from one whose parent is missing.
    """
    digest = hashlib.sha256(b"root" + fp + cache_salt.encode()).digest()
    return BlockKey(_ROOT_TAG + digest[len(_ROOT_TAG) :])


def is_root(key: BlockKey) -> bool:
    """Whether `key` is a `root_key`. One block key in 2**32 also looks like one; `TrieIndex`, the

    only user, then merely fails to see that the parent of that block's children is missing.
    """
    return key.startswith(_ROOT_TAG)


def pack_tokens(tokens: Sequence[int]) -> bytes:
    """Token ids as little-endian 32-bit integers. Raises ValueError for ids outside [0, 2**32)."""
    try:
        return struct.pack(f"<{len(tokens)}I", *tokens)
    except struct.error as error:
        raise ValueError(f"token ids must be integers in [0, 2**32): {error}") from error


def block_key(parent: BlockKey, tokens: Sequence[int]) -> BlockKey:
    """Key of the block `tokens` that follows `parent`."""
    return BlockKey(hashlib.sha256(parent + pack_tokens(tokens)).digest())


def block_chain(root: BlockKey, tokens: Sequence[int], block_tokens: int) -> list[BlockIdentity]:
    """Identities of the full blocks of `tokens`, in order; a partial tail has none.

    `root` is a `root_key`, or the key of the block before, to extend a chain.
    """
    chain: list[BlockIdentity] = []
    parent = root
    for start in range(0, len(tokens) - block_tokens + 1, block_tokens):
        block = tuple(tokens[start : start + block_tokens])
        key = block_key(parent, block)
        chain.append(BlockIdentity(key=key, parent=parent, tokens=block))
        parent = key
    return chain
