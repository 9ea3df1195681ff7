"""The directory backend: Full Blocks as files, on any local or shared POSIX file system.

`BlockDirectory` does the I/O of one block; this puts it on threads: one lane for reads, one for
everything else, so that slow durable writes never hold up a read. It decides no eviction: `Catalog` does.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

from dualpath.base.errors import ConfigError, StoreError
from dualpath.base.ids import BlockKey
from dualpath.kv.chain import Fingerprint
from dualpath.kv.layout import KVLayout
from dualpath.store.block_directory import BlockDirectory
from dualpath.store.block_file import MAX_BLOCK_TOKENS
from dualpath.store.contract import (
    BlockRead,
    BlockResult,
    BlockWrite,
    ReadStatus,
    Store,
    StoreCapabilities,
    StoredBlock,
    WriteResult,
)
from dualpath.store.io_lane import IoLane, IoTask, LaneStats, Ticket

__all__ = ["DirectoryOptions", "DirectoryStats", "DirectoryStore"]

R = TypeVar("R")
_DELETE_BATCH = 256


@dataclass(frozen=True, slots=True)
class DirectoryOptions:
    """How a `DirectoryStore` uses its threads, its time and its device.

    `sync_file`, `sync_directory`: what a write waits for. Without the first a power cut may leave
    blocks that fail their checksum, without the second it may lose reported ones: both only cost
    the block. `call_deadline_s` bounds opening, deleting, and each step of a scan.
    `temp_age_s`: temp files of writers on other hosts are left-overs when older.
    `touch_interval_s`: the time of last use on the file is at most this old.
    """

    n_read_threads: int = 8
    n_write_threads: int = 4
    read_queue_limit: int = 4096
    write_queue_limit: int = 1024
    sync_file: bool = True
    sync_directory: bool = True
    call_deadline_s: float = 30.0
    temp_age_s: float = 3600.0
    touch_interval_s: float = 60.0


@dataclass(frozen=True, slots=True)
class DirectoryStats:
    """The state of both lanes, for metrics."""

    reads: LaneStats
    writes: LaneStats


class DirectoryStore(Store):
    """Blocks of one fingerprint under `path`. Thread-safe; many processes may open the same one."""

    def __init__(
        self,
        path: Path,
        fingerprint: Fingerprint,
        layout: KVLayout,
        *,
        model: str = "",
        options: DirectoryOptions | None = None,
        files: BlockDirectory | None = None,
    ) -> None:
        """Makes the directories. `model` is a name for people; `files` replaces the I/O in tests.

        Raises ConfigError when blocks cannot be stored there, with what to do.
        """
        options = options or DirectoryOptions()
        if layout.block_tokens > MAX_BLOCK_TOKENS:
            raise ConfigError(
                f"blocks of {layout.block_tokens} tokens do not fit a block file: "
                f"set the block size to at most {MAX_BLOCK_TOKENS} tokens"
            )
        self._options = options
        self._slot_bytes = layout.slot_bytes
        self._payload_bytes = layout.full_block_bytes
        self.files = files or BlockDirectory(
            path,
            fingerprint,
            layout,
            sync_file=options.sync_file,
            sync_directory=options.sync_directory,
            touch_interval_s=options.touch_interval_s,
        )
        self._reads = IoLane(
            f"store {path} (reads)",
            n_threads=options.n_read_threads,
            queue_limit=options.read_queue_limit,
        )
        self._writes = IoLane(
            f"store {path} (writes)",
            n_threads=options.n_write_threads,
            queue_limit=options.write_queue_limit,
        )
        try:
            self._call(self._writes, "opening", partial(self.files.prepare, model))
        except StoreError as error:
            self.close()
            raise ConfigError(
                f"the store directory {path} cannot be used: {error}. Give a directory that this "
                f"user may write to, on a file system that is mounted and not full"
            ) from error
        self.capabilities = StoreCapabilities(
            persistent=True, direct_io=self.files.direct_io, scan=True
        )

    @property
    def stats(self) -> DirectoryStats:
        return DirectoryStats(self._reads.stats, self._writes.stats)

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

    def delete(self, keys: Sequence[BlockKey]) -> int:
        freed_bytes = 0
        for start in range(0, len(keys), _DELETE_BATCH):
            batch = keys[start : start + _DELETE_BATCH]
            freed_bytes += self._call(self._writes, "deleting", partial(self.files.delete, batch))
        return freed_bytes

    def scan(self) -> Iterator[StoredBlock]:
        self.tidy()
        prefixes = deque(self._call(self._reads, "listing", self.files.prefixes))
        ahead: deque[Future[list[StoredBlock] | StoreError]] = deque()
        while prefixes or ahead:
            while prefixes and len(ahead) < self._options.n_read_threads:
                scan = partial(self.files.scan, prefixes.popleft())
                ahead.append(self._start(self._reads, "scanning", scan))
            yield from _result_of(ahead.popleft())

    def tidy(self) -> None:
        clear = partial(self.files.clear_temp, self._options.temp_age_s)
        self._call(self._writes, "clearing temp files", clear)

    def free_bytes(self) -> int | None:
        return self._call(self._reads, "asking for free space", self.files.free_bytes)

    def close(self) -> None:
        self._reads.close()
        self._writes.close()

    def _read_block(self, block: BlockRead, _: Ticket) -> BlockResult:
        return self.files.read(block.identity, block.into)

    def _write_block(self, block: BlockWrite, ticket: Ticket) -> WriteResult:
        return self.files.write(block.identity, block.payload, ticket)

    def _call(self, lane: IoLane, what: str, run: Callable[[], R]) -> R:
        return _result_of(self._start(lane, what, run))

    def _start(self, lane: IoLane, what: str, run: Callable[[], R]) -> Future[R | StoreError]:
        """Run `run` on a lane; the future has its result, or what went wrong."""
        future: Future[R | StoreError] = Future()

        def attempt(_: Ticket) -> R | StoreError:
            try:
                return run()
            except OSError as error:
                where = f" {error.filename}" if error.filename else ""
                return StoreError(f"{what}{where}: {error.strerror or error}")

        def refused(_: ReadStatus, detail: str) -> R | StoreError:
            return StoreError(f"{what}: {detail}")

        task: IoTask[R | StoreError] = IoTask(
            run=attempt, refused=refused, done=future.set_result, hold=nullcontext()
        )
        lane.submit([task], deadline_s=self._options.call_deadline_s)
        return future


def _refused_write(key: BlockKey, _: ReadStatus, detail: str) -> WriteResult:
    return WriteResult(key, durable=False, stored_bytes=0, detail=detail)


def _result_of(future: Future[R | StoreError]) -> R:
    result = future.result()  # The lane's deadline bounds this wait.
    if isinstance(result, StoreError):
        raise result
    return result
