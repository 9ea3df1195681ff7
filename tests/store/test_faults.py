"""Injected faults: the plan's language, and that each fault is what it says."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from dualpath.base.errors import ConfigError
from dualpath.kv import BlockIdentity, BufferPool, block_chain, fingerprint, root_key
from dualpath.store import (
    BlockRead,
    BlockResult,
    BlockWrite,
    DirectoryStore,
    ReadStatus,
    WriteResult,
)
from dualpath.testing import (
    Fault,
    FaultPlan,
    FaultRule,
    FaultyStore,
    MemoryDevice,
    MemoryStore,
    Operation,
    Results,
    wait_until,
    with_faults,
)
from dualpath.testing.store_suite import SUITE_LAYOUT

FP = fingerprint("model", "r1", SUITE_LAYOUT)
SIZE = SUITE_LAYOUT.block_tokens


def chain_of(n_blocks: int) -> list[BlockIdentity]:
    return block_chain(root_key(FP, ""), range(n_blocks * SIZE), SIZE)


@pytest.fixture
def pool() -> Iterator[BufferPool]:
    pool = BufferPool(32, SUITE_LAYOUT.slot_bytes)
    yield pool
    wait_until(lambda: pool.n_free == 32, "slots are held")
    pool.check()
    pool.close()


@pytest.fixture
def faulty(tmp_path: Path) -> Iterator[FaultyStore]:
    store = with_faults(DirectoryStore(tmp_path, FP, SUITE_LAYOUT), "seed=1")
    yield store
    store.close()


def write(
    store: FaultyStore, pool: BufferPool, n: int, deadline_s: float = 30
) -> list[WriteResult]:
    lease = pool.try_lease("writer", n)
    assert lease is not None
    results = Results[WriteResult]()
    writes = [BlockWrite(b, lease.view(i), lease.hold()) for i, b in enumerate(chain_of(n))]
    store.write(writes, deadline_s=deadline_s, done=results)
    written = results.wait(n)
    lease.release()
    return written


def read(store: FaultyStore, pool: BufferPool, n: int, deadline_s: float = 30) -> list[BlockResult]:
    lease = pool.try_lease("reader", n)
    assert lease is not None
    results = Results[BlockResult]()
    reads = [BlockRead(b, lease.view(i), lease.hold()) for i, b in enumerate(chain_of(n))]
    store.read(reads, deadline_s=deadline_s, done=results)
    found = results.wait(n)
    lease.release()
    return found


def test_plan_is_read_and_printed() -> None:
    spec = "fault=read:hang:0.01,read:miss:0.05,write:error:0.1;seed=3;slow_s=0.2;hang_s=60"
    plan = FaultPlan.parse(spec)
    assert plan.rules == (
        FaultRule(Operation.READ, Fault.HANG, 0.01),
        FaultRule(Operation.READ, Fault.MISS, 0.05),
        FaultRule(Operation.WRITE, Fault.ERROR, 0.1),
    )
    assert plan.seed == 3
    assert str(plan) == spec
    assert FaultPlan.parse(str(plan)) == plan


def test_plan_without_a_seed_draws_one_and_prints_it() -> None:
    plan = FaultPlan.parse("fault=read:miss:1")
    assert FaultPlan.parse(str(plan)) == plan
    assert len({FaultPlan().seed for _ in range(4)}) > 1


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("fault=read:miss", "is not operation:fault:rate"),
        ("fault=read:explode:0.1", "explode"),
        ("fault=scan:miss:0.1", "scan"),
        ("fault=read:miss:often", "often"),
        ("fault=read:miss:1.5", "more than 1"),
        ("fault=read:miss:-0.5", "not in"),
        ("fault=read:miss:0.6,read:error:0.6", r"reads add up to 1\.2"),
        ("fault=write:flip:0.1", "a write cannot have the fault flip"),
        ("seed=x", "seed=x"),
        ("speed=3", "no field 'speed'; known: fault, seed"),
    ],
)
def test_bad_plan_is_refused(spec: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        FaultPlan.parse(spec)


@pytest.mark.parametrize(
    ("fault", "status", "detail"),
    [
        ("miss", ReadStatus.MISS, ""),
        ("error", ReadStatus.ERROR, "injected error"),
        ("flip", ReadStatus.CORRUPT, "payload checksum"),
        ("truncate", ReadStatus.CORRUPT, "file bytes"),
        ("slow", ReadStatus.OK, ""),
    ],
)
def test_read_faults(
    fault: str, status: ReadStatus, detail: str, faulty: FaultyStore, pool: BufferPool
) -> None:
    write(faulty, pool, 3)
    faulty.plan = FaultPlan.parse(f"fault=read:{fault}:1;slow_s=0.01;seed=1")
    results = read(faulty, pool, 3)
    assert [result.status for result in results] == [status] * 3
    assert all(detail in result.detail for result in results)
    assert faulty.injected == {f"read:{fault}": 3}


def test_damage_stays_on_the_disk(faulty: FaultyStore, pool: BufferPool) -> None:
    write(faulty, pool, 1)
    faulty.plan = FaultPlan.parse("fault=read:flip:1;seed=1")
    read(faulty, pool, 1)
    faulty.plan = FaultPlan(seed=1)
    assert read(faulty, pool, 1)[0].status is ReadStatus.CORRUPT


def test_damage_of_an_absent_block_is_a_miss(faulty: FaultyStore, pool: BufferPool) -> None:
    faulty.plan = FaultPlan.parse("fault=read:truncate:1;seed=1")
    assert read(faulty, pool, 1)[0].status is ReadStatus.MISS


def test_store_without_files_reports_corruption(pool: BufferPool) -> None:
    inner = MemoryStore(MemoryDevice(), FP, SUITE_LAYOUT)
    store = with_faults(inner, "fault=read:flip:1;seed=1")
    write(store, pool, 1)
    assert read(store, pool, 1)[0].status is ReadStatus.CORRUPT
    store.close()


def test_slow_read_meets_its_deadline(faulty: FaultyStore, pool: BufferPool) -> None:
    write(faulty, pool, 1)
    faulty.plan = FaultPlan.parse("fault=read:slow:1;slow_s=0.6;seed=1")
    assert read(faulty, pool, 1, deadline_s=0.1)[0].status is ReadStatus.TIMEOUT


def test_hung_read_holds_its_memory_until_released(faulty: FaultyStore, pool: BufferPool) -> None:
    write(faulty, pool, 2)
    faulty.plan = FaultPlan.parse("fault=read:hang:1;seed=1")
    results = read(faulty, pool, 2, deadline_s=0.2)
    assert [result.status for result in results] == [ReadStatus.TIMEOUT] * 2
    assert pool.n_free == 30
    faulty.release_hung()
    wait_until(lambda: pool.n_free == 32, "slots are held")


def test_hang_ends_by_itself(faulty: FaultyStore, pool: BufferPool) -> None:
    write(faulty, pool, 1)
    faulty.plan = FaultPlan.parse("fault=read:hang:1;hang_s=0.05;seed=1")
    assert read(faulty, pool, 1)[0].status is ReadStatus.OK


@pytest.mark.parametrize(("fault", "deadline_s"), [("error", 30), ("hang", 0.2), ("slow", 0.1)])
def test_write_faults(fault: str, deadline_s: float, faulty: FaultyStore, pool: BufferPool) -> None:
    faulty.plan = FaultPlan.parse(f"fault=write:{fault}:1;slow_s=0.5;seed=1")
    results = write(faulty, pool, 2, deadline_s)
    assert [result.durable for result in results] == [False, False]
    faulty.release_hung()
    wait_until(lambda: pool.n_free == 32, "slots are held")
    faulty.plan = FaultPlan(seed=1)
    assert [result.status for result in read(faulty, pool, 2)] == [ReadStatus.MISS] * 2


def test_same_seed_same_faults(pool: BufferPool) -> None:
    def statuses(seed: int) -> list[ReadStatus]:
        store = with_faults(
            MemoryStore(MemoryDevice(), FP, SUITE_LAYOUT),
            f"fault=read:error:0.3,read:flip:0.3;seed={seed}",
        )
        found = [read(store, pool, 1)[0].status for _ in range(40)]
        store.close()
        return found

    assert statuses(3) == statuses(3)
    assert statuses(3) != statuses(4)
    assert set(statuses(3)) == {ReadStatus.MISS, ReadStatus.ERROR, ReadStatus.CORRUPT}


def test_close_ends_hangs(tmp_path: Path, pool: BufferPool) -> None:
    store = with_faults(
        DirectoryStore(tmp_path, FP, SUITE_LAYOUT), "fault=read:hang:1;hang_s=3600;seed=1"
    )
    lease = pool.try_lease("reader", 1)
    assert lease is not None
    results = Results[BlockResult]()
    block = BlockRead(chain_of(1)[0], lease.view(0), lease.hold())
    store.read([block], deadline_s=3600, done=results)
    store.close()
    assert len(results.wait(1)) == 1
    lease.release()
