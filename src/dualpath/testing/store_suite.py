"""The contract of a store as tests: subclass `StoreContractSuite` for every backend.

    class TestMyStore(StoreContractSuite):
        @pytest.fixture
        def store_factory(self, tmp_path):
            return MyStoreFactory(tmp_path)

Importing this module needs pytest. Tests that a factory cannot support (damage, stalls) are skipped
and say so.
"""

from __future__ import annotations

import os
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager

import pytest

from dualpath.base.ids import BlockKey, RequestId
from dualpath.kv.chain import BlockIdentity, Fingerprint, block_chain, fingerprint, root_key
from dualpath.kv.layout import KVLayout, RowPart
from dualpath.kv.pool import BufferPool, Lease
from dualpath.store.contract import (
    BlockRead,
    BlockResult,
    BlockWrite,
    ReadStatus,
    Store,
    WriteResult,
)
from dualpath.testing.damage import Damage
from dualpath.testing.results import Results, wait_until

__all__ = ["SUITE_LAYOUT", "StoreContractSuite", "StoreFactory"]

SUITE_LAYOUT = KVLayout(
    kind="gqa",
    n_layers=3,
    block_tokens=16,
    parts=(RowPart("key", 2, 20), RowPart("value", 2, 20)),
    dtype="bfloat16",
    item_bytes=2,
)
"""7,680 bytes a block: not whole pages, so that padding is tested too."""

_FINGERPRINT = fingerprint("suite model", "r1", SUITE_LAYOUT)
_OTHER = fingerprint("another model", "r1", SUITE_LAYOUT)
_DEADLINE_S = 30.0
_SHORT_S = 0.15


class StoreFactory(ABC):
    """What a backend gives the suite: one place to store, opened any number of times."""

    queue_limit = 64
    """How many operations may wait in a store that `open` gives. The suite exceeds it once."""

    cuts_off = False
    """Whether an operation on a hung device is ended at its deadline: then no memory stays held."""

    @abstractmethod
    def open(self, fp: Fingerprint, layout: KVLayout) -> Store:
        """Open the place for this fingerprint, with what was stored there before."""

    def damage(self, fp: Fingerprint, key: BlockKey, damage: Damage) -> None:
        """Spoil a stored block behind the store's back."""
        pytest.skip("this factory cannot damage blocks")

    def transplant(self, fp: Fingerprint, source: BlockKey, target: BlockKey) -> None:
        """Store the bytes of block `source` where `target` belongs."""
        pytest.skip("this factory cannot exchange blocks")

    def stalled(self) -> AbstractContextManager[None]:
        """While inside, device operations of all stores that `open` gave do not come back."""
        pytest.skip("this factory cannot stall its device")


