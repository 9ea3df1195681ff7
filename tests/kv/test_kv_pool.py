"""Leases, holds, stamps and the integrity check of buffer pools."""

from __future__ import annotations

import mmap
import os
import random
import threading
from collections.abc import Iterator

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from dualpath.base.errors import InvariantViolation
from dualpath.kv import BufferPool, Lease


@pytest.fixture
def pool() -> Iterator[BufferPool]:
    pool = BufferPool(4, 4096)
    yield pool
    pool.close()


def lease_of(pool: BufferPool, owner: str, n_slots: int) -> Lease:
    lease = pool.try_lease(owner, n_slots)
    assert lease is not None
    return lease


def test_all_slots_or_none(pool: BufferPool) -> None:
    first = lease_of(pool, "a", 3)
    assert pool.try_lease("b", 2) is None
    assert pool.n_free == 1
    first.release()
    assert len(set(lease_of(pool, "b", 4).slots)) == 4
    with pytest.raises(ValueError, match="asks for 5 slots"):
        pool.try_lease("c", 5)


def test_views_are_the_slots_pages(pool: BufferPool) -> None:
    lease = lease_of(pool, "a", 4)
    for index in range(4):
        lease.view(index)[:] = bytes([index + 1]) * 4096
    shared = mmap.mmap(pool.fd, pool.geometry.total_bytes, prot=mmap.PROT_READ)
    for index, slot in enumerate(lease.slots):
        offset = pool.geometry.slot_offset(slot)
        assert offset % 4096 == 0
        assert shared[offset : offset + 4096] == bytes([index + 1]) * 4096
    shared.close()


def test_a_hold_outlives_the_release(pool: BufferPool) -> None:
    lease = lease_of(pool, "a", 4)
    with lease.hold():
        lease.release()
        assert pool.try_lease("b", 1) is None
        assert pool.leases == [lease]
        assert len(lease.view(0)) == 4096
        pool.check()
    assert pool.n_free == 4
    with pytest.raises(InvariantViolation, match="hold on released lease of a"):
        lease.hold().__enter__()
    with pytest.raises(InvariantViolation, match="after the lease of a"):
        lease.view(0)


def test_a_hold_on_one_slot_keeps_no_other(pool: BufferPool) -> None:
    """A read that hangs costs its own slot, not those of the whole prompt."""
    lease = lease_of(pool, "a", 4)
    with lease.hold(2), lease.hold(2):
        assert lease.holds == 2
        lease.release()
        assert pool.n_free == 3
        others = lease_of(pool, "b", 3)
        assert lease.slots[2] not in others.slots
        assert len(lease.view(2)) == 4096
        with pytest.raises(InvariantViolation, match="after the lease of a"):
            lease.view(0)
        pool.check()
        others.release()
    assert pool.n_free == 4
    assert pool.leases == []
    pool.check()


def test_release_is_idempotent(pool: BufferPool) -> None:
    lease = lease_of(pool, "a", 2)
    lease.release()
    other = lease_of(pool, "b", 4)
    lease.release()
    assert not other.released
    assert pool.n_free == 0
    pool.check()


def test_stamp_goes_with_the_release_even_when_held(pool: BufferPool) -> None:
    lease = lease_of(pool, "a", 1)
    (slot,) = lease.slots
    assert lease.stamp != 0
    assert pool.holds_stamp(lease.stamp, slot)
    with pool.hold(lease.stamp) as found:
        assert found is lease
    with lease.hold():
        lease.release()
        assert not pool.holds_stamp(lease.stamp, slot)
        with pool.hold(lease.stamp) as found:
            assert found is None
    again = lease_of(pool, "b", 4)
    assert slot in again.slots
    assert again.stamp != lease.stamp
    assert not pool.holds_stamp(lease.stamp, slot)
    assert not pool.holds_stamp(again.stamp, 99)


def test_another_pool_starts_with_other_stamps() -> None:
    """A restarted engine does not answer for its predecessor's leases."""
    stamps = set()
    for _ in range(3):
        pool = BufferPool(1, 4096)
        stamps.add(lease_of(pool, "a", 1).stamp)
        pool.close()
    assert len(stamps) == 3


@pytest.mark.parametrize(("n_slots", "slot_bytes"), [(0, 4096), (1, 0), (1, 4095), (1, 6000)])
def test_geometry_is_whole_pages(n_slots: int, slot_bytes: int) -> None:
    with pytest.raises(ValueError, match="whole pages"):
        BufferPool(n_slots, slot_bytes)


