from __future__ import annotations

import threading
import time

import pytest

from dualpath.base.errors import DeadlineExceeded, LeaseLost, PeerLost, TransferError
from dualpath.base.ids import RequestId
from dualpath.kv import BufferPool
from dualpath.testing import wait_until
from dualpath.transfer import RemoteSpan, TransferName
from dualpath.transfer.pulls import (
    MAX_SPANS,
    Counters,
    DeadlineClock,
    Pull,
    PullTable,
    byte_views,
    check_spans,
    why_not_held,
)

NAME = TransferName(RequestId("r"), 1, 2)


@pytest.fixture
def clock():
    clock = DeadlineClock("test-deadlines")
    yield clock
    clock.close()
    clock.close()
    assert all(thread.name != "test-deadlines" for thread in threading.enumerate())


@pytest.fixture
def counters() -> Counters:
    return Counters()


@pytest.fixture
def table(clock: DeadlineClock, counters: Counters) -> PullTable:
    return PullTable(counters, clock)


def _open(table: PullTable, deadline_s: float = 60.0) -> Pull:
    return table.open(NAME, 1, [RemoteSpan(0, 0, 8)], [memoryview(bytearray(8))], deadline_s)


def test_a_moved_pull_gives_its_bytes(table: PullTable, counters: Counters) -> None:
    pull = _open(table)
    assert pull.begin()
    assert not pull.begin()
    pull.complete()
    assert pull.future.result(0) == 8
    assert counters.stats.pulls == 1
    assert counters.stats.pulled_bytes == 8
    assert counters.stats.pull_failures == 0


def test_a_pull_cannot_be_cancelled(table: PullTable) -> None:
    pull = _open(table)
    assert not pull.future.cancel()
    assert not pull.future.done()


def test_the_clock_ends_a_waiting_pull_only(table: PullTable, counters: Counters) -> None:
    moving, waiting = _open(table, 0.03), _open(table, 0.03)
    assert moving.begin()
    assert isinstance(waiting.future.exception(10.0), DeadlineExceeded)
    wait_until(lambda: time.monotonic() >= moving.deadline_s, "the deadline does not come")
    assert not moving.future.done()
    assert isinstance(moving.must_stop(), DeadlineExceeded)
    moving.fail(moving.late())
    assert isinstance(moving.future.exception(0), DeadlineExceeded)
    assert counters.stats.pull_failures == 2


def test_an_earlier_deadline_overtakes(table: PullTable) -> None:
    later, sooner = _open(table, 60.0), _open(table, 0.03)
    assert isinstance(sooner.future.exception(10.0), DeadlineExceeded)
    assert not later.future.done()


def test_a_lost_peer_ends_waiting_pulls_and_asks_movers_to_stop(table: PullTable) -> None:
    moving, waiting = _open(table), _open(table)
    assert moving.begin()
    lost = PeerLost("gone")
    table.close(lost)
    assert waiting.future.exception(0) is lost
    assert not waiting.begin()
    assert not moving.future.done()
    assert moving.must_stop() is lost
    moving.fail(lost)
    assert moving.future.exception(0) is lost
    assert _open(table).future.exception(0) is lost


def test_the_first_end_of_a_pull_counts(table: PullTable, counters: Counters) -> None:
    pull = _open(table)
    pull.fail(LeaseLost("first"))
    pull.complete()
    pull.expire()
    pull.interrupt(PeerLost("late"))
    assert isinstance(pull.future.exception(0), LeaseLost)
    assert counters.stats.pulls == 1


def test_outstanding_pulls_are_bounded(table: PullTable) -> None:
    pulls = [_open(table) for _ in range(4096)]
    refused = _open(table).future.exception(0)
    assert type(refused) is TransferError
    pulls[0].fail(LeaseLost("done"))
    assert not _open(table).future.done()
    table.close(PeerLost("end"))
    assert all(pull.future.done() for pull in pulls)


def test_ended_pulls_do_not_pile_up_in_the_clock(clock: DeadlineClock, table: PullTable) -> None:
    for _ in range(5000):
        _open(table).complete()
    assert len(clock._heap) <= 512


def test_destinations_are_flat_writable_bytes() -> None:
    spans = [RemoteSpan(0, 0, 12)]
    shaped = memoryview(bytearray(12)).cast("I")
    assert byte_views(spans, [shaped])[0].format == "B"
    with pytest.raises(ValueError, match="writable"):
        byte_views(spans, [memoryview(bytes(12))])
    with pytest.raises(ValueError, match="contiguous"):
        byte_views(spans, [memoryview(bytearray(24))[::2]])


def test_spans_are_bounded_in_number() -> None:
    pool = BufferPool(1, 4096)
    assert check_spans(pool.geometry, [RemoteSpan(0, 0, 1)] * MAX_SPANS) == MAX_SPANS
    with pytest.raises(ValueError, match="at most"):
        check_spans(pool.geometry, [RemoteSpan(0, 0, 1)] * (MAX_SPANS + 1))
    pool.close()


def test_slots_of_another_lease_are_not_held() -> None:
    pool = BufferPool(4, 4096)
    mine, other = pool.try_lease("mine", 2), pool.try_lease("other", 1)
    assert mine is not None and other is not None
    spans = [RemoteSpan(slot, 0, 1) for slot in mine.slots]
    assert why_not_held(mine, mine.stamp, spans) is None
    assert why_not_held(None, mine.stamp, spans) is not None
    foreign = why_not_held(mine, mine.stamp, [*spans, RemoteSpan(other.slots[0], 0, 1)])
    assert foreign is not None and "mine" in foreign
    mine.release()
    other.release()
    pool.close()
