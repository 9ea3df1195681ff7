"""What is in the store, and how much of it: the one accountant of a cluster (cases 12, 13).

The frontend has the only catalog. Engines read and write blocks; the catalog learns of a block when it
is durable (`published`), answers which prefix of a prompt is stored and keeps it while it is read
(`lookup`, `release`), forgets what failed (`invalidate`), and evicts above its capacity.

Threads
    `lookup`, `release`, `published`, `invalidate`, `stats` only touch memory, under a lock that is
    never held during I/O: call them from the event loop. `load` and `enforce` block on the store:
    call them from a worker thread, or let `start` run `enforce` on a thread of its own.

Invariants
    A block is taken out of the index before its file is deleted, so no lookup hits a block that is
    going. Pinned blocks are not evicted. Blocks whose deletion is due still count as stored.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from dualpath.base.errors import StoreError
from dualpath.base.ids import BlockKey, GiB, RequestId
from dualpath.kv.chain import BlockIdentity
from dualpath.kv.index import RemovedBlock, TrieIndex
from dualpath.store.contract import Store

__all__ = ["Catalog", "CatalogStats", "default_capacity_bytes"]

_log = logging.getLogger(__name__)
_DELETE_BATCH = 64
_RETRY_S = 5.0
_CAPACITY_WHEN_UNKNOWN = 64 * GiB


@dataclass(frozen=True, slots=True)
class CatalogStats:
    """`stored_bytes` is the index and `doomed_bytes`, which wait for deletion. Counts since start."""

    capacity_bytes: int
    stored_bytes: int
    doomed_bytes: int
    blocks: int
    unreachable_blocks: int
    pinned_requests: int
    lookups: int
    lookup_blocks: int
    hit_blocks: int
    published_blocks: int
    evicted_blocks: int
    invalidated_blocks: int
    failed_deletions: int


@dataclass(slots=True)
class _Counts:
    lookups: int = 0
    lookup_blocks: int = 0
    hit_blocks: int = 0
    published_blocks: int = 0
    evicted_blocks: int = 0
    invalidated_blocks: int = 0
    failed_deletions: int = 0


def default_capacity_bytes(stored_bytes: int, free_bytes: int | None) -> int:
    """What is stored, and 80 % of the free space; 64 GiB where the backend does not know it."""
    if free_bytes is None:
        return max(stored_bytes, _CAPACITY_WHEN_UNKNOWN)
    return stored_bytes + free_bytes * 4 // 5


class Catalog:
    """Index and capacity of one store. Thread-safe as the module says.

    Eviction starts above `capacity_bytes` and goes down to `low_watermark` of it. Without
    `capacity_bytes` it is `default_capacity_bytes`, found by `load`. `clock` gives seconds since
    the epoch, like the store's times of use.
    """

    def __init__(
        self,
        store: Store,
        index: TrieIndex,
        capacity_bytes: int | None = None,
        *,
        low_watermark: float = 0.95,
        clock: Callable[[], float] = time.time,
    ) -> None:
        if capacity_bytes is not None and capacity_bytes < 0:
            raise ValueError(f"a capacity of {capacity_bytes} bytes is negative")
        if not 0.0 < low_watermark <= 1.0:
            raise ValueError(f"low_watermark {low_watermark} is not in (0, 1]")
        self._store = store
        self._index = index
        self._capacity_bytes = capacity_bytes
        self._low_watermark = low_watermark
        self._clock = clock
        self._counts = _Counts()
        self._doomed: dict[BlockKey, int] = {}
        """Out of the index, not yet deleted; with their sizes."""
        self._doomed_bytes = 0
        self._closed = False
        self._lock = threading.Lock()
        self._work = threading.Condition(self._lock)
        self._deleting = threading.Lock()
        self._thread: threading.Thread | None = None

    def load(self) -> int:
        """Scan the store into the index; returns the number of blocks. Blocks. Raises StoreError.

        Blocks published meanwhile are kept.
        """
        for block in self._store.scan():
            with self._lock:
                if block.key not in self._doomed:
                    self._index.insert(block.key, block.parent, block.stored_bytes, block.used_s)
        free_bytes = self._store.free_bytes() if self._capacity_bytes is None else None
        with self._work:
            if self._capacity_bytes is None:
                self._capacity_bytes = default_capacity_bytes(self._stored_bytes, free_bytes)
            self._work.notify()
            return self._index.n_blocks

    def lookup(self, chain: Sequence[BlockIdentity], request: RequestId) -> int:
        """How many leading blocks of `chain` are stored; pins them for `request` until `release`.

        Replaces what the request had pinned. Pass only blocks that may be hits: a prompt computes
        at least its last token, so its hits end before the block that ends the prompt.
        """
        with self._lock:
            hits = self._index.match(chain)
            keys = [identity.key for identity in chain[:hits]]
            self._index.touch(keys, self._clock())
            self._index.pin(request, keys)
            self._counts.lookups += 1
            self._counts.lookup_blocks += len(chain)
            self._counts.hit_blocks += hits
            return hits

    def release(self, request: RequestId) -> None:
        """Drop the request's pins. Idempotent: every path of a request may call it."""
        with self._work:
            self._index.unpin(request)
            if self._needs_work:
                self._work.notify()

    def published(self, key: BlockKey, parent: BlockKey, stored_bytes: int) -> None:
        """An engine made this block durable: from now on it is a hit."""
        with self._work:
            self._doomed_bytes -= self._doomed.pop(key, 0)
            self._index.insert(key, parent, stored_bytes, self._clock())
            self._counts.published_blocks += 1
            if self._needs_work:
                self._work.notify()

    def invalidate(self, key: BlockKey) -> list[BlockKey]:
        """A read of this block failed, or a write of it did: it and its descendants are no hits.

        For reads that ended with MISS or CORRUPT; TIMEOUT and ERROR say nothing about the block.
        Returns what was taken out of the index; `enforce` deletes the files. A block that is not
        in the index has its file deleted too: whatever it holds has failed.
        """
        with self._work:
            removed = self._index.remove(key)
            for block in removed or [RemovedBlock(key, 0)]:
                self._doom(block)
            self._counts.invalidated_blocks += len(removed)
            self._work.notify()
            return [block.key for block in removed]

    def contains(self, key: BlockKey) -> bool:
        """Whether the block is in the index, reachable or not."""
        with self._lock:
            return key in self._index

    @property
    def over_capacity(self) -> bool:
        """Whether `enforce` has something to do."""
        with self._lock:
            return self._needs_work

    @property
    def stats(self) -> CatalogStats:
        with self._lock:
            counts = self._counts
            return CatalogStats(
                capacity_bytes=self._capacity_bytes or 0,
                stored_bytes=self._stored_bytes,
                doomed_bytes=self._doomed_bytes,
                blocks=self._index.n_blocks,
                unreachable_blocks=self._index.n_unreachable,
                pinned_requests=self._index.n_pinned_requests,
                lookups=counts.lookups,
                lookup_blocks=counts.lookup_blocks,
                hit_blocks=counts.hit_blocks,
                published_blocks=counts.published_blocks,
                evicted_blocks=counts.evicted_blocks,
                invalidated_blocks=counts.invalidated_blocks,
                failed_deletions=counts.failed_deletions,
            )

    def enforce(self) -> int:
        """Evict down to the low watermark if above capacity, and delete what was taken out.

        Returns the bytes freed. Blocks. Raises StoreError; what is left is tried again next time.
        """
        with self._deleting:
            with self._lock:
                self._evict()
                doomed = list(self._doomed)
            freed_bytes = 0
            for start in range(0, len(doomed), _DELETE_BATCH):
                freed_bytes += self._delete(doomed[start : start + _DELETE_BATCH])
            return freed_bytes

    def start(self) -> None:
        """Run `enforce` on a thread of its own whenever there is need, until `close`."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._keep, name="catalog-evict", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """End the thread, if any. Idempotent. The store is the caller's to close."""
        with self._work:
            self._closed = True
            self._work.notify_all()
        if self._thread is not None:
            self._thread.join()

    def check(self) -> None:
        """Integrity of the index and of this account. Raises InvariantViolation."""
        with self._lock:
            self._index.check()

    @property
    def _stored_bytes(self) -> int:
        return self._index.total_bytes + self._doomed_bytes

    @property
    def _excess_bytes(self) -> int:
        """Bytes of the index above the capacity; the doomed ones are going already."""
        if self._capacity_bytes is None:
            return 0
        return self._index.total_bytes - self._capacity_bytes

    @property
    def _needs_work(self) -> bool:
        return bool(self._doomed) or (self._excess_bytes > 0 and self._index.has_evictable)

    def _doom(self, block: RemovedBlock) -> None:
        if block.key not in self._doomed:
            self._doomed[block.key] = block.stored_bytes
            self._doomed_bytes += block.stored_bytes

    def _evict(self) -> None:
        excess_bytes = self._excess_bytes
        if excess_bytes <= 0 or self._capacity_bytes is None:
            return
        low_bytes = int(self._capacity_bytes * self._low_watermark)
        evicted = self._index.evict(self._index.total_bytes - low_bytes)
        for block in evicted:
            self._doom(block)
        self._counts.evicted_blocks += len(evicted)

    def _delete(self, keys: Sequence[BlockKey]) -> int:
        with self._lock:
            # Published again since: its file is the new one.
            due = [key for key in keys if key in self._doomed]
        try:
            freed_bytes = self._store.delete(due)
        except StoreError:
            with self._lock:
                self._counts.failed_deletions += len(due)
            raise
        with self._lock:
            for key in due:
                self._doomed_bytes -= self._doomed.pop(key, 0)
        return freed_bytes

    def _keep(self) -> None:
        while True:
            with self._work:
                while not self._needs_work and not self._closed:
                    self._work.wait()
                if self._closed:
                    return
            try:
                self.enforce()
            except StoreError as error:
                _log.warning("blocks could not be deleted, trying again: %s", error)
                with self._work:
                    if not self._closed:
                        self._work.wait(_RETRY_S)
