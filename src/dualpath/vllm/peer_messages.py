"""What the agents of two servers say to each other: MessagePack of these structs, over an authenticated
channel.

PE to DE: `ReadForPeer`, answered by `ReadForPeerDone`; the PE then pulls. DE to PE: `FetchPrompt`, answered
by `PromptOffer`; the DE pulls, and says `PromptReceived`. Blocks are counted from the start of the prompt.
Nothing here knows sockets."""

from __future__ import annotations

from typing import Annotated

import msgspec
import numpy as np

from dualpath.base.errors import PeerLost

__all__ = [
    "FetchPrompt",
    "OfferedBlock",
    "PairName",
    "PeerMessage",
    "PromptOffer",
    "PromptReceived",
    "ReadForPeer",
    "ReadForPeerDone",
    "decode_message",
    "encode_message",
]


_Count = Annotated[int, msgspec.Meta(ge=0)]
_TOKEN_BYTES = 4


class PairName(msgspec.Struct, frozen=True, array_like=True):
    """A request as the router names it, in both servers."""

    request: str
    attempt: int


class OfferedBlock(msgspec.Struct, frozen=True, array_like=True):
    """The `block`-th block of the prompt lies in `slot` of the sender's pool, under `stamp`."""

    block: _Count
    slot: _Count
    stamp: _Count


class ReadForPeer(msgspec.Struct, frozen=True, tag="read"):
    """Read the blocks `[first_block, stop_block)` of these tokens from the store, and keep them for us
    both.

    `tokens` are packed 32-bit ids, `fingerprint` says what a block is.
    """

    name: PairName
    serial: int
    fingerprint: bytes
    salt: str
    tokens: bytes
    first_block: _Count
    stop_block: _Count

    def __post_init__(self) -> None:
        if len(self.tokens) % _TOKEN_BYTES:
            raise ValueError(f"{len(self.tokens)} bytes are no whole number of tokens")

    @property
    def token_ids(self) -> list[int]:
        ids: list[int] = np.frombuffer(self.tokens, "<u4").tolist()
        return ids


class ReadForPeerDone(msgspec.Struct, frozen=True, tag="read_done"):
    """What could be read: a prefix of what was asked for."""

    name: PairName
    serial: int
    blocks: tuple[OfferedBlock, ...]


class FetchPrompt(msgspec.Struct, frozen=True, tag="fetch"):
    """What do you hold of this prompt, from `first_block` on?"""

    name: PairName
    serial: int
    fingerprint: bytes
    first_block: _Count


class PromptOffer(msgspec.Struct, frozen=True, tag="offer"):
    """These blocks, which hold the prompt's tokens up to `tokens`; none when it is not known, or no
    more."""

    name: PairName
    serial: int
    tokens: _Count
    blocks: tuple[OfferedBlock, ...]


class PromptReceived(msgspec.Struct, frozen=True, tag="received"):
    """All pulled: free it."""

    name: PairName


PeerMessage = ReadForPeer | ReadForPeerDone | FetchPrompt | PromptOffer | PromptReceived

_decoder: msgspec.msgpack.Decoder[PeerMessage] = msgspec.msgpack.Decoder(PeerMessage)


def encode_message(message: PeerMessage) -> bytes:
    """For `Channel.notify`."""
    return msgspec.msgpack.encode(message)


def decode_message(data: bytes) -> PeerMessage:
    """Raises PeerLost for what no agent of this version sends."""
    try:
        return _decoder.decode(data)
    except msgspec.DecodeError as error:
        raise PeerLost(f"a message that is none: {error}; run one version on all servers") from None
