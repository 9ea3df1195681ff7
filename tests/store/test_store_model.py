"""Stores against a dictionary, whatever the order of operations."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from store_doubles import DirectoryStoreFactory, MemoryStoreFactory

from dualpath.kv import BufferPool, block_chain, fingerprint, root_key
from dualpath.store import BlockRead, BlockResult, BlockWrite, ReadStatus, WriteResult
from dualpath.testing import Damage, Results
from dualpath.testing.store_suite import SUITE_LAYOUT, StoreFactory

FP = fingerprint("model", "r1", SUITE_LAYOUT)
CHAIN = block_chain(
    root_key(FP, ""), range(4 * SUITE_LAYOUT.block_tokens), SUITE_LAYOUT.block_tokens
)
SIZE = SUITE_LAYOUT.full_block_bytes

blocks = st.sampled_from(CHAIN)
subsets = st.lists(blocks, min_size=1, unique_by=lambda identity: identity.key)


class StoreMachine(RuleBasedStateMachine):
    factory: StoreFactory

    def __init__(self) -> None:
        super().__init__()
        self.pool = BufferPool(4, SUITE_LAYOUT.slot_bytes)
        self.set_up()
        self.store = self.factory.open(FP, SUITE_LAYOUT)
        self.stored: dict[bytes, bytes] = {}

    def set_up(self) -> None:
        raise NotImplementedError

    @rule(chain=subsets, fill=st.integers(1, 255))
    def write(self, chain: list, fill: int) -> None:
        lease = self.pool.try_lease("writer", len(chain))
        assert lease is not None
        writes = []
        for index, identity in enumerate(chain):
            lease.view(index)[:] = bytes([fill]) * SUITE_LAYOUT.slot_bytes
            writes.append(BlockWrite(identity, lease.view(index), lease.hold()))
            self.stored[identity.key] = bytes([fill]) * SIZE
        results = Results[WriteResult]()
        self.store.write(writes, deadline_s=30, done=results)
        assert all(result.durable for result in results.wait(len(chain)))
        lease.release()

    @rule(chain=subsets)
    def read(self, chain: list) -> None:
        lease = self.pool.try_lease("reader", len(chain))
        assert lease is not None
        reads = [BlockRead(each, lease.view(i), lease.hold()) for i, each in enumerate(chain)]
        results = Results[BlockResult]()
        self.store.read(reads, deadline_s=30, done=results)
        statuses = {result.key: result.status for result in results.wait(len(chain))}
        for index, identity in enumerate(chain):
            expected = self.stored.get(identity.key)
            if expected is None:
                assert statuses[identity.key] in (ReadStatus.MISS, ReadStatus.CORRUPT)
            else:
                assert statuses[identity.key] is ReadStatus.OK
                assert bytes(lease.view(index)[:SIZE]) == expected
        lease.release()

    @rule(chain=subsets)
    def delete(self, chain: list) -> None:
        self.store.delete([identity.key for identity in chain])
        for identity in chain:
            self.stored.pop(identity.key, None)

    @rule(identity=blocks, damage=st.sampled_from(Damage))
    def damage(self, identity, damage: Damage) -> None:  # type: ignore[no-untyped-def]
        if self.stored.pop(identity.key, None) is not None:
            self.factory.damage(FP, identity.key, damage)
            self.store.delete([identity.key])

    @rule()
    def reopen(self) -> None:
        self.store.close()
        self.store = self.factory.open(FP, SUITE_LAYOUT)

    @invariant()
    def scan_finds_what_is_stored(self) -> None:
        assert {block.key for block in self.store.scan()} == self.stored.keys()
        self.pool.check()
        assert self.pool.n_free == 4

    def teardown(self) -> None:
        self.store.close()
        self.pool.close()


class DirectoryMachine(StoreMachine):
    def set_up(self) -> None:
        self.path = Path(tempfile.mkdtemp())
        self.factory = DirectoryStoreFactory(self.path)

    def teardown(self) -> None:
        super().teardown()
        shutil.rmtree(self.path)


class MemoryMachine(StoreMachine):
    def set_up(self) -> None:
        self.factory = MemoryStoreFactory()


TestDirectoryModel = DirectoryMachine.TestCase
TestDirectoryModel.settings = settings(max_examples=20, stateful_step_count=15)
TestMemoryModel = MemoryMachine.TestCase
TestMemoryModel.settings = settings(max_examples=30, stateful_step_count=20)
