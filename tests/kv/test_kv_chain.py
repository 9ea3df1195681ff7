"""Keys of blocks: cases 4, 14, 15, 16 and 21."""

from __future__ import annotations

import os
import subprocess
import sys

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dualpath.kv import (
    KVLayout,
    RowPart,
    block_chain,
    block_key,
    fingerprint,
    is_root,
    pack_tokens,
    root_key,
)

LAYOUT = KVLayout("gqa", 2, 4, (RowPart("key", 2, 8), RowPart("value", 2, 8)), "float16", 2)
FP = fingerprint("some/model", "main", LAYOUT)

tokens = st.lists(st.integers(0, 2**32 - 1), max_size=40)

SCRIPT = """
from dualpath.kv import KVLayout, RowPart, block_chain, fingerprint, root_key
layout = KVLayout("gqa", 2, 4, (RowPart("key", 2, 8), RowPart("value", 2, 8)), "float16", 2)
root = root_key(fingerprint("some/model", "main", layout), "tenant")
print(*(each.key.hex() for each in block_chain(root, list(range(20)), 4)))
"""


@pytest.mark.parametrize("seed", ["0", "12345"])
def test_same_keys_in_every_process(seed: str) -> None:
    env = {**os.environ, "PYTHONHASHSEED": seed}
    out = subprocess.run(
        [sys.executable, "-c", SCRIPT], env=env, check=True, capture_output=True, timeout=60
    ).stdout.decode()
    chain = block_chain(root_key(FP, "tenant"), list(range(20)), 4)
    assert out.split() == [each.key.hex() for each in chain]


def test_keys_do_not_change_between_versions() -> None:
    """A store outlives the process: these bytes are a format."""
    assert FP.hex() == "26b35be3ad2656b0187a9f4cfff04686c0fe3160b688f9bf5acae58924269cb5"
    root = root_key(FP, "tenant")
    assert root.hex() == "00000000bbbc28bcc1dcd74351d12a4b5a9ec7847ef6e205ec0733208759ce5c"
    assert (
        block_key(root, [1, 2, 3, 4]).hex()
        == "8931ca58eebdf200c9880062abf72b2917377cfab38fc1b7d40f2da96fb3d4fe"
    )


@given(tokens, st.integers(1, 8))
def test_only_full_blocks_have_keys(ids: list[int], block_tokens: int) -> None:
    root = root_key(FP, "")
    chain = block_chain(root, ids, block_tokens)
    assert len(chain) == len(ids) // block_tokens
    parents = [root, *(each.key for each in chain)]
    assert [each.parent for each in chain] == parents[:-1]
    joined = [token for each in chain for token in each.tokens]
    assert joined == ids[: len(chain) * block_tokens]


@given(tokens, tokens, st.integers(1, 4))
def test_same_key_exactly_for_the_same_prefix(
    one: list[int], other: list[int], block_tokens: int
) -> None:
    root = root_key(FP, "")
    chains = zip(
        block_chain(root, one, block_tokens), block_chain(root, other, block_tokens), strict=False
    )
    for number, (a, b) in enumerate(chains, start=1):
        same = one[: number * block_tokens] == other[: number * block_tokens]
        assert (a.key == b.key) == same


@given(tokens, st.integers(1, 4), st.integers(0, 10))
def test_a_chain_can_be_extended(ids: list[int], block_tokens: int, at: int) -> None:
    root = root_key(FP, "")
    whole = block_chain(root, ids, block_tokens)
    head = whole[: min(at, len(whole))]
    parent = head[-1].key if head else root
    rest = block_chain(parent, ids[len(head) * block_tokens :], block_tokens)
    assert head + rest == whole


def test_tenants_and_models_share_no_key() -> None:
    ids = list(range(8))
    others = [
        fingerprint("some/model", "v2", LAYOUT),
        fingerprint("other/model", "main", LAYOUT),
        fingerprint("some/model", "main", LAYOUT, parallel="tp2"),
        fingerprint("some/model", "main", msgspec.structs.replace(LAYOUT, dtype="bfloat16")),
        fingerprint("some/model", "main", msgspec.structs.replace(LAYOUT, block_tokens=8)),
        # Field borders count: no concatenation of names gives another model's fingerprint.
        fingerprint("some/modelmain", "", LAYOUT),
    ]
    roots = [root_key(fp, "") for fp in (FP, *others)]
    roots += [root_key(FP, "tenant a"), root_key(FP, "tenant b")]
    keys = {each.key for root in roots for each in block_chain(root, ids, 4)}
    assert len(keys) == 2 * len(roots)


def test_roots_are_told_from_blocks() -> None:
    root = root_key(FP, "tenant")
    assert is_root(root)
    assert not any(is_root(each.key) for each in block_chain(root, list(range(400)), 4))


def test_token_ids_that_do_not_fit_are_refused() -> None:
    assert pack_tokens([1, 2**32 - 1]) == b"\x01\0\0\0\xff\xff\xff\xff"
    for bad in (-1, 2**32):
        with pytest.raises(ValueError, match="token ids"):
            pack_tokens([bad])
