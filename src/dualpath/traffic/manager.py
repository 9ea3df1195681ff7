"""The traffic manager of an engine (paper, sections 3 and 6): all KV enters and leaves through it.

Pulls from peers, reads and writes of the store, messages to peers, and copies between host and device. It
knows no requests beyond the name of an owner, and no policy: callers say what is needed when.
`queue` decides what leaves next, `pieces` merges what leaves together, `jobs` submits it; here is the
short part in between.

Classes. EXECUTION: what computing stands still for, and messages. KV: all other pulls, and copies to and
from the device. STORAGE: reads and writes of the store. The class orders what leaves this engine; how packets
are marked is the channel's (messages and pulls have connections of their own) and the store's.

Threads. Every call may come from any thread and never waits for bytes. One thread at a time submits; another
that brings work meanwhile leaves it to that one. Clients are told on threads of the channel, the store
or the deadline clock, or, for a pull that is refused, inside the call.

Invariants
- A transfer ends exactly once, by its deadline: also one that waits, by the clock here.
- What was withdrawn, refused or late before its submission has touched no memory and never will.
- Nothing grows without a bound: `ClassLimits.queued`, and `queue`'s bounds on what is under way.
"""

from __future__ import annotations

import heapq
import itertools
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, replace
from enum import StrEnum

from dualpath.base.ids import EngineId
from dualpath.base.traffic_class import TrafficClass
from dualpath.store.contract import BlockRead, BlockResult, BlockWrite, Store, WriteResult
from dualpath.traffic.counters import DEVICE, STORE, PeerTraffic, TrafficKey
from dualpath.traffic.jobs import Job, PullJob, ReadJob, Refusal, WriteJob
from dualpath.traffic.pieces import PieceArray
from dualpath.traffic.queue import DEFAULT_LIMITS, ClassLimits, TransferQueue, Wanted
from dualpath.transfer.contract import Channel, TransferName

__all__ = ["TrafficManager", "TransferReport", "TransferState"]

log = logging.getLogger(__name__)

_PRUNE_AT = 256
_WRITES_LAST = 1
"""Blocks are read for a request that waits; a write waits for nobody."""


class TransferState(StrEnum):
    QUEUED = "queued"
    UNDER_WAY = "under way"


@dataclass(frozen=True, slots=True)
class TransferReport:
    """A transfer that has not ended. `left_s` until its deadline."""

    owner: str
    traffic_class: TrafficClass
    peer: str
    n_bytes: int
    state: TransferState
    left_s: float


@dataclass(slots=True, eq=False)
class _Transfer:
    wanted: Wanted
    owner: str
    job: Job
    asked_s: float
    deadline_s: float
    counts: PeerTraffic
    """Of its class and peer."""
    state: TransferState = TransferState.QUEUED


