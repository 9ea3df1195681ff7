"""What a socket endpoint asks of a way to reach peers; everything else is the same for all of them.

A transport knows sockets and how a pull moves its bytes. It knows no relations, events or retries.
"""

from __future__ import annotations

import socket
from abc import ABC, abstractmethod
from collections.abc import Sequence

from dualpath.base.traffic_class import TrafficClass
from dualpath.kv.pool import BufferPool, PoolGeometry
from dualpath.transfer.connection import PeerContext, SocketChannel

__all__ = ["Transport"]


class Transport(ABC):
    """One way to reach peers: how to listen, dial, and make a channel of a greeted socket."""

    kind: str

    lanes: int = 0
    """Connections to a peer beside the one for messages, for the bytes of pulls."""

    @abstractmethod
    def listen(self) -> socket.socket:
        """A new listening socket, owned by the caller."""

    @abstractmethod
    def location(self, listener: socket.socket) -> str:
        """Where peers dial it."""

    @abstractmethod
    def dial(self, location: str, timeout_s: float) -> socket.socket:
        """A connected socket, owned by the caller. Raises PeerLost, DeadlineExceeded."""

    @abstractmethod
    def mark(self, sock: socket.socket, traffic: TrafficClass) -> None:
        """Have the network treat what we send on it as of this class, as far as it can."""

    @abstractmethod
    def accepted(self, sock: socket.socket) -> None:
        """Prepare a socket that was just accepted. Raises PeerLost for one that may not connect."""

    @abstractmethod
    def introduce(self, sock: socket.socket, pool: BufferPool, deadline_s: float) -> None:
        """On the accepting side, after the proof: hand over what pulls need beyond the socket."""

    @abstractmethod
    def channel(
        self,
        socks: Sequence[socket.socket],
        geometry: PoolGeometry,
        context: PeerContext,
        deadline_s: float,
    ) -> SocketChannel:
        """On the dialling side, after the proofs: of the messages' connection, then those of the lanes.

        Takes what `introduce` sends; owns `socks` if it returns.
        """

    @abstractmethod
    def close(self) -> None:
        """Free what channels share. After all channels have ended."""
