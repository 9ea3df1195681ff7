"""What agents say to each other: whole, or refused."""

from __future__ import annotations

import msgspec
import pytest

from dualpath.base.errors import PeerLost
from dualpath.kv import pack_tokens
from dualpath.vllm.peer_messages import (
    FetchPrompt,
    OfferedBlock,
    PairName,
    PeerMessage,
    PromptOffer,
    PromptReceived,
    ReadForPeer,
    ReadForPeerDone,
    decode_message,
    encode_message,
)

NAME = PairName("r", 3)
READ = ReadForPeer(NAME, 1, bytes(32), "salt", pack_tokens([1, 2**31, 3]), 0, 2)


@pytest.mark.parametrize(
    "message",
    [
        READ,
        ReadForPeerDone(NAME, 1, (OfferedBlock(0, 7, 2**62),)),
        FetchPrompt(NAME, 1, bytes(32), 4),
        PromptOffer(NAME, 1, 130, (OfferedBlock(4, 1, 5), OfferedBlock(5, 2, 6))),
        PromptReceived(NAME),
    ],
    ids=lambda message: type(message).__name__,
)
def test_there_and_back(message: PeerMessage) -> None:
    assert decode_message(encode_message(message)) == message


def test_tokens_come_as_they_went() -> None:
    assert READ.token_ids == [1, 2**31, 3]


@pytest.mark.parametrize(
    "changes", [{"tokens": b"12345"}, {"first_block": -1}, {"fingerprint": "text"}, {"type": "no"}]
)
def test_what_no_agent_sends(changes: dict[str, object]) -> None:
    fields = {**msgspec.msgpack.decode(encode_message(READ)), **changes}
    with pytest.raises(PeerLost, match="a message that is none"):
        decode_message(msgspec.msgpack.encode(fields))


def test_garbage() -> None:
    with pytest.raises(PeerLost):
        decode_message(b"\xc1")
