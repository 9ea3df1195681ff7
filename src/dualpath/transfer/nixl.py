"""NIXL over UCX: a pull is one-sided reads of the owner's pool, over RDMA where there is any.

The TCP connection carries the greeting, messages, the peer's death, and once what NIXL needs to reach
the owner's memory. The owner's Python takes no part in a pull: after the bytes the puller reads the
stamps of their slots, also by NIXL, so that bytes which changed hands are never reported as good. A
stamp is never used twice: one that still stands after the bytes were read stood while they were.

Reads go into memory of the channel (`_STAGES` pieces), and from there into the destination: NIXL
cannot take back a read that is late, and nothing may touch the destination once a pull has ended.
"""

from __future__ import annotations

import mmap
import socket
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from dualpath.base.errors import LeaseLost, PeerLost
from dualpath.base.ids import EngineId, KiB, MiB
from dualpath.kv.pool import BufferPool, PoolGeometry
from dualpath.transfer.connection import Patience, PeerContext, SocketChannel
from dualpath.transfer.contract import ChannelCapabilities
from dualpath.transfer.handshake import receive_greeting, send_greeting
from dualpath.transfer.nixl_agent import Descriptors, NixlAgent, Pace, Read, ReadDriver, address_of
from dualpath.transfer.pulls import Pull
from dualpath.transfer.spans import SpanArray, copy_bytes, cut_spans, cut_views, merged_spans
from dualpath.transfer.tcp import TcpTransport
from dualpath.transfer.wire import Link

__all__ = ["NixlChannel", "NixlTransport"]

_STAGE_BYTES = 2 * MiB
_STAGES = 8
_STAMP_BYTES = 8
# A killed peer's reads end within this; those of one that hangs may never.
_LAST_READS_S = 2.0
_MAX_INTRODUCTION_BYTES = 64 * KiB


class _Introduction(msgspec.Struct, frozen=True, array_like=True):
    """`metadata` is NIXL's own; the pool's memory file lies at the address `base` in its owner."""

    metadata: bytes
    base: int


_introduction_decoder = msgspec.msgpack.Decoder(_Introduction)


@dataclass(eq=False, slots=True)
class _Job:
    """A pull: chunks are read until `posted` is its length, then the stamps."""

    pull: Pull
    spans: SpanArray
    posted: int = 0
    chunks_left: int = 0

    @property
    def next_stop(self) -> int:
        return min(self.posted + _STAGE_BYTES, self.pull.total_bytes)


@dataclass(frozen=True, slots=True, eq=False)
class _Flight:
    """A read of the bytes [start, stop) of a pull; or of its stamps, when there are none."""

    read: Read
    job: _Job
    stage: memoryview
    start: int
    stop: int


class _Reader(ReadDriver):
    """The reads of one channel. All of it runs on the agent's thread.

    `lost(reason)` is called when NIXL cannot reach the peer any more.
    """

    def __init__(
        self,
        agent: NixlAgent,
        peer: EngineId,
        introduction: _Introduction,
        geometry: PoolGeometry,
        lost: Callable[[str], None],
    ) -> None:
        self._agent = agent
        self._peer = peer
        self._lost = lost
        self._base = introduction.base
        self._geometry = geometry
        self._given_up_s = float("inf")
        """When to wait no longer for reads in flight; set when the channel has ended."""
        self._unread: deque[_Job] = deque()
        self._unchecked: deque[_Job] = deque()
        self._flights: list[_Flight] = []
        self._memory = memoryview(mmap.mmap(-1, _STAGES * _STAGE_BYTES))
        starts = range(0, len(self._memory), _STAGE_BYTES)
        self._free = [self._memory[start : start + _STAGE_BYTES] for start in starts]
        self._name = agent.add_peer(introduction.metadata)
        self._registered = agent.register(self._memory)
        agent.add_driver(self)

    def submit(self, job: _Job) -> None:
        if job.pull.total_bytes:
            self._unread.append(job)
        else:
            self._unchecked.append(job)

    def close(self) -> None:
        """Read no more; the memory goes when the last read in flight has ended."""
        self._given_up_s = time.monotonic() + _LAST_READS_S
        self._unread.clear()
        self._unchecked.clear()

    def abandon(self) -> None:
        self._flights.clear()
        self._lost("NIXL has ended")

    def advance(self) -> Pace:
        ended = [flight for flight in self._flights if self._agent.look(flight.read)]
        for flight in ended:
            self._flights.remove(flight)
            self._free.append(flight.stage)
            self._land(flight)
        if self._given_up_s < float("inf"):
            return self._leave()
        posted = self._post()
        if ended or posted:
            return Pace.MOVING
        return Pace.WAITING if self._flights else Pace.IDLE

    def _leave(self) -> Pace:
        if self._flights and time.monotonic() < self._given_up_s:
            return Pace.WAITING
        self._agent.remove_driver(self)
        self._agent.remove_peer(self._name)
        if self._flights:
            self._agent.keep(self._memory)
            self.abandon()
        else:
            self._agent.deregister(self._registered)
        return Pace.IDLE

    def _post(self) -> bool:
        posted = False
        while self._free and (self._unchecked or self._unread):
            job = self._unchecked[0] if self._unchecked else self._unread[0]
            if job.pull.must_stop() is not None:
                job.pull.expire()  # Ends it, unless something ended it before.
            if job.pull.done:
                (self._unchecked or self._unread).popleft()
                continue
            if self._unchecked:
                self._unchecked.popleft()
                self._post_stamps(job)
            else:
                self._post_chunk(job)
                if job.posted == job.pull.total_bytes:
                    self._unread.popleft()
            posted = True
        return posted

    def _post_chunk(self, job: _Job) -> None:
        start, stop = job.posted, job.next_stop
        spans = (
            job.spans if stop - start == job.pull.total_bytes else cut_spans(job.spans, start, stop)
        )
        pieces = merged_spans(self._geometry, spans)
        job.posted = stop
        job.chunks_left += 1
        self._fly(job, pieces[:, 0], pieces[:, 1], start, stop)

    def _post_stamps(self, job: _Job) -> None:
        slots = np.unique(job.spans[:, 0])
        heads = np.flatnonzero(np.append(True, np.diff(slots) != 1))
        counts = np.diff(np.append(heads, len(slots)))
        self._fly(job, slots[heads] * _STAMP_BYTES, counts * _STAMP_BYTES, 0, 0)

    def _fly(
        self, job: _Job, offsets: SpanArray, lengths: SpanArray, start: int, stop: int
    ) -> None:
        """Read pieces of the peer's memory file, one after the other into a free stage."""
        stage = self._free.pop()
        ends = np.cumsum(lengths)
        local = _descriptors(address_of(stage) + ends - lengths, lengths)
        remote = _descriptors(self._base + offsets, lengths)
        read = self._agent.read(self._name, local, remote)
        self._flights.append(_Flight(read, job, stage, start, stop))

    def _land(self, flight: _Flight) -> None:
        """A read has ended, and its stage is free once this returns."""
        pull, job = flight.job.pull, flight.job
        checks = flight.start == flight.stop
        job.chunks_left -= not checks
        if flight.read.error:
            reason = f"NIXL cannot read from it: {flight.read.error}"
            pull.interrupt(PeerLost(f"{pull.name}: {self._peer} is lost: {reason}"))
            self._lost(reason)
        elif checks:
            self._check(job, flight.stage)
        elif pull.begin():
            self._copy(job, flight)
            if not job.chunks_left and job.posted == pull.total_bytes:
                self._unchecked.append(job)

    def _copy(self, job: _Job, flight: _Flight) -> None:
        pull = job.pull
        views: Sequence[memoryview] = pull.into
        if flight.stop - flight.start != pull.total_bytes:
            views = cut_views(job.spans, views, flight.start, flight.stop)
        position = 0
        for view in views:
            copy_bytes(view, flight.stage[position : position + view.nbytes])
            position += view.nbytes
        pull.complete()

    def _check(self, job: _Job, stage: memoryview) -> None:
        pull = job.pull
        if not pull.begin():
            return
        slots = np.unique(job.spans[:, 0])
        stamps = np.frombuffer(stage, dtype=np.uint64, count=len(slots))
        lost = slots[stamps != np.uint64(pull.stamp)]
        stop = pull.must_stop()
        if len(lost):
            slot = int(lost[0])
            pull.fail(LeaseLost(f"{pull.name}: slot {slot} is not leased under stamp {pull.stamp}"))
        elif stop is not None:
            pull.fail(stop)
        else:
            pull.complete()


