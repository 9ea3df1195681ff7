"""Agents of two servers over real sockets: what is staged, handed over and given back."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import msgspec
import pytest
from vllm_kit import FACTS, LAYOUT, SIZE, Rig, kv_of, rig, tokens_of

from dualpath.kv import block_chain, root_key
from dualpath.testing import MemoryDevice, MemoryStore, wait_until, with_faults
from dualpath.transfer import nixl_missing
from dualpath.vllm.block_format import block_fingerprint
from dualpath.vllm.orders import StageOrder
from dualpath.vllm.params import PairParams


@pytest.fixture
def device() -> MemoryDevice:
    return MemoryDevice()


@pytest.fixture
def pe(device: MemoryDevice) -> Iterator[Rig]:
    with rig(device, lease_s=1.0) as made:
        yield made


@pytest.fixture
def de(device: MemoryDevice) -> Iterator[Rig]:
    with rig(device, lease_s=1.0) as made:
        yield made


def persist(at: Rig, tokens: tuple[int, ...], salt: str = "") -> None:
    """Have these tokens' full blocks in the store."""
    before = at.agent.stats.written_blocks
    at.save("writer", tokens, salt=salt)
    at.agent.ended("writer", aborted=False)
    n_blocks = len(tokens) // SIZE
    wait_until(lambda: at.agent.stats.written_blocks == before + n_blocks, "blocks written")


def prefill_pair(de: Rig, *, hit_tokens: int = 0, pe_tokens: int = 0) -> PairParams:
    return PairParams("prefill", "r", 1, de.peer, hit_tokens=hit_tokens, pe_tokens=pe_tokens)


def decode_pair(pe: Rig, prompt_tokens: int) -> PairParams:
    return PairParams("decode", "r", 1, pe.peer, prompt_tokens=prompt_tokens)


def test_nothing_is_stored(pe: Rig) -> None:
    assert pe.staged("a", tokens_of(1, 30)).tokens == 0
    pe.agent.ended("a", aborted=False)
    pe.wait_free()


def test_what_was_saved_is_staged(pe: Rig) -> None:
    """All full blocks, but at least one token is left to compute: the last one of the last block."""
    tokens = tokens_of(1, 8 * SIZE)
    persist(pe, tokens)
    staged = pe.staged("a", tokens)
    assert (staged.tokens, staged.own_tokens, staged.stored_tokens) == (31, 32, 32)
    assert pe.holds("a", staged.serial, tokens, range(8))
    pe.agent.release("a")
    pe.agent.ended("a", aborted=False)
    pe.wait_free()


def test_what_another_server_stored_is_found(pe: Rig, de: Rig) -> None:
    """Neither the catalog nor a hint knows of it: the store is probed, until a block is missing."""
    tokens = tokens_of(1, 13 * SIZE)
    persist(de, tokens)
    staged = pe.staged("a", (*tokens[: 11 * SIZE], 7, 7, 7, 7, 7))
    assert staged.tokens == 11 * SIZE
    assert pe.holds("a", staged.serial, tokens, range(11))


def test_a_hint_that_is_too_long_does_no_harm(pe: Rig, de: Rig) -> None:
    tokens = tokens_of(1, 10 * SIZE)
    persist(pe, tokens[: 4 * SIZE])
    pair = prefill_pair(de, hit_tokens=9 * SIZE, pe_tokens=9 * SIZE)
    assert pe.staged("a", tokens, pair=pair).tokens == 4 * SIZE
    assert pe.agent.stats.failed_reads == 0


def test_staging_starts_behind_what_the_device_has(pe: Rig) -> None:
    tokens = tokens_of(1, 30)
    persist(pe, tokens)
    staged = pe.staged("a", tokens, first_token=3 * SIZE)
    assert (staged.tokens, staged.own_tokens) == (28, 16)
    with pe.agent.staged_slots("a", staged.serial) as slots:
        assert slots is not None
        assert sorted(slots) == [3, 4, 5, 6]


def test_salts_are_apart(pe: Rig) -> None:
    tokens = tokens_of(1, 20)
    persist(pe, tokens, salt="one")
    assert pe.staged("a", tokens, salt="two").tokens == 0
    assert pe.staged("b", tokens, salt="one").tokens == 19


