"""The keys of blocks: a SHA-256 chain over (fingerprint, tenant salt, tokens).

A key names a token prefix under one model, layout and tenant. It is the same in every process and
after every restart (case 14), 64-bit collisions cannot occur (case 15), and no two tenants share a
key (case 16). Only full blocks have keys (case 4).
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence

import msgspec

from dualpath.base.ids import BlockKey
from dualpath.kv.layout import LAYOUT_VERSION, KVLayout

__all__ = ["BlockIdentity", "Fingerprint", "block_chain", "fingerprint", "root_key"]

Fingerprint = bytes
"""32 bytes: model identity, revision, layout and block size; names the store's directory."""


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
    """Parent of a prompt's first block; holds the tenant's salt ("" for none)."""
    return BlockKey(hashlib.sha256(b"root" + fp + cache_salt.encode()).digest())


def block_chain(root: BlockKey, tokens: Sequence[int], block_tokens: int) -> list[BlockIdentity]:
    """Identities of the full blocks of `tokens`, in order; a partial tail has none."""
    chain: list[BlockIdentity] = []
    parent = root
    for start in range(0, len(tokens) - block_tokens + 1, block_tokens):
        block = tuple(tokens[start : start + block_tokens])
        key = BlockKey(hashlib.sha256(parent + array("I", block).tobytes()).digest())
        chain.append(BlockIdentity(key=key, parent=parent, tokens=block))
        parent = key
    return chain
