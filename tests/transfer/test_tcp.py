from __future__ import annotations

import itertools
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from transfer_kit import LATER_S, NAME, SECRET, Heard, dial_raw, filled_pool, packed, pull_slot

from dualpath.base.errors import ConfigError, PeerLost
from dualpath.base.ids import EngineId, MiB
from dualpath.base.traffic_class import DEFAULT_PLAN, TrafficClass
from dualpath.kv import BufferPool
from dualpath.testing import wait_until
from dualpath.testing.channel_peer import pattern
from dualpath.transfer import Patience, RemoteSpan, TcpEndpoint
from dualpath.transfer.connection import ServedConnection
from dualpath.transfer.handshake import Life, dial_hello, send_proof
from dualpath.transfer.lanes import LanedChannel
from dualpath.transfer.transport import Transport
from dualpath.transfer.wire import (
    PULLS_IN_FLIGHT,
    Notify,
    Ping,
    Pong,
    PullReply,
    PullRequest,
    encode_frame,
)

OWNER, PULLER = EngineId("owner"), EngineId("puller")
SLOT_BYTES = 16 * MiB  # Far more than socket buffers hold.
QUICK = Patience(ping_interval_s=0.05, peer_timeout_s=0.3)


class Owner:
    def __init__(self, patience: Patience | None = None) -> None:
        self.heard = Heard()
        self.pool, self.stamp = filled_pool(2, SLOT_BYTES, seed=40)
        self.lease = self.pool.leases[0]
        self.endpoint = TcpEndpoint(OWNER, self.pool, SECRET, self.heard.events, patience=patience)

    def greet(self) -> socket.socket:
        """A raw socket that has proved itself as an engine, for saying what a channel never would."""
        sock = dial_raw(self.endpoint)
        until_s = time.monotonic() + LATER_S
        life = Life(b"p" * 16, 0)
        send_proof(sock, dial_hello(sock, PULLER, OWNER, life, SECRET, until_s), until_s)
        sock.settimeout(LATER_S)
        return sock

    def request(self, number: int = 0) -> bytearray:
        spans = [RemoteSpan(slot, 0, SLOT_BYTES) for slot in self.lease.slots]
        return encode_frame(PullRequest(number, NAME, self.stamp, packed(spans)))


@pytest.fixture
def owner() -> Iterator[Owner]:
    owner = Owner()
    yield owner
    owner.endpoint.close()
    owner.pool.close()


@pytest.fixture
def hasty_owner() -> Iterator[Owner]:
    owner = Owner(QUICK)
    yield owner
    owner.endpoint.close()
    owner.pool.close()


def _receive(sock: socket.socket, n_bytes: int) -> bytes:
    received = bytearray()
    while len(received) < n_bytes:
        part = sock.recv(min(MiB, n_bytes - len(received)))
        assert part, "the owner closed the connection"
        received += part
    return bytes(received)


def test_a_lease_released_while_it_is_served_stays_right(owner: Owner) -> None:
    sock = owner.greet()
    sock.sendall(owner.request())
    head = encode_frame(PullReply(0, "ok", 2 * SLOT_BYTES))  # type: ignore[arg-type]
    assert _receive(sock, len(head)) == head
    assert owner.lease.holds == 1
    owner.lease.release()
    assert owner.pool.try_lease("next", 1) is None
    payload = _receive(sock, 2 * SLOT_BYTES)
    assert payload[:SLOT_BYTES] == pattern(40, SLOT_BYTES)
    assert payload[SLOT_BYTES:] == pattern(41, SLOT_BYTES)
    wait_until(lambda: owner.pool.n_free == 2, "the slots do not come back")
    sock.close()


def test_a_peer_that_stops_reading_gives_the_slots_back(hasty_owner: Owner) -> None:
    sock = hasty_owner.greet()
    sock.sendall(hasty_owner.request())
    wait_until(lambda: hasty_owner.lease.holds == 1, "the pull is not served")
    hasty_owner.lease.release()
    assert len(hasty_owner.heard.losses.wait(1)) == 1
    wait_until(lambda: hasty_owner.pool.n_free == 2, "the slots do not come back")
    sock.close()


def test_a_silent_peer_is_lost(hasty_owner: Owner) -> None:
    sock = hasty_owner.greet()
    assert "no sign of life" in hasty_owner.heard.losses.wait(1)[0]
    sock.close()


def test_a_ping_is_answered(owner: Owner) -> None:
    sock = owner.greet()
    sock.sendall(encode_frame(Ping()))
    pong = encode_frame(Pong())
    assert _receive(sock, len(pong)) == pong
    sock.close()


