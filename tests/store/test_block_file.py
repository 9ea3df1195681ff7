"""The codec of block files: what is written proves what it is, and anything else is found."""

from __future__ import annotations

import struct
from collections.abc import Sequence

import msgspec
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from dualpath.base.ids import BlockKey
from dualpath.kv import BlockIdentity, block_chain, block_key, root_key
from dualpath.store.block_file import (
    HEADER_BYTES,
    MAX_BLOCK_TOKENS,
    BlockHeader,
    Mismatch,
    decode_header,
    encode_header,
    file_bytes,
    find_mismatch,
    payload_checksum,
)

FP = bytes(range(32))
PAYLOAD = bytes(range(256)) * 20


def identity_of(tokens: Sequence[int]) -> BlockIdentity:
    return block_chain(root_key(FP, ""), tokens, len(tokens))[0]


IDENTITY = identity_of([5, 6, 7, 2**32 - 1])


def header_of(identity: BlockIdentity = IDENTITY, fp: bytes = FP) -> BlockHeader:
    return BlockHeader(fp, identity, len(PAYLOAD), payload_checksum(PAYLOAD))


def mismatch(page: bytes, payload: bytes = PAYLOAD, asked: BlockIdentity = IDENTITY) -> str:
    found = find_mismatch(
        page, memoryview(payload), fingerprint=FP, identity=asked, payload_bytes=len(PAYLOAD)
    )
    return str(found) if found else ""


@pytest.mark.parametrize("n_tokens", [1, 64, 256, MAX_BLOCK_TOKENS])
def test_round_trip(n_tokens: int) -> None:
    header = header_of(identity_of(range(n_tokens)))
    page = encode_header(header)
    assert len(page) == HEADER_BYTES == 4096
    assert decode_header(page) == header
    assert mismatch(page, asked=header.identity) == ""


def test_more_tokens_than_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="a block of 991 tokens does not fit"):
        encode_header(header_of(identity_of(range(MAX_BLOCK_TOKENS + 1))))


def test_padding_of_the_payload_is_not_part_of_it() -> None:
    assert mismatch(encode_header(header_of()), PAYLOAD + b"anything") == ""


@pytest.mark.parametrize(("payload", "size"), [(1, 8192), (4096, 8192), (4097, 12288)])
def test_file_is_whole_pages(payload: int, size: int) -> None:
    assert file_bytes(payload) == size


def test_each_difference_is_named_with_expected_and_got() -> None:
    page = encode_header(header_of())
    other = identity_of([5, 6, 7, 8])
    root = root_key(FP, "other tenant")
    assert mismatch(encode_header(header_of(fp=bytes(32)))).startswith(
        f"fingerprint: expected {FP.hex()}, got {bytes(32).hex()}"
    )
    assert mismatch(page, asked=other).startswith(f"key: expected {other.key.hex()}, got ")
    forged = msgspec.structs.replace(IDENTITY, parent=root)
    assert mismatch(page, asked=forged).startswith(f"parent: expected {root.hex()}, got ")
    forged = msgspec.structs.replace(IDENTITY, tokens=(5, 6, 9, 8))
    assert mismatch(page, asked=forged) == "token 2: expected 9, got 7"
    forged = msgspec.structs.replace(IDENTITY, tokens=(5, 6))
    assert mismatch(page, asked=forged) == "number of tokens: expected 2, got 4"
    short = BlockHeader(FP, IDENTITY, 100, 0)
    assert mismatch(encode_header(short)) == f"payload bytes: expected {len(PAYLOAD)}, got 100"
    spoiled = b"\xff" + PAYLOAD[1:]
    assert mismatch(page, spoiled) == (
        f"payload checksum: expected {payload_checksum(PAYLOAD):016x}, "
        f"got {payload_checksum(spoiled):016x}"
    )


def test_another_version_is_not_read() -> None:
    page = bytearray(encode_header(header_of()))
    page[7] += 1
    assert mismatch(bytes(page)).startswith("magic and version: expected 4455414c4b560001, got ")


def test_short_page_is_not_read() -> None:
    assert mismatch(b"") == "header bytes: expected 4096, got 0"


def reseal(page: bytearray) -> bytes:
    """Give a changed header page a right checksum, as somebody who means harm would."""
    page[-8:] = struct.pack("<Q", xxhash.xxh3_64_intdigest(bytes(page[:-8])))
    return bytes(page)


def test_key_must_follow_from_parent_and_tokens() -> None:
    page = bytearray(encode_header(header_of()))
    page[64] ^= 1
    assert mismatch(reseal(page)).startswith("key of parent and tokens: expected")


def test_absurd_number_of_tokens_is_not_followed() -> None:
    page = bytearray(encode_header(header_of()))
    page[8:12] = struct.pack("<I", 2**31)
    assert mismatch(reseal(page)) == f"number of tokens: expected at most 990, got {2**31}"


@given(st.integers(0, HEADER_BYTES * 8 - 1))
def test_every_flipped_bit_of_the_header_is_found(bit: int) -> None:
    page = bytearray(encode_header(header_of()))
    page[bit // 8] ^= 1 << bit % 8
    assert isinstance(decode_header(bytes(page)), Mismatch)


@given(st.integers(0, len(PAYLOAD) * 8 - 1))
def test_every_flipped_bit_of_the_payload_is_found(bit: int) -> None:
    payload = bytearray(PAYLOAD)
    payload[bit // 8] ^= 1 << bit % 8
    assert mismatch(encode_header(header_of()), bytes(payload)).startswith("payload checksum")


@given(st.binary(max_size=5000))
@settings(max_examples=200)
def test_arbitrary_bytes_are_a_mismatch(data: bytes) -> None:
    assert isinstance(decode_header(data), Mismatch)


@given(
    st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=MAX_BLOCK_TOKENS),
    st.binary(min_size=32, max_size=32),
)
@settings(max_examples=50)
def test_any_identity_round_trips(tokens: list[int], parent: bytes) -> None:
    above = BlockKey(parent)
    identity = BlockIdentity(key=block_key(above, tokens), parent=above, tokens=tuple(tokens))
    header = header_of(identity)
    assert decode_header(encode_header(header)) == header