def test_close_leaves_nothing_and_late_releases_are_harmless() -> None:
    before = len(os.listdir("/proc/self/fd"))
    pool = BufferPool(2, 4096)
    lease = lease_of(pool, "a", 1)
    view = lease.view(0)
    pool.close()
    pool.close()
    view[0] = 1  # A hung read may still write: its memory is still there.
    lease.release()
    assert not pool.holds_stamp(lease.stamp, lease.slots[0])
    del view
    assert len(os.listdir("/proc/self/fd")) == before


def test_threads_never_share_a_slot() -> None:
    pool = BufferPool(8, 4096)
    clashes: list[int] = []

    def use(seed: int) -> None:
        rng = random.Random(seed)
        for turn in range(150):
            lease = pool.try_lease(f"owner {seed}", rng.randint(1, 5))
            if lease is None:
                continue
            mark = bytes([seed, turn])
            with lease.hold():
                for index in range(len(lease.slots)):
                    lease.view(index)[:2] = mark
                if rng.random() < 0.5:
                    lease.release()
                for index, slot in enumerate(lease.slots):
                    if bytes(lease.view(index)[:2]) != mark:
                        clashes.append(slot)
            lease.release()

    threads = [threading.Thread(target=use, args=(seed,)) for seed in range(1, 7)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    assert clashes == []
    pool.check()
    assert pool.n_free == 8
    pool.close()


def _free_twice(pool: BufferPool, lease: Lease) -> None:
    pool._free.append(pool._free[0])


def _free_while_leased(pool: BufferPool, lease: Lease) -> None:
    pool._free.append(lease.slots[0])


def _lost_slot(pool: BufferPool, lease: Lease) -> None:
    pool._free.pop()


def _foreign_stamp(pool: BufferPool, lease: Lease) -> None:
    pool._stamps[lease.slots[0]] = 77


def _stamped_free_slot(pool: BufferPool, lease: Lease) -> None:
    pool._stamps[pool._free[0]] = lease.stamp


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (_free_twice, "twice in the free list"),
        (_free_while_leased, r"free list|has a stamp"),
        (_lost_slot, "1 slots have no owner"),
        (_foreign_stamp, "has stamp 77"),
        (_stamped_free_slot, "has a stamp"),
    ],
)
def test_check_finds_corruption(pool: BufferPool, spoil: object, message: str) -> None:
    lease = lease_of(pool, "a", 2)
    pool.check()
    assert callable(spoil)
    spoil(pool, lease)
    with pytest.raises(InvariantViolation, match=message):
        pool.check()


class PoolMachine(RuleBasedStateMachine):
    """Against a model: a set of free slots, and leases with their holds."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BufferPool(6, 4096)
        self.leases: list[Lease] = []
        self.holds: list[tuple[tuple[int, ...], object]] = []
        """What each holds, and how to end it."""

    @rule(n_slots=st.integers(0, 6))
    def lease(self, n_slots: int) -> None:
        free = self.pool.n_free
        lease = self.pool.try_lease(f"owner {len(self.leases)}", n_slots)
        assert (lease is not None) == (n_slots <= free)
        if lease is not None:
            self.leases.append(lease)

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def hold(self, data: st.DataObject) -> None:
        lease = data.draw(st.sampled_from(self.leases))
        indexes = st.none() | st.sampled_from(range(len(lease.slots))) if lease.slots else st.none()
        index = data.draw(indexes)
        hold = lease.hold(index)
        hold.__enter__()
        self.holds.append((lease.slots if index is None else (lease.slots[index],), hold))

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        lease = data.draw(st.sampled_from(self.leases))
        lease.release()
        self.leases.remove(lease)

    @precondition(lambda self: self.holds)
    @rule(data=st.data())
    def end_hold(self, data: st.DataObject) -> None:
        index = data.draw(st.integers(0, len(self.holds) - 1))
        _, hold = self.holds.pop(index)
        hold.__exit__(None, None, None)  # type: ignore[attr-defined]

    @invariant()
    def slots_are_accounted_for(self) -> None:
        self.pool.check()
        held = {slot for slots, _ in self.holds for slot in slots}
        owned = held | {slot for lease in self.leases for slot in lease.slots}
        assert self.pool.n_free == 6 - len(owned)

    def teardown(self) -> None:
        for lease in self.leases:
            lease.release()
        for _, hold in self.holds:
            hold.__exit__(None, None, None)  # type: ignore[attr-defined]
        self.pool.check()
        assert self.pool.n_free == 6
        self.pool.close()


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=60, stateful_step_count=30)
