"""Pulls from call to completion: checks, states, deadlines, counters. Moves no bytes.

A pull is WAITING (nothing touches its destination), MOVING (its mover does) or DONE. A waiting pull
is ended by anyone: the deadline clock, a lost peer. A moving pull is ended only by its mover, which
looks at `must_stop` between steps; so a future is done only when nothing can touch `into` any more.
"""

from __future__ import annotations

import heapq
import itertools
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from enum import Enum

from dualpath.base.errors import DeadlineExceeded, TransferError
from dualpath.base.ids import MiB
from dualpath.kv.pool import Lease, PoolGeometry
from dualpath.transfer.contract import PeerStats, RemoteSpan, TransferName

__all__ = [
    "MAX_MESSAGE_BYTES",
    "MAX_OUTSTANDING",
    "MAX_SPANS",
    "Counters",
    "DeadlineClock",
    "Pull",
    "PullTable",
    "byte_views",
    "check_message",
    "check_spans",
    "why_not_held",
]

MAX_MESSAGE_BYTES = 1 * MiB
MAX_SPANS = 65_536

MAX_OUTSTANDING = 4096
"""Pulls of one channel that have not ended; more fail at once."""
_PRUNE_AT = 256


def check_spans(geometry: PoolGeometry, spans: Sequence[RemoteSpan]) -> int:
    """The bytes the spans name. Raises ValueError for one outside its slot, or for too many."""
    if len(spans) > MAX_SPANS:
        raise ValueError(f"{len(spans)} spans in one pull: at most {MAX_SPANS}")
    total = 0
    for slot, offset, length in ((span.slot, span.offset, span.length) for span in spans):
        if not 0 <= slot < geometry.n_slots:
            raise ValueError(f"slot {slot} is not in [0, {geometry.n_slots})")
        if offset < 0 or length < 0 or offset + length > geometry.slot_bytes:
            raise ValueError(
                f"bytes [{offset}, {offset + length}) are not in a slot of {geometry.slot_bytes}"
            )
        total += length
    return total


def byte_views(spans: Sequence[RemoteSpan], into: Sequence[memoryview]) -> list[memoryview]:
    """The destinations as flat bytes. Raises ValueError unless they are writable and fit the spans."""
    if len(spans) != len(into):
        raise ValueError(f"{len(spans)} spans but {len(into)} destinations")
    views: list[memoryview] = []
    for span, view in zip(spans, into, strict=True):
        if view.nbytes != span.length:
            raise ValueError(f"a span of {span.length} bytes but a destination of {view.nbytes}")
        if view.readonly or not view.c_contiguous:
            raise ValueError("a destination must be writable and contiguous")
        if view.nbytes and (view.ndim != 1 or view.format != "B"):
            view = view.cast("B")
        views.append(view)
    return views


def check_message(message: bytes) -> None:
    """Raises ValueError for one that is too long to send."""
    if len(message) > MAX_MESSAGE_BYTES:
        raise ValueError(f"a message of {len(message)} bytes exceeds {MAX_MESSAGE_BYTES}")


def why_not_held(lease: Lease | None, stamp: int, spans: Sequence[RemoteSpan]) -> str | None:
    """Why these slots cannot be read under the stamp whose live lease is given; None if they can."""
    if lease is None:
        return f"stamp {stamp} is of no live lease"
    foreign = {span.slot for span in spans}.difference(lease.slots)
    if foreign:
        return f"slot {min(foreign)} is not in the lease of {lease.owner}"
    return None


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


class _State(Enum):
    WAITING = "waiting"
    MOVING = "moving"
    DONE = "done"


@dataclass(frozen=True, slots=True)
class _Origin:
    """What a pull reports to when it ends."""

    table: PullTable
    counters: Counters
    started_s: float


class Pull:
    """One pull. `begin` is called by its mover, which then calls `complete` or `fail`."""

    __slots__ = (
        "_lock",
        "_origin",
        "_state",
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
        spans: Sequence[RemoteSpan],
        into: Sequence[memoryview],
        deadline_s: float,
    ) -> None:
        self._origin = origin
        self._lock = threading.Lock()
        self._state = _State.WAITING
        self._stop: TransferError | None = None
        self.number = number
        self.name = name
        self.stamp = stamp
        self.spans = spans
        self.into = into
        self.total_bytes = sum(span.length for span in spans)
        self.deadline_s = deadline_s
        """On the monotonic clock."""
        self.future: Future[int] = Future()
        self.future.set_running_or_notify_cancel()  # A running future cannot be cancelled.

    @property
    def done(self) -> bool:
        return self._state is _State.DONE

    def begin(self) -> bool:
        """Claim it for moving; False when it has ended already."""
        with self._lock:
            if self._state is not _State.WAITING:
                return False
            self._state = _State.MOVING
            return True

    def must_stop(self) -> TransferError | None:
        """For the mover: why to stop now, or None."""
        if self._stop is None and time.monotonic() >= self.deadline_s:
            self._stop = self.late()
        return self._stop

    def late(self) -> DeadlineExceeded:
        return DeadlineExceeded(f"{self.name} did not arrive before its deadline")

    def complete(self) -> None:
        """By the mover: all bytes are in `into`."""
        self._end(self.total_bytes, None)

    def fail(self, error: TransferError) -> None:
        """By the mover, or before anything moves."""
        self._end(0, error)

    def interrupt(self, error: TransferError) -> None:
        """By anyone: ends a waiting pull, and asks the mover of a moving one to stop."""
        with self._lock:
            moving = self._state is _State.MOVING
            if moving and self._stop is None:
                self._stop = error
        if not moving:
            self._end(0, error, only_from=_State.WAITING)

    def expire(self) -> None:
        """By the clock: ends a waiting pull; a mover watches the deadline itself."""
        self._end(0, self.late(), only_from=_State.WAITING)

    def _end(
        self, moved_bytes: int, error: TransferError | None, only_from: _State | None = None
    ) -> None:
        with self._lock:
            if self._state is _State.DONE or (only_from is not None and self._state != only_from):
                return
            self._state = _State.DONE
        self.spans = ()
        self.into = ()
        origin = self._origin
        origin.table.forget(self)
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
        spans: Sequence[RemoteSpan],
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
            pull.fail(refusal)
        elif not spans:
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