class TrafficManager:
    """One for each engine process. Close it after the last call, before channels and store."""

    def __init__(
        self,
        limits: Mapping[TrafficClass, ClassLimits] = DEFAULT_LIMITS,
    ) -> None:
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._numbers = itertools.count()
        self._queue = TransferQueue(limits)
        self._transfers: dict[int, _Transfer] = {}
        """By number; those that have not ended."""
        self._by_job: dict[Job, _Transfer] = {}
        self._counts: dict[TrafficKey, PeerTraffic] = {}
        self._deadlines: list[tuple[float, int]] = []
        self._prune_at = _PRUNE_AT
        self._refused: list[tuple[Job, Refusal]] = []
        """Refused inside a call that must not tell its client: the clock's thread does."""
        self._submitting = False
        self._closed = False
        self._thread: threading.Thread | None = None

    # What callers ask for.

    def pull(
        self,
        channel: Channel,
        name: TransferName,
        stamp: int,
        pieces: PieceArray,
        into: memoryview,
        *,
        owner: str,
        deadline_s: float,
        needed: int = 0,
        urgent: bool = False,
    ) -> Future[int]:
        """Copy pieces `[n, 4]` of a peer's slots to their places in `into`, writable and flat.

        `needed`: the layer that computes with them, 0 where no single layer waits. `urgent`: computing
        stands still for them. Those of one channel, stamp and `into` that wait may leave together.
        The future gives the bytes, or raises as `Channel.pull` does, or TransferError when it was refused;
        it is done only when nothing can touch `into` any more. No pieces: 0 bytes.
        """
        job = PullJob(name, channel, stamp, pieces, into)
        traffic_class = TrafficClass.EXECUTION if urgent else TrafficClass.KV
        group = (id(channel), stamp, id(into))
        self._ask([job], traffic_class, channel.peer, group, owner, deadline_s, needed, job.n_bytes)
        return job.future

    def read(
        self,
        store: Store,
        blocks: Sequence[BlockRead],
        *,
        owner: str,
        deadline_s: float,
        done: Callable[[BlockResult], None],
    ) -> None:
        """As `Store.read`; ERROR also when too many wait already, or `withdraw` was faster."""
        jobs = [ReadJob(store, done, block) for block in blocks]
        self._ask_store(jobs, [block.into for block in blocks], owner, deadline_s, 0)

    def write(
        self,
        store: Store,
        blocks: Sequence[BlockWrite],
        *,
        owner: str,
        deadline_s: float,
        done: Callable[[WriteResult], None],
    ) -> None:
        """As `Store.write`; not durable also when too many wait already. Reads that wait go first."""
        jobs = [WriteJob(store, done, block) for block in blocks]
        self._ask_store(jobs, [block.payload for block in blocks], owner, deadline_s, _WRITES_LAST)

    def notify(self, channel: Channel, message: bytes) -> None:
        """As `Channel.notify`: a message never waits behind KV, so that order holds and it stays small."""
        channel.notify(message)
        with self._lock:
            counts = self._count(TrafficKey(TrafficClass.EXECUTION, channel.peer))
            counts.transfers += 1
            counts.n_bytes += len(message)

    @contextmanager
    def copying(self, n_bytes: int) -> Iterator[None]:
        """While inside, the caller copies so many bytes between host and device.

        Copies are made, or put on a stream of the device, at once: they share memory bandwidth with
        computing, and a queue in between would cost more than it could order.
        """
        yield
        if not n_bytes:
            return
        with self._lock:
            counts = self._count(TrafficKey(TrafficClass.KV, DEVICE))
            counts.transfers += 1
            counts.n_bytes += n_bytes

    def withdraw(self, owner: str) -> None:
        """What waits for this owner does not leave any more, and its clients are told.

        What is under way ends by itself. Idempotent.
        """
        with self._lock:
            if not self._queue.n_waiting:
                return
            gone = [each for each in self._transfers.values() if each.owner == owner]
            jobs = self._take_out(gone, Refusal.WITHDRAWN)
        for job in jobs:
            job.refuse(Refusal.WITHDRAWN)

    # What is seen from outside.

    @property
    def counts(self) -> dict[TrafficKey, PeerTraffic]:
        """Copies of the counters, by class and peer."""
        with self._lock:
            for counts in self._counts.values():
                counts.queued = counts.under_way = 0
            for transfer in self._transfers.values():
                if transfer.state is TransferState.QUEUED:
                    transfer.counts.queued += 1
                else:
                    transfer.counts.under_way += 1
            return {key: replace(counts) for key, counts in self._counts.items()}

    def unfinished(self) -> list[TransferReport]:
        """Every transfer that has not ended, for logs and reports."""
        with self._lock:
            now_s = time.monotonic()
            return [
                TransferReport(
                    each.owner,
                    each.wanted.traffic_class,
                    each.wanted.peer,
                    each.wanted.n_bytes,
                    each.state,
                    each.deadline_s - now_s,
                )
                for each in self._transfers.values()
            ]

    def forget(self, peer: EngineId) -> None:
        """The peer is gone: its counters go too, and begin at 0 should it come back."""
        with self._lock:
            busy = {each.wanted.peer for each in self._transfers.values()}
            for key in [key for key in self._counts if key.peer == peer and peer not in busy]:
                del self._counts[key]

    def close(self) -> None:
        """Refuse what waits and what comes. What is under way ends with its channel or store. Idempotent."""
        with self._changed:
            self._closed = True
            jobs = self._take_out(list(self._transfers.values()), Refusal.CLOSED)
            self._changed.notify_all()
        for job in jobs:
            job.refuse(Refusal.CLOSED)
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    # From call to submission.

    def _ask_store(
        self,
        jobs: Sequence[ReadJob] | Sequence[WriteJob],
        memory: Sequence[memoryview],
        owner: str,
        deadline_s: float,
        needed: int,
    ) -> None:
        if jobs:
            n_bytes = max(view.nbytes for view in memory)
            group = object()  # What was asked for together leaves together: it shares a deadline.
            traffic_class = TrafficClass.STORAGE
            self._ask(jobs, traffic_class, STORE, group, owner, deadline_s, needed, n_bytes)

    def _ask(
        self,
        jobs: Sequence[Job],
        traffic_class: TrafficClass,
        peer: str,
        group: object,
        owner: str,
        deadline_s: float,
        needed: int,
        n_bytes: int,
    ) -> None:
        """Each job of `n_bytes`."""
        now_s = time.monotonic()
        refused: list[tuple[Job, Refusal]] = []
        with self._lock:
            counts = self._count(TrafficKey(traffic_class, peer))
            for job in jobs:
                number = next(self._numbers)
                wanted = Wanted(number, traffic_class, peer, group, needed, n_bytes)
                transfer = _Transfer(wanted, owner, job, now_s, now_s + deadline_s, counts)
                if self._closed or not self._queue.add(wanted):
                    counts.failed += 1
                    refused.append((job, Refusal.CLOSED if self._closed else Refusal.FULL))
                    continue
                self._transfers[number] = transfer
                self._by_job[job] = transfer
        self._refuse(refused)
        self._submit_all()
        with self._changed:
            if self._queue.n_waiting:
                self._watch(jobs)

    def _refuse(self, refused: Sequence[tuple[Job, Refusal]]) -> None:
        """A pull's future may fail inside the call; a block's callback must not run there."""
        for job, why in refused:
            if isinstance(job, PullJob):
                job.refuse(why)
        later = [(job, why) for job, why in refused if not isinstance(job, PullJob)]
        if later and self._closed:
            threading.Thread(target=lambda: [job.refuse(why) for job, why in later]).start()
        elif later:
            with self._changed:
                self._refused += later
                self._start_clock()
                self._changed.notify()

    def _submit_all(self) -> None:
        """Submit whatever may leave; one thread at a time, in order."""
        with self._lock:
            if self._submitting:
                return
            self._submitting = True
        try:
            while True:
                with self._lock:
                    batch = self._queue.next_batch()
                    if not batch:
                        self._submitting = False
                        return
                    transfers = self._leave(batch)
                self._submit(transfers)
        except BaseException:
            with self._lock:
                self._submitting = False
            raise

    def _leave(self, batch: Sequence[Wanted]) -> list[_Transfer]:
        now_s = time.monotonic()
        transfers = [self._transfers[wanted.number] for wanted in batch]
        counts = transfers[0].counts
        counts.submissions += 1
        for transfer in transfers:
            transfer.state = TransferState.UNDER_WAY
            counts.wait_s += now_s - transfer.asked_s
        return transfers

    def _submit(self, transfers: Sequence[_Transfer]) -> None:
        first = transfers[0]
        left_s = min(each.deadline_s for each in transfers) - time.monotonic()
        jobs = [each.job for each in transfers]
        descriptors = first.job.submit(jobs, max(0.0, left_s), self._ended)
        with self._lock:
            first.counts.descriptors += descriptors

    def _ended(self, jobs: Sequence[Job], well: bool, tell: Callable[[], None]) -> None:
        with self._lock:
            for job in jobs:
                transfer = self._by_job.pop(job)
                del self._transfers[transfer.wanted.number]
                self._queue.ended([transfer.wanted])
                if well:
                    transfer.counts.transfers += 1
                    transfer.counts.n_bytes += transfer.wanted.n_bytes
                else:
                    transfer.counts.failed += 1
            waiting = self._queue.n_waiting
        try:
            tell()
        finally:
            if waiting:
                self._submit_all()

    def _take_out(self, transfers: Sequence[_Transfer], why: Refusal) -> list[Job]:
        """Those of the transfers that wait, taken out of the queue; with the lock held."""
        jobs: list[Job] = []
        for transfer in transfers:
            if transfer.state is TransferState.QUEUED:
                self._queue.withdraw(transfer.wanted)
                del self._transfers[transfer.wanted.number]
                del self._by_job[transfer.job]
                if why is Refusal.WITHDRAWN:
                    transfer.counts.withdrawn += 1
                else:
                    transfer.counts.failed += 1
                jobs.append(transfer.job)
        return jobs

    def _count(self, key: TrafficKey) -> PeerTraffic:
        return self._counts.setdefault(key, PeerTraffic())

    # Deadlines of what waits.

    def _watch(self, jobs: Sequence[Job]) -> None:
        """Look at the deadlines of those of the jobs that wait; with the lock held."""
        waiting = [
            transfer
            for transfer in map(self._by_job.get, jobs)
            if transfer is not None and transfer.state is TransferState.QUEUED
        ]
        if not waiting or self._closed:
            return
        if len(self._deadlines) >= self._prune_at:
            self._deadlines = [entry for entry in self._deadlines if self._is_queued(entry[1])]
            heapq.heapify(self._deadlines)
            self._prune_at = max(_PRUNE_AT, 2 * len(self._deadlines))
        for transfer in waiting:
            heapq.heappush(self._deadlines, (transfer.deadline_s, transfer.wanted.number))
        self._start_clock()
        self._changed.notify()

    def _is_queued(self, number: int) -> bool:
        transfer = self._transfers.get(number)
        return transfer is not None and transfer.state is TransferState.QUEUED

    def _start_clock(self) -> None:
        if self._thread is None and not self._closed:
            self._thread = threading.Thread(target=self._tick, name="traffic-clock", daemon=True)
            self._thread.start()

    def _tick(self) -> None:
        """The clock's thread: ends what waited too long, and tells those that were refused."""
        while True:
            with self._changed:
                now_s = time.monotonic()
                late: list[_Transfer] = []
                while self._deadlines and (
                    self._deadlines[0][0] <= now_s or not self._is_queued(self._deadlines[0][1])
                ):
                    number = heapq.heappop(self._deadlines)[1]
                    if self._is_queued(number):
                        late.append(self._transfers[number])
                jobs = [(job, Refusal.LATE) for job in self._take_out(late, Refusal.LATE)]
                jobs, self._refused = [*jobs, *self._refused], []
                if not jobs:
                    if self._closed:
                        return
                    left_s = self._deadlines[0][0] - now_s if self._deadlines else None
                    self._changed.wait(left_s)
                    continue
            for job, why in jobs:
                try:
                    job.refuse(why)
                except Exception:
                    log.exception("a client of a transfer failed")
            del jobs
