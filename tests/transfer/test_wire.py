from __future__ import annotations

import socket
import struct
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transfer_kit import packed

from dualpath.base.errors import PeerLost
from dualpath.base.ids import KiB, MiB, RequestId
from dualpath.testing import wait_until
from dualpath.transfer import RemoteSpan, TransferName
from dualpath.transfer.pulls import MAX_MESSAGE_BYTES
from dualpath.transfer.spans import MAX_SPANS
from dualpath.transfer.wire import (
    MAX_FRAME_BYTES,
    ByteCursor,
    Link,
    Notify,
    Ping,
    PullReply,
    PullRequest,
    PullStatus,
    decode_from_owner,
    decode_from_puller,
    encode_frame,
)

LATER_S = 30.0


@dataclass
class Pair:
    link: Link
    other: socket.socket


@pytest.fixture
def pair() -> Iterator[Pair]:
    left, right = socket.socketpair()
    link = Link(left, stall_s=0.2)
    yield Pair(link, right)
    link.close()
    right.close()


@settings(max_examples=50)
@given(st.lists(st.integers(0, 300)), st.data())
def test_a_cursor_covers_each_byte_once(sizes: list[int], data: st.DataObject) -> None:
    views = [memoryview(bytearray(size)) for size in sizes]
    source = bytes(index % 251 for index in range(sum(sizes)))
    cursor = ByteCursor(iter(views), sum(sizes))
    position = 0
    while cursor.left:
        enough = data.draw(st.integers(1, 1000))
        batch = cursor.batch(enough)
        assert all(view.nbytes for view in batch)
        assert sum(view.nbytes for view in batch) >= min(enough, cursor.left)
        step = data.draw(st.integers(1, cursor.left))
        assert cursor.fill(memoryview(source)[position : position + step]) == step
        position += step
    assert cursor.batch() == []
    assert b"".join(views) == source
    assert cursor.fill(memoryview(b"more")) == 0


def test_frames_survive_any_cut(pair: Pair) -> None:
    name = TransferName(RequestId("r"), 2, 3)
    frames = [
        Notify(b"abc"),
        Ping(),
        PullRequest(7, name, 2**63 + 5, packed([RemoteSpan(1, 2, 3)])),
        Notify(b"y" * (200 * KiB)),
        Notify(b""),
    ]
    stream = b"".join(encode_frame(frame) for frame in frames)
    received = []

    def send() -> None:
        for start in range(0, len(stream), 777):
            pair.other.sendall(stream[start : start + 777])

    sender = threading.Thread(target=send)
    sender.start()
    while len(received) < len(frames):
        body = pair.link.read_frame(LATER_S)
        assert body is not None
        received.append(decode_from_puller(body))
    sender.join()
    assert received == frames
    assert pair.link.read_frame(0.0) is None


def test_the_longest_message_and_pull_fit_a_frame() -> None:
    name = TransferName(RequestId("r"), 1, 1)
    spans = [RemoteSpan(2**62, 2**62, 2**62)] * MAX_SPANS
    assert len(encode_frame(PullRequest(2**62, name, 2**64 - 1, packed(spans)))) <= MAX_FRAME_BYTES
    assert len(encode_frame(Notify(b"x" * MAX_MESSAGE_BYTES))) <= MAX_FRAME_BYTES
    with pytest.raises(ValueError):
        encode_frame(Notify(b"x" * MAX_FRAME_BYTES))


def test_a_huge_frame_is_refused_before_it_is_received(pair: Pair) -> None:
    pair.other.sendall(struct.pack("<I", MAX_FRAME_BYTES + 1))
    with pytest.raises(PeerLost, match="announced"):
        pair.link.read_frame(LATER_S)


@pytest.mark.parametrize("body", [b"", b"\xc1", b"\x93\xa1z", b"\x92\xa1n\x05", b"\x90"])
def test_garbage_in_a_frame_is_a_lost_peer(body: bytes) -> None:
    with pytest.raises(PeerLost):
        decode_from_puller(body)
    with pytest.raises(PeerLost):
        decode_from_owner(body)


def test_payload_follows_its_frame(pair: Pair) -> None:
    payload = bytes(range(256)) * 1000
    reply = PullReply(1, PullStatus.OK, len(payload))
    sent = threading.Thread(
        target=lambda: pair.other.sendall(encode_frame(reply) + payload + encode_frame(Ping()))
    )
    sent.start()
    body = pair.link.read_frame(LATER_S)
    assert body is not None and decode_from_owner(body) == reply
    into = [bytearray(100), bytearray(0), bytearray(len(payload) - 100)]
    views = [memoryview(target) for target in into]
    assert pair.link.read_into(views, time.monotonic() + LATER_S) == 0
    assert b"".join(into) == payload
    body = pair.link.read_frame(LATER_S)
    assert body is not None and decode_from_puller(body) == Ping()
    sent.join()


def test_payload_that_does_not_come_in_time_says_how_much_is_missing(pair: Pair) -> None:
    pair.other.sendall(b"1234")
    into = bytearray(10)
    assert pair.link.read_into([memoryview(into)], time.monotonic() + 0.05) == 6
    assert into[:4] == b"1234"
    pair.other.sendall(b"567890" + encode_frame(Ping()))
    pair.link.drain(6)
    assert pair.link.read_frame(LATER_S) is not None


def test_payload_that_stands_still_is_a_lost_peer(pair: Pair) -> None:
    with pytest.raises(PeerLost, match="nothing moved"):
        pair.link.read_into([memoryview(bytearray(10))], time.monotonic() + LATER_S)


def test_a_peer_that_takes_nothing_is_lost_within_the_limit(pair: Pair) -> None:
    frame = encode_frame(Notify(b"x" * MiB))
    with pytest.raises(PeerLost, match="took nothing"):
        pair.link.send_frame(frame, 0.05)
    with pytest.raises(PeerLost):
        pair.link.send_frame(encode_frame(Ping()), LATER_S)
    with pytest.raises(PeerLost):
        pair.link.send_stream(encode_frame(Ping()))


def test_payload_is_sent_as_long_as_it_goes_on(pair: Pair) -> None:
    payload = bytes(range(256)) * (8 * KiB)
    received = bytearray()

    def receive() -> None:
        while part := pair.other.recv(64 * KiB):
            received.extend(part)

    reader = threading.Thread(target=receive)
    reader.start()
    view = memoryview(payload)
    pair.link.send_stream(encode_frame(Ping()), [view[:5], view[5:5], view[5:]], len(view))
    pair.link.abort("done")
    reader.join()
    assert received == encode_frame(Ping()) + payload


def test_abort_wakes_a_reader_and_keeps_the_first_reason(pair: Pair) -> None:
    errors: list[PeerLost] = []

    def read() -> None:
        try:
            pair.link.read_frame(float("inf"))
        except PeerLost as error:
            errors.append(error)

    reader = threading.Thread(target=read)
    reader.start()
    pair.link.abort("first")
    pair.link.abort("second")
    reader.join(LATER_S)
    assert not reader.is_alive()
    assert len(errors) == 1
    assert pair.link.reason == "first"


def test_a_closed_peer_is_lost(pair: Pair) -> None:
    pair.other.close()
    with pytest.raises(PeerLost, match="closed"):
        pair.link.read_frame(LATER_S)
    wait_until(lambda: pair.link.reason is not None, "the link is not aborted")
