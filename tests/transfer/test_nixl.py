"""NIXL: the channel contract suite over shared memory and over TCP, and what is its own.

UCX chooses by its environment, which it reads whenever an agent is made.
"""

from __future__ import annotations

import subprocess
import sys
from typing import ClassVar

import pytest
from channel_factories import NixlFactory
from transfer_kit import LATER_S, NAME, SECRET, Heard, filled_pool, pull_slot

from dualpath.base.errors import ConfigError, DeadlineExceeded, LeaseLost
from dualpath.base.ids import EngineId, MiB
from dualpath.kv import BufferPool
from dualpath.testing.channel_kit import OpenEngine, buffers, pull_spans, whole
from dualpath.testing.channel_peer import (
    REMOTE_SLOT_BYTES,
    ChannelFactory,
    RemotePeer,
    pattern,
)
from dualpath.testing.channel_suite import ChannelContractSuite
from dualpath.transfer import RemoteSpan, nixl_missing, open_endpoint
from dualpath.transfer.nixl import NixlChannel

OWNER, PULLER = EngineId("owner"), EngineId("puller")
SLOT_BYTES = 5 * MiB  # More than one stage holds, and no multiple of it.
needs_nixl = pytest.mark.skipif(nixl_missing() is not None, reason=nixl_missing() or "")


@pytest.fixture(autouse=True)
def on_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    """Interfaces that come and go beside the tests are not UCX's business."""
    monkeypatch.setenv("UCX_NET_DEVICES", "lo")
    monkeypatch.delenv("UCX_TLS", raising=False)


class _NixlSuite(ChannelContractSuite):
    transports: ClassVar[str]

    @pytest.fixture(autouse=True)
    def over(self, on_loopback: None, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("UCX_TLS", self.transports)

    @pytest.fixture
    def channel_factory(self) -> ChannelFactory:
        return NixlFactory()


@needs_nixl
class TestNixlOverSharedMemory(_NixlSuite):
    transports = "sm,self,tcp"  # UCX connects by TCP even where it moves nothing over it.


@needs_nixl
class TestNixlOverTcp(_NixlSuite):
    transports = "tcp"

    def test_it_is_tcp_where_the_owner_takes_part(
        self, engine: OpenEngine, remote: RemotePeer
    ) -> None:
        puller = engine("puller")
        channel = puller.endpoint.connect(remote.address, remote.engine, deadline_s=LATER_S)
        spans = whole(remote.slots, REMOTE_SLOT_BYTES)
        remote.stop()
        late = pull_spans(channel, remote.stamp, spans, buffers(spans), deadline_s=0.2)
        assert isinstance(late.exception(LATER_S), DeadlineExceeded)
        puller.endpoint.close()  # With reads in flight, of which NIXL will never hear.
        remote.resume()


@needs_nixl
def test_a_pull_of_many_stages_and_runs_of_slots_arrives_exactly() -> None:
    pool, stamp = filled_pool(5, SLOT_BYTES, seed=80)
    slots = pool.leases[0].slots
    target = BufferPool(5, SLOT_BYTES)
    owner = open_endpoint("nixl", OWNER, pool, SECRET, Heard().events)
    puller = open_endpoint("nixl", PULLER, target, SECRET, Heard().events)
    channel = puller.connect(owner.address, OWNER, deadline_s=LATER_S)
    assert isinstance(channel, NixlChannel)
    assert not channel.capabilities.same_host
    for chosen in ((0, 1, 2, 3, 4), (4, 0, 2), (3, 3)):
        spans = [RemoteSpan(slots[index], 0, SLOT_BYTES) for index in chosen]
        into = [target.view(place) for place in range(len(chosen))]
        pull = channel.pull(NAME, stamp, spans, into, deadline_s=LATER_S)
        assert pull.result(LATER_S) == len(chosen) * SLOT_BYTES
        for index, view in zip(chosen, into, strict=True):
            assert view == pattern(80 + index, SLOT_BYTES)
    for endpoint in (puller, owner):
        endpoint.close()
    pool.close()
    target.close()


@needs_nixl
def test_every_slot_of_a_pull_must_be_under_the_stamp() -> None:
    pool = BufferPool(4, 4096)
    mine, other = pool.try_lease("mine", 2), pool.try_lease("other", 2)
    assert mine is not None and other is not None
    owner = open_endpoint("nixl", OWNER, pool, SECRET, Heard().events)
    puller = open_endpoint("nixl", PULLER, pool, SECRET, Heard().events)
    channel = puller.connect(owner.address, OWNER, deadline_s=LATER_S)
    spans = [RemoteSpan(slot, 7, 9) for slot in (*mine.slots, other.slots[1])]
    into = [memoryview(bytearray(9)) for _ in spans]
    lost = channel.pull(NAME, mine.stamp, spans, into, deadline_s=LATER_S).exception(LATER_S)
    assert isinstance(lost, LeaseLost)
    assert f"slot {other.slots[1]} " in str(lost)
    empty = [RemoteSpan(mine.slots[0], 0, 0)]
    nothing = [memoryview(bytearray())]
    assert channel.pull(NAME, mine.stamp, empty, nothing, deadline_s=LATER_S).result(LATER_S) == 0
    mine.release()
    gone = channel.pull(NAME, mine.stamp, empty, nothing, deadline_s=LATER_S).exception(LATER_S)
    assert isinstance(gone, LeaseLost)
    for endpoint in (puller, owner):
        endpoint.close()
    other.release()
    pool.close()


@needs_nixl
def test_a_peer_given_up_and_taken_again_is_read_from() -> None:
    """NIXL knows the owner's agent by one name in both lives."""
    pool, stamp = filled_pool(1, SLOT_BYTES, seed=90)
    owner = open_endpoint("nixl", OWNER, pool, SECRET, Heard().events)
    puller = open_endpoint("nixl", PULLER, pool, SECRET, Heard().events)
    for _ in range(3):
        assert pull_slot(puller, owner, OWNER, stamp, 0) == pattern(90, SLOT_BYTES)
        puller.disconnect(OWNER)
    puller.close()
    owner.close()
    pool.close()


_LEFT_OPEN = """
from dualpath.base.ids import EngineId
from dualpath.kv import BufferPool
from dualpath.transfer import EndpointEvents, RemoteSpan, TransferName, open_endpoint
events = EndpointEvents(lambda peer, message: None, lambda peer, reason: None)
pool = BufferPool(2, 4096)
lease = pool.try_lease("test", 1)
ends = [open_endpoint("nixl", EngineId(name), pool, b"", events) for name in ("a", "b")]
channel = ends[0].connect(ends[1].address, EngineId("b"), deadline_s=10.0)
into = memoryview(bytearray(8))
span = RemoteSpan(lease.slots[0], 0, 8)
channel.pull(TransferName("r", 1, 0), lease.stamp, [span], [into], deadline_s=10.0).result(10.0)
print("pulled")
"""


@needs_nixl
def test_a_process_that_closes_nothing_ends_well_and_says_nothing_else() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _LEFT_OPEN], capture_output=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout) == (0, b"pulled\n"), done.stderr


def test_without_nixl_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    pool = BufferPool(1, 4096)
    with pytest.raises(ConfigError, match="make nixl"):
        open_endpoint("nixl", OWNER, pool, SECRET, Heard().events)
    pool.close()
