from __future__ import annotations

import threading

import pytest

from dualpath.base.errors import DeadlineExceeded, LeaseLost, PeerLost, TransferError
from dualpath.base.ids import RequestId
from dualpath.transfer import RemoteSpan, TransferName
from dualpath.transfer.pulls import Counters, DeadlineClock, Pull, PullTable
from dualpath.transfer.spans import span_array

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
    spans = span_array([RemoteSpan(0, 0, 8)])
    return table.open(NAME, 1, spans, [memoryview(bytearray(8))], deadline_s)


def test_a_moved_pull_gives_its_bytes(table: PullTable, counters: Counters) -> None:
    pull = _open(table)
    assert pull.begin()
    pull.complete()
    assert not pull.begin()
    assert pull.future.result(0) == 8
    assert counters.stats.pulls == 1
    assert counters.stats.pulled_bytes == 8
    assert counters.stats.pull_failures == 0


def test_a_pull_cannot_be_cancelled(table: PullTable) -> None:
    pull = _open(table)
    assert not pull.future.cancel()
    assert not pull.future.done()


def test_the_clock_ends_a_waiting_pull_only(table: PullTable, counters: Counters) -> None:
    moving = _open(table)
    assert moving.begin()
    moving.expire()  # As the clock does when its deadline has come.
    waiting = _open(table, 0.03)
    assert isinstance(waiting.future.exception(10.0), DeadlineExceeded)
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
    pull.interrupt(LeaseLost("first"))
    pull.expire()
    pull.interrupt(PeerLost("late"))
    assert isinstance(pull.future.exception(0), LeaseLost)
    assert counters.stats.pulls == 1


def test_outstanding_pulls_are_bounded(table: PullTable) -> None:
    pulls = [_open(table) for _ in range(4096)]
    refused = _open(table).future.exception(0)
    assert type(refused) is TransferError
    pulls[0].interrupt(LeaseLost("done"))
    assert not _open(table).future.done()
    table.close(PeerLost("end"))
    assert all(pull.future.done() for pull in pulls)


def test_ended_pulls_do_not_pile_up_in_the_clock(clock: DeadlineClock, table: PullTable) -> None:
    for _ in range(5000):
        pull = _open(table)
        assert pull.begin()
        pull.complete()
    assert len(clock._heap) <= 512


def test_a_pull_of_parts_is_complete_with_the_last(table: PullTable, counters: Counters) -> None:
    pull = _open(table)
    pull.split(3)
    assert pull.begin() and pull.begin()
    pull.complete()
    pull.complete()
    assert not pull.future.done()
    assert pull.begin()
    pull.complete()
    assert pull.future.result(0) == 8
    assert counters.stats.pulls == 1


def test_a_failed_part_ends_the_pull_when_no_other_moves(table: PullTable) -> None:
    pull = _open(table)
    pull.split(3)
    assert pull.begin() and pull.begin()
    first = LeaseLost("first")
    pull.fail(first)
    assert not pull.future.done()  # The other one still writes.
    assert not pull.begin()
    assert pull.must_stop() is first
    pull.complete()
    assert pull.future.exception(0) is first


def test_the_clock_waits_for_the_parts_that_move(table: PullTable) -> None:
    pull = _open(table)
    pull.split(2)
    assert pull.begin()
    pull.expire()
    assert not pull.future.done()
    pull.complete()
    assert isinstance(pull.future.exception(0), DeadlineExceeded)


def test_a_pull_that_arrived_whole_is_good_even_if_it_was_asked_to_stop(table: PullTable) -> None:
    pull = _open(table)
    assert pull.begin()
    pull.interrupt(PeerLost("too late"))
    pull.complete()
    assert pull.future.result(0) == 8
