"""Block files in a directory: one thread's blocking I/O on one block at a time.

    <root>/<fingerprint>/model.json                  what these blocks are of, for people
    <root>/<fingerprint>/ab/cd/abcd<rest of key>.kv  a whole, durable block (`block_file` has the format)
    <root>/<fingerprint>/tmp/<writer>.<n>.tmp        a write under way, or left by a dead writer

A block becomes visible by rename after its bytes are durable, so a reader sees a whole block or
none. The time of last use is the file's mtime. Failures of the device are results; only `prepare`,
`delete` and scanning raise OSError. It starts no threads and has no deadlines:
`DirectoryStore` calls it from its I/O lanes, any number of threads at once.
"""

from __future__ import annotations

import errno
import itertools
import json
import logging
import mmap
import os
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from dualpath.base.ids import PAGE_BYTES, BlockKey
from dualpath.kv.chain import BlockIdentity, Fingerprint
from dualpath.kv.layout import KVLayout
from dualpath.store.block_file import (
    HEADER_BYTES,
    BlockHeader,
    Mismatch,
    file_bytes,
    find_mismatch,
    header_page,
    prove_header,
)
from dualpath.store.contract import BlockResult, ReadStatus, StoredBlock, WriteResult
from dualpath.store.io_lane import Ticket
from dualpath.store.page_io import can_do_direct_io, read_pages, sync_directory, write_pages
from dualpath.store.writer_name import WriterName

__all__ = ["BlockDirectory"]

_SUFFIX = ".kv"
_TEMP_SUFFIX = ".tmp"
_log = logging.getLogger(__name__)


class _Scratch(threading.local):
    """A header page and a page for a payload's ragged end, page-aligned, for each thread."""

    def __init__(self) -> None:
        pages = memoryview(mmap.mmap(-1, 2 * PAGE_BYTES))
        self.header = pages[:PAGE_BYTES]
        self.tail = pages[PAGE_BYTES:]


