"""Stored blocks that are not what they should be, and a store that fails: right tokens all the same.

One request on an idle engine each time, so that nothing else could wake what should go on (case 23).
"""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from cluster_kit import BLOCK_TOKENS, Reference, Served, prompt_of

from dualpath.kv.chain import Fingerprint, block_chain, root_key
from dualpath.store.block_file import HEADER_BYTES, BlockHeader, decode_header, encode_header
from dualpath.testing.damage import Damage, damage_file

BLOCKS = 12
TOKENS = BLOCKS * BLOCK_TOKENS + 5
STORE_TIMEOUT_S = 1.0


@pytest.fixture(scope="module")
def served(plain: Reference, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    served = Served(
        plain,
        store=str(tmp_path_factory.mktemp("blocks") / "store"),
        store_timeout_s=STORE_TIMEOUT_S,
    )
    served.start()
    # One failure is not yet a failing store, and no pause outlasts a test.
    served.cluster.driver.prefixes.health.first_pause_s = 0.3
    yield served
    assert served.close() == 0


@pytest.fixture(autouse=True)
def all_released(served: Served) -> Iterator[None]:
    yield
    served.run(served.released())


def of_another_model(file: Path) -> None:
    """A whole, sound block, but its header names another fingerprint."""
    data = file.read_bytes()
    header = decode_header(data[:HEADER_BYTES])
    assert isinstance(header, BlockHeader)
    foreign = replace(header, fingerprint=Fingerprint(bytes(32)))
    file.write_bytes(encode_header(foreign) + data[HEADER_BYTES:])


def of_other_tokens(file: Path) -> None:
    """The whole file of another block of the same model (case 2)."""
    other = next(each for each in file.parent.parent.parent.rglob("*.kv") if each != file)
    shutil.copyfile(other, file)


WRONG = {
    "missing": (lambda file: file.unlink(), "block_miss"),
    "truncated": (lambda file: damage_file(file, Damage.TRUNCATE), "block_corrupt"),
    "empty": (lambda file: damage_file(file, Damage.EMPTY), "block_corrupt"),
    "bit of the payload": (lambda file: damage_file(file, Damage.FLIP_PAYLOAD), "block_corrupt"),
    "bit of the header": (lambda file: damage_file(file, Damage.FLIP_HEADER), "block_corrupt"),
    "another model's": (of_another_model, "block_corrupt"),
    "another block's": (of_other_tokens, "block_corrupt"),
}


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("bad", [(0,), (4,), (9,), (11,), (3, 8)], ids=str)
def test_wrong_block_is_computed_again(served: Served, wrong: str, bad: tuple[int, ...]) -> None:
    """The PE reads the first half, the DE the second: the good prefix is used, the rest computed."""
    spoil, cause = WRONG[wrong]
    prompt = prompt_of(100 * list(WRONG).index(wrong) + 13 * len(bad) + sum(bad), TOKENS)

    async def check() -> None:
        files = await served.store_prompt(prompt)
        assert len(files) == BLOCKS
        for block in bad:
            spoil(files[block])
        before, retries = (
            served.load_failures(),
            served.metric("request_retries_total", cause=cause),
        )
        answer = await served.ask_right(prompt)
        assert answer.cached_tokens in [block * BLOCK_TOKENS for block in bad]
        failures = served.load_failures()[cause] - before.get(cause, 0)
        assert 1 <= failures <= len(bad)
        assert served.metric("request_retries_total", cause=cause) - retries == failures
        # The blocks were forgotten, computed, and stored again. Deleting what was forgotten may take
        # a block that was stored again meanwhile: that is a miss once more, and never wrong.
        for _ in range(BLOCKS):
            await served.stored(prompt)
            if (await served.ask_right(prompt)).cached_tokens == BLOCKS * BLOCK_TOKENS:
                break
        else:
            raise AssertionError("the blocks never become whole again")
        assert served.cluster.driver.health().store_up

    served.run(check())


def test_blocks_that_vanish_while_they_are_read(served: Served) -> None:
    """Files of running requests are removed at any time, as a second server's eviction would."""

    async def check() -> None:
        prompts = [prompt_of(1000 + i, TOKENS) for i in range(6)]
        files = [await served.store_prompt(prompt) for prompt in prompts]
        asking = asyncio.gather(*(served.ask_right(prompt) for prompt in prompts for _ in range(2)))
        for block in reversed(range(BLOCKS)):
            for each in files:
                each[block].unlink(missing_ok=True)
            await asyncio.sleep(0.001)
        await asking

    served.run(check())


def test_policy_fail_ends_the_request_and_no_other(served: Served) -> None:
    driver, prompt = served.cluster.driver, prompt_of(2000, TOKENS)

    async def check() -> None:
        files = await served.store_prompt(prompt)
        damage_file(files[5], Damage.FLIP_PAYLOAD)
        recompute = driver.limits
        driver.limits = replace(recompute, recompute_on_load_failure=False)
        try:
            answer = await served.ask(prompt)
        finally:
            driver.limits = recompute
        assert answer.tokens == []
        assert (answer.finish_reason, answer.error_status) == ("error", 500)
        assert answer.error is not None
        assert "stored KV could not be loaded (block_corrupt)" in answer.error
        assert str(files[5]) in answer.error
        # The next one finds the good prefix.
        assert (await served.ask_right(prompt)).cached_tokens == 5 * BLOCK_TOKENS

    served.run(check())


def test_request_that_takes_too_long_ends(served: Served) -> None:
    """The time counts from its arrival, also when tokens come all the while."""
    driver = served.cluster.driver

    async def check() -> None:
        usual = driver.limits
        driver.limits = replace(usual, request_timeout_s=0.5)
        try:
            answer = await served.ask(prompt_of(2500, 40), 5000)
        finally:
            driver.limits = usual
        assert 0 < len(answer.tokens) < 5000
        assert (answer.finish_reason, answer.error_status) == ("error", 504)
        assert answer.error == "not ended within 0.5 s"
        await served.released()

    served.run(check())


def hang(file: Path) -> None:
    """Opening it blocks in the kernel until somebody opens the other end."""
    pipe = file.with_suffix(".pipe")
    os.mkfifo(pipe)
    file.unlink()
    os.link(pipe, file)  # The block that is computed again replaces the file, not the pipe.


def end_hang(file: Path) -> None:
    pipe = file.with_suffix(".pipe")
    try:
        os.close(os.open(pipe, os.O_WRONLY | os.O_NONBLOCK))
    except OSError as error:
        if error.errno != errno.ENXIO:  # Nobody hangs on this one.
            raise
    pipe.unlink()


def test_hung_store_costs_few_deadlines_then_nothing_and_comes_back(served: Served) -> None:
    driver = served.cluster.driver

    async def check() -> None:
        prompts = [prompt_of(3000 + i, TOKENS) for i in range(5)]
        files = [await served.store_prompt(prompt) for prompt in prompts]
        driver.prefixes.health.first_pause_s = 60.0
        for each in files:
            for file in each:
                hang(file)
        slow = await asyncio.gather(*(served.ask_right(prompt) for prompt in prompts[:3]))
        assert [answer.cached_tokens for answer in slow] == [0, 0, 0]
        assert served.load_failures()["store_timeout"] >= 3
        assert served.metric("store_up") == 0
        assert driver.health().store_up is False
        assert driver.health().detail == "serving without the store, which does not answer"
        assert driver.health().ready
        # The circuit is open: nothing is looked up, nobody waits.
        failures = served.load_failures()
        started_s = time.monotonic()
        for prompt in prompts[3:]:
            assert (await served.ask_right(prompt)).cached_tokens == 0
        assert time.monotonic() - started_s < 60 - STORE_TIMEOUT_S
        assert served.load_failures() == failures
        # Back: the next try, due when the pause is over, finds what was computed meanwhile.
        for each in files:
            for file in each:
                end_hang(file)
        driver.prefixes.health._closed_at_s = 0.0
        driver.prefixes.health.first_pause_s = 0.3
        await served.released()
        await served.stored(prompts[4])
        assert (await served.ask_right(prompts[4])).cached_tokens == BLOCKS * BLOCK_TOKENS
        assert served.metric("store_up") == 1
        assert driver.health().detail == "serving"

    served.run(check())


def test_failing_writes_cost_blocks_only(served: Served) -> None:
    """Prompts and answers do not care, and nothing that was not written is ever found (case 1)."""
    root = served.store_root
    prompt = prompt_of(4000, TOKENS)

    async def check() -> None:
        dropped = served.metric("kv_dropped_blocks_total")
        temp, aside = root / "tmp", root / "aside"
        temp.rename(aside)
        temp.write_bytes(b"")  # A file where a directory should be: every write fails.
        try:
            await served.ask_right(prompt, 3 * BLOCK_TOKENS)
            await served.until(
                lambda: served.metric("kv_dropped_blocks_total") == dropped + BLOCKS + 3
            )
            assert (await served.ask_right(prompt)).cached_tokens == 0
        finally:
            temp.unlink()
            aside.rename(temp)
        await served.store_prompt(prompt)
        assert (await served.ask_right(prompt)).cached_tokens == BLOCKS * BLOCK_TOKENS

    served.run(check())


def test_store_directory_deleted_while_running(served: Served) -> None:
    """Everything is computed, nothing stored, until the directory is back."""
    root, aside = served.store_root, served.store_root.with_name("aside")

    async def check() -> None:
        prompt = prompt_of(5000, TOKENS)
        await served.store_prompt(prompt)
        missed = served.load_failures().get("block_miss", 0)
        dropped = served.metric("kv_dropped_blocks_total")
        root.rename(aside)
        try:
            for _ in range(2):
                assert (await served.ask_right(prompt)).cached_tokens == 0
            # Each failed load leaves at most half of the split to the next: 12 blocks, 6, 3, 1, none.
            assert 1 <= served.load_failures()["block_miss"] - missed <= 4
            await served.until(
                lambda: served.metric("kv_dropped_blocks_total") == dropped + 2 * BLOCKS
            )
        finally:
            aside.rename(root)
        await served.store_prompt(prompt)
        assert (await served.ask_right(prompt)).cached_tokens == BLOCKS * BLOCK_TOKENS

    served.run(check())


def test_tenants_share_nothing(served: Served) -> None:
    prompt = prompt_of(6000, TOKENS)

    async def check() -> None:
        await served.store_prompt(prompt, salt="tenant one")
        for salt in ("tenant two", "", "tenant one "):
            assert (await served.ask_right(prompt, salt=salt)).cached_tokens == 0
        own = await served.ask_right(prompt, salt="tenant one")
        assert own.cached_tokens == BLOCKS * BLOCK_TOKENS

    served.run(check())


def test_failed_write_takes_the_key_out_of_the_index(served: Served) -> None:
    """A rewrite of an indexed block fails: its file may be gone, so nothing may find it (case 1)."""
    from dualpath.serve.messages import BlockNotPersisted

    driver, catalog = served.cluster.driver, served.cluster.catalog
    assert catalog is not None
    prompt = prompt_of(7000, TOKENS)

    async def check() -> None:
        await served.store_prompt(prompt)
        chain = block_chain(root_key(served.cluster.facts.fingerprint, ""), prompt, BLOCK_TOKENS)
        engine = next(name for name in driver.roster.engines if name.startswith("de"))
        driver.engine_message(engine, BlockNotPersisted(chain[6].key))
        assert not catalog.contains(chain[6].key)
        assert (await served.ask_right(prompt)).cached_tokens == 6 * BLOCK_TOKENS

    served.run(check())
