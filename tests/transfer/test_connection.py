"""The pulling side against a scripted owner: what it sends, and what it makes of odd answers."""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator
from dataclasses import replace

import pytest
from transfer_kit import LATER_S, NAME

from dualpath.base.errors import DeadlineExceeded, PeerLost
from dualpath.base.ids import EngineId, RequestId
from dualpath.kv.pool import PoolGeometry
from dualpath.testing import Results
from dualpath.transfer import ChannelCapabilities, Patience, RemoteSpan, TransferName
from dualpath.transfer.connection import DialledConnection, PeerContext, ServedConnection
from dualpath.transfer.lanes import LanedChannel, PullLane
from dualpath.transfer.pulls import Counters, DeadlineClock
from dualpath.transfer.wire import (
    PULLS_IN_FLIGHT,
    FromPuller,
    Link,
    Ping,
    Pong,
    PullReply,
    PullRequest,
    PullStatus,
    decode_from_puller,
    encode_frame,
)

SIZE = 4096
SPANS = [RemoteSpan(0, 0, SIZE)]


class ScriptedOwner:
    """The other end of a channel with one lane; what the tests say and hear is the lane's."""

    def __init__(self, patience: Patience) -> None:
        left, self.sock = socket.socketpair()
        messages, self.message_sock = socket.socketpair()
        self.sock.settimeout(LATER_S)
        self.ended: Results[str] = Results()
        self.clock = DeadlineClock("test-deadlines")
        context = PeerContext(
            EngineId("owner"),
            Counters(),
            self.clock,
            patience,
            self._ended,
        )
        lane = PullLane(Link(left, stall_s=patience.peer_timeout_s), context, 0)
        self.channel = LanedChannel(
            Link(messages, stall_s=patience.peer_timeout_s),
            [lane],
            PoolGeometry(n_slots=1, slot_bytes=SIZE),
            ChannelCapabilities("test", same_host=False),
            replace(context, patience=Patience(ping_interval_s=LATER_S)),
        )
        self.channel.start()

    def _ended(self, connection: DialledConnection | ServedConnection, reason: str) -> None:
        """As an endpoint's relations do it: the first end is the end of all."""
        if not self.ended.items:
            self.ended(reason)
        for each in (self.channel, *self.channel.lanes):
            each.abort(reason)

    def hear(self) -> FromPuller:
        (size,) = struct.unpack("<I", self._receive(4))
        return decode_from_puller(self._receive(size))

    def hear_request(self) -> PullRequest:
        frame = self.hear()
        assert isinstance(frame, PullRequest)
        return frame

    def say(self, frame: PullReply | Pong, payload: bytes = b"") -> None:
        self.sock.sendall(encode_frame(frame) + payload)

    def close(self) -> None:
        self.sock.close()
        self.message_sock.close()
        self.channel.abort("the test is over")
        self.channel.join(LATER_S)
        self.clock.close()

    def _receive(self, size: int) -> bytes:
        return self.sock.recv(size, socket.MSG_WAITALL)


@pytest.fixture
def owner() -> Iterator[ScriptedOwner]:
    owner = ScriptedOwner(Patience(ping_interval_s=LATER_S))
    yield owner
    owner.close()


@pytest.fixture
def idle_owner() -> Iterator[ScriptedOwner]:
    owner = ScriptedOwner(Patience(ping_interval_s=0.02, peer_timeout_s=0.2))
    yield owner
    owner.close()


def _ok(request: PullRequest, length: int = SIZE) -> PullReply:
    return PullReply(request.number, PullStatus.OK, length)


def test_an_idle_channel_asks_for_a_sign_of_life_and_gives_up_without(
    idle_owner: ScriptedOwner,
) -> None:
    assert idle_owner.hear() == Ping()
    assert "no sign of life" in idle_owner.ended.wait(1)[0]


