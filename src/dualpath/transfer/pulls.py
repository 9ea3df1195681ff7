"""Pulls from call to completion: states, deadlines, counters. Moves no bytes.

A pull waits (nothing touches its destination), moves (one or more movers do, each a part of it), or
is done. A waiting pull is ended by anyone: the deadline clock, a lost peer. A moving one is told to
stop, and ends with the last of its movers, which look at `must_stop` between steps; so a future is
done only when nothing can touch `into` any more.
"""

from __future__ import annotations

import heapq
import itertools
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace

from dualpath.base.errors import DeadlineExceeded, TransferError
from dualpath.base.ids import MiB
from dualpath.transfer.contract import PeerStats, TransferName
from dualpath.transfer.spans import SpanArray

__all__ = [
    "MAX_MESSAGE_BYTES",
    "MAX_OUTSTANDING",
    "Counters",
    "DeadlineClock",
    "Pull",
    "PullTable",
    "check_message",
]

MAX_MESSAGE_BYTES = 1 * MiB

MAX_OUTSTANDING = 4096
"""Pulls of one channel that have not ended; more fail at once."""
_PRUNE_AT = 256


def check_message(message: bytes) -> None:
    """Raises ValueError for one that is too long to send."""
    if len(message) > MAX_MESSAGE_BYTES:
        raise ValueError(f"a message of {len(message)} bytes exceeds {MAX_MESSAGE_BYTES}")


class Counters:
    """Mutable `PeerStats`; thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._stats = PeerStats()

    @property
    def stats(self) -> PeerStats:
        return self._stats

    def pull_ended(self, moved_bytes: int, seconds: float, *, failed: bool) -> None:
        with self._lock:
            now = self._stats
            self._stats = replace(
                now,
                pulls=now.pulls + 1,
                pull_failures=now.pull_failures + failed,
                pulled_bytes=now.pulled_bytes + moved_bytes,
                pull_s=now.pull_s + seconds,
            )

    def served(self, n_bytes: int) -> None:
        with self._lock:
            now = self._stats
            self._stats = replace(
                now, served_pulls=now.served_pulls + 1, served_bytes=now.served_bytes + n_bytes
            )

    def notified(self, *, sent: int = 0, received: int = 0) -> None:
        with self._lock:
            now = self._stats
            self._stats = replace(
                now,
                notifies_sent=now.notifies_sent + sent,
                notifies_received=now.notifies_received + received,
            )


@dataclass(frozen=True, slots=True)
class _Origin:
    """What a pull reports to when it ends."""

    table: PullTable
    counters: Counters
    started_s: float


class Pull:
    """One pull, moved in one or more parts.

    A mover calls `begin` before it touches its part of `into`, and then `complete` or `fail`.
    """

    __slots__ = (
        "_done",
        "_lock",
        "_moving",
        "_origin",
        "_parts_left",
        "_stop",
        "deadline_s",
        "future",
        "into",
        "name",
        "number",
        "spans",
        "stamp",
        "total_bytes",
    )

    def __init__(
        self,
        origin: _Origin,
        number: int,
        name: TransferName,
        stamp: int,
        spans: SpanArray,
        into: Sequence[memoryview],
        deadline_s: float,
    ) -> None:
        self._origin = origin
        self._lock = threading.Lock()
        self._done = False
        self._moving = 0
        self._parts_left = 1
        self._stop: TransferError | None = None
        self.number = number
        self.name = name
        self.stamp = stamp
        self.spans = spans
        self.into = into
        """Empty once it is done: no one holds on to the caller's memory."""
        self.total_bytes = int(spans[:, 2].sum())
        self.deadline_s = deadline_s
        """On the monotonic clock."""
        self.future: Future[int] = Future()
        self.future.set_running_or_notify_cancel()  # A running future cannot be cancelled.

    @property
    def done(self) -> bool:
        return self._done

    def split(self, n_parts: int) -> None:
        """Before any part begins: it is complete when so many parts are."""
        self._parts_left = n_parts

    def begin(self) -> bool:
        """Claim a part for moving; False when the pull has ended, or is about to."""
        with self._lock:
            if self._done or self._stop is not None:
                return False
            self._moving += 1
            return True

    def must_stop(self) -> TransferError | None:
        """For a mover: why to stop now, or None."""
        if self._stop is None and time.monotonic() >= self.deadline_s:
            self._stop = self.late()
        return self._stop

    def late(self) -> DeadlineExceeded:
        return DeadlineExceeded(f"{self.name} did not arrive before its deadline")

    def complete(self) -> None:
        """By a mover: all bytes of its part are in `into`."""
        with self._lock:
            self._moving -= 1
            self._parts_left -= 1
            last = not self._moving and (self._stop is not None or not self._parts_left)
        if last:
            # What arrived is good, even if it was asked to stop meanwhile.
            self._end(self._stop if self._parts_left else None)

    def fail(self, error: TransferError) -> None:
        """By a mover: its part did not arrive. The first error counts."""
        with self._lock:
            self._moving -= 1
            self._stop = self._stop or error
            last = not self._moving
        if last:
            self._end(self._stop)

    def interrupt(self, error: TransferError) -> None:
        """By anyone: no part begins any more, and the pull ends when none is moving."""
        with self._lock:
            self._stop = self._stop or error
            moving = self._moving
        if not moving:
            self._end(self._stop)

    def expire(self) -> None:
        """By the clock: its time is up."""
        self.interrupt(self.late())

    def _end(self, error: TransferError | None) -> None:
        with self._lock:
            if self._done:
                return
            self._done = True
        self.spans = self.spans[:0]
        self.into = ()
        origin = self._origin
        origin.table.forget(self)
        moved_bytes = self.total_bytes if error is None else 0
        seconds = time.monotonic() - origin.started_s
        origin.counters.pull_ended(moved_bytes, seconds, failed=error is not None)
        if error is None:
            self.future.set_result(moved_bytes)
        else:
            self.future.set_exception(error)


