from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
from transfer_kit import LATER_S, NAME, Heard, filled_pool

from dualpath.base.errors import ConfigError, DeadlineExceeded, LeaseLost, PeerLost
from dualpath.base.ids import EngineId
from dualpath.kv import BufferPool
from dualpath.testing.channel_peer import pattern
from dualpath.transfer import (
    Channel,
    EndpointEvents,
    MemoryEndpoint,
    MemoryFabric,
    PullFault,
    RemoteSpan,
    TransferName,
)

OWNER, PULLER = EngineId("owner"), EngineId("puller")


class World:
    def __init__(self) -> None:
        self.fabric = MemoryFabric()
        self.pool, self.stamp = filled_pool(1, 4096, seed=90)
        self.puller_pool = BufferPool(1, 4096)
        self.owner_heard, self.puller_heard = Heard(), Heard()
        self.owner = self.fabric.endpoint(OWNER, self.pool, self.owner_heard.events)
        self.puller = self.fabric.endpoint(PULLER, self.puller_pool, self.puller_heard.events)

    def connect(self) -> Channel:
        return self.puller.connect(self.owner.address, OWNER, deadline_s=LATER_S)

    def pull_error(self, channel: Channel, deadline_s: float = LATER_S) -> BaseException | None:
        self.into = bytearray(4096)
        spans = [RemoteSpan(0, 0, 4096)]
        views = [memoryview(self.into)]
        pull = channel.pull(NAME, self.stamp, spans, views, deadline_s=deadline_s)
        return pull.exception(LATER_S)


@pytest.fixture
def world() -> Iterator[World]:
    world = World()
    yield world
    world.puller.close()
    world.owner.close()
    world.pool.close()
    world.puller_pool.close()


def test_a_fault_hook_decides_each_pull(world: World) -> None:
    asked: list[tuple[EngineId, TransferName]] = []
    faults = iter([PullFault.HANG, PullFault.LEASE_LOST, None, PullFault.PEER_LOST])

    def fault(owner: EngineId, name: TransferName) -> PullFault | None:
        asked.append((owner, name))
        return next(faults)

    world.fabric.fault = fault
    channel = world.connect()
    assert isinstance(world.pull_error(channel, deadline_s=0.03), DeadlineExceeded)
    assert isinstance(world.pull_error(channel), LeaseLost)
    assert world.pull_error(channel) is None
    assert world.into == pattern(90, 4096)
    assert isinstance(world.pull_error(channel), PeerLost)
    assert world.puller_heard.losses.wait(1) == ["an injected fault"]
    assert world.owner_heard.losses.wait(1) == ["an injected fault"]
    assert asked == [(OWNER, NAME)] * 4
    world.fabric.fault = None
    assert world.pull_error(world.connect()) is None


def test_a_killed_engine_is_lost_by_its_peers_and_hears_nothing(world: World) -> None:
    channel = world.connect()
    world.fabric.kill(OWNER)
    assert world.puller_heard.losses.wait(1) == ["the connection was reset"]
    assert isinstance(world.pull_error(channel), PeerLost)
    with pytest.raises(PeerLost):
        world.connect()
    assert world.owner_heard.losses.items == []
    again = world.fabric.endpoint(OWNER, world.pool, world.owner_heard.events)
    channel = world.puller.connect(again.address, OWNER, deadline_s=LATER_S)
    assert world.pull_error(channel) is None
    again.close()


def test_an_engine_has_one_endpoint(world: World) -> None:
    with pytest.raises(ConfigError):
        world.fabric.endpoint(OWNER, world.pool, world.owner_heard.events)


def test_a_peer_that_handles_no_messages_is_lost() -> None:
    fabric = MemoryFabric()
    pool = BufferPool(1, 4096)
    go_on = threading.Event()
    slow: MemoryEndpoint = fabric.endpoint(
        OWNER, pool, EndpointEvents(lambda peer, body: _wait(go_on), lambda peer, reason: None)
    )
    heard = Heard()
    sender = fabric.endpoint(PULLER, pool, heard.events)
    channel = sender.connect(slow.address, OWNER, deadline_s=LATER_S)

    def flood() -> None:
        for _ in range(100_000):
            channel.notify(b"")

    with pytest.raises(PeerLost):
        flood()
    assert len(heard.losses.wait(1)) == 1
    go_on.set()
    slow.close()
    sender.close()
    pool.close()


def _wait(event: threading.Event) -> None:
    assert event.wait(LATER_S)
