"""The traffic manager over a channel and a store whose answers the test gives by hand."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import Event, Thread, current_thread

import pytest

from dualpath.base.errors import DeadlineExceeded, PeerLost, TransferError
from dualpath.base.ids import BlockKey, EngineId, RequestId
from dualpath.base.traffic_class import TrafficClass
from dualpath.kv.chain import BlockIdentity, block_chain
from dualpath.store.contract import (
    BlockRead,
    BlockResult,
    BlockWrite,
    ReadStatus,
    Store,
    StoreCapabilities,
    WriteResult,
)
from dualpath.traffic import (
    DEVICE,
    STORE,
    ClassLimits,
    TrafficKey,
    TrafficManager,
    TransferState,
    pieces_array,
)
from dualpath.transfer.contract import Channel, ChannelCapabilities, RemoteSpan, TransferName

PEER = EngineId("de0")
LONG_S = 60.0
SOON_S = 0.01
WAIT_S = 20.0
KV, EXECUTION, STORAGE = TrafficClass.KV, TrafficClass.EXECUTION, TrafficClass.STORAGE


@dataclass
class Asked:
    """One call of `Channel.pull`."""

    name: TransferName
    spans: list[RemoteSpan]
    into: Sequence[memoryview]
    deadline_s: float
    future: Future[int] = field(default_factory=Future)

    def arrive(self) -> None:
        for view in self.into:
            view[:] = b"\xff" * view.nbytes
        self.future.set_result(sum(view.nbytes for view in self.into))


class HandChannel(Channel):
    """Pulls end when the test says so."""

    peer = PEER
    capabilities = ChannelCapabilities("hand", True)

    def __init__(self) -> None:
        self.asked: list[Asked] = []
        self.messages: list[bytes] = []
        self.lost: PeerLost | None = None

    def pull(
        self,
        name: TransferName,
        stamp: int,
        spans: Sequence[RemoteSpan],
        into: Sequence[memoryview],
        *,
        deadline_s: float,
    ) -> Future[int]:
        pull = Asked(name, list(spans), into, deadline_s)
        self.asked.append(pull)
        if self.lost is not None:
            pull.future.set_exception(self.lost)
        return pull.future

    def notify(self, message: bytes) -> None:
        self.messages.append(message)


class HandStore(Store):
    """Reads and writes end when the test says so; a hold is left as the contract has it."""

    capabilities = StoreCapabilities(persistent=False, direct_io=False, scan=False)

    def __init__(self) -> None:
        self.calls: list[list[BlockKey]] = []
        self.reads: dict[BlockKey, Callable[[ReadStatus], None]] = {}
        self.writes: dict[BlockKey, Callable[[bool], None]] = {}

    def read(
        self,
        blocks: Sequence[BlockRead],
        *,
        deadline_s: float,
        done: Callable[[BlockResult], None],
    ) -> None:
        self.calls.append([block.identity.key for block in blocks])
        for block in blocks:
            block.hold.__enter__()

            def end(status: ReadStatus, block: BlockRead = block) -> None:
                block.hold.__exit__(None, None, None)
                done(BlockResult(block.identity.key, status))

            self.reads[block.identity.key] = end

    def write(
        self,
        blocks: Sequence[BlockWrite],
        *,
        deadline_s: float,
        done: Callable[[WriteResult], None],
    ) -> None:
        self.calls.append([block.identity.key for block in blocks])
        for block in blocks:
            block.hold.__enter__()

            def end(durable: bool, block: BlockWrite = block) -> None:
                block.hold.__exit__(None, None, None)
                done(WriteResult(block.identity.key, durable, 64 if durable else 0))

            self.writes[block.identity.key] = end

    def delete(self, keys: Sequence[BlockKey]) -> int:
        raise NotImplementedError

    def scan(self) -> Iterator[object]:  # type: ignore[override]
        raise NotImplementedError

    def close(self) -> None:
        pass


def manager(**limits: int) -> TrafficManager:
    return TrafficManager(dict.fromkeys(TrafficClass, ClassLimits(**limits)))


def pull(
    traffic: TrafficManager,
    channel: Channel,
    into: memoryview,
    layer: int = 0,
    *,
    owner: str = "r1#0",
    stamp: int = 7,
    deadline_s: float = LONG_S,
    **more: bool,
) -> Future[int]:
    """Layer `layer`, 8 bytes of one slot."""
    name = TransferName(RequestId("r1"), 0, layer)
    pieces = pieces_array([(3, 8 * layer, 8, 8 * layer)])
    return traffic.pull(
        channel, name, stamp, pieces, into, owner=owner, deadline_s=deadline_s, needed=layer, **more
    )


@pytest.fixture
def channel() -> HandChannel:
    return HandChannel()


def memory() -> memoryview:
    return memoryview(bytearray(256))


def test_a_pull_leaves_at_once_and_ends_with_the_channels(channel: HandChannel) -> None:
    traffic = manager()
    into = memory()
    future = pull(traffic, channel, into, 2)
    (asked,) = channel.asked
    assert asked.spans == [RemoteSpan(3, 16, 8)]
    assert not future.done() and not future.cancel()
    asked.arrive()
    assert future.result(0) == 8
    assert bytes(into) == bytes(16) + b"\xff" * 8 + bytes(232)
    assert traffic.unfinished() == []


def test_layers_that_wait_leave_as_one_merged_submission_in_order_of_need(
    channel: HandChannel,
) -> None:
    traffic = manager(transfers=3, peer_transfers=3)
    into = memory()
    first = [pull(traffic, channel, into, layer) for layer in (0, 5, 9)]
    later = [pull(traffic, channel, into, layer) for layer in (4, 3, 2)]
    assert len(channel.asked) == 3
    for asked in channel.asked[:3]:
        asked.arrive()
    # Room came one by one: the layer that is needed first took it.
    assert [asked.name.layer for asked in channel.asked[3:]] == [2, 3, 4]
    for asked in channel.asked[3:]:
        asked.arrive()
    assert [future.result(0) for future in first + later] == [8] * 6


def test_one_call_of_the_channel_for_many_layers(channel: HandChannel) -> None:
    traffic = manager(peer_bytes=64)
    into = memory()
    big = traffic.pull(
        channel,
        TransferName(RequestId("r0"), 0, 0),
        1,
        pieces_array([(0, 0, 100, 0)]),
        memory(),
        owner="r0#0",
        deadline_s=LONG_S,
    )
    futures = [pull(traffic, channel, into, layer) for layer in range(4)]
    assert len(channel.asked) == 1
    channel.asked[0].arrive()
    assert big.result(0) == 100
    assert channel.asked[1].spans == [RemoteSpan(3, 0, 32)]
    channel.asked[1].arrive()
    assert [future.result(0) for future in futures] == [8] * 4
    counts = traffic.counts[TrafficKey(KV, PEER)]
    assert (counts.transfers, counts.n_bytes, counts.submissions, counts.descriptors) == (
        5,
        132,
        2,
        2,
    )


def test_leases_are_not_mixed_in_one_submission(channel: HandChannel) -> None:
    traffic = manager(peer_transfers=1)
    into = memory()
    pull(traffic, channel, into, 0)
    pull(traffic, channel, into, 1, stamp=8)
    pull(traffic, channel, into, 2, stamp=9)
    for number in range(3):
        channel.asked[number].arrive()
    assert [len(asked.spans) for asked in channel.asked] == [1, 1, 1]


def test_a_lost_peer_ends_all_that_wait_for_it(channel: HandChannel) -> None:
    """A thousand of them, without a thousand calls inside one another."""
    traffic = manager(peer_transfers=1, batch_transfers=1)
    into = memory()
    futures = [pull(traffic, channel, into, owner=f"r{i}", stamp=i) for i in range(1000)]
    channel.lost = PeerLost("de0 is lost")
    channel.asked[0].future.set_exception(channel.lost)
    assert all(isinstance(future.exception(0), PeerLost) for future in futures)
    counts = traffic.counts[TrafficKey(KV, PEER)]
    assert (counts.failed, counts.transfers, counts.queued, counts.under_way) == (1000, 0, 0, 0)


def test_an_error_of_a_batch_is_that_of_each_of_its_transfers(channel: HandChannel) -> None:
    traffic = manager(peer_transfers=2)
    into = memory()
    futures = [pull(traffic, channel, into, layer) for layer in range(2)]
    channel.asked[0].future.set_exception(DeadlineExceeded("late"))
    channel.asked[1].arrive()
    assert isinstance(futures[0].exception(0), DeadlineExceeded)
    assert futures[1].result(0) == 8


def test_beyond_the_bound_a_pull_fails_at_once(channel: HandChannel) -> None:
    traffic = manager(peer_transfers=1, queued=2)
    into = memory()
    futures = [pull(traffic, channel, into, stamp=i) for i in range(4)]
    error = futures[3].exception(0)
    assert type(error) is TransferError and "as many transfers wait" in str(error)
    assert not any(future.done() for future in futures[:3])


def test_what_waits_too_long_is_late_and_never_leaves(channel: HandChannel) -> None:
    traffic = manager(peer_transfers=1)
    into = memory()
    first = pull(traffic, channel, into, stamp=1)
    late = pull(traffic, channel, into, stamp=2, deadline_s=SOON_S)
    assert isinstance(late.exception(WAIT_S), DeadlineExceeded)
    channel.asked[0].arrive()
    assert first.result(0) == 8
    assert len(channel.asked) == 1
    traffic.close()


def test_a_pull_leaves_with_the_time_that_is_left_to_it(channel: HandChannel) -> None:
    traffic = manager()
    pull(traffic, channel, memory(), deadline_s=LONG_S)
    assert 0 < channel.asked[0].deadline_s <= LONG_S


def test_a_released_attempt_leaves_the_queue_and_what_is_under_way_ends_by_itself(
    channel: HandChannel,
) -> None:
    traffic = manager(peer_transfers=1)
    into = memory()
    moving = pull(traffic, channel, into, 0, owner="r1#0")
    waiting = pull(traffic, channel, into, 1, owner="r1#0", stamp=8)
    other = pull(traffic, channel, into, 2, owner="r2#0", stamp=9)
    traffic.withdraw("r1#0")
    traffic.withdraw("r1#0")
    error = waiting.exception(0)
    assert isinstance(error, TransferError) and "released" in str(error)
    assert not moving.done() and not other.done()
    channel.asked[0].arrive()
    channel.asked[1].arrive()
    assert (moving.result(0), other.result(0)) == (8, 8)
    assert [asked.name.layer for asked in channel.asked] == [0, 2]
    assert traffic.counts[TrafficKey(KV, PEER)].withdrawn == 1
    assert bytes(into[8:16]) == bytes(8)


def test_urgent_pulls_do_not_wait_behind_kv(channel: HandChannel) -> None:
    traffic = manager(transfers=1)
    into = memory()
    pull(traffic, channel, into, 0)
    pull(traffic, channel, into, 1, stamp=8)
    pull(traffic, channel, into, 2, stamp=9, urgent=True)
    assert [asked.name.layer for asked in channel.asked] == [0, 2]
    assert traffic.counts[TrafficKey(EXECUTION, PEER)].under_way == 1


def test_messages_and_copies_are_counted(channel: HandChannel) -> None:
    traffic = manager()
    traffic.notify(channel, b"12345")
    with traffic.copying(1000):
        pass
    assert channel.messages == [b"12345"]
    counts = traffic.counts
    assert counts[TrafficKey(EXECUTION, PEER)].n_bytes == 5
    assert counts[TrafficKey(KV, DEVICE)].n_bytes == 1000


def test_no_pieces_need_no_bytes(channel: HandChannel) -> None:
    traffic = manager()
    name = TransferName(RequestId("r1"), 0, 0)
    future = traffic.pull(
        channel, name, 1, pieces_array([]), memory(), owner="r1#0", deadline_s=LONG_S
    )
    channel.asked[0].arrive()
    assert future.result(0) == 0


def test_a_peer_that_is_gone_is_forgotten(channel: HandChannel) -> None:
    traffic = manager()
    pull(traffic, channel, memory())
    traffic.forget(PEER)
    assert TrafficKey(KV, PEER) in traffic.counts, "something of it is still under way"
    channel.asked[0].arrive()
    traffic.forget(PEER)
    assert traffic.counts == {}


def test_after_close_nothing_leaves_and_everything_has_ended(channel: HandChannel) -> None:
    traffic = manager(peer_transfers=1)
    into = memory()
    moving = pull(traffic, channel, into, 0)
    waiting = pull(traffic, channel, into, 1, stamp=8)
    traffic.close()
    traffic.close()
    assert isinstance(waiting.exception(0), TransferError)
    assert isinstance(pull(traffic, channel, into, 2).exception(0), TransferError)
    channel.asked[0].arrive()
    assert moving.result(0) == 8
    assert len(channel.asked) == 1


# The store.


@dataclass
class Client:
    """Blocks of one request, with holds that are counted, and what became of them."""

    chain: list[BlockIdentity]
    held: int = 0
    results: dict[BlockKey, BlockResult | WriteResult] = field(default_factory=dict)
    told: Event = field(default_factory=Event)

    @classmethod
    def of(cls, n_blocks: int, seed: int = 0) -> Client:
        return cls(block_chain(BlockKey(bytes([seed]) * 16), list(range(4 * n_blocks)), 4))

    @contextmanager
    def hold(self) -> Iterator[None]:
        self.held += 1
        try:
            yield
        finally:
            self.held -= 1

    def done(self, result: BlockResult | WriteResult) -> None:
        assert result.key not in self.results
        self.results[result.key] = result
        if len(self.results) == len(self.chain):
            self.told.set()

    def read(
        self, traffic: TrafficManager, store: Store, deadline_s: float = LONG_S, owner: str = "r1#0"
    ) -> None:
        blocks = [BlockRead(each, memory(), self.hold()) for each in self.chain]
        traffic.read(store, blocks, owner=owner, deadline_s=deadline_s, done=self.done)

    def write(self, traffic: TrafficManager, store: Store) -> None:
        blocks = [BlockWrite(each, memory(), self.hold()) for each in self.chain]
        traffic.write(store, blocks, owner="r1#0", deadline_s=LONG_S, done=self.done)

    @property
    def keys(self) -> list[BlockKey]:
        return [each.key for each in self.chain]

    @property
    def statuses(self) -> set[ReadStatus]:
        return {each.status for each in self.results.values() if isinstance(each, BlockResult)}


def test_blocks_of_one_call_leave_in_one_call_and_each_has_its_own_result() -> None:
    traffic, store, client = manager(), HandStore(), Client.of(3)
    client.read(traffic, store)
    assert store.calls == [client.keys]
    assert client.held == 3
    for key, status in zip(
        client.keys, (ReadStatus.OK, ReadStatus.MISS, ReadStatus.OK), strict=True
    ):
        store.reads[key](status)
    assert [client.results[key].status for key in client.keys] == [  # type: ignore[union-attr]
        ReadStatus.OK,
        ReadStatus.MISS,
        ReadStatus.OK,
    ]
    assert client.held == 0
    counts = traffic.counts[TrafficKey(STORAGE, STORE)]
    assert (counts.transfers, counts.n_bytes, counts.failed, counts.submissions) == (2, 512, 1, 1)


def test_reads_that_wait_go_before_writes_that_wait() -> None:
    traffic, store = manager(peer_transfers=1), HandStore()
    busy, writer, reader = Client.of(1, 1), Client.of(1, 2), Client.of(1, 3)
    busy.read(traffic, store)
    writer.write(traffic, store)
    reader.read(traffic, store)
    store.reads[busy.keys[0]](ReadStatus.OK)
    store.reads[reader.keys[0]](ReadStatus.OK)
    store.writes[writer.keys[0]](True)
    assert store.calls == [busy.keys, reader.keys, writer.keys]
    assert client_durable(writer)


def client_durable(client: Client) -> bool:
    return all(isinstance(each, WriteResult) and each.durable for each in client.results.values())


def test_the_hold_is_there_from_the_call_on_and_goes_when_the_block_is_withdrawn() -> None:
    traffic, store = manager(peer_transfers=1), HandStore()
    busy, client = Client.of(1, 1), Client.of(2, 2)
    busy.read(traffic, store, owner="r0#0")
    client.read(traffic, store)
    assert client.held == 2
    traffic.withdraw("r1#0")
    assert client.held == 0
    assert client.statuses == {ReadStatus.ERROR}
    store.reads[busy.keys[0]](ReadStatus.OK)
    assert store.calls == [busy.keys]
    assert busy.statuses == {ReadStatus.OK}


def test_reads_that_wait_too_long_time_out() -> None:
    traffic, store = manager(peer_transfers=1), HandStore()
    busy, late = Client.of(1, 1), Client.of(2, 2)
    busy.read(traffic, store)
    late.read(traffic, store, deadline_s=SOON_S)
    assert late.told.wait(WAIT_S)
    assert late.statuses == {ReadStatus.TIMEOUT}
    assert late.held == 0
    traffic.close()


def test_reads_beyond_the_bound_are_refused_but_not_inside_the_call() -> None:
    traffic, store = manager(peer_transfers=1, queued=1), HandStore()
    client = Client.of(5)
    tellers: set[Thread] = set()

    def done(result: BlockResult) -> None:
        if result.status is not ReadStatus.OK:
            tellers.add(current_thread())
        client.done(result)

    blocks = [BlockRead(each, memory(), client.hold()) for each in client.chain]
    traffic.read(store, blocks, owner="r1#0", deadline_s=LONG_S, done=done)
    store.reads[client.keys[0]](ReadStatus.OK)
    assert client.told.wait(WAIT_S)
    assert client.statuses == {ReadStatus.OK, ReadStatus.ERROR}
    assert current_thread() not in tellers
    assert client.held == 0
    traffic.close()


def test_after_close_the_store_is_not_asked() -> None:
    traffic, store, client = manager(), HandStore(), Client.of(2)
    traffic.close()
    client.read(traffic, store)
    assert client.told.wait(WAIT_S)
    assert client.statuses == {ReadStatus.ERROR}
    assert store.calls == [] and client.held == 0


def test_the_state_of_each_transfer_can_be_seen(channel: HandChannel) -> None:
    traffic = manager(peer_transfers=1)
    into = memory()
    pull(traffic, channel, into, 0, owner="a")
    pull(traffic, channel, into, 1, owner="b", stamp=8)
    assert [(each.owner, each.state) for each in traffic.unfinished()] == [
        ("a", TransferState.UNDER_WAY),
        ("b", TransferState.QUEUED),
    ]
    assert all(0 < each.left_s <= LONG_S for each in traffic.unfinished())
