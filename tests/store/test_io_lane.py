"""Deadlines, bounds and holds of a lane, with tasks that a test controls."""

from __future__ import annotations

import gc
import logging
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import pytest

from dualpath.store import IoLane, IoTask, ReadStatus, Ticket
from dualpath.testing import Results, wait_until

LONG_S = 30.0
SHORT_S = 0.4


class Gate:
    """A device call that comes back when the test says so."""

    def __init__(self) -> None:
        self.entered = threading.Semaphore(0)
        self.open = threading.Event()

    def run(self, _: Ticket) -> str:
        self.entered.release()
        self.open.wait()
        return "ok"

    def wait_entered(self, count: int = 1) -> None:
        for _ in range(count):
            assert self.entered.acquire(timeout=LONG_S)


class Hold:
    def __init__(self) -> None:
        self.inside = 0

    def enter(self) -> AbstractContextManager[None]:
        @contextmanager
        def held() -> Iterator[None]:
            self.inside += 1
            yield
            self.inside -= 1

        return held()


def task(
    run: Callable[[Ticket], str],
    done: Callable[[str], None],
    hold: AbstractContextManager[object] | None = None,
) -> IoTask[str]:
    return IoTask(run, lambda status, detail: f"{status}: {detail}", done, hold or nullcontext())


def quick(_: Ticket) -> str:
    return "ok"


@pytest.fixture
def results() -> Results[str]:
    return Results()


@pytest.fixture
def lane() -> Iterator[IoLane]:
    lane = IoLane("lane", n_threads=2, queue_limit=4, spare_threads=1)
    yield lane
    lane.close()


@pytest.fixture
def gate() -> Iterator[Gate]:
    gate = Gate()
    yield gate
    gate.open.set()


def test_results_come_back(lane: IoLane, results: Results[str]) -> None:
    for number in range(1, 51):
        lane.submit([task(quick, results)], deadline_s=LONG_S)
        assert results.wait(number)[-1] == "ok"


def test_answers_never_come_inside_submit(lane: IoLane, gate: Gate) -> None:
    """A caller may submit while it holds a lock that its callback takes."""
    threads = Results[str]()
    blocked = [task(gate.run, lambda _: threads(threading.current_thread().name))] * 20
    lane.submit(blocked, deadline_s=LONG_S)
    wait_until(lambda: len(threads.items) >= 14, "refusals")
    gate.open.set()
    assert threading.current_thread().name not in threads.wait(20)
    lane.close()
    lane.submit([task(quick, lambda _: threads(threading.current_thread().name))], deadline_s=1)
    assert threading.current_thread().name not in threads.wait(21)


def test_never_more_threads_than_allowed(lane: IoLane, results: Results[str], gate: Gate) -> None:
    lane.submit([task(gate.run, results) for _ in range(4)], deadline_s=LONG_S)
    gate.wait_entered(2)
    assert (lane.stats.running, lane.stats.queued) == (2, 2)
    gate.open.set()
    assert results.wait(4) == ["ok"] * 4


def test_full_queue_refuses_at_once(lane: IoLane, results: Results[str], gate: Gate) -> None:
    lane.submit([task(gate.run, results) for _ in range(2)], deadline_s=LONG_S)
    gate.wait_entered(2)
    lane.submit([task(quick, results) for _ in range(7)], deadline_s=LONG_S)
    assert results.wait(3) == ["error: lane is full: 4 operations wait"] * 3
    gate.open.set()
    assert sorted(results.wait(9))[3:] == ["ok"] * 6


def test_hung_task_is_answered_and_its_thread_replaced(
    lane: IoLane, results: Results[str], gate: Gate
) -> None:
    hold = Hold()
    lane.submit([task(gate.run, results, hold.enter()) for _ in range(2)], deadline_s=SHORT_S)
    assert results.wait(2) == ["timeout: no completion within 0.4 s"] * 2
    assert hold.inside == 2
    assert lane.stats.stuck == 2
    lane.submit([task(quick, results)], deadline_s=LONG_S)
    assert results.wait(3)[2] == "ok"
    gate.open.set()
    wait_until(lambda: hold.inside == 0, "the holds end when the calls come back")
    wait_until(lambda: lane.stats.stuck == 0, "no thread is stuck")
    lane.close()
    results.wait(3)


