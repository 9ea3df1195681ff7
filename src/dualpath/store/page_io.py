"""Whole-page reads and writes of a file, and what POSIX needs to make a rename durable.

Knows nothing of blocks. Views are page-aligned when the descriptor was opened with O_DIRECT.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from pathlib import Path

from dualpath.base.ids import PAGE_BYTES

__all__ = ["can_do_direct_io", "read_pages", "sync_directory", "write_pages"]


def sync_directory(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def read_pages(fd: int, page: memoryview, into: memoryview) -> int:
    """Read header and payload from the start; returns the bytes got, fewer only at the end of file."""
    got = os.preadv(fd, [page, into], 0)
    while PAGE_BYTES <= got < PAGE_BYTES + len(into):
        more = os.preadv(fd, [into[got - PAGE_BYTES :]], got)
        if more == 0:
            break
        got += more
    return got


def write_pages(fd: int, views: Sequence[memoryview]) -> None:
    """Write whole pages from the start of the file. Raises OSError when the device takes no more."""
    total = sum(len(view) for view in views)
    written = os.pwritev(fd, views, 0)
    while written < total:
        rest: list[memoryview] = []
        skip = written
        for view in views:
            rest.append(view[min(skip, len(view)) :])
            skip -= min(skip, len(view))
        # A full disk shows as a short write first, and as ENOSPC at the next.
        written += os.pwritev(fd, [view for view in rest if view], written)


def can_do_direct_io(probe: Path) -> bool:
    """Write and read a page with O_DIRECT. Raises OSError when even buffered I/O is not possible."""
    page = mmap.mmap(-1, PAGE_BYTES)
    for flag in (os.O_DIRECT, 0):
        try:
            fd = os.open(probe, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | flag, 0o600)
            try:
                done = os.pwritev(fd, [page], 0), os.preadv(fd, [page], 0)
            finally:
                os.close(fd)
        except OSError:
            if not flag:
                raise
        else:
            if flag and done == (PAGE_BYTES, PAGE_BYTES):
                return True
    return False