class StoreContractSuite:
    """Every promise of `dualpath.store.contract`. Checks after each test that nothing leaked."""

    @pytest.fixture
    def store_factory(self) -> StoreFactory:
        raise NotImplementedError("a subclass gives the fixture `store_factory`")

    @pytest.fixture
    def pool(self) -> Iterator[BufferPool]:
        pool = BufferPool(64, SUITE_LAYOUT.slot_bytes, name="suite")
        yield pool
        wait_until(lambda: all(lease.holds == 0 for lease in pool.leases), "holds are left")
        for lease in pool.leases:
            lease.release()
        pool.check()
        assert pool.n_free == 64
        pool.close()

    @pytest.fixture
    def store(self, store_factory: StoreFactory, pool: BufferPool) -> Iterator[Store]:
        store = store_factory.open(_FINGERPRINT, SUITE_LAYOUT)
        yield store
        store.close()

    def test_absent_block_is_a_miss(self, store: Store, pool: BufferPool) -> None:
        chain = _chain(2)
        assert _statuses(_read(store, pool, chain)) == [ReadStatus.MISS] * 2

    def test_block_comes_back_as_written(self, store: Store, pool: BufferPool) -> None:
        chain = _chain(5)
        results = _write(store, pool, chain)
        assert all(result.durable and result.stored_bytes > 0 for result in results)
        lease = _lease(pool, len(chain))
        read = _read_into(store, lease, chain)
        assert _statuses(read) == [ReadStatus.OK] * 5
        assert {result.key for result in read} == {identity.key for identity in chain}
        for index, identity in enumerate(chain):
            assert _payload(lease, index) == _content(identity)

    def test_another_opening_sees_what_is_durable(
        self, store: Store, store_factory: StoreFactory, pool: BufferPool
    ) -> None:
        chain = _chain(2)
        _write(store, pool, chain)
        other = store_factory.open(_FINGERPRINT, SUITE_LAYOUT)
        try:
            assert _statuses(_read(other, pool, chain)) == [ReadStatus.OK] * 2
        finally:
            other.close()

    def test_another_model_does_not_see_it(
        self, store: Store, store_factory: StoreFactory, pool: BufferPool
    ) -> None:
        chain = _chain(1)
        _write(store, pool, chain)
        other = store_factory.open(_OTHER, SUITE_LAYOUT)
        try:
            (result,) = _read(other, pool, chain)
            assert result.status in (ReadStatus.MISS, ReadStatus.CORRUPT)
            assert list(other.scan()) == []
        finally:
            other.close()

    @pytest.mark.parametrize("part", ["tokens", "parent"])
    def test_other_identity_under_the_key_is_corrupt(
        self, part: str, store: Store, pool: BufferPool
    ) -> None:
        (identity,) = _chain(1)
        _write(store, pool, [identity])
        tokens, parent = identity.tokens, identity.parent
        if part == "tokens":
            tokens = (*tokens[:-1], tokens[-1] + 1)
        else:
            parent = root_key(_FINGERPRINT, "another tenant")
        asked = BlockIdentity(key=identity.key, parent=parent, tokens=tokens)
        (result,) = _read(store, pool, [asked])
        assert result.status is ReadStatus.CORRUPT
        assert result.detail

    @pytest.mark.parametrize("damage", list(Damage))
    def test_damaged_block_is_not_ok_and_heals_by_rewriting(
        self, damage: Damage, store: Store, store_factory: StoreFactory, pool: BufferPool
    ) -> None:
        chain = _chain(2)
        _write(store, pool, chain)
        store_factory.damage(_FINGERPRINT, chain[0].key, damage)
        results = {result.key: result for result in _read(store, pool, chain)}
        assert results[chain[0].key].status in (ReadStatus.CORRUPT, ReadStatus.MISS)
        assert results[chain[1].key].status is ReadStatus.OK
        _write(store, pool, chain[:1])
        assert _statuses(_read(store, pool, chain)) == [ReadStatus.OK] * 2

    def test_another_blocks_bytes_are_not_ok(
        self, store: Store, store_factory: StoreFactory, pool: BufferPool
    ) -> None:
        chain = _chain(2)
        _write(store, pool, chain)
        store_factory.transplant(_FINGERPRINT, chain[0].key, chain[1].key)
        results = {result.key: result.status for result in _read(store, pool, chain)}
        assert results[chain[0].key] is ReadStatus.OK
        assert results[chain[1].key] in (ReadStatus.CORRUPT, ReadStatus.MISS)

    def test_reader_meets_writers_of_the_same_key(self, store: Store, pool: BufferPool) -> None:
        """Whole block or miss: never a mixture of two versions (case 3)."""
        (identity,) = _chain(1)
        versions = [bytes([n]) * SUITE_LAYOUT.full_block_bytes for n in range(1, 9)]
        writes, reads = Results[WriteResult](), Results[BlockResult]()
        source, target = _lease(pool, 8), _lease(pool, 8)
        for index, version in enumerate(versions):
            source.view(index)[: len(version)] = version
        for index in range(8):
            write = BlockWrite(identity, source.view(index), source.hold())
            store.write([write], deadline_s=_DEADLINE_S, done=writes)
            read = BlockRead(identity, target.view(index), target.hold())
            seen = _Seen(target, index, reads)
            store.read([read], deadline_s=_DEADLINE_S, done=seen)
        assert all(result.durable for result in writes.wait(8))
        for result in reads.wait(8):
            assert result.status in (ReadStatus.OK, ReadStatus.MISS), result
        for index in range(8):
            content = _payload(target, index)
            assert not any(content) or content in versions
        (result,) = _read_into(store, target, [identity])
        assert result.status is ReadStatus.OK
        assert _payload(target, 0) in versions

    def test_rewriting_a_key_is_fine(self, store: Store, pool: BufferPool) -> None:
        chain = _chain(1)
        first, second = _write(store, pool, chain), _write(store, pool, chain)
        assert first[0].durable and second[0].durable
        assert len(list(store.scan())) == 1

    def test_hung_device_read_times_out(
        self, store: Store, store_factory: StoreFactory, pool: BufferPool
    ) -> None:
        """By the deadline; memory that the device may still touch stays held until it is back (case 8)."""
        chain = _chain(2)
        _write(store, pool, chain)
        results = Results[BlockResult]()
        lease = _lease(pool, 2)
        with store_factory.stalled():
            store.read(_reads(lease, chain), deadline_s=_SHORT_S, done=results)
            assert _statuses(results.wait(2)) == [ReadStatus.TIMEOUT] * 2
            lease.release()
            pool.check()
            if store_factory.cuts_off:
                wait_until(lambda: pool.n_free == 64, "what was cut off still holds its slots")
            else:
                assert pool.n_free < 64
        wait_until(lambda: pool.n_free == 64, "the hung read still holds its slots")
        assert _statuses(_read(store, pool, chain)) == [ReadStatus.OK] * 2
        store.close()
        results.wait(2)

    def test_hung_device_write_is_not_durable_and_never_appears(
        self, store: Store, store_factory: StoreFactory, pool: BufferPool
    ) -> None:
        """Also not later: nobody would account for it (case 1)."""
        chain = _chain(2)
        results = Results[WriteResult]()
        lease = _fill(pool, chain)
        with store_factory.stalled():
            store.write(_writes(lease, chain), deadline_s=_SHORT_S, done=results)
            assert [result.durable for result in results.wait(2)] == [False, False]
            assert [result.stored_bytes for result in results.items] == [0, 0]
        wait_until(lambda: lease.holds == 0, "the hung write still holds its slots")
        assert _statuses(_read(store, pool, chain)) == [ReadStatus.MISS] * 2
        assert list(store.scan()) == []

    def test_queue_is_bounded(
        self, store: Store, store_factory: StoreFactory, pool: BufferPool
    ) -> None:
        """What does not fit is answered at once, not when the deadline comes."""
        most_threads = 64
        count = 2 * store_factory.queue_limit + most_threads
        (identity,) = _chain(1)
        results = Results[BlockResult]()
        lease = _lease(pool, 1)
        reads = [BlockRead(identity, lease.view(0), lease.hold()) for _ in range(count)]
        with store_factory.stalled():
            store.read(reads, deadline_s=_DEADLINE_S, done=results)
            expected = count - store_factory.queue_limit - most_threads
            wait_until(lambda: len(results.items) >= expected, "the queue takes too much")
            assert {result.status for result in results.items} == {ReadStatus.ERROR}
            assert all(result.detail for result in results.items)
        results.wait(count)

    def test_scan_after_restart_finds_everything(
        self, store: Store, store_factory: StoreFactory, pool: BufferPool
    ) -> None:
        if not store.capabilities.scan:
            pytest.skip("this backend cannot scan")
        chain = _chain(20)
        before_s = time.time()
        sizes = {result.key: result.stored_bytes for result in _write(store, pool, chain)}
        store.close()
        again = store_factory.open(_FINGERPRINT, SUITE_LAYOUT)
        try:
            found = {block.key: block for block in again.scan()}
            assert found.keys() == {identity.key for identity in chain}
            for identity in chain:
                block = found[identity.key]
                assert block.parent == identity.parent
                assert block.stored_bytes == sizes[identity.key]
                assert before_s - 2 <= block.used_s <= time.time() + 2
            assert _statuses(_read(again, pool, chain)) == [ReadStatus.OK] * 20
        finally:
            again.close()

    def test_scan_leaves_out_broken_blocks(
        self, store: Store, store_factory: StoreFactory, pool: BufferPool
    ) -> None:
        chain = _chain(3)
        _write(store, pool, chain)
        store_factory.damage(_FINGERPRINT, chain[0].key, Damage.TRUNCATE)
        store_factory.damage(_FINGERPRINT, chain[1].key, Damage.FLIP_HEADER)
        assert [block.key for block in store.scan()] == [chain[2].key]

    def test_delete(self, store: Store, pool: BufferPool) -> None:
        chain = _chain(3)
        stored_bytes = sum(result.stored_bytes for result in _write(store, pool, chain[:2]))
        keys = [identity.key for identity in chain]
        assert store.delete(keys) == stored_bytes
        assert store.delete(keys) == 0
        assert _statuses(_read(store, pool, chain)) == [ReadStatus.MISS] * 3
        assert list(store.scan()) == []

    def test_delete_meets_reads(self, store: Store, pool: BufferPool) -> None:
        """A block that is evicted while it is read is whole or missing (case 11)."""
        chain = _chain(16)
        _write(store, pool, chain)
        lease = _lease(pool, 16)
        results = Results[BlockResult]()
        for index, read in enumerate(_reads(lease, chain)):
            store.read([read], deadline_s=_DEADLINE_S, done=results)
            store.delete([chain[index].key])
        statuses = {result.key: result.status for result in results.wait(16)}
        assert set(statuses.values()) <= {ReadStatus.OK, ReadStatus.MISS}
        for index, identity in enumerate(chain):
            if statuses[identity.key] is ReadStatus.OK:
                assert _payload(lease, index) == _content(identity)

    def test_view_that_is_too_small_or_read_only_is_refused(
        self, store: Store, pool: BufferPool
    ) -> None:
        (identity,) = _chain(1)
        lease = _lease(pool, 1)
        unexpected = Results[BlockResult]()
        for view in (lease.view(0)[:100], lease.view(0).toreadonly()):
            with pytest.raises(ValueError, match="bytes"):
                store.read(
                    [BlockRead(identity, view, lease.hold())],
                    deadline_s=_DEADLINE_S,
                    done=unexpected,
                )
        assert lease.holds == 0
        assert unexpected.items == []

    def test_many_threads_at_once(self, store: Store, pool: BufferPool) -> None:
        chains = [_chain(4, first_token=1000 * n) for n in range(4)]
        failures: list[str] = []

        def use(chain: list[BlockIdentity]) -> None:
            for _ in range(3):
                _write(store, pool, chain)
                lease = _lease(pool, len(chain))
                for result in _read_into(store, lease, chain):
                    if result.status is not ReadStatus.OK:
                        failures.append(str(result))
                for index, identity in enumerate(chain):
                    if _payload(lease, index) != _content(identity):
                        failures.append(f"block {identity.key.hex()} has other bytes")
                lease.release()

        threads = [threading.Thread(target=use, args=(chain,)) for chain in chains]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=60)
            assert not thread.is_alive()
        assert failures == []

    def test_descriptors_do_not_leak(
        self, store: Store, store_factory: StoreFactory, pool: BufferPool
    ) -> None:
        chain = _chain(8)
        _write(store, pool, chain)
        _read(store, pool, chain)
        before = _n_descriptors()
        absent = _chain(4, first_token=5000)
        for _ in range(3):
            _write(store, pool, chain)
            assert _statuses(_read(store, pool, chain)) == [ReadStatus.OK] * 8
            assert _statuses(_read(store, pool, absent)) == [ReadStatus.MISS] * 4
            list(store.scan())
        assert _n_descriptors() <= before
        store.close()
        assert _n_descriptors() <= before

    def test_close_is_idempotent_and_final(self, store: Store, pool: BufferPool) -> None:
        chain = _chain(1)
        _write(store, pool, chain)
        store.close()
        store.close()
        (read,) = _read(store, pool, chain)
        assert read.status is ReadStatus.ERROR
        (write,) = _write(store, pool, chain)
        assert not write.durable

    def test_free_bytes(self, store: Store) -> None:
        free_bytes = store.free_bytes()
        assert free_bytes is None or free_bytes >= 0