@pytest.mark.parametrize("pe_blocks", [0, 3, 7])
def test_both_sides_read(pe: Rig, de: Rig, pe_blocks: int) -> None:
    """The PE side reads the start, the DE side the rest; the PE gets all, the DE keeps its part."""
    tokens = tokens_of(1, 30)
    persist(pe, tokens)
    pair = prefill_pair(de, hit_tokens=28, pe_tokens=pe_blocks * SIZE)
    staged = pe.staged("a", tokens, pair=pair)
    assert (staged.tokens, staged.own_tokens) == (28, pe_blocks * SIZE)
    assert pe.holds("a", staged.serial, tokens, range(7))
    assert de.agent.stats.read_for_peer_blocks == 7 - pe_blocks
    assert de.pool.geometry.n_slots - de.pool.n_free == 7 - pe_blocks


@pytest.mark.parametrize("pe_blocks", [0, 2, 5])
def test_the_prompt_is_handed_over(pe: Rig, de: Rig, pe_blocks: int) -> None:
    """Also the block that is not full; what the DE read itself does not come again."""
    tokens = tokens_of(1, 30)
    persist(pe, tokens[: 5 * SIZE])
    pair = prefill_pair(de, hit_tokens=5 * SIZE, pe_tokens=pe_blocks * SIZE)
    pe.staged("a", tokens, pair=pair)
    pe.save("a", tokens, first_block=5, known_tokens=30, pair=pair)
    pe.agent.ended("a", aborted=False)

    staged = de.staged("b", tokens, pair=decode_pair(pe, 30))
    assert staged.tokens == 29, "the last token is computed"
    assert staged.stored_tokens == 28
    assert de.holds("b", staged.serial, tokens, range(8))
    assert de.agent.stats.pulled_blocks == 3 + pe_blocks
    pe.wait_free()
    de.agent.release("b")
    de.agent.ended("b", aborted=False)
    de.wait_free()


@pytest.mark.parametrize("pe_blocks", [0, 2, 4])
def test_a_stored_prompt_of_full_blocks_is_handed_over_as_it_was_read(
    pe: Rig, de: Rig, pe_blocks: int
) -> None:
    tokens = tokens_of(1, 5 * SIZE)
    persist(pe, tokens)
    pair = prefill_pair(de, hit_tokens=4 * SIZE, pe_tokens=pe_blocks * SIZE)
    assert pe.staged("a", tokens, pair=pair).tokens == 19
    pe.agent.ended("a", aborted=False)

    staged = de.staged("b", tokens, pair=decode_pair(pe, 20))
    assert (staged.tokens, staged.stored_tokens) == (19, 20)
    assert de.holds("b", staged.serial, tokens, range(5))
    pe.wait_free()


@pytest.mark.skipif(nixl_missing() is not None, reason=nixl_missing() or "")
def test_kv_moves_over_nixl(device: MemoryDevice) -> None:
    """As over TCP: to the PE what the DE read, to the DE the rest."""
    with rig(device, transfer="nixl") as pe, rig(device, transfer="nixl") as de:
        tokens = tokens_of(1, 30)
        persist(pe, tokens[: 5 * SIZE])
        pair = prefill_pair(de, hit_tokens=5 * SIZE, pe_tokens=2 * SIZE)
        first = pe.staged("a", tokens, pair=pair)
        assert pe.holds("a", first.serial, tokens, range(5))
        pe.save("a", tokens, first_block=5, known_tokens=30, pair=pair)
        pe.agent.ended("a", aborted=False)
        second = de.staged("b", tokens, pair=decode_pair(pe, 30))
        assert de.holds("b", second.serial, tokens, range(8))
        assert (pe.agent.stats.pulled_blocks, de.agent.stats.pulled_blocks) == (3, 5)
        pe.wait_free()


def test_a_rank_talks_to_the_same_rank_of_the_peer(device: MemoryDevice) -> None:
    with rig(device, rank=1) as pe, rig(device, rank=1) as de:
        tokens = tokens_of(1, 30)
        persist(pe, tokens[: 5 * SIZE])
        pair = prefill_pair(de, hit_tokens=5 * SIZE, pe_tokens=2 * SIZE)
        assert pe.staged("a", tokens, pair=pair).tokens == 5 * SIZE
        assert de.agent.stats.read_for_peer_blocks == 3
        pe.save("a", tokens, first_block=5, known_tokens=30, pair=pair)
        pe.agent.ended("a", aborted=False)
        assert de.staged("b", tokens, pair=decode_pair(pe, 30)).tokens == 29
        pe.wait_free()