@pytest.mark.parametrize(
    "said",
    [
        b"\xff\xff\xff\xff",
        b"\x05\0\0\0hello",
        bytes(encode_frame(PullRequest(0, NAME, 1, packed([RemoteSpan(99, 0, 1)])))),
        bytes(encode_frame(PullRequest(0, NAME, 1, packed([RemoteSpan(0, -5, 1)])))),
        bytes(encode_frame(PullRequest(0, NAME, 1, b"not whole spans"))),
        bytes(encode_frame(PullReply(0, "ok", 1))),  # type: ignore[arg-type]
    ],
)
def test_a_peer_that_breaks_the_protocol_is_dropped(owner: Owner, said: bytes) -> None:
    sock = owner.greet()
    sock.sendall(said)
    assert len(owner.heard.losses.wait(1)) == 1
    assert sock.recv(1) == b""
    sock.close()


def test_a_peer_that_asks_for_too_much_at_once_is_dropped(owner: Owner) -> None:
    sock = owner.greet()
    for number in range(2 * PULLS_IN_FLIGHT):
        try:
            sock.sendall(owner.request(number))
        except OSError:
            break
    assert len(owner.heard.losses.wait(1)) == 1
    sock.close()
    wait_until(lambda: owner.lease.holds == 0, "a hold is left")


def test_garbage_on_the_port_hurts_nobody(owner: Owner) -> None:
    heard = Heard()
    pool = BufferPool(1, 4096)
    puller = TcpEndpoint(PULLER, pool, SECRET, heard.events)
    strangers = [dial_raw(owner.endpoint) for _ in range(20)]
    for number, sock in enumerate(strangers):
        sock.sendall(pattern(number, 5000) if number % 2 else b"GET / HTTP/1.0\r\n\r\n")
    for sock in strangers[:10]:
        sock.close()
    slot = owner.lease.slots[0]
    content = pull_slot(puller, owner.endpoint, OWNER, owner.stamp, slot)
    assert content == pattern(40, SLOT_BYTES)
    assert owner.heard.losses.items == []
    for sock in strangers[10:]:
        sock.close()
    puller.close()
    pool.close()


def test_strangers_that_say_nothing_do_not_shut_peers_out_for_long() -> None:
    heard = Heard()
    pool, stamp = filled_pool(1, 4096, seed=3)
    patience = Patience(handshake_s=0.3)
    owner = TcpEndpoint(OWNER, pool, SECRET, heard.events, patience=patience)
    puller = TcpEndpoint(PULLER, pool, SECRET, heard.events)
    strangers = [dial_raw(owner) for _ in range(70)]

    def reaches() -> bool:
        try:
            return pull_slot(puller, owner, OWNER, stamp, 0) == pattern(3, 4096)
        except PeerLost:
            return False

    wait_until(reaches, "the owner takes no connection")
    for sock in strangers:
        sock.close()
    puller.close()
    owner.close()
    pool.close()


def test_a_message_waits_for_no_payload(owner: Owner) -> None:
    sock = owner.greet()
    sock.sendall(owner.request())
    wait_until(lambda: owner.lease.holds == 1, "the pull is not served")
    sock.sendall(encode_frame(Notify(b"overtakes")))
    assert owner.heard.messages.wait(1) == [b"overtakes"]
    sock.close()
    owner.heard.losses.wait(1)
    wait_until(lambda: owner.lease.holds == 0, "a hold is left")


def test_what_cannot_be_safe_is_refused_at_the_start() -> None:
    heard = Heard()
    pool = BufferPool(1, 4096)
    with pytest.raises(ConfigError, match="secret"):
        TcpEndpoint(OWNER, pool, b"", heard.events, host="0.0.0.0", advertise="10.0.0.1")
    with pytest.raises(ConfigError, match="at least 16"):
        TcpEndpoint(OWNER, pool, b"short", heard.events)
    with pytest.raises(ConfigError, match="wildcard"):
        TcpEndpoint(OWNER, pool, SECRET, heard.events, host="0.0.0.0")
    with pytest.raises(ConfigError, match="no-such-host"):
        TcpEndpoint(OWNER, pool, SECRET, heard.events, host="no-such-host.invalid")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match="cannot listen"):
            TcpEndpoint(OWNER, pool, SECRET, heard.events, port=port)
    pool.close()


def _marks(sock: socket.socket) -> tuple[int, int]:
    return (
        sock.getsockopt(socket.IPPROTO_IP, socket.IP_TOS),
        sock.getsockopt(socket.SOL_SOCKET, socket.SO_PRIORITY),
    )


@dataclass
class Pair:
    """A puller connected to an owner by a channel with three lanes."""

    owner: Owner
    puller: TcpEndpoint
    heard: Heard
    channel: LanedChannel

    @property
    def served(self) -> list[ServedConnection]:
        (relation,) = self.owner.endpoint._relations._relations.values()
        return [each for each in relation.connections if isinstance(each, ServedConnection)]


