"""The protocol, against a peer that sends what it likes, in whatever pieces."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dualpath.base.errors import StoreError
from dualpath.store.resp import ErrorReply, Reply, RespConnection, encode_command


class Peer:
    def __init__(self) -> None:
        ours, self.socket = socket.socketpair()
        self.link = RespConnection(ours)

    def close(self) -> None:
        self.link.close()
        self.socket.close()


@pytest.fixture
def peer() -> Iterator[Peer]:
    peer = Peer()
    yield peer
    peer.close()


def soon() -> float:
    return time.monotonic() + 20


def encode_reply(reply: Reply) -> bytes:
    """What a server sends for it; strings as bulk strings."""
    if reply is None:
        return b"$-1\r\n"
    if isinstance(reply, int):
        return b":%d\r\n" % reply
    if isinstance(reply, bytes):
        return b"$%d\r\n%b\r\n" % (len(reply), reply)
    if isinstance(reply, ErrorReply):
        return b"-%b\r\n" % reply.text.encode()
    return b"*%d\r\n" % len(reply) + b"".join(map(encode_reply, reply))


def test_commands_are_arrays_of_strings() -> None:
    assert (
        encode_command("GET", b"\x00\r\n", 12)
        == b"*3\r\n$3\r\nGET\r\n$3\r\n\x00\r\n\r\n$2\r\n12\r\n"
    )


texts = st.text(st.characters(codec="ascii", min_codepoint=32), max_size=30)
leaves = st.one_of(
    st.none(), st.integers(-(2**62), 2**62), st.binary(max_size=300), texts.map(ErrorReply)
)
replies = st.recursive(leaves, lambda inner: st.lists(inner, max_size=4), max_leaves=12)


@settings(max_examples=60)
@given(wanted=st.lists(replies, min_size=1, max_size=5), cut=st.integers(1, 17))
def test_replies_come_whole_however_they_are_cut(wanted: list[Any], cut: int) -> None:
    peer = Peer()
    data = b"".join(map(encode_reply, wanted))

    def feed() -> None:
        for start in range(0, len(data), cut):
            peer.socket.sendall(data[start : start + cut])

    feeder = threading.Thread(target=feed)
    feeder.start()
    try:
        assert [peer.link.receive(soon()) for _ in wanted] == wanted
    finally:
        feeder.join()
        peer.close()


@settings(max_examples=60)
@given(
    head=st.integers(1, 500),
    body=st.integers(0, 5000),
    before=st.lists(leaves, max_size=3),
    after=st.lists(leaves, max_size=3),
    cut=st.sampled_from([1, 7, 100, 4096, 100_000]),
)
def test_value_lies_in_the_callers_memory(
    head: int, body: int, before: list[Any], after: list[Any], cut: int
) -> None:
    """And what comes before and behind it is not touched."""
    peer = Peer()
    value = bytes((7 * i) % 256 for i in range(head + body))
    data = b"".join(map(encode_reply, [*before, value, *after]))

    def feed() -> None:
        for start in range(0, len(data), cut):
            peer.socket.sendall(data[start : start + cut])

    feeder = threading.Thread(target=feed)
    feeder.start()
    memory = bytearray(b"\xee" * (head + body + 2))
    view = memoryview(memory)
    try:
        assert [peer.link.receive(soon()) for _ in before] == before
        got = peer.link.receive_into(view[1 : 1 + head], view[1 + head : -1], soon())
        assert got == len(value)
        assert memory == b"\xee" + value + b"\xee"
        assert [peer.link.receive(soon()) for _ in after] == after
    finally:
        feeder.join()
        peer.close()


@pytest.mark.parametrize(
    ("sent", "expected"),
    [(b"$-1\r\n", None), (b"-OOM full\r\n", ErrorReply("OOM full")), (b"$99\r\n", 99)],
)
def test_value_that_is_none_is_not_received(peer: Peer, sent: bytes, expected: object) -> None:
    peer.socket.sendall(sent)
    memory = bytearray(20)
    view = memoryview(memory)
    assert peer.link.receive_into(view[:10], view[10:], soon()) == expected
    assert not any(memory)


@pytest.mark.parametrize(
    "sent",
    [
        b"HTTP/1.1 400 Bad Request\r\n",
        b":twelve\r\n",
        b"$3\r\nabcde",
        b"$99999999999\r\n",
        b"*99999999999\r\n",
        b"+" + b"x" * 70_000,
    ],
    ids=lambda sent: sent[:12].decode().strip(),
)
def test_what_is_no_resp_is_refused(peer: Peer, sent: bytes) -> None:
    feeder = threading.Thread(target=peer.socket.sendall, args=(sent,))
    feeder.start()
    with pytest.raises(StoreError, match="expected"):
        peer.link.receive(soon())
    feeder.join()


def test_silent_peer_costs_the_deadline(peer: Peer) -> None:
    with pytest.raises(TimeoutError):
        peer.link.receive(time.monotonic() + 0.05)
    with pytest.raises(TimeoutError):
        peer.link.receive(time.monotonic() - 1)


def test_peer_that_takes_nothing_costs_the_deadline(peer: Peer) -> None:
    with pytest.raises(TimeoutError):
        peer.link.send([b"x", memoryview(bytes(64 * 2**20))], time.monotonic() + 0.05)


def test_value_that_stops_half_way_costs_the_deadline(peer: Peer) -> None:
    peer.socket.sendall(b"$1000000\r\n" + bytes(400_000)[:100])
    view = memoryview(bytearray(1_000_000))
    with pytest.raises(TimeoutError):
        peer.link.receive_into(view[:4096], view[4096:], time.monotonic() + 0.05)


def test_peer_that_goes_away_is_noticed(peer: Peer) -> None:
    peer.socket.sendall(b"$1000000\r\nabc")
    peer.socket.close()
    view = memoryview(bytearray(1_000_000))
    with pytest.raises(ConnectionResetError, match="closed"):
        peer.link.receive_into(view[:4096], view[4096:], soon())