def test_queued_task_times_out_without_running(
    lane: IoLane, results: Results[str], gate: Gate
) -> None:
    hold = Hold()
    busy = Results[str]()
    lane.submit([task(gate.run, busy) for _ in range(2)], deadline_s=LONG_S)
    gate.wait_entered(2)
    ran: list[int] = []

    def never(_: Ticket) -> str:
        ran.append(1)
        return "ok"

    lane.submit([task(never, results, hold.enter())], deadline_s=SHORT_S)
    assert results.wait(1) == ["timeout: not started within 0.4 s"]
    assert hold.inside == 0
    gate.open.set()
    busy.wait(2)
    lane.close()
    assert ran == []


def test_stuck_lane_refuses_until_a_thread_is_back(
    lane: IoLane, results: Results[str], gate: Gate
) -> None:
    for number in range(1, 4):
        lane.submit([task(gate.run, results)], deadline_s=SHORT_S)
        gate.wait_entered()
        results.wait(number)
    wait_until(lambda: lane.stats.refusing, "the lane refuses")
    lane.submit([task(quick, results)], deadline_s=LONG_S)
    assert results.wait(4)[3].startswith("error: lane hangs: 3 threads")
    gate.open.set()
    wait_until(lambda: not lane.stats.refusing, "the lane works again")
    lane.submit([task(quick, results)], deadline_s=LONG_S)
    assert results.wait(5)[4] == "ok"


def test_tasks_that_wait_when_the_lane_gets_stuck_are_refused(
    results: Results[str], gate: Gate
) -> None:
    lane = IoLane("lane", n_threads=1, queue_limit=4, spare_threads=0)
    waiting = Results[str]()
    lane.submit([task(gate.run, results)], deadline_s=SHORT_S)
    gate.wait_entered()
    lane.submit([task(quick, waiting)], deadline_s=LONG_S)
    assert waiting.wait(1)[0].startswith("error: lane hangs: 1 threads")
    assert results.wait(1)[0].startswith("timeout")
    lane.close()


def test_claim_decides_between_result_and_timeout(lane: IoLane, results: Results[str]) -> None:
    claimed, go_on = threading.Event(), threading.Event()

    def claims(ticket: Ticket) -> str:
        assert ticket.claim()
        claimed.set()
        go_on.wait(LONG_S)
        assert not ticket.abandoned
        return "durable"

    lane.submit([task(claims, results)], deadline_s=SHORT_S)
    assert claimed.wait(LONG_S)
    after = Results[str]()
    never_ready = threading.Event()
    lane.submit([task(lambda _: str(never_ready.wait(SHORT_S * 4)), after)], deadline_s=SHORT_S * 2)
    assert after.wait(1)[0].startswith("timeout")  # The watcher passed the first deadline too.
    assert results.items == []
    go_on.set()
    assert results.wait(1) == ["durable"]


def test_claim_fails_after_the_timeout(lane: IoLane, results: Results[str]) -> None:
    answered, seen = threading.Event(), Results[bool]()

    def late(ticket: Ticket) -> str:
        answered.wait(LONG_S)
        seen(ticket.abandoned)
        seen(ticket.claim())
        return "too late"

    lane.submit([task(late, results)], deadline_s=SHORT_S)
    assert results.wait(1)[0].startswith("timeout")
    answered.set()
    assert seen.wait(2) == [True, False]
    lane.close()
    results.wait(1)


def test_task_that_raises_is_an_error(
    lane: IoLane, results: Results[str], caplog: pytest.LogCaptureFixture
) -> None:
    hold = Hold()

    def broken(_: Ticket) -> str:
        raise KeyError("bug")

    with caplog.at_level(logging.ERROR):
        lane.submit([task(broken, results, hold.enter())], deadline_s=LONG_S)
        assert results.wait(1) == ["error: KeyError: 'bug'"]
    assert hold.inside == 0
    assert "bug" in caplog.text


