"""A prefill and a decode server, real vLLM: the tokens of vLLM without a connector, on every path."""

from __future__ import annotations

import random
from functools import partial
from pathlib import Path

import pytest
from server_kit import at_once, wait_stored, wait_until

from dualpath.bench.vllm_faults import change_block, cut_block
from dualpath.bench.vllm_server import BLOCK_TOKENS, Answer, VllmPair, VllmServer
from dualpath.vllm import prefill_params


def prompt_of(seed: int | str, n_tokens: int) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(1000) for _ in range(n_tokens)]


def whole_blocks(n_tokens: int) -> int:
    return n_tokens // BLOCK_TOKENS * BLOCK_TOKENS


@pytest.mark.parametrize("plan", ["pe", "de", "split"])
@pytest.mark.parametrize(
    "n_tokens", [50, 127, 128, 129, pytest.param(1000, marks=pytest.mark.smoke), 6000]
)
def test_turns_of_a_session(plain: VllmServer, pair: VllmPair, plan: str, n_tokens: int) -> None:
    """Each turn hits all that the turns before left: prompt and answer, up to the last full block."""
    prompt = prompt_of(f"{plan} {n_tokens}", n_tokens)
    stored = 0
    for turn in range(3):
        want = plain.complete(prompt, 70)
        pe_tokens = {"pe": stored, "de": 0, "split": whole_blocks(stored // 2)}[plan]
        first, answer = pair.complete(prompt, 70, hit_tokens=stored, pe_tokens=pe_tokens)
        assert answer.tokens == want.tokens, (plan, n_tokens, turn)
        assert first.cached == stored
        assert answer.cached == len(prompt) - 1, "the DE computes one token of the prompt"
        stored = whole_blocks(len(prompt) + len(answer.tokens) - 1)
        wait_stored(pair)
        prompt = prompt + answer.tokens + prompt_of(turn, 40)


def test_a_partial_hit(plain: VllmServer, pair: VllmPair) -> None:
    prompt = prompt_of(1, 2000)
    pair.complete(prompt, 4)
    wait_stored(pair)
    other = prompt[:1500] + prompt_of(2, 300)
    want = plain.complete(other, 40)
    first, answer = pair.complete(other, 40, hit_tokens=1920, pe_tokens=1024)
    assert answer.tokens == want.tokens
    assert first.cached == whole_blocks(1500)


@pytest.mark.smoke
@pytest.mark.parametrize("plan", ["pe", "de", "split"])
def test_what_only_the_store_has(plain: VllmServer, pair: VllmPair, plan: str) -> None:
    """The DE's device has nothing of it: what its side read stays in DRAM, the rest comes from the PE."""
    prompt = prompt_of(f"only stored {plan}", 1000)
    pair.pe.complete(prompt, 1)
    wait_stored(pair)
    hit = whole_blocks(len(prompt))
    pe_tokens = {"pe": hit, "de": 0, "split": whole_blocks(hit // 2)}[plan]
    want = plain.complete([*prompt, 7], 40)
    first, answer = pair.complete([*prompt, 7], 40, hit_tokens=hit, pe_tokens=pe_tokens)
    assert answer.tokens == want.tokens
    assert first.cached == hit
    assert answer.cached == len(prompt)


@pytest.mark.parametrize("plan", ["pe", "de", "split"])
def test_a_prompt_of_full_blocks(plain: VllmServer, pair: VllmPair, plan: str) -> None:
    """Stored whole, it needs one token computed by each server."""
    prompt = prompt_of(f"full blocks {plan}", 8 * BLOCK_TOKENS)
    want = plain.complete(prompt, 150)
    pair.pe.complete(prompt, 1)
    wait_stored(pair)
    hit = len(prompt)
    pe_tokens = {"pe": hit, "de": 0, "split": whole_blocks(hit // 2)}[plan]
    for _ in range(2):
        first, answer = pair.complete(prompt, 150, hit_tokens=hit, pe_tokens=pe_tokens)
        assert answer.tokens == want.tokens
        assert first.cached == hit - 1
        wait_stored(pair)


def test_sixteen_at_once(plain: VllmServer, pair: VllmPair) -> None:
    prompts = [prompt_of(100 + n, 90 + 130 * n) for n in range(16)]
    wants = [plain.complete(prompt, 40).tokens for prompt in prompts]
    for plan in (0.0, 1.0):
        hits = [whole_blocks(len(prompt) - 1) for prompt in prompts]
        calls = [
            partial(pair.complete, prompt, 40, hit_tokens=hit, pe_tokens=int(hit * plan))
            for prompt, hit in zip(prompts, hits, strict=True)
        ]
        answers: list[tuple[Answer, Answer]] = at_once(calls)
        assert [each[1].tokens for each in answers] == wants
        wait_stored(pair)
    assert [each[0].cached for each in answers] == hits


def test_one_server_alone(plain: VllmServer, pair: VllmPair) -> None:
    """Without a router's params a server does both, and finds what others stored."""
    prompt = prompt_of(7, 700)
    want = plain.complete(prompt, 200)
    assert pair.de.complete(prompt, 200).tokens == want.tokens
    wait_stored(pair)
    again = pair.pe.complete(prompt + want.tokens, 60)
    assert again.tokens == plain.complete(prompt + want.tokens, 60).tokens
    assert again.cached == whole_blocks(700 + 199)


def test_tenants_share_nothing(pair: VllmPair) -> None:
    prompt = prompt_of(8, 400)
    for salt in ("one", "two"):
        assert pair.pe.complete(prompt, 4, cache_salt=salt).cached == 0
        wait_stored(pair)
        assert pair.pe.complete(prompt, 4, cache_salt=salt).cached == whole_blocks(400)


def test_spoilt_blocks_are_computed(plain: VllmServer, pair: VllmPair, store: Path) -> None:
    """Cut, changed and missing files: the good prefix is used, the rest computed."""
    for seed, spoil in enumerate((cut_block, change_block, Path.unlink)):
        prompt = prompt_of(200 + seed, 1500)
        before = set(store.rglob("*.kv"))
        pair.complete(prompt, 4)
        wait_stored(pair)
        made = sorted(set(store.rglob("*.kv")) - before)
        assert len(made) == 1500 // BLOCK_TOKENS
        for file in made[::2]:
            spoil(file)
        want = plain.complete([*prompt, 5], 30)
        hit = whole_blocks(1500)
        first, answer = pair.complete([*prompt, 5], 30, hit_tokens=hit, pe_tokens=hit // 2)
        assert answer.tokens == want.tokens
        assert first.cached < hit


def test_the_prefill_is_never_fetched(plain: VllmServer, pair: VllmPair) -> None:
    """A client that goes after the prefill: the lease ends, and no slot is lost."""
    prompt = prompt_of(300, 1200)
    params = pair.pe.complete(prompt, 1, _prefill(pair, "left")).params
    assert params is not None
    _wait_slots(pair)
    late = pair.de.complete(prompt, 30, params)
    assert late.tokens == plain.complete(prompt, 30).tokens


def test_aborts_leave_nothing(plain: VllmServer, pair: VllmPair) -> None:
    draw = random.Random(11)
    prompt = prompt_of(400, 3000)

    def one(seed: int) -> None:
        mine = prompt[: draw.randrange(200, 3000)] + prompt_of(seed, 200)
        try:
            server = pair.pe if seed % 2 else pair.de
            params = _prefill(pair, f"abort{seed}") if seed % 2 else None
            server.complete(mine, 1 if seed % 2 else 200, params, timeout_s=draw.uniform(0.02, 0.6))
        except OSError:
            pass  # That is the abort.

    for start in range(0, 48, 8):
        at_once([partial(one, seed) for seed in range(start, start + 8)])
    _wait_slots(pair)
    assert pair.pe.metric("vllm:kv_cache_usage_perc") == 0
    assert pair.de.metric("vllm:kv_cache_usage_perc") == 0
    answer = pair.complete(prompt, 30)[1]
    assert answer.tokens == plain.complete(prompt, 30).tokens


def test_a_lost_prefill_server(
    plain: VllmServer, pair: VllmPair, model: Path, logs: Path, store: Path
) -> None:
    """Killed after its answer: the DE uses what is stored, and computes the rest."""
    connector = {"store": str(store), "buffer_bytes": 128 << 20}
    lost = VllmServer(model, logs / "lost.log", connector=connector).wait_ready()
    try:
        other = VllmPair(lost, pair.de)
        prompt = prompt_of(500, 1000)
        assert other.complete(prompt, 20)[1].tokens == plain.complete(prompt, 20).tokens
        longer = prompt + prompt_of(501, 300)
        params = lost.complete(longer, 1, _prefill(other, "lost")).params
    finally:
        lost.kill()
    answer = pair.de.complete(longer, 20, params)
    assert answer.tokens == plain.complete(longer, 20).tokens
    assert answer.cached >= whole_blocks(1000)


def _prefill(pair: VllmPair, name: str) -> dict[str, object]:
    return prefill_params(name, 1, pair.de.kv_peer, hit_tokens=0, pe_tokens=0)


def _wait_slots(pair: VllmPair) -> None:
    """Until no slot of a buffer is owned; leases end within 5 s."""

    def free() -> bool:
        for server in (pair.pe, pair.de):
            server.complete([1, 2, 3], 2)
        return all(s.metric("vllm:dualpath_slots_in_use") == 0 for s in (pair.pe, pair.de))

    wait_until(free)
