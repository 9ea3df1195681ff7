"""The contract suite over every backend and wrapper that the package has."""

from __future__ import annotations

from pathlib import Path

import pytest
from store_doubles import DirectoryStoreFactory, MemoryStoreFactory

from dualpath.kv import BufferPool, Fingerprint, KVLayout
from dualpath.store import Store
from dualpath.testing import FaultPlan, FaultyStore, with_faults
from dualpath.testing.store_suite import StoreContractSuite, StoreFactory


class TestDirectoryStore(StoreContractSuite):
    @pytest.fixture
    def store_factory(self, tmp_path: Path) -> StoreFactory:
        return DirectoryStoreFactory(tmp_path)


class TestDirectoryStoreWithoutDirectIO(StoreContractSuite):
    @pytest.fixture
    def store_factory(self, tmp_path: Path) -> StoreFactory:
        return DirectoryStoreFactory(tmp_path, direct_io=False)


class TestMemoryStore(StoreContractSuite):
    @pytest.fixture
    def store_factory(self) -> StoreFactory:
        return MemoryStoreFactory()


class _WrappedFactory(MemoryStoreFactory):
    """Every operation goes the way of an injected fault that changes nothing."""

    def open(self, fp: Fingerprint, layout: KVLayout) -> Store:
        spec = "fault=read:slow:0.5,write:slow:0.5;slow_s=0;seed=11"
        return with_faults(super().open(fp, layout), spec)


class TestFaultyStoreKeepsTheContract(StoreContractSuite):
    @pytest.fixture
    def store_factory(self) -> StoreFactory:
        return _WrappedFactory()

    def test_view_that_is_too_small_or_read_only_is_refused(
        self, store: Store, pool: BufferPool
    ) -> None:
        """A wrapper does not know the size of blocks: the inner store refuses, once it is asked."""
        assert isinstance(store, FaultyStore)
        store.plan = FaultPlan()
        super().test_view_that_is_too_small_or_read_only_is_refused(store, pool)