def test_callback_that_raises_costs_no_thread(
    lane: IoLane, results: Results[str], caplog: pytest.LogCaptureFixture
) -> None:
    def broken(_: str) -> None:
        raise KeyError("bug in a callback")

    for _ in range(6):
        lane.submit([task(quick, broken)], deadline_s=LONG_S)
        wait_until(lambda: lane.stats.running + lane.stats.queued == 0, "it ran")
    lane.submit([task(quick, results)], deadline_s=LONG_S)
    assert results.wait(1) == ["ok"]
    assert "bug in a callback" in caplog.text


def test_hold_that_cannot_be_entered_starts_nothing(lane: IoLane, results: Results[str]) -> None:
    @contextmanager
    def refuses() -> Iterator[None]:
        raise RuntimeError("released")
        yield

    hold = Hold()
    with pytest.raises(RuntimeError, match="released"):
        lane.submit(
            [task(quick, results, hold.enter()), task(quick, results, refuses())],
            deadline_s=LONG_S,
        )
    assert hold.inside == 0
    lane.close()
    assert results.items == []


def test_close_refuses_what_waits_and_lets_finish_what_runs(
    results: Results[str], gate: Gate
) -> None:
    lane = IoLane("lane", n_threads=1, queue_limit=4)
    hold = Hold()
    lane.submit([task(gate.run, results, hold.enter()) for _ in range(3)], deadline_s=LONG_S)
    gate.wait_entered()
    closer = threading.Thread(target=lane.close)
    closer.start()
    assert results.wait(2) == ["error: lane was closed"] * 2
    gate.open.set()
    closer.join(LONG_S)
    assert not closer.is_alive()
    assert results.wait(3)[2] == "ok"
    assert hold.inside == 0


def test_close_abandons_a_hung_thread(results: Results[str], gate: Gate) -> None:
    lane = IoLane("lane", n_threads=1, queue_limit=4)
    lane.submit([task(gate.run, results)], deadline_s=SHORT_S)
    gate.wait_entered()
    lane.close()
    assert results.wait(1)[0].startswith("timeout")


def test_threads_end_with_the_lane() -> None:
    def threads() -> list[str]:
        return [each.name for each in threading.enumerate() if each.name.startswith("ending")]

    lane = IoLane("ending", n_threads=4, queue_limit=100)
    results = Results[str]()
    lane.submit([task(quick, results) for _ in range(50)], deadline_s=LONG_S)
    results.wait(50)
    assert threads()
    lane.close()
    wait_until(lambda: threads() == [], "threads are left")


def test_nothing_keeps_the_memory_of_a_finished_task(lane: IoLane, results: Results[str]) -> None:
    class Memory:
        pass

    memory = Memory()
    gone = weakref.ref(memory)

    def use(_: Ticket, memory: Memory = memory) -> str:
        return "ok"

    lane.submit([task(use, results)], deadline_s=LONG_S)
    del use, memory
    results.wait(1)
    wait_until(lambda: gc.collect() >= 0 and gone() is None, "the task's memory is kept")


def test_deadlines_of_finished_batches_do_not_pile_up(lane: IoLane) -> None:
    for _ in range(1000):
        results = Results[str]()
        lane.submit([task(quick, results)], deadline_s=3600)
        results.wait(1)
        wait_until(lambda: lane._n_unanswered == 0, "answered")
    assert len(lane._deadlines) <= 130


@pytest.mark.parametrize(("n_threads", "queue_limit"), [(0, 1), (1, 0)])
def test_sizes_are_checked(n_threads: int, queue_limit: int) -> None:
    with pytest.raises(ValueError, match="lane bad"):
        IoLane("bad", n_threads=n_threads, queue_limit=queue_limit)


def test_status_words_are_those_of_reads() -> None:
    assert (ReadStatus.TIMEOUT, ReadStatus.ERROR) == ("timeout", "error")
