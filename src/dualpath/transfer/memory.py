"""Channels inside one process: for tests of what runs above channels, with faults on demand.

Same contract, no sockets: each endpoint has one thread that runs its events and moves the bytes of
its pulls. Two engines are tied by their first `connect`; when the tie breaks, both lose each other.
"""

from __future__ import annotations

import itertools
import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from enum import Enum

from dualpath.base.errors import ConfigError, LeaseLost, PeerLost, TransferError
from dualpath.base.ids import EngineId
from dualpath.kv.pool import BufferPool
from dualpath.transfer.contract import (
    Channel,
    ChannelCapabilities,
    Endpoint,
    EndpointEvents,
    PeerStats,
    RemoteSpan,
    TransferName,
)
from dualpath.transfer.pulls import (
    Counters,
    DeadlineClock,
    Pull,
    PullTable,
    check_message,
)
from dualpath.transfer.spans import byte_views, check_spans, span_array, why_not_held

__all__ = ["FaultHook", "MemoryEndpoint", "MemoryFabric", "PullFault"]

_MAX_QUEUED = 16_384


class PullFault(Enum):
    """What a fault hook can make of a pull."""

    HANG = "hang"
    """No answer: it ends by its deadline."""
    LEASE_LOST = "lease_lost"
    PEER_LOST = "peer_lost"
    """The tie between the two engines breaks."""


FaultHook = Callable[[EngineId, TransferName], PullFault | None]
"""Called with the owner and the name of every pull, on the pulling endpoint's thread."""


class _Tie:
    """Two endpoints that know each other, until it breaks. Guarded by the fabric's lock."""

    def __init__(self, ends: tuple[MemoryEndpoint, MemoryEndpoint]) -> None:
        self.ends = ends
        self.broken: str | None = None
        self.channels: dict[EngineId, _MemoryChannel] = {}

    def other(self, end: MemoryEndpoint) -> MemoryEndpoint:
        first, second = self.ends
        return second if first is end else first


class MemoryFabric:
    """The network that the endpoints of one test share. `fault` may be set at any time."""

    def __init__(self, *, fault: FaultHook | None = None) -> None:
        self.fault = fault
        self._lock = threading.RLock()
        self._numbers = itertools.count()
        self._endpoints: dict[str, MemoryEndpoint] = {}
        self._ties: dict[frozenset[EngineId], _Tie] = {}

    def endpoint(
        self, engine: EngineId, pool: BufferPool, events: EndpointEvents
    ) -> MemoryEndpoint:
        """A new endpoint; `pool` stays the caller's. Raises ConfigError when the engine has one."""
        with self._lock:
            if any(end.engine == engine for end in self._endpoints.values()):
                raise ConfigError(f"{engine} has an endpoint in this fabric already")
            address = f"memory:{engine}#{next(self._numbers)}"
            endpoint = MemoryEndpoint(self, address, engine, pool, events)
            self._endpoints[address] = endpoint
        return endpoint

    def kill(self, engine: EngineId) -> None:
        """As if the engine's process had died: its peers lose it, it sees no more events."""
        with self._lock:
            ends = [end for end in self._endpoints.values() if end.engine == engine]
        for end in ends:
            self._leave(end, "the connection was reset")

    def _leave(self, endpoint: MemoryEndpoint, reason: str) -> None:
        with self._lock:
            self._endpoints.pop(endpoint.address, None)
            ties = [tie for tie in self._ties.values() if endpoint in tie.ends]
        for tie in ties:
            self._break(tie, reason, silent=endpoint)

    def _tie(self, endpoint: MemoryEndpoint, address: str, peer: EngineId) -> _Tie:
        with self._lock:
            other = self._endpoints.get(address)
            if endpoint.address not in self._endpoints:
                raise PeerLost(f"the endpoint of {endpoint.engine} is closed")
            if other is None or other.engine != peer:
                raise PeerLost(f"{peer} is not at {address}")
            key = frozenset((endpoint.engine, peer))
            tie = self._ties.get(key)
            if tie is None:
                tie = self._ties[key] = _Tie((endpoint, other))
            return tie

    def _untie(self, endpoint: MemoryEndpoint, peer: EngineId) -> None:
        with self._lock:
            tie = self._ties.get(frozenset((endpoint.engine, peer)))
        if tie is not None:
            self._break(tie, "disconnected", silent=endpoint)

    def _break(self, tie: _Tie, reason: str, silent: MemoryEndpoint | None = None) -> None:
        with self._lock:
            if tie.broken is not None:
                return
            tie.broken = reason
            del self._ties[frozenset(end.engine for end in tie.ends)]
            # Before a new tie can be made, whose messages come after the loss.
            for end in tie.ends:
                if end is not silent:
                    end.post_loss(tie.other(end).engine, reason)
            channels = list(tie.channels.values())
        for channel in channels:
            channel.lose(reason)


