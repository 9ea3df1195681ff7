"""What a transfer does when its turn comes: pulls from a peer, reads and writes of the store.

A job moves no bytes itself; it submits to a channel or a store, and tells its client how it ended. It
knows no order and no bounds. Invariant: its client is told once.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from enum import StrEnum
from types import TracebackType
from typing import Generic, TypeVar

from dualpath.base.errors import DeadlineExceeded, TransferError
from dualpath.store.contract import (
    BlockRead,
    BlockResult,
    BlockWrite,
    ReadStatus,
    Store,
    WriteResult,
)
from dualpath.traffic.pieces import PieceArray, coalesced, remote_spans
from dualpath.transfer.contract import Channel, TransferName

__all__ = ["Job", "PullJob", "ReadJob", "Refusal", "WriteJob"]


class Refusal(StrEnum):
    """Why a transfer ends without having been submitted."""

    FULL = "as many transfers wait already as may"
    LATE = "it was not submitted before its deadline"
    WITHDRAWN = "its attempt was released before it was submitted"
    CLOSED = "the engine ends"


Ended = Callable[[Sequence["Job"], bool, Callable[[], None]], None]
"""Of jobs that were submitted, whether they ended well, and what tells their clients."""


class Job(ABC):
    """One transfer."""

    @abstractmethod
    def submit(self, jobs: Sequence[Job], deadline_s: float, ended: Ended) -> int:
        """Submit these jobs of one kind and group, the first being this one, as one.

        Returns how many descriptors that took. Never waits for bytes.
        """

    @abstractmethod
    def refuse(self, why: Refusal) -> None:
        """It will not be submitted: tell the client."""


@dataclass(slots=True, eq=False)
class PullJob(Job):
    """Pieces of a peer's slots, leased under `stamp`, into places of the memory `into`."""

    name: TransferName
    channel: Channel
    stamp: int
    pieces: PieceArray
    into: memoryview
    future: Future[int] = field(default_factory=Future)

    def __post_init__(self) -> None:
        self.future.set_running_or_notify_cancel()  # A running future cannot be cancelled.

    @property
    def n_bytes(self) -> int:
        return int(self.pieces[:, 2].sum())

    def submit(self, jobs: Sequence[Job], deadline_s: float, ended: Ended) -> int:
        pulls = [job for job in jobs if isinstance(job, PullJob)]
        pieces = coalesced([pull.pieces for pull in pulls])
        into = self.into
        views = [into[place : place + length] for length, place in pieces[:, 2:].tolist()]

        def done(moved: Future[int]) -> None:
            error = moved.exception()
            ended(jobs, error is None, lambda: tell_all(error))

        def tell_all(error: BaseException | None) -> None:
            for pull in pulls:
                pull.tell(error)

        try:
            moved = self.channel.pull(
                self.name, self.stamp, remote_spans(pieces), views, deadline_s=deadline_s
            )
        except Exception as bug:
            # It reaches whoever waits, and ends the process there.
            moved = Future()
            moved.set_exception(bug)
        moved.add_done_callback(done)
        return len(views)

    def tell(self, error: BaseException | None) -> None:
        n_bytes = self.n_bytes
        self.into = memoryview(b"")  # No one holds on to the caller's memory.
        if error is None:
            self.future.set_result(n_bytes)
        else:
            self.future.set_exception(error)

    def refuse(self, why: Refusal) -> None:
        kind = DeadlineExceeded if why is Refusal.LATE else TransferError
        self.tell(kind(f"{self.name}: {why}"))


class _Leaving(AbstractContextManager[None]):
    """For one who begins to use memory whose hold was entered before: only leaves it."""

    __slots__ = ("_hold",)

    def __init__(self, hold: AbstractContextManager[object]) -> None:
        self._hold = hold

    def __enter__(self) -> None:
        pass

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._hold.__exit__(kind, error, trace)


ResultT = TypeVar("ResultT", BlockResult, WriteResult)


@dataclass(slots=True, eq=False)
class _StoreJob(Job, Generic[ResultT]):
    """Its block's hold is entered when it is made, so that no release can come in between."""

    store: Store
    done: Callable[[ResultT], None]


@dataclass(slots=True, eq=False)
class ReadJob(_StoreJob[BlockResult]):
    """One block from the store."""

    block: BlockRead

    def __post_init__(self) -> None:
        self.block.hold.__enter__()

    def submit(self, jobs: Sequence[Job], deadline_s: float, ended: Ended) -> int:
        reads = {job.block.identity.key: job for job in jobs if isinstance(job, ReadJob)}

        def done(result: BlockResult) -> None:
            job = reads.pop(result.key)
            ended([job], result.status is ReadStatus.OK, lambda: job.done(result))

        blocks = [
            BlockRead(job.block.identity, job.block.into, _Leaving(job.block.hold))
            for job in reads.values()
        ]
        self.store.read(blocks, deadline_s=deadline_s, done=done)
        return len(blocks)

    def refuse(self, why: Refusal) -> None:
        self.block.hold.__exit__(None, None, None)
        status = ReadStatus.TIMEOUT if why is Refusal.LATE else ReadStatus.ERROR
        self.done(BlockResult(self.block.identity.key, status, str(why)))


@dataclass(slots=True, eq=False)
class WriteJob(_StoreJob[WriteResult]):
    """One block to the store."""

    block: BlockWrite

    def __post_init__(self) -> None:
        self.block.hold.__enter__()

    def submit(self, jobs: Sequence[Job], deadline_s: float, ended: Ended) -> int:
        writes = {job.block.identity.key: job for job in jobs if isinstance(job, WriteJob)}

        def done(result: WriteResult) -> None:
            job = writes.pop(result.key)
            ended([job], result.durable, lambda: job.done(result))

        blocks = [
            BlockWrite(job.block.identity, job.block.payload, _Leaving(job.block.hold))
            for job in writes.values()
        ]
        self.store.write(blocks, deadline_s=deadline_s, done=done)
        return len(blocks)

    def refuse(self, why: Refusal) -> None:
        self.block.hold.__exit__(None, None, None)
        self.done(WriteResult(self.block.identity.key, False, 0, str(why)))