class DeadlineClock:
    """One thread that ends waiting pulls when their time is up; started on first use."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._changed = threading.Condition()
        self._heap: list[tuple[float, int, Pull]] = []
        self._order = itertools.count()
        self._prune_at = _PRUNE_AT
        self._thread: threading.Thread | None = None
        self._closed = False

    def watch(self, pull: Pull) -> None:
        with self._changed:
            if self._closed:
                return  # The pull's table is closed as well, which ends it.
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._thread.start()
            if len(self._heap) >= self._prune_at:
                self._heap = [entry for entry in self._heap if not entry[2].done]
                heapq.heapify(self._heap)
                self._prune_at = max(_PRUNE_AT, 2 * len(self._heap))
            heapq.heappush(self._heap, (pull.deadline_s, next(self._order), pull))
            if self._heap[0][2] is pull:
                self._changed.notify()

    def close(self) -> None:
        """Stop the thread. Idempotent."""
        with self._changed:
            self._closed = True
            self._heap.clear()
            self._changed.notify()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def _run(self) -> None:
        while True:
            with self._changed:
                if self._closed:
                    return
                left_s = self._heap[0][0] - time.monotonic() if self._heap else None
                if left_s is None or left_s > 0:
                    self._changed.wait(left_s)
                    continue
                pull = heapq.heappop(self._heap)[2]
            pull.expire()


class PullTable:
    """The outstanding pulls of one channel; bounded."""

    def __init__(self, counters: Counters, clock: DeadlineClock) -> None:
        self._counters = counters
        self._clock = clock
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._outstanding: dict[int, Pull] = {}
        self._closed: TransferError | None = None

    def open(
        self,
        name: TransferName,
        stamp: int,
        spans: SpanArray,
        into: Sequence[memoryview],
        deadline_s: float,
    ) -> Pull:
        """A new pull; it has failed already when the channel is closed or has too many.

        `spans` and `into` are checked; `deadline_s` is from now.
        """
        now_s = time.monotonic()
        origin = _Origin(self, self._counters, now_s)
        pull = Pull(origin, next(self._numbers), name, stamp, spans, into, now_s + deadline_s)
        with self._lock:
            refusal = self._closed
            if refusal is None and len(self._outstanding) >= MAX_OUTSTANDING:
                refusal = TransferError(f"{name}: {MAX_OUTSTANDING} pulls are outstanding already")
            if refusal is None:
                self._outstanding[pull.number] = pull
        if refusal is not None:
            pull.interrupt(refusal)
        elif not len(spans) and pull.begin():
            pull.complete()
        else:
            self._clock.watch(pull)
        return pull

    def forget(self, pull: Pull) -> None:
        with self._lock:
            self._outstanding.pop(pull.number, None)

    def close(self, error: TransferError) -> None:
        """End every waiting pull, ask moving ones to stop, and refuse new ones. Idempotent."""
        with self._lock:
            self._closed = self._closed or error
            pulls = list(self._outstanding.values())
        for pull in pulls:
            pull.interrupt(error)