class _Seen:
    """Blanks a read's memory unless the result is OK, so that what is left has been promised."""

    def __init__(self, lease: Lease, index: int, results: Results[BlockResult]) -> None:
        self._lease, self._index, self._results = lease, index, results

    def __call__(self, result: BlockResult) -> None:
        if result.status is not ReadStatus.OK:
            view = self._lease.view(self._index)
            view[:] = bytes(len(view))
        self._results(result)


def _chain(n_blocks: int, first_token: int = 0) -> list[BlockIdentity]:
    n_tokens = n_blocks * SUITE_LAYOUT.block_tokens
    tokens = range(first_token, first_token + n_tokens)
    return block_chain(root_key(_FINGERPRINT, ""), tokens, SUITE_LAYOUT.block_tokens)


def _content(identity: BlockIdentity) -> bytes:
    size = SUITE_LAYOUT.full_block_bytes
    return (identity.key * (size // len(identity.key) + 1))[:size]


def _payload(lease: Lease, index: int) -> bytes:
    return bytes(lease.view(index)[: SUITE_LAYOUT.full_block_bytes])


def _lease(pool: BufferPool, n_slots: int) -> Lease:
    lease = pool.try_lease(RequestId("suite"), n_slots)
    assert lease is not None, "the suite's pool is too small"
    return lease


def _fill(pool: BufferPool, chain: Sequence[BlockIdentity]) -> Lease:
    lease = _lease(pool, len(chain))
    for index, identity in enumerate(chain):
        lease.view(index)[: SUITE_LAYOUT.full_block_bytes] = _content(identity)
    return lease


def _reads(lease: Lease, chain: Sequence[BlockIdentity]) -> list[BlockRead]:
    return [BlockRead(each, lease.view(i), lease.hold()) for i, each in enumerate(chain)]


def _writes(lease: Lease, chain: Sequence[BlockIdentity]) -> list[BlockWrite]:
    return [BlockWrite(each, lease.view(i), lease.hold()) for i, each in enumerate(chain)]


def _write(store: Store, pool: BufferPool, chain: Sequence[BlockIdentity]) -> list[WriteResult]:
    lease = _fill(pool, chain)
    results = Results[WriteResult]()
    store.write(_writes(lease, chain), deadline_s=_DEADLINE_S, done=results)
    written = results.wait(len(chain))
    assert lease.holds == 0
    lease.release()
    return written


def _read_into(store: Store, lease: Lease, chain: Sequence[BlockIdentity]) -> list[BlockResult]:
    results = Results[BlockResult]()
    store.read(_reads(lease, chain), deadline_s=_DEADLINE_S, done=results)
    read = results.wait(len(chain))
    assert lease.holds == 0
    return read


def _read(store: Store, pool: BufferPool, chain: Sequence[BlockIdentity]) -> list[BlockResult]:
    lease = _lease(pool, len(chain))
    read = _read_into(store, lease, chain)
    lease.release()
    return read


def _statuses(results: Sequence[BlockResult]) -> list[ReadStatus]:
    return [result.status for result in results]


def _n_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))
