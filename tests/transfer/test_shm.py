from __future__ import annotations

import fcntl
import json
import os
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest
from transfer_kit import LATER_S, NAME, SECRET, Heard, filled_pool, location, pull_slot

from dualpath.base.errors import LeaseLost, PeerLost, TransferError
from dualpath.base.ids import EngineId, MiB
from dualpath.kv import BufferPool
from dualpath.kv.pool import Lease, PoolGeometry
from dualpath.testing import wait_until
from dualpath.testing.channel_peer import pattern
from dualpath.transfer import Endpoint, RemoteSpan, ShmEndpoint, TcpEndpoint, open_endpoint
from dualpath.transfer.pulls import Counters, DeadlineClock, Pull, PullTable
from dualpath.transfer.shm import MappedPool
from dualpath.transfer.spans import span_array

OWNER, PULLER = EngineId("owner"), EngineId("puller")
SLOT_BYTES = 16 * MiB


@dataclass
class Mapped:
    """A mapped pool, and pulls from it that are copied on the test's own thread."""

    pool: BufferPool
    lease: Lease
    region: MappedPool
    table: PullTable
    into: bytearray

    def pull(self) -> Pull:
        spans = span_array([RemoteSpan(self.lease.slots[0], 0, SLOT_BYTES)])
        pull = self.table.open(NAME, self.lease.stamp, spans, [memoryview(self.into)], LATER_S)
        assert pull.begin()
        return pull


@pytest.fixture
def mapped() -> Iterator[Mapped]:
    pool, _ = filled_pool(1, SLOT_BYTES, seed=60)
    clock = DeadlineClock("test-deadlines")
    region = MappedPool(pool.fd, pool.geometry)
    table = PullTable(Counters(), clock)
    yield Mapped(pool, pool.leases[0], region, table, bytearray(SLOT_BYTES))
    region.close()
    clock.close()
    pool.close()


@pytest.fixture
def in_the_middle(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], None]], None]:
    """Does something whenever a copy looks whether to go on, so also in its middle."""

    def install(act: Callable[[], None]) -> None:
        look = Pull.must_stop

        def act_and_look(pull: Pull) -> TransferError | None:
            act()
            return look(pull)

        monkeypatch.setattr(Pull, "must_stop", act_and_look)

    return install


def test_a_copy_gives_the_owners_bytes(mapped: Mapped) -> None:
    with mapped.region.use():
        assert mapped.region.copy(mapped.pull()) is None
    assert mapped.into == pattern(60, SLOT_BYTES)


def test_a_release_in_the_middle_of_a_copy_is_lease_lost(
    mapped: Mapped, in_the_middle: Callable[[Callable[[], None]], None]
) -> None:
    def reuse() -> None:
        mapped.lease.release()
        following = mapped.pool.try_lease("next", 1)
        if following is not None:
            following.view(0)[:] = bytes(SLOT_BYTES)

    in_the_middle(reuse)
    with mapped.region.use():
        assert isinstance(mapped.region.copy(mapped.pull()), LeaseLost)
    assert mapped.into[-1024:] == bytes(1024)  # It was in the middle.


def test_a_peer_lost_in_the_middle_of_a_copy_stops_it(
    mapped: Mapped, in_the_middle: Callable[[Callable[[], None]], None]
) -> None:
    lost = PeerLost("gone")
    in_the_middle(lambda: mapped.table.close(lost))
    with mapped.region.use():
        assert mapped.region.copy(mapped.pull()) is lost
    assert mapped.into[-1024:] == bytes(1024)


def test_memory_in_use_is_unmapped_when_the_use_ends(mapped: Mapped) -> None:
    with mapped.region.use():
        mapped.region.close()
        assert mapped.region.copy(mapped.pull()) is None
    with pytest.raises(PeerLost), mapped.region.use():
        pass
    assert mapped.into == pattern(60, SLOT_BYTES)


def test_a_pool_smaller_than_it_says_is_refused(mapped: Mapped) -> None:
    geometry = PoolGeometry(n_slots=2, slot_bytes=SLOT_BYTES)
    with pytest.raises(PeerLost, match="in a file of"):
        MappedPool(mapped.pool.fd, geometry)


@dataclass
class Two:
    owner: Endpoint
    puller: Endpoint
    heard: Heard
    stamp: int