class NixlChannel(SocketChannel):
    """Pulls by NIXL reads; messages over the socket."""

    def __init__(
        self,
        link: Link,
        geometry: PoolGeometry,
        capabilities: ChannelCapabilities,
        context: PeerContext,
        agent: NixlAgent,
        reader: _Reader,
    ) -> None:
        super().__init__(link, geometry, capabilities, context)
        self._agent = agent
        self._reader = reader

    def _submit(self, pull: Pull) -> None:
        chunks = -(-pull.total_bytes // _STAGE_BYTES)
        pull.split(chunks + 1)  # The stamps are the last part.
        job = _Job(pull, pull.spans)
        try:
            self._agent.post(lambda: self._reader.submit(job))
        except PeerLost as error:
            pull.interrupt(PeerLost(f"{pull.name}: {error}"))

    def _broken(self, reason: str) -> None:
        super()._broken(reason)
        try:
            self._agent.post(self._reader.close)
        except PeerLost:
            pass  # The agent is gone, with all that it read.


class NixlTransport(TcpTransport):
    """Listens as `TcpTransport` does; owns a NIXL agent that knows `pool`, until `close`.

    Raises ConfigError when NIXL is missing or does not start.
    """

    kind = "nixl"

    def __init__(
        self,
        name: str,
        pool: BufferPool,
        secret: bytes,
        patience: Patience,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        advertise: str | None = None,
    ) -> None:
        super().__init__(secret, patience, host=host, port=port, advertise=advertise)
        self.lanes = 0
        self._agent = NixlAgent(name, pool.memory)

    def introduce(self, sock: socket.socket, pool: BufferPool, deadline_s: float) -> None:
        introduction = _Introduction(self._agent.metadata, self._agent.base)
        send_greeting(sock, introduction, deadline_s)

    def channel(
        self,
        socks: Sequence[socket.socket],
        geometry: PoolGeometry,
        context: PeerContext,
        deadline_s: float,
    ) -> SocketChannel:
        (sock,) = socks
        introduction = receive_greeting(
            sock, _introduction_decoder, deadline_s, max_bytes=_MAX_INTRODUCTION_BYTES
        )
        link = Link(sock, stall_s=context.patience.peer_timeout_s)
        reader = self._agent.call(
            lambda: _Reader(self._agent, context.peer, introduction, geometry, link.abort),
            context.patience.handshake_s,
        )
        capabilities = ChannelCapabilities(kind=self.kind, same_host=False)
        return NixlChannel(link, geometry, capabilities, context, self._agent, reader)

    def close(self) -> None:
        self._agent.close()


def _descriptors(addresses: SpanArray, lengths: SpanArray) -> Descriptors:
    zeros = np.zeros_like(lengths)
    return np.ascontiguousarray(np.column_stack((addresses, lengths, zeros)), dtype=np.uint64)
