"""Prompts that wait for a peer: what is offered, taken, and given back."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from dualpath.base.ids import PAGE_BYTES
from dualpath.kv import BufferPool, Lease
from dualpath.vllm.held_blocks import HeldBlocks
from dualpath.vllm.held_prompts import HeldPrompts, Offer
from dualpath.vllm.peer_messages import OfferedBlock, PairName

NAME = PairName("r", 1)


@pytest.fixture
def pool() -> Iterator[BufferPool]:
    made = BufferPool(8, PAGE_BYTES)
    yield made
    made.check()
    assert made.n_free == 8, "every test gives all slots back"
    made.close()


def lease_of(pool: BufferPool, n_slots: int) -> Lease:
    lease = pool.try_lease("test", n_slots)
    assert lease is not None
    return lease


def test_the_unbroken_run_is_offered(pool: BufferPool) -> None:
    prompts = HeldPrompts(4)
    prompts.begin(NAME)
    lease, other = lease_of(pool, 2), lease_of(pool, 1)
    prompts.add(NAME, range(2), lease, 8)
    prompts.add(NAME, range(3, 4), other, 14)
    first = [OfferedBlock(n, lease.slots[n], lease.stamp) for n in range(2)]
    assert prompts.offer(NAME, 0) == Offer(8, tuple(first))
    assert prompts.offer(NAME, 1) == Offer(8, tuple(first[1:]))
    assert prompts.offer(NAME, 3) == Offer(14, (OfferedBlock(3, other.slots[0], other.stamp),))
    assert prompts.offer(NAME, 2).blocks == ()
    assert prompts.offer(PairName("r", 2), 0) == Offer()
    prompts.drop(NAME)


def test_expiry(pool: BufferPool) -> None:
    prompts = HeldPrompts(4)
    prompts.add(NAME, range(1), lease_of(pool, 1), 4)
    assert prompts.expire(1e9) == []
    prompts.keep_until(NAME, 5.0)
    assert prompts.expire(4.9) == []
    assert prompts.expire(5.0) == [NAME]
    assert NAME not in prompts


def test_a_new_attempt_replaces_the_old(pool: BufferPool) -> None:
    prompts = HeldPrompts(4)
    prompts.add(NAME, range(1), lease_of(pool, 1), 4)
    prompts.begin(NAME)
    assert pool.n_free == 8
    assert prompts.offer(NAME, 0) == Offer()
    prompts.drop(NAME)
    prompts.drop(NAME)


def test_blocks_change_owners(pool: BufferPool) -> None:
    mine, theirs = HeldBlocks(), HeldBlocks()
    theirs.reserve(range(2), lease_of(pool, 2))
    theirs.filled.update({0, 1})
    mine.absorb(theirs)
    theirs.release()
    assert pool.n_free == 6
    prompts = HeldPrompts(4)
    prompts.absorb(NAME, mine, 8)
    mine.release()
    assert pool.n_free == 6
    taken = prompts.take(NAME)
    assert taken is not None
    assert prompts.take(NAME) is None
    assert taken.filled_stop(0) == 2
    taken.release()