@pytest.fixture
def pair(owner: Owner) -> Iterator[Pair]:
    heard = Heard()
    pool = BufferPool(1, 4096)
    puller = TcpEndpoint(PULLER, pool, SECRET, heard.events, connections=3)
    channel = puller.connect(owner.endpoint.address, OWNER, deadline_s=LATER_S)
    assert isinstance(channel, LanedChannel)
    pair = Pair(owner, puller, heard, channel)
    wait_until(lambda: len(pair.served) == 4, "the owner does not serve every connection")
    yield pair
    puller.close()
    pool.close()


def _pull_all(pair: Pair) -> bytes:
    spans = [RemoteSpan(slot, 0, SLOT_BYTES) for slot in pair.owner.lease.slots]
    into = [bytearray(SLOT_BYTES) for _ in spans]
    views = [memoryview(target) for target in into]
    pull = pair.channel.pull(NAME, pair.owner.stamp, spans, views, deadline_s=LATER_S)
    assert pull.result(LATER_S) == 2 * SLOT_BYTES
    return b"".join(into)


def test_a_large_pull_comes_over_every_lane(pair: Pair) -> None:
    before = [lane._link.heard_s for lane in pair.channel.lanes]
    assert _pull_all(pair) == pattern(40, SLOT_BYTES) + pattern(41, SLOT_BYTES)
    after = [lane._link.heard_s for lane in pair.channel.lanes]
    assert all(then < now for then, now in zip(before, after, strict=True))
    assert pair.owner.endpoint.stats()[PULLER].served_bytes == 2 * SLOT_BYTES


def test_messages_and_kv_are_marked_apart_at_both_ends(pair: Pair) -> None:
    message, kv = DEFAULT_PLAN.marks(TrafficClass.CONTROL), DEFAULT_PLAN.marks(TrafficClass.KV)
    low = (kv.tos, kv.so_priority)
    high = (message.tos, message.so_priority)
    assert low != high
    assert _marks(pair.channel._link._sock) == high
    assert [_marks(lane._link._sock) for lane in pair.channel.lanes] == [low] * 3
    assert sorted(_marks(each._link._sock) for each in pair.served) == sorted([high] + [low] * 3)


@pytest.mark.parametrize("broken", [0, 1, 2, 3])
def test_any_connection_that_breaks_is_one_loss_of_the_peer(pair: Pair, broken: int) -> None:
    pair.owner.endpoint.connect(pair.puller.address, PULLER, deadline_s=LATER_S)
    connections = [pair.channel, *pair.channel.lanes]
    connections[broken]._link._sock.shutdown(socket.SHUT_RDWR)
    assert len(pair.heard.losses.wait(1)) == 1
    assert len(pair.owner.heard.losses.wait(1)) == 1
    late = pair.channel.pull(
        NAME, 1, [RemoteSpan(0, 0, 1)], [memoryview(bytearray(1))], deadline_s=LATER_S
    )
    assert isinstance(late.exception(LATER_S), PeerLost)
    for connection in connections:
        connection.join(LATER_S)
    again = pair.puller.connect(pair.owner.endpoint.address, OWNER, deadline_s=LATER_S)
    assert again is not pair.channel
    again.notify(b"back")
    assert pair.owner.heard.messages.wait(1) == [b"back"]
    assert len(pair.heard.losses.items) == len(pair.owner.heard.losses.items) == 1


def test_a_lane_that_is_refused_leaves_no_channel(owner: Owner) -> None:
    """The owner takes the first connection and no further one."""
    heard = Heard()
    pool = BufferPool(1, 4096)
    puller = TcpEndpoint(PULLER, pool, SECRET, heard.events)
    greet, accepted = owner.endpoint._greet, itertools.count()

    def greet_once(sock: socket.socket, transport: Transport) -> ServedConnection:
        if next(accepted) == 1:
            raise PeerLost("the test refuses it")
        return greet(sock, transport)

    owner.endpoint._greet = greet_once  # type: ignore[method-assign]
    with pytest.raises(PeerLost):
        puller.connect(owner.endpoint.address, OWNER, deadline_s=LATER_S)
    assert len(owner.heard.losses.wait(1)) == 1
    assert heard.losses.items == []
    puller.connect(owner.endpoint.address, OWNER, deadline_s=LATER_S).notify(b"again")
    assert owner.heard.messages.wait(1) == [b"again"]
    puller.close()
    pool.close()


@pytest.mark.parametrize("connections", [0, 17])
def test_the_number_of_connections_is_bounded(connections: int) -> None:
    pool = BufferPool(1, 4096)
    with pytest.raises(ConfigError, match="1 to 16"):
        TcpEndpoint(OWNER, pool, SECRET, Heard().events, connections=connections)
    pool.close()
