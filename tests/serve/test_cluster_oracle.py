"""The oracle: a server without reads, copies and transfers of KV, which finds what a real one would find."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import pytest
from cluster_kit import BLOCK_TOKENS, Answer, Reference, Served, prompt_of

from dualpath.base.errors import ConfigError
from dualpath.base.ids import RequestId
from dualpath.base.traffic_class import TrafficClass
from dualpath.kv.chain import block_chain, root_key
from dualpath.policy.config import SchedulerKind
from dualpath.serve.config import ServeConfig
from dualpath.traffic import DEVICE, STORE

Serve = Callable[..., Served]

ORACLE = SchedulerKind.ORACLE
BLOCKS = 6
NEW_TOKENS = 20


def stored_files(served: Served) -> list[Path]:
    return sorted(served.store_root.rglob("*.kv"))


async def known(served: Served, tokens: list[int], blocks: int) -> None:
    """Wait until so many leading blocks of these tokens count as stored."""
    catalog, probe = served.cluster.catalog, RequestId("probe")
    assert catalog is not None
    chain = block_chain(root_key(served.cluster.facts.fingerprint, ""), tokens, BLOCK_TOKENS)
    await served.until(lambda: catalog.lookup(chain, probe) == blocks)
    catalog.release(probe)


def moved_bytes(served: Served) -> dict[tuple[str, str], int]:
    """All that any engine's traffic manager moved, by class and kind of peer."""
    moved: dict[tuple[str, str], int] = {}
    for status in served.cluster.driver.roster.statuses.values():
        for key, counts in status.traffic or ():
            peer = key.peer if key.peer in (STORE, DEVICE) else "engine"
            moved[key.traffic_class.value, peer] = (
                moved.get((key.traffic_class.value, peer), 0) + counts.n_bytes
            )
    return moved


def test_it_serves_finds_and_reads_and_moves_no_byte(
    serve: Serve, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        served = serve(scheduler=ORACLE, prefill=2, decode=2)
    assert any("NOT MEANINGFUL" in record.message for record in caplog.records)
    prompt = prompt_of(1, BLOCKS * BLOCK_TOKENS + 3)

    async def turns() -> tuple[Answer, Answer]:
        first = await served.ask(prompt, NEW_TOKENS)
        everything = [*prompt, *first.tokens]
        await known(served, everything, (len(everything) - 1) // BLOCK_TOKENS)
        second = await served.ask([*everything, 1, 2, 3], NEW_TOKENS)
        await served.released()
        roster = served.cluster.driver.roster
        await served.until(lambda: all(s.traffic is not None for s in roster.statuses.values()))
        return first, second

    first, second = served.run(turns())
    for answer in (first, second):
        assert (answer.error, answer.finish_reason) == (None, "length")
        assert len(answer.tokens) == NEW_TOKENS
    assert first.cached_tokens == 0
    hit_blocks = (len(prompt) + NEW_TOKENS - 1) // BLOCK_TOKENS
    assert second.cached_tokens == hit_blocks * BLOCK_TOKENS, "also of what was generated"
    assert stored_files(served) == []
    moved = moved_bytes(served)
    assert {key for key, n_bytes in moved.items() if n_bytes} == {
        (TrafficClass.EXECUTION.value, "engine")
    }
    assert 0 < moved[TrafficClass.EXECUTION.value, "engine"] < 10_000, "messages only"
    for side in ("pe", "de"):
        assert served.metric("kv_read_bytes_total", path=side) == 0
    assert served.metric("kv_written_bytes_total") == 0
    assert served.metric("transfer_bytes_total") == 0
    assert served.metric("oracle") == 1


def test_it_finds_what_a_real_server_stored_and_leaves_it_as_it_is(
    serve: Serve, plain: Reference, tmp_path: Path
) -> None:
    store = str(tmp_path / "shared")
    prompt = prompt_of(2, BLOCKS * BLOCK_TOKENS + 3)
    real = serve(store=store)
    real.run(real.store_prompt(prompt))
    assert real.metric("oracle") == 0
    real.close()
    before = {path: path.read_bytes() for path in stored_files(real)}
    assert len(before) == BLOCKS

    # Room for so few blocks that it would delete real ones, if it could.
    room = 1024 * 1024
    oracle = serve(store=store, scheduler=ORACLE, store_capacity=room)
    block_bytes = oracle.cluster.facts.layout.full_block_bytes

    async def fill() -> int:
        answer = await oracle.ask(prompt, 4)
        assert answer.cached_tokens is not None
        for seed in range(3, 3 + 2 * room // (BLOCKS * block_bytes)):
            await oracle.ask(prompt_of(seed, BLOCKS * BLOCK_TOKENS + 3), 4)
        catalog = oracle.cluster.catalog
        assert catalog is not None
        await oracle.until(lambda: catalog.stats.evicted_blocks > 0)
        return answer.cached_tokens

    assert oracle.run(fill()) == BLOCKS * BLOCK_TOKENS
    oracle.close()
    assert {path: path.read_bytes() for path in stored_files(oracle)} == before

    again = serve(store=store)
    again.run(again.ask_right(prompt))


def test_it_is_not_combined_with_faults_and_never_the_default() -> None:
    assert not ServeConfig(model="tiny").oracle
    with pytest.raises(ConfigError, match="oracle reads and writes no store"):
        ServeConfig(model="tiny", scheduler=ORACLE, store_faults="fault=read:miss:1")
