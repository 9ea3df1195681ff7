"""What a vLLM KV block is to us: opaque bytes of a known size, and a name for all that decides them.

A block of vLLM is, in each layer, the bytes of `block_tokens` tokens in whatever order the attention
backend likes (on the CPU keys lie transposed, values do not). They are stored and moved as they are, so any
backend works; what must agree between writer and reader is in the fingerprint. It knows neither vLLM nor
torch."""

from __future__ import annotations

import json

import msgspec

from dualpath.base.errors import UnsupportedModel
from dualpath.kv import Fingerprint, KVLayout, RowPart, fingerprint

__all__ = ["BlockFacts", "block_fingerprint", "opaque_layout", "tenant_salt"]


class BlockFacts(msgspec.Struct, frozen=True):
    """Everything that decides the bytes of a block, except tokens and tenant.

    `layers`: for each layer its name, the shape of one block, and its element type. `kv_spec`: vLLM's own
    description of the cache. `rank` of `ranks` tensor-parallel ones.
    """

    model: str
    revision: str
    vllm_version: str
    backend: str
    kv_spec: str
    layers: tuple[tuple[str, tuple[int, ...], str], ...]
    block_tokens: int
    block_bytes: tuple[int, ...]
    """Of one block, layer by layer."""
    rank: int
    ranks: int


def opaque_layout(facts: BlockFacts) -> KVLayout:
    """The layout of our Full Blocks: the layers' bytes of a block, one after the other.

    Raises UnsupportedModel where layers differ in size, or a layer's block is no whole number of bytes a
    token."""
    sizes = set(facts.block_bytes)
    if len(sizes) != 1:
        raise UnsupportedModel(
            f"the KV blocks of this model have {len(sizes)} different sizes {sorted(sizes)}: the connector "
            f"serves models whose layers are alike; run it without --kv-transfer-config"
        )
    row_bytes, ragged = divmod(sizes.pop(), facts.block_tokens)
    if ragged or row_bytes == 0:
        raise UnsupportedModel(
            f"a KV block of {facts.block_bytes[0]} bytes does not divide into {facts.block_tokens} tokens; "
            f"set another --block-size"
        )
    return KVLayout(
        kind="opaque",
        n_layers=len(facts.block_bytes),
        block_tokens=facts.block_tokens,
        parts=(RowPart("opaque", heads=1, dim=row_bytes),),
        dtype="uint8",
        item_bytes=1,
    )


def block_fingerprint(facts: BlockFacts) -> Fingerprint:
    """Names the store's directory. Servers whose facts differ in anything share no block (case 21)."""
    parallel = json.dumps(msgspec.to_builtins(facts), sort_keys=True)
    return fingerprint(facts.model, facts.revision, opaque_layout(facts), parallel=parallel)


def tenant_salt(cache_salt: str | None, adapter: str | None) -> str:
    """The salt of a request's keys: tenants and adapters (LoRA) share no block. "" without either."""
    if not cache_salt and not adapter:
        return ""
    return json.dumps([cache_salt or "", adapter or ""])
