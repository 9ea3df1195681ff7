"""What the directory backend promises beyond the contract suite."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from store_doubles import DirectoryStoreFactory

from dualpath.base.errors import ConfigError, StoreError
from dualpath.base.ids import BlockKey
from dualpath.kv import (
    BlockIdentity,
    BufferPool,
    KVLayout,
    RowPart,
    block_chain,
    fingerprint,
    root_key,
)
from dualpath.store import (
    BlockDirectory,
    BlockRead,
    BlockResult,
    BlockWrite,
    DirectoryOptions,
    DirectoryStore,
    ReadStatus,
    WriteResult,
)
from dualpath.store.block_file import MAX_BLOCK_TOKENS
from dualpath.testing import Damage, Results, damage_file, wait_until

LAYOUT = KVLayout("gqa", 2, 8, (RowPart("key", 1, 100), RowPart("value", 1, 100)), "float16", 2)
FP = fingerprint("model", "r1", LAYOUT)
LONG_S = 30.0


def chain_of(n_blocks: int) -> list[BlockIdentity]:
    return block_chain(root_key(FP, ""), range(8 * n_blocks), 8)


@pytest.fixture
def pool() -> Iterator[BufferPool]:
    pool = BufferPool(16, LAYOUT.slot_bytes)
    yield pool
    pool.check()
    pool.close()


@pytest.fixture
def store(tmp_path: Path) -> Iterator[DirectoryStore]:
    store = DirectoryStore(tmp_path, FP, LAYOUT, model="a model")
    yield store
    store.close()


def write(
    store: DirectoryStore, pool: BufferPool, chain: Sequence[BlockIdentity], fill: int = 7
) -> list[WriteResult]:
    results = Results[WriteResult]()
    lease = pool.try_lease("writer", len(chain))
    assert lease is not None
    blocks = []
    for index, identity in enumerate(chain):
        lease.view(index)[:] = bytes([fill]) * LAYOUT.slot_bytes
        blocks.append(BlockWrite(identity, lease.view(index), lease.hold()))
    store.write(blocks, deadline_s=LONG_S, done=results)
    written = results.wait(len(chain))
    lease.release()
    return written


def read(
    store: DirectoryStore,
    pool: BufferPool,
    chain: Sequence[BlockIdentity],
    deadline_s: float = LONG_S,
) -> list[BlockResult]:
    results = Results[BlockResult]()
    lease = pool.try_lease("reader", len(chain))
    assert lease is not None
    blocks = [BlockRead(each, lease.view(i), lease.hold()) for i, each in enumerate(chain)]
    store.read(blocks, deadline_s=deadline_s, done=results)
    found = results.wait(len(chain))
    lease.release()
    return found


def test_files_lie_where_the_documentation_says(
    store: DirectoryStore, pool: BufferPool, tmp_path: Path
) -> None:
    (identity,) = chain_of(1)
    (result,) = write(store, pool, [identity])
    name = identity.key.hex()
    path = tmp_path / FP.hex() / name[:2] / name[2:4] / f"{name}.kv"
    assert path == store.files.path_of(identity.key)
    assert path.stat().st_size == result.stored_bytes == 4096 + LAYOUT.slot_bytes
    assert path.stat().st_mode & 0o777 == 0o600
    about = json.loads((tmp_path / FP.hex() / "model.json").read_text())
    assert about["model"] == "a model"
    assert about["fingerprint"] == FP.hex()
    assert about["layout"]["n_layers"] == 2


def test_rest_of_a_slot_is_not_stored(store: DirectoryStore, pool: BufferPool) -> None:
    """It may be what another tenant's request left there."""
    (identity,) = chain_of(1)
    write(store, pool, [identity], fill=9)
    payload = store.files.path_of(identity.key).read_bytes()[4096:]
    assert LAYOUT.full_block_bytes % 4096 != 0
    assert payload[: LAYOUT.full_block_bytes] == bytes([9]) * LAYOUT.full_block_bytes
    assert not any(payload[LAYOUT.full_block_bytes :])