def test_a_deadline_in_the_middle_of_payload_ends_the_pull_and_not_the_channel(
    owner: ScriptedOwner,
) -> None:
    into = bytearray(SIZE)
    pull = owner.channel.pull(NAME, 1, SPANS, [memoryview(into)], deadline_s=0.2)
    request = owner.hear_request()
    owner.say(_ok(request), b"\x01" * 1000)
    assert isinstance(pull.exception(LATER_S), DeadlineExceeded)
    into[:] = b"\x02" * SIZE  # It is the caller's again.
    owner.sock.sendall(b"\x01" * (SIZE - 1000))
    second = bytearray(SIZE)
    again = owner.channel.pull(NAME, 1, SPANS, [memoryview(second)], deadline_s=LATER_S)
    owner.say(_ok(owner.hear_request()), b"\x03" * SIZE)
    assert again.result(LATER_S) == SIZE
    assert second == b"\x03" * SIZE
    assert into == b"\x02" * SIZE


def test_payload_that_stands_still_in_the_middle_is_a_lost_peer(
    idle_owner: ScriptedOwner,
) -> None:
    into = memoryview(bytearray(SIZE))
    pull = idle_owner.channel.pull(NAME, 1, SPANS, [into], deadline_s=LATER_S)
    idle_owner.say(_ok(idle_owner.hear_request()), b"\x01" * 1000)
    assert isinstance(pull.exception(LATER_S), PeerLost)
    assert "nothing moved" in idle_owner.ended.wait(1)[0]


def test_an_answer_after_the_deadline_goes_nowhere(owner: ScriptedOwner) -> None:
    into = bytearray(b"\x02" * SIZE)
    pull = owner.channel.pull(NAME, 1, SPANS, [memoryview(into)], deadline_s=0.02)
    request = owner.hear_request()
    assert isinstance(pull.exception(LATER_S), DeadlineExceeded)
    owner.say(_ok(request), b"\x01" * SIZE)
    again = owner.channel.pull(NAME, 1, SPANS, [memoryview(bytearray(SIZE))], deadline_s=LATER_S)
    owner.say(_ok(owner.hear_request()), b"\x03" * SIZE)
    assert again.result(LATER_S) == SIZE
    assert into == b"\x02" * SIZE


@pytest.mark.parametrize(
    "reply",
    [
        PullReply(99, PullStatus.OK, SIZE),
        PullReply(0, PullStatus.OK, SIZE - 1),
        PullReply(0, PullStatus.OK, SIZE + 1),
    ],
)
def test_an_answer_that_does_not_fit_is_a_lost_peer(owner: ScriptedOwner, reply: PullReply) -> None:
    into = memoryview(bytearray(SIZE))
    pull = owner.channel.pull(NAME, 1, SPANS, [into], deadline_s=LATER_S)
    owner.hear_request()
    owner.say(reply)
    assert isinstance(pull.exception(LATER_S), PeerLost)
    assert len(owner.ended.wait(1)) == 1


def test_pulls_in_flight_are_bounded_and_expired_ones_keep_their_place(
    owner: ScriptedOwner,
) -> None:
    targets = [memoryview(bytearray(SIZE)) for _ in range(PULLS_IN_FLIGHT + 2)]
    short = [owner.channel.pull(NAME, 1, SPANS, [into], deadline_s=0.05) for into in targets[:-1]]
    name = TransferName(RequestId("last"), 1, 0)
    last = owner.channel.pull(name, 1, SPANS, targets[-1:], deadline_s=LATER_S)
    requests = [owner.hear_request() for _ in range(PULLS_IN_FLIGHT)]
    for pull in short:
        assert isinstance(pull.exception(LATER_S), DeadlineExceeded)
    owner.sock.settimeout(0.02)
    with pytest.raises(TimeoutError):
        owner.hear()
    owner.sock.settimeout(LATER_S)
    owner.say(_ok(requests[0]), bytes(SIZE))
    request = owner.hear_request()
    assert request.name == name  # Of the two that waited, the expired one is never asked for.
    owner.say(_ok(request), b"\x04" * SIZE)
    assert last.result(LATER_S) == SIZE
    assert targets[-1] == b"\x04" * SIZE


def test_a_future_of_a_lost_channel_has_failed_already(owner: ScriptedOwner) -> None:
    owner.sock.close()
    owner.ended.wait(1)
    owner.channel.join(LATER_S)  # The lane's end came first.
    pull = owner.channel.pull(NAME, 1, SPANS, [memoryview(bytearray(SIZE))], deadline_s=LATER_S)
    assert isinstance(pull.exception(0), PeerLost)
    with pytest.raises(PeerLost, match="owner is lost"):
        owner.channel.notify(b"anyone?")
