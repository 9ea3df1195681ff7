"""Which peers an endpoint is connected with, and when one is lost.

A *relation* is all connections to one life of a peer, in both directions. When the first of them
breaks, all are ended and the peer is lost, once. A peer that comes back with another life (it
restarted, or gave us up) first loses its old relation, with the event, and then gets a new one.

Invariants: events of one peer never overlap, and none follows its `peer_lost`; a loss is reported
only by a connection's reading thread, never by a thread that calls into the endpoint.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass

from dualpath.base.errors import DeadlineExceeded, PeerLost
from dualpath.base.ids import EngineId
from dualpath.transfer.connection import DialledConnection, ServedConnection, SocketChannel
from dualpath.transfer.contract import EndpointEvents
from dualpath.transfer.handshake import Life

__all__ = ["Relation", "Relations"]


class Relation:
    """Guarded by the lock of `Relations`, except `deliver`, which orders the peer's events."""

    def __init__(self, peer: EngineId, life: Life, epoch: int) -> None:
        self.peer = peer
        self.life = life
        self.epoch = epoch
        """Of our own life in it, as announced to the peer."""
        self.connections: set[DialledConnection | ServedConnection] = set()
        self.channel: SocketChannel | None = None
        self.address = ""
        self.over = False
        self.deliver = threading.RLock()

    def abort(self, reason: str) -> None:
        for connection in self.connections:
            connection.abort(reason)


@dataclass(frozen=True, slots=True)
class _GivenUp:
    """The last relation to a peer that ended: what it knew of us must not be announced to it again."""

    life: Life
    epoch: int


class Relations:
    """The relations of one endpoint. Thread-safe."""

    def __init__(self, engine: EngineId, events: EndpointEvents) -> None:
        self._engine = engine
        self._events = events
        self._changed = threading.Condition()
        self._relations: dict[EngineId, Relation] = {}
        self._given_up: dict[EngineId, _GivenUp] = {}
        self._closed = False

    def epoch(self, peer: EngineId) -> int:
        """The epoch to announce to a peer in a greeting. Raises PeerLost after `close`."""
        with self._changed:
            self._check_open()
            relation = self._relations.get(peer)
            if relation is not None and not relation.over:
                return relation.epoch
            given_up = self._given_up.get(peer)
            return 0 if given_up is None else given_up.epoch + 1

    def channel(self, peer: EngineId, address: str, until_s: float) -> SocketChannel | None:
        """The live channel to the peer; one to another address is ended first."""
        with self._changed:
            relation = self._relations.get(peer)
            if relation is None or relation.over or relation.channel is None:
                return None
            if relation.address == address:
                return relation.channel
            self._end_old(relation, f"{peer} has moved to another address", until_s)
            return None

    def enter(self, peer: EngineId, life: Life, epoch: int, until_s: float) -> Relation | None:
        """The relation to this life of the peer, after an older one has ended.

        None when what was announced (`life` by the peer, `epoch` by us) is out of date, because
        either gave the other up since. The end of an older life makes nothing out of date.
        """
        with self._changed:
            self._check_open()
            while (relation := self._relations.get(peer)) is not None:
                if relation.life == life and not relation.over:
                    return relation if relation.epoch == epoch else None
                if _is_older(life, relation.life):
                    return None
                self._end_old(relation, f"{peer} came back with a new life", until_s)
            given_up = self._given_up.get(peer)
            if given_up is not None and given_up.life == life and epoch <= given_up.epoch:
                return None
            relation = self._relations[peer] = Relation(peer, life, epoch)
            return relation

    def add(self, relation: Relation, connection: DialledConnection | ServedConnection) -> None:
        """Count the connection; one that came too late ends as soon as it starts."""
        with self._changed:
            relation.connections.add(connection)
            if relation.over:
                connection.abort("the peer is lost")

    def add_channel(self, relation: Relation, channel: SocketChannel, address: str) -> None:
        """Count the channel and its lanes."""
        with self._changed:
            for connection in (channel, *channel.lanes):
                self.add(relation, connection)
            relation.channel = channel
            relation.address = address

    def deliver(self, relation: Relation, message: bytes) -> None:
        """A message arrived, on a reading thread."""
        with relation.deliver:
            if not relation.over:
                self._events.notified(relation.peer, message)

    def ended(self, connection: DialledConnection | ServedConnection, reason: str) -> None:
        """A reading thread reports its connection's end; the first one ends the relation."""
        with self._changed:
            relation = self._relations.get(connection.peer)
            if relation is None or relation.over or connection not in relation.connections:
                return
            self._give_up(relation, reason)
        try:
            with relation.deliver:
                self._events.peer_lost(relation.peer, reason)
        finally:
            with self._changed:
                del self._relations[relation.peer]
                self._changed.notify_all()

    def drop(self, peer: EngineId) -> SocketChannel | None:
        """Give a peer up without an event; returns its channel, which is ending."""
        with self._changed:
            relation = self._relations.get(peer)
            if relation is None or relation.over:
                return None
            self._give_up(relation, "disconnected")
            del self._relations[peer]
            self._changed.notify_all()
            return relation.channel

    def close(self) -> list[SocketChannel]:
        """End all without events, and take no new ones; returns the channels, which are ending."""
        with self._changed:
            self._closed = True
            for relation in self._relations.values():
                self._give_up(relation, "the endpoint is closing")
            self._changed.notify_all()
            channels = [relation.channel for relation in self._relations.values()]
        return [channel for channel in channels if channel is not None]

    def _end_old(self, relation: Relation, reason: str, until_s: float) -> None:
        """End a relation through its connections' threads, and wait until its event was given."""
        if not relation.connections and not relation.over:
            relation.over = True  # Its first connection was never made: nobody knows of it.
            del self._relations[relation.peer]
        relation.abort(reason)
        while self._relations.get(relation.peer) is relation:
            left_s = until_s - time.monotonic()
            if left_s <= 0:
                raise DeadlineExceeded(f"the last connection to {relation.peer} did not end")
            self._changed.wait(left_s)
            self._check_open()

    def _check_open(self) -> None:
        if self._closed:
            raise PeerLost(f"the endpoint of {self._engine} is closed")

    def _give_up(self, relation: Relation, reason: str) -> None:
        relation.over = True
        relation.abort(reason)
        last = self._given_up.get(relation.peer)
        epoch = relation.epoch if last is None else max(relation.epoch, last.epoch)
        self._given_up[relation.peer] = _GivenUp(relation.life, epoch)


def _is_older(life: Life, known: Life) -> bool:
    return life.incarnation == known.incarnation and life.epoch < known.epoch
