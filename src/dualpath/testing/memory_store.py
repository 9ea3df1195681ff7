"""A store in this process's memory: a double for tests, and the shortest example of a backend.

`MemoryDevice` is what a disk or server is to a real backend: it outlives the store, several stores may
use one, and it can be made to stall.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

from dualpath.base.ids import BlockKey
from dualpath.kv.chain import Fingerprint
from dualpath.kv.layout import KVLayout
from dualpath.store.block_file import (
    HEADER_BYTES,
    BlockHeader,
    decode_header,
    encode_header,
    file_bytes,
    find_mismatch,
    payload_checksum,
)
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
from dualpath.store.io_lane import IoLane, IoTask, Ticket

__all__ = ["MemoryDevice", "MemoryStore"]


@dataclass(slots=True)
class _Stored:
    data: bytes
    used_s: float


class MemoryDevice:
    """Block files by (fingerprint, key). Thread-safe: values are replaced, never changed."""

    def __init__(self) -> None:
        self.files: dict[tuple[Fingerprint, BlockKey], _Stored] = {}
        self._open = threading.Event()
        self._open.set()

    @contextmanager
    def stalled(self) -> Iterator[None]:
        """While inside, reads and writes hang in the device."""
        self._open.clear()
        try:
            yield
        finally:
            self._open.set()

    def answer(self) -> None:
        """Returns when the device does not stall."""
        self._open.wait()


class MemoryStore(Store):
    """Blocks of one fingerprint on a `MemoryDevice`."""

    capabilities = StoreCapabilities(persistent=False, direct_io=False, scan=True)

    def __init__(
        self,
        device: MemoryDevice,
        fingerprint: Fingerprint,
        layout: KVLayout,
        *,
        n_threads: int = 4,
        queue_limit: int = 1024,
    ) -> None:
        self._device = device
        self._fingerprint = fingerprint
        self._layout = layout
        self._payload_bytes = layout.full_block_bytes
        self._lane = IoLane("memory store", n_threads=n_threads, queue_limit=queue_limit)

    def read(
        self,
        blocks: Sequence[BlockRead],
        *,
        deadline_s: float,
        done: Callable[[BlockResult], None],
    ) -> None:
        if any(b.into.readonly or b.into.nbytes < self._layout.slot_bytes for b in blocks):
            raise ValueError(f"a read needs {self._layout.slot_bytes} writable bytes")
        tasks = [
            IoTask(partial(self._read, b), partial(BlockResult, b.identity.key), done, b.hold)
            for b in blocks
        ]
        self._lane.submit(tasks, deadline_s=deadline_s)

    def write(
        self,
        blocks: Sequence[BlockWrite],
        *,
        deadline_s: float,
        done: Callable[[WriteResult], None],
    ) -> None:
        if any(b.payload.nbytes < self._payload_bytes for b in blocks):
            raise ValueError(f"a write needs {self._payload_bytes} bytes")
        tasks = [
            IoTask(partial(self._write, b), partial(_not_durable, b.identity.key), done, b.hold)
            for b in blocks
        ]
        self._lane.submit(tasks, deadline_s=deadline_s)

    def delete(self, keys: Sequence[BlockKey]) -> int:
        gone = [self._device.files.pop((self._fingerprint, key), None) for key in keys]
        return sum(len(stored.data) for stored in gone if stored is not None)

    def scan(self) -> Iterator[StoredBlock]:
        whole_bytes = file_bytes(self._payload_bytes)
        for (fingerprint, key), stored in list(self._device.files.items()):
            header = decode_header(stored.data)
            if (
                isinstance(header, BlockHeader)
                and header.fingerprint == fingerprint == self._fingerprint
                and header.identity.key == key
                and len(stored.data) == whole_bytes
            ):
                yield StoredBlock(key, header.identity.parent, whole_bytes, stored.used_s)

    def close(self) -> None:
        self._lane.close()

    def _read(self, block: BlockRead, _: Ticket) -> BlockResult:
        self._device.answer()
        key = block.identity.key
        stored = self._device.files.get((self._fingerprint, key))
        if stored is None:
            return BlockResult(key, ReadStatus.MISS)
        if len(stored.data) != file_bytes(self._payload_bytes):
            return BlockResult(key, ReadStatus.CORRUPT, f"{len(stored.data)} bytes")
        data = memoryview(stored.data)
        block.into[: self._payload_bytes] = data[HEADER_BYTES : HEADER_BYTES + self._payload_bytes]
        mismatch = find_mismatch(
            data[:HEADER_BYTES],
            block.into,
            fingerprint=self._fingerprint,
            identity=block.identity,
            payload_bytes=self._payload_bytes,
        )
        if mismatch is not None:
            return BlockResult(key, ReadStatus.CORRUPT, str(mismatch))
        stored.used_s = time.time()
        return BlockResult(key, ReadStatus.OK)

    def _write(self, block: BlockWrite, ticket: Ticket) -> WriteResult:
        self._device.answer()
        payload = block.payload[: self._payload_bytes]
        header = BlockHeader(
            self._fingerprint, block.identity, self._payload_bytes, payload_checksum(payload)
        )
        data = encode_header(header) + payload
        data = data.ljust(file_bytes(self._payload_bytes), b"\0")
        if not ticket.claim():
            return _not_durable(block.identity.key, ReadStatus.TIMEOUT, "too late")
        self._device.files[self._fingerprint, block.identity.key] = _Stored(data, time.time())
        return WriteResult(block.identity.key, durable=True, stored_bytes=len(data))


def _not_durable(key: BlockKey, _: ReadStatus, detail: str) -> WriteResult:
    return WriteResult(key, durable=False, stored_bytes=0, detail=detail)
