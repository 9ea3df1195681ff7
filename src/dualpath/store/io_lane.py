"""Blocking I/O on a bounded number of threads, with a deadline on every operation.

Any backend whose I/O is a blocking call can be built on a lane; it knows no blocks and no files.

Promises
- Each task is answered exactly once: by its own result, or by `refuse` when the queue is full, the
  lane is closed or stuck (ERROR, at once), or the deadline has passed (TIMEOUT).
- Answers come on the lane's threads, never inside `submit`.
- A task's `hold` is entered in `submit`, on the caller's thread, and left when the task can touch no
  memory any more: before its answer, or, when it hangs, after the call came back from the kernel.
- A thread that hangs past its task's deadline is *stuck*: another takes its place, up to
  `spare_threads`. When as many hang the lane refuses everything until one of them comes back.
- Memory is O(1) a task: views are dropped as soon as the task has been answered and has ended.
"""

from __future__ import annotations

import heapq
import itertools
import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from enum import Enum, auto
from functools import partial
from typing import Generic, Protocol, TypeVar

from dualpath.base.kv_threads import kv_thread
from dualpath.store.contract import ReadStatus

__all__ = ["IoLane", "IoTask", "LaneStats", "Ticket"]

R = TypeVar("R")

_Answer = Callable[[], None]
_log = logging.getLogger(__name__)


class Ticket(Protocol):
    """What a running task knows of its deadline."""

    @property
    def deadline(self) -> float:
        """When it is answered with TIMEOUT, by `time.monotonic`. I/O that can be cut off ends before."""

    @property
    def abandoned(self) -> bool:
        """Whether the task has been answered without its result: it should undo what it did."""

    def claim(self) -> bool:
        """Make sure that the result will be the answer; False when it is abandoned.

        For tasks with effects, after the last call that may hang: return at once after it.
        """


@dataclass(frozen=True, slots=True)
class IoTask(Generic[R]):
    """`run` blocks, on an I/O thread; `refused` makes the result of a task that was cut short."""

    run: Callable[[Ticket], R]
    refused: Callable[[ReadStatus, str], R]
    done: Callable[[R], None]
    hold: AbstractContextManager[object]

    def execute(self, ticket: Ticket) -> _Answer:
        return partial(self.done, self.run(ticket))

    def refuse(self, status: ReadStatus, detail: str) -> _Answer:
        return partial(self.done, self.refused(status, detail))


class _Task(Protocol):
    @property
    def hold(self) -> AbstractContextManager[object]: ...
    def execute(self, ticket: Ticket) -> _Answer: ...
    def refuse(self, status: ReadStatus, detail: str) -> _Answer: ...


@dataclass(frozen=True, slots=True)
class LaneStats:
    """`stuck` threads hang past a deadline; `refusing` means that all the lane may have do."""

    queued: int
    running: int
    stuck: int
    refusing: bool


class _State(Enum):
    QUEUED = auto()
    RUNNING = auto()
    CLAIMED = auto()
    """Running, and no deadline may answer it any more."""
    ABANDONED = auto()
    """Answered with TIMEOUT while a thread is still inside."""
    ENDED = auto()


class _Op:
    __slots__ = ("batch", "lock", "serial", "state", "task")

    def __init__(self, task: _Task, batch: _Batch, serial: int, lock: threading.Lock) -> None:
        self.lock = lock
        self.task: _Task | None = task
        self.batch = batch
        self.serial = serial
        self.state = _State.QUEUED

    @property
    def deadline(self) -> float:
        return self.batch.deadline

    @property
    def abandoned(self) -> bool:
        return self.state is _State.ABANDONED

    def claim(self) -> bool:
        with self.lock:
            if self.state is _State.RUNNING:
                self.state = _State.CLAIMED
            return self.state is _State.CLAIMED


class _Batch:
    """What was submitted together, and shares a deadline."""

    __slots__ = ("deadline", "deadline_s", "ops", "unanswered")

    def __init__(self, deadline: float, deadline_s: float) -> None:
        self.deadline = deadline
        self.deadline_s = deadline_s
        self.ops: list[_Op] = []
        self.unanswered = 0


