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
    "PeerStats",
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
    `peer_lost(peer, reason)`: once for each life of the peer, and after it nothing more of that
    life; every pull from it has failed or will with PeerLost. Calls for one peer never overlap.
    A callback must not wait for the same endpoint (`connect`, `close`).
    """

    notified: Callable[[EngineId, bytes], None]
    peer_lost: Callable[[EngineId, str], None]


@dataclass(frozen=True, slots=True)
class PeerStats:
    """What has passed between this endpoint and one peer, since their first contact; only grows.

    `pull_s` is the sum over pulls, ended well or not, of the time from the call to the end;
    pulls overlap, so it may exceed the time passed. `served_*` count pulls of the peer from our
    pool over a socket; copies a peer makes through shared memory are seen only on its side.
    """

    pulls: int = 0
    pull_failures: int = 0
    pulled_bytes: int = 0
    pull_s: float = 0.0
    notifies_sent: int = 0
    notifies_received: int = 0
    served_pulls: int = 0
    served_bytes: int = 0


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

        The future gives the bytes moved, or raises LeaseLost, PeerLost or DeadlineExceeded (or
        TransferError when too many pulls are outstanding); it is done only when nothing can touch
        `into` any more, and cannot be cancelled. What `into` holds after an error is undefined.
        Its callbacks run on the channel's threads: hand over and return. No spans: 0 bytes, and
        nothing is checked. A span outside the slot, lengths that differ, or more than 65,536 spans
        raise ValueError at once.
        """

    @abstractmethod
    def notify(self, message: bytes) -> None:
        """Send a message in order. Raises PeerLost, or ValueError when it exceeds 1 MiB.

        Never blocks on a slow peer longer than a second, after which the peer counts as lost.
        """


class Endpoint(ABC):
    """An engine's end to all its peers, serving pulls from its own pool.

    `address` is what a peer passes to `connect`; it is opaque, and carries no secret.
    """

    address: str

    @abstractmethod
    def connect(self, address: str, peer: EngineId, *, deadline_s: float) -> Channel:
        """The channel to `peer`, opened when there is none. Raises PeerLost or DeadlineExceeded.

        A channel that was opened to another address belongs to a predecessor of the peer, which
        is lost by this call (with its event).
        """

    @abstractmethod
    def disconnect(self, peer: EngineId) -> None:
        """Close the channel to `peer`, if any; its pulls fail with PeerLost, no event is raised."""

    @abstractmethod
    def stats(self) -> dict[EngineId, PeerStats]:
        """Counters by peer, for metrics; `disconnect` forgets those of its peer."""

    @abstractmethod
    def close(self) -> None:
        """Close everything, without events; nothing of this endpoint is left on the machine. Idempotent."""