def test_durable_before_visible(
    store: DirectoryStore, pool: BufferPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    (identity,) = chain_of(1)
    path = store.files.path_of(identity.key)
    events: list[str] = []
    fsync, rename = os.fsync, Path.rename

    def recorded_fsync(fd: int) -> None:
        target = Path(os.readlink(f"/proc/self/fd/{fd}"))
        events.append(f"sync {'file' if target.suffix == '.tmp' else target.name}")
        fsync(fd)

    def recorded_rename(self: Path, target: Path) -> Path:
        try:
            return rename(self, target)
        finally:
            events.append("visible" if path.exists() else "not yet")

    monkeypatch.setattr(os, "fsync", recorded_fsync)
    monkeypatch.setattr(Path, "rename", recorded_rename)
    assert write(store, pool, [identity])[0].durable
    top = FP.hex()
    name = identity.key.hex()
    assert (
        events
        == [
            "sync file",
            "not yet",  # its directories are made
            "visible",
            f"sync {name[:2]}",
            f"sync {top}",
            f"sync {name[2:4]}",
        ]
    )
    events.clear()
    assert write(store, pool, [identity])[0].durable
    assert events == ["sync file", "visible", f"sync {name[2:4]}"]


@pytest.mark.parametrize(
    ("call", "code"),
    [
        ("pwritev", errno.ENOSPC),
        ("pwritev", errno.EIO),
        ("fsync", errno.EIO),
        ("open", errno.EACCES),
    ],
)
def test_failing_device_is_a_result_and_leaves_nothing(
    call: str,
    code: int,
    store: DirectoryStore,
    pool: BufferPool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (identity,) = chain_of(1)

    def fails(*_: object) -> int:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(f"dualpath.store.block_directory.os.{call}", fails)
    (result,) = write(store, pool, [identity])
    monkeypatch.undo()
    assert not result.durable
    assert result.stored_bytes == 0
    assert os.strerror(code) in result.detail
    assert str(store.files.path_of(identity.key)) in result.detail
    assert list((store.files.path / "tmp").iterdir()) == []
    assert list(store.scan()) == []


def test_disk_that_fills_up_during_a_write(
    store: DirectoryStore, pool: BufferPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel writes what fits, and says ENOSPC at the next call."""
    (identity,) = chain_of(1)
    pwritev = os.pwritev
    calls: list[int] = []

    def fills(fd: int, views: Sequence[memoryview], offset: int) -> int:
        calls.append(offset)
        if offset:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return pwritev(fd, views[:1], 0)

    monkeypatch.setattr(os, "pwritev", fills)
    (result,) = write(store, pool, [identity])
    assert calls == [0, 4096]
    assert "No space left" in result.detail
    assert read(store, pool, [identity])[0].status is ReadStatus.MISS


def test_short_reads_and_writes_are_continued(
    store: DirectoryStore, pool: BufferPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    (identity,) = chain_of(1)
    pwritev, preadv = os.pwritev, os.preadv
    monkeypatch.setattr(os, "pwritev", lambda fd, views, at: pwritev(fd, views[:1], at))
    monkeypatch.setattr(
        os, "preadv", lambda fd, views, at: preadv(fd, [view[:4096] for view in views], at)
    )
    assert write(store, pool, [identity])[0].durable
    assert read(store, pool, [identity])[0].status is ReadStatus.OK


@pytest.mark.parametrize(
    ("code", "status"),
    [
        (errno.EIO, ReadStatus.CORRUPT),
        (errno.EACCES, ReadStatus.ERROR),
        (errno.ESTALE, ReadStatus.ERROR),
    ],
)
def test_failing_read_is_a_result(
    code: int,
    status: ReadStatus,
    store: DirectoryStore,
    pool: BufferPool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (identity,) = chain_of(1)
    write(store, pool, [identity])

    def fails(*_: object) -> int:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "preadv", fails)
    (result,) = read(store, pool, [identity])
    assert result.status is status
    assert os.strerror(code) in result.detail


def test_corruption_names_file_expected_and_got(store: DirectoryStore, pool: BufferPool) -> None:
    (identity,) = chain_of(1)
    write(store, pool, [identity])
    path = store.files.path_of(identity.key)
    damage_file(path, Damage.TRUNCATE)
    (result,) = read(store, pool, [identity])
    size = 4096 + LAYOUT.slot_bytes
    assert result.detail == f"{path}: file bytes: expected {size}, got {size - 4096}"


def test_device_that_hangs_in_the_kernel(store: DirectoryStore, pool: BufferPool) -> None:
    """Opening a FIFO blocks in the kernel, as a dead mount does, until somebody opens its other end."""
    (identity,) = chain_of(1)
    path = store.files.path_of(identity.key)
    path.parent.mkdir(parents=True)
    os.mkfifo(path)
    start = time.monotonic()
    (result,) = read(store, pool, [identity], deadline_s=0.2)
    assert result.status is ReadStatus.TIMEOUT
    assert time.monotonic() - start < LONG_S / 2
    assert pool.n_free == 15
    assert store.stats.reads.stuck == 1
    os.close(os.open(path, os.O_RDWR))
    wait_until(lambda: pool.n_free == 16, "the slot is held although the read is over")
    assert store.stats.reads.stuck == 0


def test_write_that_comes_too_late_leaves_nothing(
    store: DirectoryStore, pool: BufferPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hung in the last step, when the block is visible already."""
    (identity,) = chain_of(1)
    go_on = threading.Event()
    fsync = os.fsync

    def hangs(fd: int) -> None:
        if os.path.isdir(f"/proc/self/fd/{fd}"):
            go_on.wait(LONG_S)
        fsync(fd)

    monkeypatch.setattr(os, "fsync", hangs)
    results = Results[WriteResult]()
    lease = pool.try_lease("writer", 1)
    assert lease is not None
    block = BlockWrite(identity, lease.view(0), lease.hold())
    store.write([block], deadline_s=0.3, done=results)
    assert not results.wait(1)[0].durable
    assert store.files.path_of(identity.key).exists()
    go_on.set()
    wait_until(lambda: lease.holds == 0, "the write ends")
    assert not store.files.path_of(identity.key).exists()
    lease.release()


def test_scan_removes_broken_files_only(store: DirectoryStore, pool: BufferPool) -> None:
    chain = chain_of(4)
    write(store, pool, chain)
    paths = [store.files.path_of(identity.key) for identity in chain]
    damage_file(paths[0], Damage.EMPTY)
    damage_file(paths[1], Damage.FLIP_HEADER)
    paths[2].rename(paths[2].with_name("0" * 64 + ".kv"))
    strangers = [store.files.path / "notes.txt", paths[3].with_name("README")]
    for path in strangers:
        path.write_text("mine")
    assert [block.key for block in store.scan()] == [chain[3].key]
    assert not paths[0].exists()
    assert not paths[1].exists()
    assert not paths[2].with_name("0" * 64 + ".kv").exists()
    assert all(path.read_text() == "mine" for path in strangers)


def test_scan_of_many_prefixes(store: DirectoryStore, pool: BufferPool) -> None:
    chain = chain_of(64)
    for start in range(0, 64, 16):
        write(store, pool, chain[start : start + 16])
    assert {block.key for block in store.scan()} == {identity.key for identity in chain}


WRITER = """
import sys, time
from pathlib import Path
sys.path.insert(0, {here!r})
import test_directory as t
files = t.BlockDirectory(Path({root!r}), t.FP, t.LAYOUT)
files.prepare("m")
files._temp_path().write_bytes(b"half a block")
print("ready", flush=True)
time.sleep(60)
"""


def test_temp_files_of_dead_writers_are_cleared(store: DirectoryStore, tmp_path: Path) -> None:
    temp = store.files.path / "tmp"
    ours = store.files._temp_path()
    ours.write_bytes(b"under way")
    elsewhere = temp / "0123456789ab-1-1.0.tmp"
    elsewhere.write_bytes(b"of a live writer on another host")
    old = temp / "0123456789ab-2-2.0.tmp"
    old.write_bytes(b"left by another host")
    os.utime(old, (0, 0))
    script = WRITER.format(here=str(Path(__file__).parent), root=str(tmp_path))
    writer = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE)
    try:
        assert writer.stdout is not None
        assert writer.stdout.readline() == b"ready\n"
        list(store.scan())
        (theirs,) = (p for p in temp.iterdir() if p.name.split("-")[1] == str(writer.pid))
        assert {path.name for path in temp.iterdir()} == {ours.name, elsewhere.name, theirs.name}
    finally:
        writer.send_signal(signal.SIGKILL)
        writer.wait()
        writer.stdout.close()
    list(store.scan())
    assert {path.name for path in temp.iterdir()} == {ours.name, elsewhere.name}


def test_use_is_noted_on_the_file_at_most_once_an_interval(
    store: DirectoryStore, pool: BufferPool
) -> None:
    old, recent = chain_of(2)
    write(store, pool, [old, recent])
    now = time.time()
    os.utime(store.files.path_of(old.key), (now - 500, now - 500))
    os.utime(store.files.path_of(recent.key), (now - 30, now - 30))
    read(store, pool, [old, recent])
    used_s = {block.key: block.used_s for block in store.scan()}
    assert used_s[old.key] > now - 5
    assert used_s[recent.key] == pytest.approx(now - 30, abs=0.01)


def test_delete_reports_a_failing_device(
    store: DirectoryStore, pool: BufferPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    chain = chain_of(1)
    write(store, pool, chain)

    def fails(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), "the file")

    monkeypatch.setattr(Path, "unlink", fails)
    with pytest.raises(StoreError, match="deleting the file: Read-only file system"):
        store.delete([chain[0].key])


def test_delete_on_a_hung_device_has_a_deadline(tmp_path: Path) -> None:
    go_on = threading.Event()

    class Hanging(BlockDirectory):
        def delete(self, keys: Sequence[BlockKey]) -> int:
            go_on.wait(LONG_S)
            return 0

        def free_bytes(self) -> int:
            go_on.wait(LONG_S)
            return 0

        def prefixes(self) -> list[str]:
            go_on.wait(LONG_S)
            return []

    options = DirectoryOptions(call_deadline_s=0.3)
    store = DirectoryStore(
        tmp_path, FP, LAYOUT, options=options, files=Hanging(tmp_path, FP, LAYOUT)
    )
    with pytest.raises(StoreError, match=r"deleting: no completion within 0\.3 s"):
        store.delete([BlockKey(bytes(32))])
    with pytest.raises(StoreError, match="asking for free space: no completion"):
        store.free_bytes()
    with pytest.raises(StoreError, match="listing: no completion"):
        list(store.scan())
    go_on.set()
    store.close()


def test_directory_that_vanishes_is_an_error_not_a_crash(
    store: DirectoryStore, pool: BufferPool, tmp_path: Path
) -> None:
    chain = chain_of(1)
    store.files.path.rename(tmp_path / "unmounted")
    assert read(store, pool, chain)[0].status is ReadStatus.MISS
    (result,) = write(store, pool, chain)
    assert not result.durable
    assert "No such file" in result.detail
    with pytest.raises(StoreError, match="No such file"):
        list(store.scan())


def test_place_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(
        ConfigError, match=r"file cannot be used: .*Not a directory.*Give a directory"
    ):
        DirectoryStore(tmp_path / "file", FP, LAYOUT)


def test_place_that_cannot_be_written_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object, **__: object) -> int:
        raise PermissionError(errno.EACCES, "Permission denied", "x.tmp")

    monkeypatch.setattr("dualpath.store.page_io.os.open", fails)
    with pytest.raises(ConfigError, match="Permission denied"):
        DirectoryStore(tmp_path, FP, LAYOUT)


def test_place_that_hangs_is_refused(tmp_path: Path) -> None:
    go_on = threading.Event()

    class Hanging(BlockDirectory):
        def prepare(self, model: str) -> None:
            go_on.wait(LONG_S)

    with pytest.raises(ConfigError, match="opening: no completion within"):
        DirectoryStore(
            tmp_path,
            FP,
            LAYOUT,
            options=DirectoryOptions(call_deadline_s=0.2),
            files=Hanging(tmp_path, FP, LAYOUT),
        )
    go_on.set()


def test_block_of_too_many_tokens_is_refused(tmp_path: Path) -> None:
    layout = KVLayout("mla", 1, MAX_BLOCK_TOKENS + 1, (RowPart("latent", 1, 8),), "float16", 2)
    with pytest.raises(ConfigError, match="set the block size to at most 990"):
        DirectoryStore(tmp_path, fingerprint("m", "r", layout), layout)


def test_without_direct_io(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some file systems know no O_DIRECT: buffered I/O, and the capability says so."""
    os_open = os.open

    def refuses(path: Path, flags: int, *rest: int) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL), str(path))
        return os_open(path, flags, *rest)

    monkeypatch.setattr(os, "open", refuses)
    pool = BufferPool(4, LAYOUT.slot_bytes)
    store = DirectoryStore(tmp_path, FP, LAYOUT)
    assert not store.capabilities.direct_io
    assert write(store, pool, chain_of(2))[0].durable
    assert [result.status for result in read(store, pool, chain_of(2))] == [ReadStatus.OK] * 2
    store.close()
    pool.close()


def test_direct_io_does_not_fill_the_page_cache(store: DirectoryStore, pool: BufferPool) -> None:
    if not store.capabilities.direct_io:
        pytest.skip("no O_DIRECT on this file system")
    (identity,) = chain_of(1)
    write(store, pool, [identity])
    read(store, pool, [identity])
    fd = os.open(store.files.path_of(identity.key), os.O_RDONLY)
    page = bytearray(4096)
    with pytest.raises(BlockingIOError):
        os.preadv(fd, [page], 0, os.RWF_NOWAIT)
    os.close(fd)


def test_two_processes_may_open_the_same_place(tmp_path: Path, pool: BufferPool) -> None:
    factory = DirectoryStoreFactory(tmp_path)
    one, two = factory.open(FP, LAYOUT), factory.open(FP, LAYOUT)
    (identity,) = chain_of(1)
    write(one, pool, [identity])
    write(two, pool, [identity])
    assert read(one, pool, [identity])[0].status is ReadStatus.OK
    one.close()
    assert read(two, pool, [identity])[0].status is ReadStatus.OK
    two.close()
