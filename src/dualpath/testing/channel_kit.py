"""What the channel contract suite's tests share: engines that close and leak nothing, and pulls.

Importing this module needs pytest.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

import pytest

from dualpath.base.ids import EngineId, KiB, RequestId
from dualpath.kv.pool import BufferPool, Lease
from dualpath.testing.channel_peer import ChannelFactory, RemotePeer, pattern
from dualpath.testing.results import Results, wait_until
from dualpath.transfer import Channel, Endpoint, EndpointEvents, RemoteSpan, TransferName

__all__ = [
    "DEADLINE_S",
    "NAME",
    "SECRET",
    "SLOTS",
    "SLOT_BYTES",
    "ChannelSuiteFixtures",
    "Engine",
    "OpenEngine",
    "Received",
    "buffers",
    "pull_spans",
    "whole",
]

SECRET = bytes(range(32))
DEADLINE_S = 30.0
SLOTS = 12
SLOT_BYTES = 64 * KiB
NAME = TransferName(RequestId("r"), 1, 0)


@dataclass(frozen=True, slots=True)
class Received:
    """A message or, with its reason, a loss."""

    peer: EngineId
    body: bytes | str


@dataclass
class Engine:
    """An endpoint with its pool, and what its events said."""

    name: EngineId
    pool: BufferPool
    endpoint: Endpoint
    messages: Results[Received] = field(default_factory=Results)
    losses: Results[Received] = field(default_factory=Results)

    def lease(self, n_slots: int, seed: int) -> Lease:
        """The i-th slot is filled by `pattern(seed + i)`."""
        lease = self.pool.try_lease("suite", n_slots)
        assert lease is not None
        for index in range(n_slots):
            lease.view(index)[:] = pattern(seed + index, self.pool.geometry.slot_bytes)
        return lease

    def connect(self, other: Engine) -> Channel:
        return self.endpoint.connect(other.endpoint.address, other.name, deadline_s=DEADLINE_S)


OpenEngine = Callable[..., Engine]


def pull_spans(
    channel: Channel,
    stamp: int,
    spans: Sequence[RemoteSpan],
    into: Sequence[bytearray],
    deadline_s: float = DEADLINE_S,
) -> Future[int]:
    views = [memoryview(target) for target in into]
    return channel.pull(NAME, stamp, spans, views, deadline_s=deadline_s)


def whole(slots: Sequence[int], slot_bytes: int) -> list[RemoteSpan]:
    return [RemoteSpan(slot, 0, slot_bytes) for slot in slots]


def buffers(spans: Sequence[RemoteSpan]) -> list[bytearray]:
    return [bytearray(span.length) for span in spans]


def _threads_and_descriptors() -> tuple[int, int]:
    return threading.active_count(), len(os.listdir("/proc/self/fd"))


class ChannelSuiteFixtures:
    """A subclass gives `channel_factory`. After each test it is checked that nothing leaked."""

    @pytest.fixture
    def channel_factory(self) -> ChannelFactory:
        raise NotImplementedError("a subclass gives the fixture `channel_factory`")

    @pytest.fixture
    def engine(self, channel_factory: ChannelFactory) -> Iterator[OpenEngine]:
        """Opens engines; closes them at the end, when no thread, descriptor or hold may be left."""
        before = _threads_and_descriptors()
        opened: list[Engine] = []

        def open_engine(
            name: str, secret: bytes = SECRET, on_message: Callable[[], None] | None = None
        ) -> Engine:
            messages: Results[Received] = Results()
            losses: Results[Received] = Results()

            def notified(peer: EngineId, message: bytes) -> None:
                messages(Received(peer, message))
                if on_message is not None:
                    on_message()

            events = EndpointEvents(notified, lambda peer, reason: losses(Received(peer, reason)))
            pool = BufferPool(SLOTS, SLOT_BYTES, name=name)
            endpoint = channel_factory.open(EngineId(name), pool, secret, events)
            opened.append(Engine(EngineId(name), pool, endpoint, messages, losses))
            return opened[-1]

        yield open_engine
        for one in opened:
            one.endpoint.close()
            one.endpoint.close()
        for one in opened:
            assert all(lease.holds == 0 for lease in one.pool.leases), "a hold is left"
            one.pool.check()
            one.pool.close()
        wait_until(
            lambda: _threads_and_descriptors() <= before,
            f"threads and descriptors are not back to {before}",
        )

    @pytest.fixture
    def remote(self, channel_factory: ChannelFactory) -> Iterator[RemotePeer]:
        if not channel_factory.crosses_processes:
            pytest.skip("these channels do not cross processes")
        with RemotePeer(channel_factory, EngineId("remote"), SECRET, seed=900) as peer:
            yield peer
