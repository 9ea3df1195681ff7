"""The directory backend: Full Blocks as files, on any local or shared POSIX file system.

`BlockDirectory` does the I/O of one block; this puts it on the lanes of a `LaneStore`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from dualpath.base.errors import ConfigError, StoreError
from dualpath.base.ids import BlockKey
from dualpath.kv.chain import Fingerprint
from dualpath.kv.layout import KVLayout
from dualpath.store.block_directory import BlockDirectory
from dualpath.store.block_file import require_fitting_header
from dualpath.store.contract import (
    BlockRead,
    BlockResult,
    BlockWrite,
    StoreCapabilities,
    StoredBlock,
    WriteResult,
)
from dualpath.store.io_lane import IoLane, Ticket
from dualpath.store.lane_store import LaneStore

__all__ = ["DirectoryOptions", "DirectoryStore"]

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


class DirectoryStore(LaneStore):
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
        require_fitting_header(layout.block_tokens)
        super().__init__(
            layout,
            reads=IoLane(
                f"store {path} (reads)",
                n_threads=options.n_read_threads,
                queue_limit=options.read_queue_limit,
            ),
            writes=IoLane(
                f"store {path} (writes)",
                n_threads=options.n_write_threads,
                queue_limit=options.write_queue_limit,
            ),
            call_deadline_s=options.call_deadline_s,
        )
        self._options = options
        self.files = files or BlockDirectory(
            path,
            fingerprint,
            layout,
            sync_file=options.sync_file,
            sync_directory=options.sync_directory,
            touch_interval_s=options.touch_interval_s,
        )
        try:
            self._call(self._writes, "opening", lambda _: self.files.prepare(model))
        except StoreError as error:
            self.close()
            raise ConfigError(
                f"the store directory {path} cannot be used: {error}. Give a directory that this "
                f"user may write to, on a file system that is mounted and not full"
            ) from error
        self.capabilities = StoreCapabilities(
            persistent=True, direct_io=self.files.direct_io, scan=True
        )

    def delete(self, keys: Sequence[BlockKey]) -> int:
        freed_bytes = 0
        for start in range(0, len(keys), _DELETE_BATCH):
            batch = keys[start : start + _DELETE_BATCH]
            freed_bytes += self._call(self._writes, "deleting", partial(self._delete, batch))
        return freed_bytes

    def scan(self) -> Iterator[StoredBlock]:
        self.tidy()
        prefixes = deque(self._call(self._reads, "listing", lambda _: self.files.prefixes()))
        ahead: deque[Future[list[StoredBlock] | StoreError]] = deque()
        while prefixes or ahead:
            while prefixes and len(ahead) < self._options.n_read_threads:
                scan = partial(self._scan, prefixes.popleft())
                ahead.append(self._start(self._reads, "scanning", scan))
            yield from self._wait(ahead.popleft())

    def tidy(self) -> None:
        age_s = self._options.temp_age_s
        self._call(self._writes, "clearing temp files", lambda _: self.files.clear_temp(age_s))

    def free_bytes(self) -> int | None:
        return self._call(self._reads, "asking for free space", lambda _: self.files.free_bytes())

    def _read_block(self, block: BlockRead, _: Ticket) -> BlockResult:
        return self.files.read(block.identity, block.into)

    def _write_block(self, block: BlockWrite, ticket: Ticket) -> WriteResult:
        return self.files.write(block.identity, block.payload, ticket)

    def _delete(self, keys: Sequence[BlockKey], _: Ticket) -> int:
        return self.files.delete(keys)

    def _scan(self, prefix: str, _: Ticket) -> list[StoredBlock]:
        return self.files.scan(prefix)
