"""The contract of a channel: pull KV out of a peer's buffer pool, and notify it.

Transfers are one-sided reads, as with RDMA: the side that needs the bytes pulls them from slots
that the owner holds under a lease. So a late or repeated transfer can spoil no one's memory, and the owner
frees only when the peer said it is done, or is lost. Every pull carries the lease's stamp; an owner
that no longer holds the slots under this stamp answers `LeaseLost` (cases 5, 11).

`dualpath.testing.channel_suite` checks every implementation.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

import msgspec

from dualpath.base.ids import EngineId, RequestId

__all__ = [
    "Channel",
    "ChannelCapabilities",
    "Endpoint",
    "EndpointEvents",
    "RemoteSpan",
    "TransferName",
]


class TransferName(msgspec.Struct, frozen=True, order=True):
    """Names a transfer in logs, errors and traces. `attempt` tells a retry from its predecessor."""

    request: RequestId
    attempt: int
    layer: int


class RemoteSpan(msgspec.Struct, frozen=True, array_like=True):
    """`length` bytes at `offset` inside slot `slot` of the peer's pool."""

    slot: int
    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class ChannelCapabilities:
    """What callers may rely on. `same_host` channels copy through shared memory."""

    kind: str
    same_host: bool


@dataclass(frozen=True, slots=True)
class EndpointEvents:
    """Callbacks of an endpoint; they run on its thread: hand over and return.

    `notified(peer, message)`: a peer's message arrived; in order for one peer.
    `peer_lost(peer, reason)`: once; every pull from that peer has failed or will with PeerLost.
    """

    notified: Callable[[EngineId, bytes], None]
    peer_lost: Callable[[EngineId, str], None]


class Channel(ABC):
    """This engine's end to one peer. Thread-safe."""

    peer: EngineId
    capabilities: ChannelCapabilities

    @abstractmethod
    def pull(
        self,
        name: TransferName,
        stamp: int,
        spans: Sequence[RemoteSpan],
        into: Sequence[memoryview],
        *,
        deadline_s: float,
    ) -> Future[int]:
        """Copy the peer's spans into `into` (one writable view a span, same length), in order.

        The future gives the bytes moved, or raises LeaseLost, PeerLost or DeadlineExceeded; it
        is done only when nothing can touch `into` any more. What `into` holds after an error is
        undefined. A span outside the slot, or lengths that differ, raise ValueError at once.
        """

    @abstractmethod
    def notify(self, message: bytes) -> None:
        """Send a message (at most 1 MiB) in order. Raises PeerLost; never blocks on a slow peer

        longer than a second, after which the peer counts as lost.
        """


class Endpoint(ABC):
    """An engine's end to all its peers, serving pulls from its own pool.

    `address` is what a peer passes to `connect`; it is opaque, and carries no secret.
    """

    address: str

    @abstractmethod
    def connect(self, address: str, peer: EngineId, *, deadline_s: float) -> Channel:
        """The channel to `peer`, opened when there is none. Raises PeerLost or DeadlineExceeded."""

    @abstractmethod
    def disconnect(self, peer: EngineId) -> None:
        """Close the channel to `peer`, if any; its pulls fail with PeerLost, no event is raised."""

    @abstractmethod
    def close(self) -> None:
        """Close everything; nothing of this endpoint is left on the machine. Idempotent."""
