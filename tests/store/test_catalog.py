"""The accountant: what is a hit, what is evicted, and that memory and store agree."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from store_doubles import DirectoryStoreFactory

from dualpath.base.errors import StoreError
from dualpath.base.ids import BlockKey, GiB, RequestId
from dualpath.kv import BlockIdentity, BufferPool, TrieIndex, block_chain, fingerprint, root_key
from dualpath.store import (
    BlockRead,
    BlockWrite,
    Catalog,
    Store,
    StoredBlock,
    WriteResult,
    default_capacity_bytes,
)
from dualpath.store.contract import StoreCapabilities
from dualpath.testing import MemoryDevice, MemoryStore, Results, wait_until
from dualpath.testing.store_suite import SUITE_LAYOUT

FP = fingerprint("model", "r1", SUITE_LAYOUT)
ROOT = root_key(FP, "")
R = RequestId


def chain_of(*tokens: int) -> list[BlockIdentity]:
    """Blocks of one repeated token each; they share prefixes as the arguments do."""
    size = SUITE_LAYOUT.block_tokens
    return block_chain(ROOT, [token for token in tokens for _ in range(size)], size)


class Clock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        self.now_s += 1.0
        return self.now_s


class FakeStore(Store):
    """Sizes by key; deletions are recorded, and can fail or be watched."""

    capabilities = StoreCapabilities(persistent=True, direct_io=False, scan=True)

    def __init__(self, blocks: Sequence[StoredBlock] = (), free_bytes: int | None = None) -> None:
        self.blocks = {block.key: block for block in blocks}
        self.free = free_bytes
        self.deleted: list[BlockKey] = []
        self.failure: StoreError | None = None

    def read(self, blocks: Sequence[BlockRead], *, deadline_s: float, done: object) -> None:
        raise NotImplementedError

    def write(self, blocks: Sequence[BlockWrite], *, deadline_s: float, done: object) -> None:
        raise NotImplementedError

    def delete(self, keys: Sequence[BlockKey]) -> int:
        if self.failure is not None:
            raise self.failure
        self.deleted.extend(keys)
        gone = [self.blocks.pop(key, None) for key in keys]
        return sum(block.stored_bytes for block in gone if block is not None)

    def scan(self) -> Iterator[StoredBlock]:
        yield from self.blocks.values()

    def free_bytes(self) -> int | None:
        return self.free

    def close(self) -> None:
        pass


def stored(chain: Sequence[BlockIdentity], used_s: float = 1.0) -> list[StoredBlock]:
    return [StoredBlock(each.key, each.parent, 10, used_s) for each in chain]


def catalog_of(store: Store, capacity_bytes: int | None = 1000, **options: float) -> Catalog:
    return Catalog(store, TrieIndex(), capacity_bytes, clock=Clock(), **options)


def publish(catalog: Catalog, chain: Sequence[BlockIdentity]) -> None:
    for each in chain:
        catalog.published(each.key, each.parent, 10)


def keys_of(chain: Sequence[BlockIdentity]) -> list[BlockKey]:
    return [each.key for each in chain]


def test_load_then_lookup() -> None:
    chain = chain_of(1, 2, 3)
    catalog = catalog_of(FakeStore(stored(chain)))
    assert catalog.load() == 3
    assert catalog.lookup(chain_of(1, 2, 9), R("r")) == 2
    assert catalog.lookup(chain_of(9), R("s")) == 0
    stats = catalog.stats
    assert (stats.lookups, stats.lookup_blocks, stats.hit_blocks) == (2, 4, 2)
    assert (stats.blocks, stats.stored_bytes, stats.pinned_requests) == (3, 30, 1)
    catalog.check()


def test_block_is_a_hit_only_when_published() -> None:
    chain = chain_of(1, 2)
    catalog = catalog_of(FakeStore())
    assert catalog.lookup(chain, R("r")) == 0
    publish(catalog, chain[:1])
    assert catalog.lookup(chain, R("r")) == 1
    publish(catalog, chain[1:])
    assert catalog.lookup(chain, R("r")) == 2
    assert catalog.stats.published_blocks == 2


def test_above_capacity_the_least_recently_used_go() -> None:
    store = FakeStore()
    catalog = catalog_of(store, 100, low_watermark=0.8)
    chains = [chain_of(n) for n in range(10)]
    for chain in chains:
        publish(catalog, chain)
    assert catalog.enforce() == 0
    assert not catalog.over_capacity
    catalog.lookup(chains[0], R("r"))
    catalog.release(R("r"))
    publish(catalog, chain_of(99))
    assert catalog.over_capacity
    catalog.enforce()
    assert store.deleted == keys_of([chains[1][0], chains[2][0], chains[3][0]])
    stats = catalog.stats
    assert (stats.stored_bytes, stats.doomed_bytes, stats.evicted_blocks) == (80, 0, 3)


def test_pinned_blocks_stay_until_released() -> None:
    store = FakeStore()
    catalog = catalog_of(store, 10, low_watermark=1.0)
    chain = chain_of(1, 2, 3)
    publish(catalog, chain)
    assert catalog.lookup(chain, R("r")) == 3
    catalog.enforce()
    assert store.deleted == []
    assert not catalog.over_capacity  # Nothing that can be done about it now.
    catalog.release(R("r"))
    catalog.release(R("r"))
    assert catalog.over_capacity
    catalog.enforce()
    assert store.deleted == [chain[2].key, chain[1].key]


def test_a_new_attempt_replaces_the_pins_of_the_last() -> None:
    store = FakeStore()
    catalog = catalog_of(store, 10, low_watermark=1.0)
    chain = chain_of(1, 2, 3)
    publish(catalog, chain)
    catalog.lookup(chain, R("r"))
    catalog.lookup(chain[:1], R("r"))
    catalog.enforce()
    assert store.deleted == [chain[2].key, chain[1].key]


def test_evicted_block_is_no_hit_before_it_is_deleted() -> None:
    chain = chain_of(1)
    seen: list[int] = []

    class Watched(FakeStore):
        def delete(self, keys: Sequence[BlockKey]) -> int:
            seen.append(catalog.lookup(chain, R("r")))
            return super().delete(keys)

    catalog = catalog_of(Watched(), 0)
    publish(catalog, chain)
    catalog.enforce()
    assert seen == [0]


def test_failed_read_takes_the_descendants_along_and_deletes_files() -> None:
    chain = chain_of(1, 2, 3, 4)
    store = FakeStore(stored(chain))
    catalog = catalog_of(store)
    catalog.load()
    catalog.lookup(chain, R("r"))
    assert set(catalog.invalidate(chain[1].key)) == set(keys_of(chain[1:]))
    assert catalog.lookup(chain, R("r")) == 1
    assert catalog.stats.doomed_bytes == 30
    assert catalog.stats.stored_bytes == 40
    assert catalog.enforce() == 30
    assert set(store.deleted) == set(keys_of(chain[1:]))
    assert catalog.stats.stored_bytes == 10
    assert catalog.stats.invalidated_blocks == 3
    catalog.check()


def test_failed_write_of_an_unknown_block_deletes_its_file() -> None:
    store = FakeStore()
    catalog = catalog_of(store)
    (identity,) = chain_of(1)
    assert catalog.invalidate(identity.key) == []
    catalog.enforce()
    assert store.deleted == [identity.key]


def test_block_that_is_published_again_is_not_deleted() -> None:
    store = FakeStore()
    catalog = catalog_of(store)
    chain = chain_of(1)
    publish(catalog, chain)
    catalog.invalidate(chain[0].key)
    publish(catalog, chain)
    catalog.enforce()
    assert store.deleted == []
    assert catalog.lookup(chain, R("r")) == 1
    assert (catalog.stats.stored_bytes, catalog.stats.doomed_bytes) == (10, 0)


def test_failing_deletion_is_tried_again() -> None:
    store = FakeStore()
    catalog = catalog_of(store, 0)
    chain = chain_of(1)
    publish(catalog, chain)
    store.failure = StoreError("gone away")
    with pytest.raises(StoreError, match="gone away"):
        catalog.enforce()
    assert catalog.lookup(chain, R("r")) == 0
    assert (catalog.stats.doomed_bytes, catalog.stats.failed_deletions) == (10, 1)
    assert catalog.over_capacity
    store.failure = None
    catalog.enforce()
    assert store.deleted == keys_of(chain)
    assert catalog.stats.doomed_bytes == 0


def test_restart_keeps_the_order_of_use() -> None:
    old, new = chain_of(1), chain_of(2)
    store = FakeStore([*stored(new, used_s=500.0), *stored(old, used_s=100.0)])
    catalog = catalog_of(store, 10, low_watermark=1.0)
    catalog.load()
    catalog.enforce()
    assert store.deleted == keys_of(old)


def test_default_capacity() -> None:
    assert default_capacity_bytes(100, 1000) == 900
    assert default_capacity_bytes(100, 0) == 100
    assert default_capacity_bytes(100, None) == 64 * GiB
    store = FakeStore(stored(chain_of(1, 2)), free_bytes=100)
    catalog = catalog_of(store, None)
    catalog.load()
    assert catalog.stats.capacity_bytes == 100
    publish(catalog, chain_of(1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11))
    assert catalog.over_capacity


@pytest.mark.parametrize(("capacity", "low"), [(-1, 0.9), (1, 0.0), (1, 1.1)])
def test_settings_are_checked(capacity: int, low: float) -> None:
    with pytest.raises(ValueError, match=r"capacity|low_watermark"):
        catalog_of(FakeStore(), capacity, low_watermark=low)


def test_thread_evicts_by_itself() -> None:
    store = FakeStore()
    catalog = catalog_of(store, 20, low_watermark=1.0)
    catalog.start()
    catalog.start()
    chain = chain_of(1, 2, 3)
    publish(catalog, chain)
    wait_until(lambda: store.deleted == [chain[2].key], "eviction")
    catalog.invalidate(chain[1].key)
    wait_until(lambda: store.deleted == [chain[2].key, chain[1].key], "deletion")
    catalog.close()
    catalog.close()
    assert "catalog-evict" not in {thread.name for thread in threading.enumerate()}


def test_thread_survives_a_failing_store(caplog: pytest.LogCaptureFixture) -> None:
    store = FakeStore()
    store.failure = StoreError("gone away")
    catalog = catalog_of(store, 0)
    catalog.start()
    publish(catalog, chain_of(1))
    wait_until(lambda: "gone away" in caplog.text, "a log line")
    catalog.close()
    assert catalog.stats.failed_deletions == 1


def test_from_many_threads_at_once() -> None:
    store = FakeStore()
    catalog = catalog_of(store, 200)
    catalog.start()
    errors: list[BaseException] = []

    def use(number: int) -> None:
        try:
            for turn in range(40):
                chain = chain_of(number % 3, turn % 7, number)
                publish(catalog, chain)
                request = R(f"{number}/{turn}")
                hits = catalog.lookup(chain, request)
                if hits == 3 and turn % 5 == 0:
                    catalog.invalidate(chain[1].key)
                catalog.release(request)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=use, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    assert errors == []
    wait_until(lambda: not catalog.over_capacity, "eviction")
    catalog.close()
    catalog.enforce()
    catalog.check()
    stats = catalog.stats
    assert stats.stored_bytes <= 200
    assert (stats.doomed_bytes, stats.pinned_requests) == (0, 0)


def test_on_a_real_store(tmp_path: Path) -> None:
    """Written, published, found after a restart, evicted: files and account agree."""
    factory = DirectoryStoreFactory(tmp_path)
    chain = chain_of(1, 2, 3, 4)
    with_store = factory.open(FP, SUITE_LAYOUT)
    catalog = Catalog(with_store, TrieIndex())
    catalog.load()
    write_blocks(with_store, catalog, chain)
    assert catalog.stats.capacity_bytes > 1 * GiB // 1024
    assert catalog.lookup(chain, R("r")) == 4
    with_store.close()

    again = factory.open(FP, SUITE_LAYOUT)
    size = catalog.stats.stored_bytes // 4
    catalog = Catalog(again, TrieIndex(), 2 * size, low_watermark=1.0)
    assert catalog.load() == 4
    assert catalog.enforce() == 2 * size
    assert catalog.lookup(chain, R("r")) == 2
    assert {block.key for block in again.scan()} == set(keys_of(chain[:2]))
    again.close()


def test_memory_store_has_no_free_space_to_report() -> None:
    store = MemoryStore(MemoryDevice(), FP, SUITE_LAYOUT)
    catalog = Catalog(store, TrieIndex())
    catalog.load()
    assert catalog.stats.capacity_bytes == 64 * GiB
    store.close()


def write_blocks(store: Store, catalog: Catalog, chain: Sequence[BlockIdentity]) -> None:
    pool = BufferPool(len(chain), SUITE_LAYOUT.slot_bytes)
    lease = pool.try_lease("writer", len(chain))
    assert lease is not None
    results = Results[WriteResult]()
    writes = [BlockWrite(each, lease.view(i), lease.hold()) for i, each in enumerate(chain)]
    store.write(writes, deadline_s=30, done=results)
    parents = {each.key: each.parent for each in chain}
    for result in results.wait(len(chain)):
        assert result.durable
        catalog.published(result.key, parents[result.key], result.stored_bytes)
    lease.release()
    pool.close()