class IoLane:
    """At most `n_threads` tasks at a time, `queue_limit` waiting. Thread-safe."""

    def __init__(
        self, name: str, *, n_threads: int, queue_limit: int, spare_threads: int | None = None
    ) -> None:
        if n_threads < 1 or queue_limit < 1 or (spare_threads or 0) < 0:
            raise ValueError(f"lane {name}: {n_threads} threads, queue of {queue_limit}")
        self.name = name
        self._n_threads = n_threads
        self._max_threads = n_threads + (n_threads if spare_threads is None else spare_threads)
        self._queue_limit = queue_limit
        self._lock = threading.Lock()
        self._work = threading.Condition(self._lock)
        self._watch = threading.Condition(self._lock)
        self._ended = threading.Condition(self._lock)
        self._queue: OrderedDict[int, _Op] = OrderedDict()
        self._refused: list[tuple[_Op, ReadStatus, str]] = []
        self._deadlines: list[tuple[float, int, _Batch]] = []
        self._serial = itertools.count()
        self._n_alive = self._n_idle = self._n_running = self._n_stuck = 0
        self._n_unanswered = 0
        self._closed = False
        self._watcher = threading.Thread(
            target=self._watch_loop, name=f"{name}-deadline", daemon=True
        )
        self._watcher.start()

    @property
    def stats(self) -> LaneStats:
        with self._work:
            return LaneStats(len(self._queue), self._n_running, self._n_stuck, self._refusing)

    def submit(self, tasks: Sequence[_Task], *, deadline_s: float) -> None:
        """Start the tasks; each is answered within `deadline_s` from now, in any order.

        Raises what entering a hold raises; then none has been started.
        """
        _enter_holds(tasks)
        batch = _Batch(time.monotonic() + deadline_s, deadline_s)
        with self._work:
            for task in tasks:
                op = _Op(task, batch, next(self._serial), self._lock)
                self._n_unanswered += 1
                batch.unanswered += 1
                reason = self._refusal()
                if reason is not None:
                    self._refused.append((op, ReadStatus.ERROR, reason))
                    continue
                batch.ops.append(op)
                self._queue[op.serial] = op
            if batch.ops:
                self._push_deadline(batch)
            self._staff()
            if self._closed:
                # The watcher may have ended; answers still never come from inside this call.
                threading.Thread(target=self._answer_due, daemon=True).start()
            elif self._refused or (batch.ops and self._deadlines[0][2] is batch):
                self._watch.notify()

    def close(self) -> None:
        """Refuse what waits, let what runs end or meet its deadline, and end the threads.

        A stuck thread is abandoned. Idempotent. Never call it from a callback.
        """
        with self._work:
            self._closed = True
            self._refuse_queue(f"{self.name} was closed")
            self._work.notify_all()
            self._watch.notify()
            while self._n_unanswered:
                self._ended.wait()
            self._watch.notify()
        self._watcher.join()

    @property
    def _refusing(self) -> bool:
        return self._n_stuck >= self._max_threads

    def _refusal(self) -> str | None:
        if self._closed:
            return f"{self.name} is closed"
        if self._refusing:
            return f"{self.name} hangs: {self._n_stuck} threads have not come back from the device"
        if len(self._queue) >= self._queue_limit:
            return f"{self.name} is full: {self._queue_limit} operations wait"
        return None

    def _refuse_queue(self, reason: str) -> None:
        self._refused.extend((op, ReadStatus.ERROR, reason) for op in self._queue.values())
        self._queue.clear()

    def _push_deadline(self, batch: _Batch) -> None:
        if len(self._deadlines) > 64:
            live = [entry for entry in self._deadlines if entry[2].unanswered]
            if 2 * len(live) < len(self._deadlines):
                heapq.heapify(live)
                self._deadlines = live
        heapq.heappush(self._deadlines, (batch.deadline, next(self._serial), batch))

    def _staff(self) -> None:
        """Wake idle threads for the queue, and start new ones where there are too few."""
        wanted = len(self._queue)
        self._work.notify(min(wanted, self._n_idle))
        able = min(self._n_threads, self._max_threads - self._n_stuck)
        while wanted > self._n_idle and self._n_alive - self._n_stuck < able:
            self._n_alive += 1
            wanted -= 1
            kv_thread(self._work_loop, name=f"{self.name}-io").start()

    def _work_loop(self) -> None:
        while True:
            op = self._take()
            if op is None:
                return
            self._perform(op)
            del op  # An idle thread must not keep the memory of its last task alive.

    def _take(self) -> _Op | None:
        with self._work:
            while not self._queue:
                if self._closed or self._n_alive - self._n_stuck > self._n_threads:
                    self._n_alive -= 1
                    return None
                self._n_idle += 1
                self._work.wait()
                self._n_idle -= 1
            _, op = self._queue.popitem(last=False)
            op.state = _State.RUNNING
            self._n_running += 1
            return op

    def _perform(self, op: _Op) -> None:
        task = op.task
        assert task is not None
        try:
            answer = task.execute(op)
        except Exception as error:
            _log.exception("%s: a task failed in a way that its backend does not expect", self.name)
            answer = task.refuse(ReadStatus.ERROR, f"{type(error).__name__}: {error}")
        _leave_hold(task)
        op.task = None
        with self._work:
            self._n_running -= 1
            late = op.state is _State.ABANDONED
            op.state = _State.ENDED
            if late:
                self._n_stuck -= 1
        if not late:
            self._answer([(op, answer)])

    def _watch_loop(self) -> None:
        while True:
            with self._watch:
                answers = list(self._due())
                if not answers:
                    if self._closed and not self._n_unanswered:
                        return
                    self._watch.wait(self._until_next_deadline())
            self._answer(answers)
            del answers

    def _answer_due(self) -> None:
        with self._work:
            answers = list(self._due())
        self._answer(answers)

    def _until_next_deadline(self) -> float | None:
        while self._deadlines and not self._deadlines[0][2].unanswered:
            heapq.heappop(self._deadlines)
        if not self._deadlines:
            return None
        return max(0.0, self._deadlines[0][0] - time.monotonic())

    def _due(self) -> Iterator[tuple[_Op, _Answer]]:
        """Take out what must be answered now without a result."""
        now = time.monotonic()
        while self._deadlines and self._deadlines[0][0] <= now:
            _, _, batch = heapq.heappop(self._deadlines)
            limit = f"{batch.deadline_s:g} s"
            for op in batch.ops:
                if op.state is _State.QUEUED and self._queue.pop(op.serial, None) is not None:
                    self._refused.append((op, ReadStatus.TIMEOUT, f"not started within {limit}"))
                elif op.state is _State.RUNNING and op.task is not None:
                    op.state = _State.ABANDONED
                    self._n_stuck += 1
                    yield op, op.task.refuse(ReadStatus.TIMEOUT, f"no completion within {limit}")
        if self._refusing:
            reason = self._refusal()
            assert reason is not None
            self._refuse_queue(reason)
        self._staff()
        refused, self._refused = self._refused, []
        for op, status, detail in refused:
            assert op.task is not None
            op.state = _State.ENDED
            yield op, partial(_answer_unstarted, op.task, status, detail)
            op.task = None

    def _answer(self, answers: Sequence[tuple[_Op, _Answer]]) -> None:
        for _, answer in answers:
            try:
                answer()
            except Exception:
                _log.exception("%s: a completion callback failed", self.name)
        with self._work:
            for op, _ in answers:
                op.batch.unanswered -= 1
                self._n_unanswered -= 1
            self._ended.notify_all()


def _enter_holds(tasks: Sequence[_Task]) -> None:
    entered: list[_Task] = []
    try:
        for task in tasks:
            task.hold.__enter__()
            entered.append(task)
    except BaseException:
        for task in entered:
            _leave_hold(task)
        raise


def _answer_unstarted(task: _Task, status: ReadStatus, detail: str) -> None:
    _leave_hold(task)
    task.refuse(status, detail)()


def _leave_hold(task: _Task) -> None:
    task.hold.__exit__(None, None, None)
