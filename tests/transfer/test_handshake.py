from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from dualpath.base.errors import DeadlineExceeded, DualPathError, PeerLost
from dualpath.base.ids import EngineId
from dualpath.base.traffic_class import TrafficClass
from dualpath.kv.pool import PoolGeometry
from dualpath.transfer.handshake import (
    Dialled,
    Hello,
    Life,
    answer_hello,
    await_hello,
    await_proof,
    dial_hello,
    send_proof,
)

A, B = EngineId("a"), EngineId("b")
GEOMETRY = PoolGeometry(n_slots=3, slot_bytes=4096)
A_LIFE, B_LIFE = Life(b"a" * 16, 4), Life(b"b" * 16, 9)
SECRET, OTHER = b"s" * 32, b"t" * 32


@dataclass
class Outcome:
    dialled: Dialled | DualPathError
    accepted: Hello | DualPathError


def _greet(dialling_secret: bytes, accepting_secret: bytes, peer: EngineId = B) -> Outcome:
    left, right = socket.socketpair()
    until_s = time.monotonic() + 10.0
    accepted: list[Hello | DualPathError] = []

    def accept() -> None:
        try:
            hello = await_hello(right, B, until_s)
            mac = answer_hello(right, hello, B_LIFE, GEOMETRY, accepting_secret, until_s)
            await_proof(right, mac, until_s)
            accepted.append(hello)
        except DualPathError as error:
            accepted.append(error)
        right.close()

    thread = threading.Thread(target=accept)
    thread.start()
    dialled: Dialled | DualPathError
    try:
        dialled = dial_hello(left, A, peer, A_LIFE, dialling_secret, until_s, TrafficClass.KV)
        send_proof(left, dialled, until_s)
    except DualPathError as error:
        dialled = error
    left.close()
    thread.join()
    return Outcome(dialled, accepted[0])


@pytest.mark.parametrize("secret", [SECRET, b""])
def test_both_sides_learn_who_the_other_is(secret: bytes) -> None:
    outcome = _greet(secret, secret)
    assert isinstance(outcome.accepted, Hello)
    assert (outcome.accepted.engine, outcome.accepted.life) == (A, A_LIFE)
    assert outcome.accepted.traffic is TrafficClass.KV
    assert isinstance(outcome.dialled, Dialled)
    assert (outcome.dialled.life, outcome.dialled.geometry) == (B_LIFE, GEOMETRY)


@pytest.mark.parametrize(("dialling", "accepting"), [(SECRET, OTHER), (SECRET, b""), (b"", SECRET)])
def test_another_secret_proves_nothing_to_either_side(dialling: bytes, accepting: bytes) -> None:
    outcome = _greet(dialling, accepting)
    assert isinstance(outcome.dialled, PeerLost)
    assert "secret" in str(outcome.dialled)
    assert isinstance(outcome.accepted, PeerLost)


def test_the_wrong_engine_says_who_it_is() -> None:
    outcome = _greet(SECRET, SECRET, peer=EngineId("c"))
    assert isinstance(outcome.dialled, PeerLost)
    assert "this is b, not c" in str(outcome.dialled)


def _with_socket(act: Callable[[socket.socket, socket.socket], None]) -> None:
    left, right = socket.socketpair()
    try:
        act(left, right)
    finally:
        left.close()
        right.close()


def test_an_accepting_sides_mac_does_not_pass_as_a_proof() -> None:
    """Who knows no secret reflects what it is sent: the roles in the MACs differ."""

    def act(dialling: socket.socket, accepting: socket.socket) -> None:
        until_s = time.monotonic() + 10.0
        hello = Hello(
            protocol=2,
            engine="a",
            peer="b",
            life=A_LIFE,
            nonce=b"n" * 32,
            traffic=TrafficClass.CONTROL,
        )
        expected = answer_hello(accepting, hello, B_LIFE, GEOMETRY, SECRET, until_s)
        challenge = dialling.recv(4096)
        shown = challenge[-32:]
        assert shown != expected
        send_proof(dialling, Dialled(B_LIFE, GEOMETRY, shown), until_s)
        with pytest.raises(PeerLost):
            await_proof(accepting, expected, until_s)

    _with_socket(act)


@pytest.mark.parametrize(
    "garbage", [b"GET / HTTP/1.1\r\n\r\n", b"\x05\0\0\0hello", b"\0\0\0\0", b"\xff" * 64]
)
def test_garbage_is_refused(garbage: bytes) -> None:
    def act(dialling: socket.socket, accepting: socket.socket) -> None:
        dialling.sendall(garbage)
        with pytest.raises(PeerLost):
            await_hello(accepting, B, time.monotonic() + 10.0)

    _with_socket(act)


def test_silence_ends_by_the_deadline() -> None:
    def act(dialling: socket.socket, accepting: socket.socket) -> None:
        with pytest.raises(DeadlineExceeded):
            await_hello(accepting, B, time.monotonic() + 0.05)
        with pytest.raises(DeadlineExceeded):
            dial_hello(dialling, A, B, A_LIFE, SECRET, time.monotonic() - 1.0)

    _with_socket(act)
