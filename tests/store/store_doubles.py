"""Factories of the backends under test, and a device that stalls."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dualpath.base.ids import BlockKey
from dualpath.kv import BlockIdentity, Fingerprint, KVLayout
from dualpath.store import (
    BlockDirectory,
    BlockResult,
    DirectoryOptions,
    DirectoryStore,
    Store,
    Ticket,
    WriteResult,
)
from dualpath.testing import Damage, MemoryDevice, MemoryStore, damage_bytes, damage_file
from dualpath.testing.store_suite import SUITE_LAYOUT, StoreFactory


class GatedDirectory(BlockDirectory):
    """A directory whose device hangs while the gate is closed."""

    gate = threading.Event()

    def read(self, identity: BlockIdentity, into: memoryview) -> BlockResult:
        self.gate.wait()
        return super().read(identity, into)

    def write(self, identity: BlockIdentity, payload: memoryview, ticket: Ticket) -> WriteResult:
        self.gate.wait()
        return super().write(identity, payload, ticket)


class DirectoryStoreFactory(StoreFactory):
    def __init__(self, root: Path, *, direct_io: bool = True) -> None:
        self.root = root
        self.direct_io = direct_io
        self.gate = threading.Event()
        self.gate.set()

    def open(self, fp: Fingerprint, layout: KVLayout) -> DirectoryStore:
        files = GatedDirectory(self.root, fp, layout)
        files.gate = self.gate
        options = DirectoryOptions(
            read_queue_limit=self.queue_limit, write_queue_limit=self.queue_limit
        )
        store = DirectoryStore(self.root, fp, layout, options=options, files=files)
        if not self.direct_io:
            files.direct_io = False
        return store

    def damage(self, fp: Fingerprint, key: BlockKey, damage: Damage) -> None:
        assert damage_file(self._path(fp, key), damage)

    def transplant(self, fp: Fingerprint, source: BlockKey, target: BlockKey) -> None:
        shutil.copyfile(self._path(fp, source), self._path(fp, target))

    @contextmanager
    def stalled(self) -> Iterator[None]:
        self.gate.clear()
        try:
            yield
        finally:
            self.gate.set()

    def _path(self, fp: Fingerprint, key: BlockKey) -> Path:
        return BlockDirectory(self.root, fp, SUITE_LAYOUT).path_of(key)


class MemoryStoreFactory(StoreFactory):
    def __init__(self) -> None:
        self.device = MemoryDevice()

    def open(self, fp: Fingerprint, layout: KVLayout) -> Store:
        return MemoryStore(self.device, fp, layout, queue_limit=self.queue_limit)

    def damage(self, fp: Fingerprint, key: BlockKey, damage: Damage) -> None:
        stored = self.device.files[fp, key]
        stored.data = damage_bytes(stored.data, damage)

    def transplant(self, fp: Fingerprint, source: BlockKey, target: BlockKey) -> None:
        self.device.files[fp, target].data = self.device.files[fp, source].data

    @contextmanager
    def stalled(self) -> Iterator[None]:
        with self.device.stalled():
            yield