class BlockDirectory:
    """The block files of one fingerprint. Thread-safe after `prepare`."""

    def __init__(
        self,
        root: Path,
        fingerprint: Fingerprint,
        layout: KVLayout,
        *,
        sync_file: bool = True,
        sync_directory: bool = True,
        touch_interval_s: float = 60.0,
    ) -> None:
        self.path = root / fingerprint.hex()
        self.direct_io = False
        self._fingerprint = fingerprint
        self._layout = layout
        self._payload_bytes = layout.full_block_bytes
        self._file_bytes = file_bytes(layout.full_block_bytes)
        self._sync_file = sync_file
        self._sync_directory = sync_directory
        self._touch_interval_s = touch_interval_s
        self._temp = self.path / "tmp"
        self._writer = WriterName.of_this_process()
        self._serial = itertools.count()
        self._scratch = _Scratch()

    def path_of(self, key: BlockKey) -> Path:
        """The file of a block, whether it exists or not."""
        name = key.hex()
        return self.path / name[:2] / name[2:4] / (name + _SUFFIX)

    def prepare(self, model: str) -> None:
        """Make the directories, prove that blocks can be written, and find out about O_DIRECT."""
        self._temp.mkdir(mode=0o700, parents=True, exist_ok=True)
        probe = self._temp_path()
        try:
            self.direct_io = can_do_direct_io(probe)
        finally:
            probe.unlink(missing_ok=True)
        about = self.path / "model.json"
        if not about.exists():
            text = {
                "made_by": "dualpath",
                "what": "KV-cache blocks; safe to delete while nothing serves from here",
                "model": model,
                "fingerprint": self._fingerprint.hex(),
                "layout": msgspec.to_builtins(self._layout),
                "block_file_bytes": self._file_bytes,
            }
            probe.write_text(json.dumps(text, indent=2) + "\n")
            probe.rename(about)
        sync_directory(self.path)
        sync_directory(self.path.parent)

    def read(self, identity: BlockIdentity, into: memoryview) -> BlockResult:
        """Fill `into` and prove that it is the block. Device errors are results."""
        path = self.path_of(identity.key)
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | self._direct_flag)
        except FileNotFoundError:
            return BlockResult(identity.key, ReadStatus.MISS)
        except OSError as error:
            return BlockResult(identity.key, ReadStatus.ERROR, f"{path}: {error.strerror}")
        try:
            mismatch = self._read_file(fd, identity, into)
        except OSError as error:
            # EIO on an open file is about its sectors: asked again, it would fail again.
            status = ReadStatus.CORRUPT if error.errno == errno.EIO else ReadStatus.ERROR
            return BlockResult(identity.key, status, f"{path}: {error.strerror}")
        finally:
            os.close(fd)
        if mismatch is not None:
            return BlockResult(identity.key, ReadStatus.CORRUPT, f"{path}: {mismatch}")
        return BlockResult(identity.key, ReadStatus.OK)

    def write(self, identity: BlockIdentity, payload: memoryview, ticket: Ticket) -> WriteResult:
        """Make the block durable, then visible. Device errors are results.

        A write that nobody waits for any more leaves no file behind.
        """
        temp, path = self._temp_path(), self.path_of(identity.key)
        visible = False
        try:
            self._write_temp(temp, identity, payload)
            if not ticket.abandoned:
                self._rename(temp, path)
                visible = True
                if self._sync_directory:
                    sync_directory(path.parent)
            if ticket.claim():
                return WriteResult(identity.key, durable=True, stored_bytes=self._file_bytes)
            detail = "too late"
        except OSError as error:
            detail = error.strerror or str(error)
        # Nobody will account for this file, so it must not stay.
        left_over = path if visible else temp
        try:
            left_over.unlink(missing_ok=True)
        except OSError as error:
            detail += f"; {left_over} stays: {error.strerror}"
        return WriteResult(identity.key, durable=False, stored_bytes=0, detail=f"{path}: {detail}")

    def delete(self, keys: Sequence[BlockKey]) -> int:
        """Remove files; returns their bytes. Raises OSError, with some of them perhaps gone."""
        freed_bytes = 0
        for key in keys:
            path = self.path_of(key)
            try:
                size = path.stat().st_size
                path.unlink()
            except FileNotFoundError:
                continue
            freed_bytes += size
        return freed_bytes

    def free_bytes(self) -> int:
        """Space that an unprivileged writer has left on this file system."""
        stat = os.statvfs(self.path)
        return stat.f_bavail * stat.f_frsize

    def prefixes(self) -> list[str]:
        """The parts that `scan` takes one by one."""
        with os.scandir(self.path) as entries:
            return sorted(entry.name for entry in entries if _is_hex(entry.name, 2))

    def scan(self, prefix: str) -> list[StoredBlock]:
        """The whole blocks whose key starts with `prefix`; broken files are removed."""
        found: list[StoredBlock] = []
        for inner in _scan_directory(self.path / prefix):
            if not _is_hex(inner.name, 2):
                continue
            for entry in _scan_directory(Path(inner.path)):
                name, dot, suffix = entry.name.rpartition(".")
                if dot + suffix == _SUFFIX and _is_hex(name, 64):
                    block = self._examine(Path(entry.path), BlockKey(bytes.fromhex(name)))
                    if block is not None:
                        found.append(block)
        return found

    def clear_temp(self, older_than_s: float) -> int:
        """Remove temp files of writers that are dead, or that may be and are old; returns how many."""
        removed = 0
        for entry in _scan_directory(self._temp):
            writer = WriterName.parse(entry.name.split(".")[0])
            try:
                age_s = time.time() - entry.stat(follow_symlinks=False).st_mtime
                if writer is None or not writer.is_here:
                    if age_s < older_than_s:
                        continue
                elif writer.is_alive:
                    continue
                os.unlink(entry.path)
                removed += 1
            except FileNotFoundError:
                continue
        return removed

    @property
    def _direct_flag(self) -> int:
        return os.O_DIRECT if self.direct_io else 0

    def _temp_path(self) -> Path:
        return self._temp / f"{self._writer}.{next(self._serial)}{_TEMP_SUFFIX}"

    def _read_file(self, fd: int, identity: BlockIdentity, into: memoryview) -> Mismatch | None:
        stat = os.fstat(fd)
        if stat.st_size != self._file_bytes:
            return Mismatch("file bytes", str(self._file_bytes), str(stat.st_size))
        page = self._scratch.header
        got = read_pages(fd, page, into[: self._file_bytes - HEADER_BYTES])
        if got != self._file_bytes:
            return Mismatch("bytes read", str(self._file_bytes), str(got))
        if not self.direct_io:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        mismatch = find_mismatch(
            page,
            into,
            fingerprint=self._fingerprint,
            identity=identity,
            payload_bytes=self._payload_bytes,
        )
        if mismatch is None and time.time() - stat.st_mtime > self._touch_interval_s:
            _touch(fd)
        return mismatch

    def _write_temp(self, temp: Path, identity: BlockIdentity, payload: memoryview) -> None:
        scratch = self._scratch
        scratch.header[:] = header_page(self._fingerprint, identity, payload[: self._payload_bytes])
        whole = self._payload_bytes // PAGE_BYTES * PAGE_BYTES
        views = [scratch.header, payload[:whole]]
        if whole < self._payload_bytes:
            # What follows the payload in the slot may be of another request: zeros go to the file.
            ragged = self._payload_bytes - whole
            scratch.tail[:ragged] = payload[whole : self._payload_bytes]
            scratch.tail[ragged:] = bytes(PAGE_BYTES - ragged)
            views.append(scratch.tail)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | self._direct_flag
        fd = os.open(temp, flags, 0o600)
        try:
            write_pages(fd, views)
            if self._sync_file:
                os.fsync(fd)
            if not self.direct_io:
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)

    def _rename(self, temp: Path, path: Path) -> None:
        try:
            temp.rename(path)
        except FileNotFoundError:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            temp.rename(path)
            if self._sync_directory:
                sync_directory(path.parent.parent)
                sync_directory(self.path)

    def _examine(self, path: Path, key: BlockKey) -> StoredBlock | None:
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                stat = os.fstat(fd)
                page = os.pread(fd, HEADER_BYTES, 0)
            finally:
                os.close(fd)
        except FileNotFoundError:
            return None  # Evicted since the directory was listed.
        except OSError as error:
            _log.warning("leaving out block file %s: %s", path, error.strerror)
            return None
        header = self._prove(page, key, stat.st_size)
        if isinstance(header, BlockHeader):
            return StoredBlock(key, header.identity.parent, stat.st_size, stat.st_mtime)
        _log.warning("removing broken block file %s: %s", path, header)
        path.unlink(missing_ok=True)
        return None

    def _prove(self, page: bytes, key: BlockKey, size: int) -> BlockHeader | Mismatch:
        if size != self._file_bytes:
            return Mismatch("file bytes", str(self._file_bytes), str(size))
        return prove_header(
            page, fingerprint=self._fingerprint, key=key, payload_bytes=self._payload_bytes
        )


def _is_hex(name: str, length: int) -> bool:
    return len(name) == length and all(c in "0123456789abcdef" for c in name)


def _scan_directory(path: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(path) as entries:
            return list(entries)
    except (FileNotFoundError, NotADirectoryError):
        return []


def _touch(fd: int) -> None:
    """The order of eviction survives a restart; a store that may only be read goes without."""
    try:
        os.utime(fd)
    except OSError:
        pass