class MemoryEndpoint(Endpoint):
    """Made by `MemoryFabric.endpoint`."""

    def __init__(
        self,
        fabric: MemoryFabric,
        address: str,
        engine: EngineId,
        pool: BufferPool,
        events: EndpointEvents,
    ) -> None:
        self.address = address
        self.engine = engine
        self.pool = pool
        self._fabric = fabric
        self._events = events
        self._clock = DeadlineClock(f"dualpath-deadlines-{engine}")
        self._counters: dict[EngineId, Counters] = {}
        # Bounded by `post`, except for losses: one a peer.
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(
            target=self._run, name=f"dualpath-memory-{engine}", daemon=True
        )
        self._thread.start()

    def connect(self, address: str, peer: EngineId, *, deadline_s: float) -> Channel:
        with self._fabric._lock:
            tie = self._fabric._tie(self, address, peer)
            channel = tie.channels.get(self.engine)
            if channel is None:
                channel = _MemoryChannel(self._fabric, tie, self, self._clock)
                tie.channels[self.engine] = channel
        return channel

    def disconnect(self, peer: EngineId) -> None:
        self._fabric._untie(self, peer)
        self._counters.pop(peer, None)

    def stats(self) -> dict[EngineId, PeerStats]:
        return {peer: counters.stats for peer, counters in list(self._counters.items())}

    def close(self) -> None:
        self._fabric._leave(self, "the peer closed the connection")
        self._clock.close()
        if self._thread is not threading.current_thread():
            if self._thread.is_alive():
                self._work.put(None)
            self._thread.join()

    def counters(self, peer: EngineId) -> Counters:
        return self._counters.setdefault(peer, Counters())

    def post(self, work: Callable[[], None]) -> bool:
        """Have the endpoint's thread do it; False when it has too much to do already."""
        if self._work.qsize() >= _MAX_QUEUED:
            return False
        self._work.put(work)
        return True

    def post_message(self, tie: _Tie, message: bytes) -> bool:
        sender = tie.other(self).engine

        def deliver() -> None:
            if tie.broken is None:
                self.counters(sender).notified(received=1)
                self._events.notified(sender, message)

        return self.post(deliver)

    def post_loss(self, peer: EngineId, reason: str) -> None:
        self._work.put(lambda: self._events.peer_lost(peer, reason))

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            work()


class _MemoryChannel(Channel):
    def __init__(
        self, fabric: MemoryFabric, tie: _Tie, endpoint: MemoryEndpoint, clock: DeadlineClock
    ) -> None:
        self._fabric = fabric
        self._tie = tie
        self._endpoint = endpoint
        self._owner = tie.other(endpoint)
        self.peer = self._owner.engine
        self.capabilities = ChannelCapabilities(kind="memory", same_host=True)
        self._pulls = PullTable(endpoint.counters(self.peer), clock)

    def pull(
        self,
        name: TransferName,
        stamp: int,
        spans: Sequence[RemoteSpan],
        into: Sequence[memoryview],
        *,
        deadline_s: float,
    ) -> Future[int]:
        array = span_array(spans)
        check_spans(self._owner.pool.geometry, array)
        pull = self._pulls.open(name, stamp, array, byte_views(array, into), deadline_s)
        if not pull.done and not self._endpoint.post(lambda: self._move(pull)):
            pull.interrupt(TransferError(f"{name}: {_MAX_QUEUED} operations wait already"))
        return pull.future

    def notify(self, message: bytes) -> None:
        check_message(message)
        if self._tie.broken is None and not self._owner.post_message(self._tie, message):
            self._fabric._break(self._tie, f"{_MAX_QUEUED} messages wait already")
        if self._tie.broken is not None:
            raise PeerLost(f"{self.peer} is lost: {self._tie.broken}")
        self._endpoint.counters(self.peer).notified(sent=1)

    def lose(self, reason: str) -> None:
        self._pulls.close(PeerLost(f"{self.peer} is lost: {reason}"))

    def _move(self, pull: Pull) -> None:
        fault = self._fabric.fault(self.peer, pull.name) if self._fabric.fault else None
        if fault is PullFault.HANG:
            return
        if fault is PullFault.PEER_LOST:
            self._fabric._break(self._tie, "an injected fault")
        if not pull.begin():
            return
        with self._owner.pool.hold(pull.stamp) as lease:
            missing = why_not_held(lease, pull.stamp, pull.spans)
            if fault is PullFault.LEASE_LOST:
                missing = "an injected fault"
            if missing is not None:
                pull.fail(LeaseLost(f"{pull.name}: {self.peer} says {missing}"))
                return
            for (slot, offset, length), target in zip(pull.spans.tolist(), pull.into, strict=True):
                stop = pull.must_stop()
                if stop is not None:
                    pull.fail(stop)
                    return
                target[:] = self._owner.pool.view(slot)[offset : offset + length]
        self._owner.counters(self._endpoint.engine).served(pull.total_bytes)
        pull.complete()
