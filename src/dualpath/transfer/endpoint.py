"""Endpoints over sockets: listening, dialling, greeting; one endpoint, one or more transports.

It knows no frames after the greeting (connection), and not when a peer counts as lost (relations).
Invariants: nothing counts before it proved that it knows the secret; greetings in progress are
bounded in number and time; after `close` no thread or descriptor is left.
"""

from __future__ import annotations

import logging
import os
import secrets
import select
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import msgspec

from dualpath.base.errors import ConfigError, DeadlineExceeded, PeerLost, TransferError
from dualpath.base.ids import EngineId
from dualpath.base.kv_threads import kv_thread
from dualpath.base.traffic_class import TrafficClass
from dualpath.kv.pool import BufferPool, PoolGeometry
from dualpath.transfer.connection import Patience, PeerContext, ServedConnection, SocketChannel
from dualpath.transfer.contract import Channel, Endpoint, EndpointEvents, PeerStats
from dualpath.transfer.handshake import (
    Life,
    answer_hello,
    await_hello,
    await_proof,
    dial_hello,
    send_proof,
)
from dualpath.transfer.pulls import Counters, DeadlineClock
from dualpath.transfer.relations import Relation, Relations
from dualpath.transfer.transport import Transport
from dualpath.transfer.wire import Link

__all__ = ["MIN_SECRET_BYTES", "SocketEndpoint", "port_address"]

log = logging.getLogger(__name__)

MIN_SECRET_BYTES = 16
_MAX_GREETINGS = 64
_JOIN_S = 10.0


class _Address(msgspec.Struct, frozen=True):
    """An endpoint's public address: a location for each kind of transport."""

    locations: dict[str, str]


def port_address(kind: Literal["tcp", "nixl"], host: str, port: int) -> str:
    """The address of an endpoint of this kind that is known to listen on this TCP port, for
    `Endpoint.connect`."""
    return msgspec.json.encode(_Address({kind: f"{host}:{port}"})).decode()


@dataclass(frozen=True, slots=True)
class _Greeted:
    """A peer that proved itself."""

    relation: Relation
    geometry: PoolGeometry