def test_a_prompt_that_nobody_fetches_goes_with_its_lease(pe: Rig, de: Rig) -> None:
    tokens = tokens_of(1, 30)
    pair = prefill_pair(de)
    pe.staged("a", tokens, pair=pair)
    pe.save("a", tokens, known_tokens=30, pair=pair)
    pe.agent.ended("a", aborted=False)
    pe.wait_free()
    assert pe.agent.stats.expired_prompts == 1
    assert de.staged("b", tokens, pair=decode_pair(pe, 30)).tokens == 28, "from the store"


def test_an_aborted_prefill_leaves_nothing(pe: Rig, de: Rig) -> None:
    tokens = tokens_of(1, 30)
    pair = prefill_pair(de)
    pe.staged("a", tokens, pair=pair)
    pe.save("a", tokens, known_tokens=30, persist=False, pair=pair)
    pe.agent.ended("a", aborted=True)
    pe.wait_free()
    assert pe.agent.stats.expired_prompts == 0


def test_a_lost_pe(pe: Rig, de: Rig) -> None:
    """The DE has what is stored."""
    tokens = tokens_of(1, 30)
    persist(pe, tokens[: 3 * SIZE])
    pe.agent.close()
    assert de.staged("b", tokens, pair=decode_pair(pe, 30)).tokens == 3 * SIZE


def test_a_lost_pe_after_both_sides_read(pe: Rig, de: Rig) -> None:
    """What the DE read for the PE stays as it is; only the rest is read."""
    tokens = tokens_of(1, 30)
    persist(pe, tokens[: 5 * SIZE])
    pe.staged("a", tokens, pair=prefill_pair(de, hit_tokens=5 * SIZE, pe_tokens=2 * SIZE))
    assert de.agent.stats.read_blocks == 3
    pe.agent.close()
    staged = de.staged("b", tokens, pair=decode_pair(pe, 30))
    assert staged.tokens == 5 * SIZE
    assert de.holds("b", staged.serial, tokens, range(5))
    assert de.agent.stats.read_blocks == 5


def test_a_lost_de(pe: Rig, de: Rig) -> None:
    """What it should have read, the PE side reads."""
    tokens = tokens_of(1, 30)
    persist(pe, tokens)
    de.agent.close()
    pair = prefill_pair(de, hit_tokens=28, pe_tokens=8)
    staged = pe.staged("a", tokens, pair=pair)
    assert (staged.tokens, staged.own_tokens) == (28, 28)


def test_a_de_that_does_not_answer(device: MemoryDevice, de: Rig) -> None:
    """Alive and silent: at the deadline the own part counts, and the answer, when it comes, is too late."""
    tokens = tokens_of(1, 30)
    with rig(device, stage_deadline_s=0.5, lease_s=0.2) as pe:
        persist(pe, tokens)
        goes_on = threading.Event()
        de.agent._post(lambda: _wait_for(goes_on))
        pair = prefill_pair(de, hit_tokens=28, pe_tokens=8)
        staged = pe.staged("a", tokens, pair=pair)
        assert (staged.tokens, staged.own_tokens) == (8, 8)
        goes_on.set()
        pe.agent.ended("a", aborted=False)
        pe.wait_free()
    de.wait_free()


def test_another_model_gets_nothing(device: MemoryDevice, pe: Rig) -> None:
    tokens = tokens_of(1, 30)
    persist(pe, tokens)
    other = msgspec.structs.replace(FACTS, backend="another layout")
    with rig(device, facts=other) as de:
        pair = prefill_pair(de, hit_tokens=28, pe_tokens=8)
        assert pe.staged("a", tokens, pair=pair).tokens == 8
        pe.save("a", tokens, known_tokens=30, pair=pair)
        assert de.staged("b", tokens, pair=decode_pair(pe, 30)).tokens == 0


def test_another_secret_gets_nothing(device: MemoryDevice, de: Rig) -> None:
    with rig(device, secret=b"0123456789abcdef") as pe:
        tokens = tokens_of(1, 30)
        pe.save("a", tokens, pair=prefill_pair(de), persist=False)
        assert de.staged("b", tokens, pair=decode_pair(pe, 30)).tokens == 0