@pytest.fixture(params=["shm", "auto"])
def two(request: pytest.FixtureRequest) -> Iterator[Two]:
    owner_pool, stamp = filled_pool(1, 4096, seed=70)
    puller_pool = BufferPool(1, 4096)
    heard = Heard()
    owner = open_endpoint(request.param, OWNER, owner_pool, SECRET, Heard().events)
    puller = open_endpoint(request.param, PULLER, puller_pool, SECRET, heard.events)
    yield Two(owner, puller, heard, stamp)
    puller.close()
    owner.close()
    owner_pool.close()
    puller_pool.close()


def test_one_host_shares_memory(two: Two) -> None:
    channel = two.puller.connect(two.owner.address, OWNER, deadline_s=LATER_S)
    assert channel.capabilities.kind == "shm"
    assert channel.capabilities.same_host
    assert pull_slot(two.puller, two.owner, OWNER, two.stamp, 0) == pattern(70, 4096)


def _memory_files() -> dict[str, int]:
    """Open flags of each memory file's descriptor."""
    found = {}
    for fd in os.listdir("/proc/self/fd"):
        try:
            if "memfd" in os.readlink(f"/proc/self/fd/{fd}"):
                found[fd] = fcntl.fcntl(int(fd), fcntl.F_GETFL)
        except OSError:
            pass  # It was closed meanwhile.
    return found


def test_a_peer_cannot_write_into_our_pool(two: Two) -> None:
    before = _memory_files()
    channel = two.puller.connect(two.owner.address, OWNER, deadline_s=LATER_S)
    # The owner's own copy, made for handing over, goes at once.
    wait_until(lambda: len(_memory_files()) == len(before) + 1, "descriptors are left")
    flags = [flags for fd, flags in _memory_files().items() if fd not in before]
    assert [flag & os.O_ACCMODE for flag in flags] == [os.O_RDONLY]
    with pytest.raises(TypeError):
        channel._region._map[0] = 1  # type: ignore[attr-defined]


def test_garbage_on_the_socket_hurts_nobody(two: Two) -> None:
    name = location(two.owner, "shm").rpartition("/")[2]
    strangers = [socket.socket(socket.AF_UNIX) for _ in range(10)]
    for number, sock in enumerate(strangers):
        sock.connect(b"\0" + name.encode())
        sock.sendall(pattern(number, 3000))
    assert pull_slot(two.puller, two.owner, OWNER, two.stamp, 0) == pattern(70, 4096)
    for sock in strangers:
        sock.close()


def _moved(address: str, **locations: str) -> str:
    changed = json.loads(address)
    changed["locations"].update(locations)
    return json.dumps(changed)


@pytest.mark.parametrize("shm", ["another-host/dualpath-x", "SAME/nobody-listens"])
def test_auto_takes_tcp_where_memory_cannot_be_shared(shm: str) -> None:
    pool, _ = filled_pool(1, 4096, seed=80)
    owner = open_endpoint("auto", OWNER, pool, SECRET, Heard().events)
    puller = open_endpoint("auto", PULLER, pool, SECRET, Heard().events)
    host = location(owner, "shm").partition("/")[0]
    address = _moved(owner.address, shm=shm.replace("SAME", host))
    channel = puller.connect(address, OWNER, deadline_s=LATER_S)
    assert channel.capabilities.kind == "tcp"
    assert puller.connect(address, OWNER, deadline_s=LATER_S) is channel
    puller.close()
    owner.close()
    pool.close()


def test_another_host_is_out_of_reach_of_shared_memory() -> None:
    pool, _ = filled_pool(1, 4096, seed=80)
    owner = ShmEndpoint(OWNER, pool, SECRET, Heard().events)
    puller = ShmEndpoint(PULLER, pool, SECRET, Heard().events)
    with pytest.raises(PeerLost, match="not on this host"):
        puller.connect(_moved(owner.address, shm="elsewhere/x"), OWNER, deadline_s=LATER_S)
    tcp = TcpEndpoint(EngineId("tcp"), pool, SECRET, Heard().events)
    with pytest.raises(PeerLost, match="no address"):
        puller.connect(tcp.address, EngineId("tcp"), deadline_s=LATER_S)
    for endpoint in (tcp, puller, owner):
        endpoint.close()
    pool.close()
