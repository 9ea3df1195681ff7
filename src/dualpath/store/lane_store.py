"""What every store on I/O lanes shares: one lane for reads, one for everything else.

A backend gives blocking I/O on one block; this checks the caller's views, makes lane tasks of them, and
runs the backend's other calls with a deadline. Two lanes, so that slow durable writes never hold up a
read. It knows no device and decides no eviction: `Catalog` does.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from dualpath.base.errors import StoreError
from dualpath.base.ids import BlockKey
from dualpath.kv.layout import KVLayout
from dualpath.store.contract import (
    BlockRead,
    BlockResult,
    BlockWrite,
    ReadStatus,
    Store,
    WriteResult,
)
from dualpath.store.io_lane import IoLane, IoTask, LaneStats, Ticket

__all__ = ["LaneStore", "LaneStoreStats"]

R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class LaneStoreStats:
    """The state of both lanes, for metrics."""

    reads: LaneStats
    writes: LaneStats


class LaneStore(Store):
    """Owns the two lanes. `call_deadline_s` bounds every call that is not a read or write of blocks."""

    def __init__(
        self, layout: KVLayout, *, reads: IoLane, writes: IoLane, call_deadline_s: float
    ) -> None:
        self._slot_bytes = layout.slot_bytes
        self._payload_bytes = layout.full_block_bytes
        self._reads = reads
        self._writes = writes
        self._call_deadline_s = call_deadline_s

    @abstractmethod
    def _read_block(self, block: BlockRead, ticket: Ticket) -> BlockResult:
        """Blocks, on an I/O thread. What goes wrong is a result."""

    @abstractmethod
    def _write_block(self, block: BlockWrite, ticket: Ticket) -> WriteResult:
        """As `_read_block`; claims the ticket before it reports a durable block."""

    @property
    def stats(self) -> LaneStoreStats:
        return LaneStoreStats(self._reads.stats, self._writes.stats)

    def read(
        self,
        blocks: Sequence[BlockRead],
        *,
        deadline_s: float,
        done: Callable[[BlockResult], None],
    ) -> None:
        for block in blocks:
            if block.into.readonly or block.into.nbytes < self._slot_bytes:
                raise ValueError(
                    f"a read needs {self._slot_bytes} writable bytes, got {block.into.nbytes}"
                    f"{' read-only' if block.into.readonly else ''}"
                )
        tasks = [
            IoTask(
                run=partial(self._read_block, block),
                refused=partial(BlockResult, block.identity.key),
                done=done,
                hold=block.hold,
            )
            for block in blocks
        ]
        self._reads.submit(tasks, deadline_s=deadline_s)

    def write(
        self,
        blocks: Sequence[BlockWrite],
        *,
        deadline_s: float,
        done: Callable[[WriteResult], None],
    ) -> None:
        for block in blocks:
            if block.payload.nbytes < self._payload_bytes:
                raise ValueError(
                    f"a write needs {self._payload_bytes} bytes, got {block.payload.nbytes}"
                )
        tasks = [
            IoTask(
                run=partial(self._write_block, block),
                refused=partial(_refused_write, block.identity.key),
                done=done,
                hold=block.hold,
            )
            for block in blocks
        ]
        self._writes.submit(tasks, deadline_s=deadline_s)

    def close(self) -> None:
        self._reads.close()
        self._writes.close()

    def _call(self, lane: IoLane, what: str, run: Callable[[Ticket], R]) -> R:
        """Run `run` on a lane and wait for it. Raises StoreError, also for its OSError."""
        return self._wait(self._start(lane, what, run))

    def _start(self, lane: IoLane, what: str, run: Callable[[Ticket], R]) -> Future[R | StoreError]:
        """Run `run` on a lane; the future has its result, or what went wrong."""
        future: Future[R | StoreError] = Future()

        def attempt(ticket: Ticket) -> R | StoreError:
            try:
                return run(ticket)
            except OSError as error:
                where = f" {error.filename}" if error.filename else ""
                return StoreError(f"{what}{where}: {error.strerror or error}")
            except StoreError as error:
                return StoreError(f"{what}: {error}")

        def refused(_: ReadStatus, detail: str) -> R | StoreError:
            return StoreError(f"{what}: {detail}")

        task: IoTask[R | StoreError] = IoTask(
            run=attempt, refused=refused, done=future.set_result, hold=nullcontext()
        )
        lane.submit([task], deadline_s=self._call_deadline_s)
        return future

    @staticmethod
    def _wait(future: Future[R | StoreError]) -> R:
        """The result of what `_start` started. Raises StoreError."""
        result = future.result()  # The lane's deadline bounds this wait.
        if isinstance(result, StoreError):
            raise result
        return result


def _refused_write(key: BlockKey, _: ReadStatus, detail: str) -> WriteResult:
    return WriteResult(key, durable=False, stored_bytes=0, detail=detail)
