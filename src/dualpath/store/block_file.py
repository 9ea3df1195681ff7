"""The format of a block file, and the proof that a file holds the block that is asked for.

    offset  size
    0       8     magic, with the format's version
    8       4     n, number of tokens
    12      4     zero
    16      8     payload_bytes
    24      8     xxh3-64 of the payload
    32      32    fingerprint
    64      32    key
    96      32    parent
    128     4 n   token ids
    ...           zeros
    4088    8     xxh3-64 of the bytes before
    4096          payload: one Full Block, then zeros up to a whole page

Integers are little-endian. A checksum guards against bit rot and torn writes, not against somebody
who can write the file; the key, which is recomputed from parent and tokens, proves identity (cases
2, 7, 15, 21). Pure: bytes in, values out. It knows no files.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import xxhash

from dualpath.base.errors import ConfigError
from dualpath.base.ids import PAGE_BYTES, BlockKey
from dualpath.kv.chain import BlockIdentity, Fingerprint, block_key, pack_tokens

__all__ = [
    "HEADER_BYTES",
    "MAX_BLOCK_TOKENS",
    "BlockHeader",
    "Mismatch",
    "decode_header",
    "encode_header",
    "file_bytes",
    "find_mismatch",
    "header_page",
    "payload_checksum",
    "prove_header",
    "require_fitting_header",
]

HEADER_BYTES = PAGE_BYTES
_MAGIC = b"DUALKV\x00\x01"
_FIXED = struct.Struct("<8sI4xQQ32s32s32s")
_CHECKSUM = struct.Struct("<Q")
_CHECKSUM_OFFSET = HEADER_BYTES - _CHECKSUM.size

MAX_BLOCK_TOKENS = (_CHECKSUM_OFFSET - _FIXED.size) // 4
"""Token ids that fit the header page: 990. The usual block sizes are 64 to 256."""

_Buffer = bytes | bytearray | memoryview


@dataclass(frozen=True, slots=True)
class BlockHeader:
    """What a header page says. `payload_xxh3` covers `payload_bytes`, not the padding."""

    fingerprint: Fingerprint
    identity: BlockIdentity
    payload_bytes: int
    payload_xxh3: int


@dataclass(frozen=True, slots=True)
class Mismatch:
    """Why a file is not the block that was asked for."""

    what: str
    expected: str
    got: str

    def __str__(self) -> str:
        return f"{self.what}: expected {self.expected}, got {self.got}"


def file_bytes(payload_bytes: int) -> int:
    """Size of the file of a block: the header page and the payload in whole pages."""
    return HEADER_BYTES + -(-payload_bytes // PAGE_BYTES) * PAGE_BYTES


def payload_checksum(payload: _Buffer) -> int:
    return xxhash.xxh3_64_intdigest(payload)


def encode_header(header: BlockHeader) -> bytes:
    """The header page. Raises ValueError when the token ids do not fit it."""
    identity = header.identity
    if len(identity.tokens) > MAX_BLOCK_TOKENS:
        raise ValueError(
            f"a block of {len(identity.tokens)} tokens does not fit a block file; "
            f"the most is {MAX_BLOCK_TOKENS}"
        )
    fixed = _FIXED.pack(
        _MAGIC,
        len(identity.tokens),
        header.payload_bytes,
        header.payload_xxh3,
        header.fingerprint,
        identity.key,
        identity.parent,
    )
    body = (fixed + pack_tokens(identity.tokens)).ljust(_CHECKSUM_OFFSET, b"\0")
    return body + _CHECKSUM.pack(xxhash.xxh3_64_intdigest(body))


def header_page(fingerprint: Fingerprint, identity: BlockIdentity, payload: memoryview) -> bytes:
    """The header page of the block `identity`, which holds exactly `payload`."""
    return encode_header(
        BlockHeader(fingerprint, identity, payload.nbytes, payload_checksum(payload))
    )


def require_fitting_header(block_tokens: int) -> None:
    """Raises ConfigError when the token ids of a block do not fit a header page."""
    if block_tokens > MAX_BLOCK_TOKENS:
        raise ConfigError(
            f"blocks of {block_tokens} tokens do not fit a block file: "
            f"set the block size to at most {MAX_BLOCK_TOKENS} tokens"
        )


def decode_header(page: _Buffer) -> BlockHeader | Mismatch:
    """Read a header page that claims to be whole, and prove that its key is that of its tokens."""
    if len(page) < HEADER_BYTES:
        return Mismatch("header bytes", str(HEADER_BYTES), str(len(page)))
    magic, n_tokens, payload_bytes, payload_xxh3, fp, key, parent = _FIXED.unpack_from(page)
    if magic != _MAGIC:
        return Mismatch("magic and version", _MAGIC.hex(), magic.hex())
    (expected_xxh3,) = _CHECKSUM.unpack_from(page, _CHECKSUM_OFFSET)
    got_xxh3 = xxhash.xxh3_64_intdigest(page[:_CHECKSUM_OFFSET])
    if got_xxh3 != expected_xxh3:
        return Mismatch("header checksum", f"{expected_xxh3:016x}", f"{got_xxh3:016x}")
    if n_tokens > MAX_BLOCK_TOKENS:
        return Mismatch("number of tokens", f"at most {MAX_BLOCK_TOKENS}", str(n_tokens))
    tokens = struct.unpack_from(f"<{n_tokens}I", page, _FIXED.size)
    proven = block_key(BlockKey(parent), tokens)
    if proven != key:
        return Mismatch("key of parent and tokens", proven.hex(), key.hex())
    identity = BlockIdentity(key=BlockKey(key), parent=BlockKey(parent), tokens=tokens)
    return BlockHeader(fp, identity, payload_bytes, payload_xxh3)


def prove_header(
    page: _Buffer, *, fingerprint: Fingerprint, key: BlockKey, payload_bytes: int
) -> BlockHeader | Mismatch:
    """The header of the block `key`, as far as it can be proved without its tokens and payload."""
    header = decode_header(page)
    if isinstance(header, Mismatch):
        return header
    if header.fingerprint != fingerprint:
        return Mismatch("fingerprint", fingerprint.hex(), header.fingerprint.hex())
    if header.identity.key != key:
        return Mismatch("key", key.hex(), header.identity.key.hex())
    if header.payload_bytes != payload_bytes:
        return Mismatch("payload bytes", str(payload_bytes), str(header.payload_bytes))
    return header


def find_mismatch(
    page: _Buffer,
    payload: memoryview,
    *,
    fingerprint: Fingerprint,
    identity: BlockIdentity,
    payload_bytes: int,
) -> Mismatch | None:
    """Why header page and payload are not the block `identity`, or None when they prove to be it.

    `payload` holds `payload_bytes` or more; the rest is padding.
    """
    header = prove_header(
        page, fingerprint=fingerprint, key=identity.key, payload_bytes=payload_bytes
    )
    if isinstance(header, Mismatch):
        return header
    found = header.identity
    if found.parent != identity.parent:
        return Mismatch("parent", identity.parent.hex(), found.parent.hex())
    if found.tokens != identity.tokens:
        return _token_mismatch(identity.tokens, found.tokens)
    got_xxh3 = payload_checksum(payload[:payload_bytes])
    if got_xxh3 != header.payload_xxh3:
        return Mismatch("payload checksum", f"{header.payload_xxh3:016x}", f"{got_xxh3:016x}")
    return None


def _token_mismatch(expected: tuple[int, ...], got: tuple[int, ...]) -> Mismatch:
    if len(expected) != len(got):
        return Mismatch("number of tokens", str(len(expected)), str(len(got)))
    where = next(i for i, (a, b) in enumerate(zip(expected, got, strict=True)) if a != b)
    return Mismatch(f"token {where}", str(expected[where]), str(got[where]))