def test_a_store_that_hangs_is_not_waited_for(device: MemoryDevice) -> None:
    tokens = tokens_of(1, 30)
    with rig(device, stage_deadline_s=0.3) as at:
        persist(at, tokens)
        with device.stalled():
            assert at.staged("a", tokens).tokens == 0
            at.agent.ended("a", aborted=False)
        at.wait_free()
        assert at.staged("b", tokens).tokens == 28


@pytest.mark.parametrize("seed", range(4))
def test_bad_blocks_end_the_prefix(device: MemoryDevice, seed: int) -> None:
    """Whatever reads do, what counts as staged has the right bytes."""
    spec = f"fault=read:miss:0.1,read:flip:0.1,read:error:0.1,write:error:0.1;seed={seed}"
    store = with_faults(MemoryStore(device, block_fingerprint(FACTS), LAYOUT), spec)
    with rig(device, store=store) as at:
        for turn in range(6):
            tokens = tokens_of(turn, 12 * SIZE + 1)
            at.save("w", tokens)
            at.agent.ended("w", aborted=False)
            at.wait_free()
            staged = at.staged("a", tokens)
            assert at.holds("a", staged.serial, tokens, range(staged.tokens // SIZE))
            at.agent.ended("a", aborted=False)
            at.wait_free()


def test_a_full_buffer_drops_saves_and_makes_stagings_wait(device: MemoryDevice) -> None:
    tokens = tokens_of(1, 30)
    with rig(device, n_slots=8) as at:
        persist(at, tokens)
        held = at.pool.try_lease("somebody", 3)
        assert held is not None
        assert at.agent.lease_for_save("x", 6) is None
        wait_until(lambda: at.agent.stats.dropped_saves == 6, "the drop is counted")
        at.reports.clear()
        at.agent.stage(StageOrder("a", 99, tokens, 0, "", None))
        assert at.agent.take_reports() == ()
        held.release()
        wait_until(lambda: bool(at.agent.take_reports()), "the staging goes on")


def test_a_prompt_longer_than_the_buffer(device: MemoryDevice) -> None:
    tokens = tokens_of(1, 30)
    with rig(device) as writer:
        persist(writer, tokens)
        with rig(device, n_slots=4) as at:
            staged = at.staged("a", tokens)
            assert 0 < staged.tokens <= 4 * SIZE
            assert at.holds("a", staged.serial, tokens, range(staged.tokens // SIZE))


def test_a_staging_that_is_not_needed_any_more(pe: Rig) -> None:
    tokens = tokens_of(1, 30)
    persist(pe, tokens)
    staged = pe.staged("a", tokens)
    pe.agent.release("a")
    pe.wait_free()
    with pe.agent.staged_slots("a", staged.serial) as slots:
        assert slots is None


def test_a_staging_that_is_copied_keeps_its_slots(pe: Rig) -> None:
    """The copying thread holds them, whatever happens to the request meanwhile."""
    tokens = tokens_of(1, 30)
    persist(pe, tokens)
    staged = pe.staged("a", tokens)
    with pe.agent.staged_slots("a", staged.serial) as slots:
        assert slots is not None
        pe.agent.ended("a", aborted=True)
        wait_until(lambda: bool(pe.pool.leases) and pe.pool.leases[0].released, "released")
        assert bytes(pe.pool.view(slots[0])[: LAYOUT.full_block_bytes]) == kv_of(tokens, 0)
        assert pe.pool.n_free < pe.pool.geometry.n_slots
    pe.wait_free()


def test_what_is_durable_is_told(pe: Rig) -> None:
    """With what events name: keys, each with the key before it, and tokens."""
    persist(pe, tokens_of(1, 9))
    stored = sorted(pe.agent.take_stored(), key=lambda each: each.tokens)
    root = root_key(block_fingerprint(FACTS), "")
    assert stored == block_chain(root, tokens_of(1, 9), SIZE)
    assert pe.agent.take_stored() == ()


def test_counts_are_taken_once(pe: Rig) -> None:
    persist(pe, tokens_of(1, 9))
    assert pe.agent.stats.taken() == {"saved_blocks": 3, "written_blocks": 2}
    assert pe.agent.stats.taken() == {}


def _wait_for(event: threading.Event) -> None:
    assert event.wait(30)