class SocketEndpoint(Endpoint):
    """An endpoint over the given transports, best first. Takes connections at once.

    `pool` stays the caller's, who closes it after the endpoint. `secret` is what all engines of a
    cluster share; empty means that every local process is trusted.
    Raises ConfigError for a secret that is too short, and for an address that cannot be bound.
    """

    def __init__(
        self,
        engine: EngineId,
        pool: BufferPool,
        secret: bytes,
        events: EndpointEvents,
        transports: Sequence[Transport],
        *,
        patience: Patience | None = None,
    ) -> None:
        if 0 < len(secret) < MIN_SECRET_BYTES:
            raise ConfigError(
                f"a transfer secret of {len(secret)} bytes: give at least {MIN_SECRET_BYTES}"
            )
        self.engine = engine
        self._pool = pool
        self._secret = secret
        self._patience = patience or Patience()
        self._transports = transports
        self._incarnation = secrets.token_bytes(16)
        self._relations = Relations(engine, events)
        self._clock = DeadlineClock(f"dualpath-deadlines-{engine}")
        self._changed = threading.Condition()
        self._counters: dict[EngineId, Counters] = {}
        self._dialling: set[EngineId] = set()
        self._dials: set[socket.socket] = set()
        self._greetings: set[socket.socket] = set()
        self._threads: set[threading.Thread] = set()
        self._closed = False
        self._listeners = _listen(engine, transports)
        locations = {t.kind: t.location(listener) for listener, t in self._listeners.items()}
        self.address = msgspec.json.encode(_Address(locations)).decode()
        self._wake = os.eventfd(0, os.EFD_CLOEXEC)
        self._acceptor = threading.Thread(
            target=self._accept_all, name=f"dualpath-accept-{engine}", daemon=True
        )
        self._acceptor.start()

    def connect(self, address: str, peer: EngineId, *, deadline_s: float) -> Channel:
        until_s = time.monotonic() + deadline_s
        with self._dialling_alone(peer, until_s):
            channel = self._relations.channel(peer, address, until_s)
            return channel or self._dial_any(address, peer, until_s)

    def disconnect(self, peer: EngineId) -> None:
        channel = self._relations.drop(peer)
        with self._changed:
            self._counters.pop(peer, None)
        if channel is not None:
            channel.join(_JOIN_S)

    def stats(self) -> dict[EngineId, PeerStats]:
        with self._changed:
            return {peer: counters.stats for peer, counters in self._counters.items()}

    def close(self) -> None:
        with self._changed:
            if self._closed:
                return
            self._closed = True
            for sock in self._greetings | self._dials:
                _shut(sock)
            self._changed.notify_all()
        channels = self._relations.close()
        os.eventfd_write(self._wake, 1)
        if self._acceptor is not threading.current_thread():
            self._acceptor.join()
        os.close(self._wake)
        for channel in channels:
            channel.join(_JOIN_S)
        with self._changed:
            threads = self._threads - {threading.current_thread()}
        for thread in threads:
            thread.join(_JOIN_S)
        self._clock.close()
        for transport in self._transports:
            transport.close()

    @contextmanager
    def _dialling_alone(self, peer: EngineId, until_s: float) -> Iterator[None]:
        """One connection attempt a peer at a time; others wait and find its channel."""
        with self._changed:
            while peer in self._dialling and not self._closed:
                left_s = until_s - time.monotonic()
                if left_s <= 0:
                    raise DeadlineExceeded(f"{self.engine} did not get to connect to {peer}")
                self._changed.wait(left_s)
            self._dialling.add(peer)
        try:
            yield
        finally:
            with self._changed:
                self._dialling.discard(peer)
                self._changed.notify_all()

    def _dial_any(self, address: str, peer: EngineId, until_s: float) -> SocketChannel:
        locations = _locations(address)
        failure = PeerLost(f"{peer} has no address that {self.engine} can reach: {address}")
        for transport in self._transports:
            if transport.kind not in locations:
                continue
            try:
                while True:
                    channel = self._dial(
                        transport, locations[transport.kind], address, peer, until_s
                    )
                    if channel is not None:
                        return channel
            except PeerLost as error:
                failure = error
        raise failure

    def _dial(
        self, transport: Transport, location: str, address: str, peer: EngineId, until_s: float
    ) -> SocketChannel | None:
        """A started channel; None when the relation changed meanwhile: to be done again."""
        socks: list[socket.socket] = []
        greeted, channel = None, None
        try:
            greeted = self._greet_owner(transport, location, peer, socks, until_s)
            if greeted is not None:
                context = self._context(peer)
                channel = transport.channel(socks, greeted.geometry, context, until_s)
        finally:
            with self._changed:
                self._dials.difference_update(socks)
            if channel is None:
                for sock in socks:
                    sock.close()
        if greeted is None or channel is None:
            return None
        self._relations.add_channel(greeted.relation, channel, address)
        channel.start()
        return channel

    def _greet_owner(
        self,
        transport: Transport,
        location: str,
        peer: EngineId,
        socks: list[socket.socket],
        until_s: float,
    ) -> _Greeted | None:
        """Dial and prove ourselves on every connection of a channel; adds them to `socks`.

        All must belong to one relation: None when it changed between two of them.
        """
        epoch = self._relations.epoch(peer)
        mine = Life(self._incarnation, epoch)
        greeted: _Greeted | None = None
        for traffic in (TrafficClass.CONTROL, *[TrafficClass.KV] * transport.lanes):
            sock = transport.dial(location, until_s - time.monotonic())
            socks.append(sock)
            self._track_dial(sock)
            transport.mark(sock, traffic)
            dialled = dial_hello(sock, self.engine, peer, mine, self._secret, until_s, traffic)
            relation = self._relations.enter(peer, dialled.life, epoch, until_s)
            if relation is None or (greeted is not None and greeted.relation is not relation):
                return None
            send_proof(sock, dialled, until_s)
            greeted = _Greeted(relation, dialled.geometry)
        return greeted

    def _track_dial(self, sock: socket.socket) -> None:
        """From now on `close` ends what waits on the socket."""
        with self._changed:
            if self._closed:
                raise PeerLost(f"the endpoint of {self.engine} is closed")
            self._dials.add(sock)

    def _context(self, peer: EngineId) -> PeerContext:
        with self._changed:
            counters = self._counters.setdefault(peer, Counters())
        return PeerContext(peer, counters, self._clock, self._patience, self._relations.ended)

    def _accept_all(self) -> None:
        poll = select.poll()
        poll.register(self._wake, select.POLLIN)
        by_fd = {listener.fileno(): listener for listener in self._listeners}
        for fd in by_fd:
            poll.register(fd, select.POLLIN)
        while not self._closed:
            for fd, _ in poll.poll():
                if fd in by_fd:
                    self._accept(by_fd[fd])
        for listener in self._listeners:
            listener.close()

    def _accept(self, listener: socket.socket) -> None:
        try:
            sock, _ = listener.accept()
        except BlockingIOError:
            return
        except OSError as error:
            log.warning("%s cannot accept a connection: %s", self.engine, error)
            select.select([self._wake], [], [], 0.1)  # Out of descriptors, perhaps: do not spin.
            return
        with self._changed:
            if self._closed or len(self._greetings) >= _MAX_GREETINGS:
                sock.close()
                return
            self._greetings.add(sock)
            thread = kv_thread(
                self._greet_and_serve,
                name=f"dualpath-served-{self.engine}",
                args=(sock, self._listeners[listener]),
            )
            self._threads.add(thread)
        thread.start()

    def _greet_and_serve(self, sock: socket.socket, transport: Transport) -> None:
        connection = None
        try:
            try:
                connection = self._greet(sock, transport)
            except TransferError as error:
                log.warning("%s refused a connection: %s", self.engine, error)
            finally:
                with self._changed:
                    self._greetings.discard(sock)
                if connection is None:
                    sock.close()
            if connection is not None:
                connection.run()
        finally:
            with self._changed:
                self._threads.discard(threading.current_thread())

    def _greet(self, sock: socket.socket, transport: Transport) -> ServedConnection:
        """Authenticate the dialling side and add it to its relation. Raises TransferError."""
        until_s = time.monotonic() + self._patience.handshake_s
        transport.accepted(sock)
        hello = await_hello(sock, self.engine, until_s)
        transport.mark(sock, hello.traffic)
        peer = EngineId(hello.engine)
        epoch = self._relations.epoch(peer)
        mine = Life(self._incarnation, epoch)
        mac = answer_hello(sock, hello, mine, self._pool.geometry, self._secret, until_s)
        await_proof(sock, mac, until_s)
        relation = self._relations.enter(peer, hello.life, epoch, until_s)
        if relation is None:
            raise PeerLost(f"{peer} was given up while it connected")
        transport.introduce(sock, self._pool, until_s)
        link = Link(sock, stall_s=self._patience.peer_timeout_s)
        connection = ServedConnection(
            link,
            self._pool,
            self._context(peer),
            lambda message: self._relations.deliver(relation, message),
        )
        self._relations.add(relation, connection)
        return connection


def _listen(engine: EngineId, transports: Sequence[Transport]) -> dict[socket.socket, Transport]:
    listeners: dict[socket.socket, Transport] = {}
    try:
        for transport in transports:
            listeners[transport.listen()] = transport
    except OSError as error:
        for listener in listeners:
            listener.close()
        for transport in transports:
            transport.close()
        raise ConfigError(f"{engine} cannot listen for transfers: {error}") from error
    return listeners


def _locations(address: str) -> dict[str, str]:
    try:
        return msgspec.json.decode(address, type=_Address).locations
    except msgspec.DecodeError as error:
        raise PeerLost(f"not an endpoint's address: {address!r} ({error})") from None


def _shut(sock: socket.socket) -> None:
    try:
        sock.shutdown(socket.SHUT_RDWR)
    except OSError:
        pass  # The peer was faster.
