"""Continuous batching: joining and leaving, the token budget, block export, and how texts end."""

from __future__ import annotations

import pytest
from engine_kit import Conversation, Loader, Plain, greedy, random_prompt, run_chunk

from dualpath.base.errors import InvariantViolation
from dualpath.engine.decode import DecodeEngine
from dualpath.engine.host_blocks import HostBlocks
from dualpath.engine.model import LoadedModel
from dualpath.engine.prefill import LayerwisePrefill
from dualpath.engine.sampling import FinishReason, SamplingParams


def computed(loaded: LoadedModel, name: str, prompt: list[int]) -> tuple[Conversation, int]:
    """A request whose prompt is computed, and its first token."""
    one = Conversation.of(loaded, name, prompt)
    with LayerwisePrefill(loaded) as engine:
        logits = run_chunk(engine, one).logits
    assert logits is not None
    return one, int(logits.argmax())


def join(engine: DecodeEngine, one: Conversation, first: int, params: SamplingParams) -> None:
    engine.join(
        one.name, [*one.prompt, first], one.blocks.blocks, params, prompt_tokens=len(one.prompt)
    )


def test_requests_join_and_leave_between_steps(load: Loader, plain: Plain) -> None:
    loaded = load("tiny")
    a, first_a = computed(loaded, "a", random_prompt(1, 20))
    b, first_b = computed(loaded, "b", random_prompt(2, 35))
    engine = DecodeEngine(loaded, hbm_tokens=200)
    assert engine.reserve("a", 30)
    assert engine.reserve("b", 45)
    out = {"a": [first_a], "b": [first_b]}
    join(engine, a, first_a, greedy(10))
    for step in range(12):
        if step == 3:
            join(engine, b, first_b, greedy(6))
        for token in engine.step():
            out[token.name].append(token.token)
            if token.finish_reason:
                assert token.finish_reason is FinishReason.LENGTH
                engine.remove(token.name)
    assert out == {
        "a": plain("tiny").generate(a.prompt, 10),
        "b": plain("tiny").generate(b.prompt, 6),
    }
    assert engine.running == 0
    assert engine.free_tokens == 200


def test_a_request_continues_on_another_engine(load: Loader, plain: Plain) -> None:
    """Prompt plus what was generated is the new prompt; nothing else is carried over."""
    loaded, prompt = load("tiny"), random_prompt(3, 20)
    expected = plain("tiny").generate(prompt, 12)
    one, first = computed(loaded, "r", prompt + expected[:5])
    assert first == expected[5]
    engine = DecodeEngine(loaded, hbm_tokens=64)
    engine.reserve("r", 40)
    engine.join("r", [*one.prompt, first], one.blocks.blocks, greedy(12), prompt_tokens=len(prompt))
    tokens = []
    while engine.running:
        tokens += engine.step()
    assert [t.token for t in tokens] == expected[6:]
    assert tokens[-1].finish_reason is FinishReason.LENGTH


def test_full_blocks_of_generated_tokens_are_those_of_a_prefill(load: Loader) -> None:
    loaded = load("tiny-mla")
    size = loaded.layout.block_tokens
    one, first = computed(loaded, "r", random_prompt(4, 10))
    engine = DecodeEngine(loaded, hbm_tokens=64)
    engine.reserve("r", 10 + 30)
    join(engine, one, first, greedy(30))
    while engine.running:
        engine.step()
    tokens = engine.tokens("r")
    assert engine.kv_tokens("r") == len(tokens) - 1 == 39
    exported = HostBlocks.allocate(loaded.layout, 2 * size)
    for index, block in enumerate(exported.blocks):
        engine.copy_block("r", index * size, block)
    whole = Conversation.of(loaded, "whole", tokens[: 2 * size])
    with LayerwisePrefill(loaded) as prefill:
        run_chunk(prefill, whole)
    for got, expected in zip(exported.blocks, whole.blocks.blocks, strict=True):
        a, b = (memoryview(x).cast("f").tolist() for x in (got, expected))
        assert a == pytest.approx(b, rel=1e-4, abs=1e-4)
    with pytest.raises(ValueError, match="KV of 39 tokens"):
        engine.copy_block("r", 2 * size, exported.blocks[0])
    with pytest.raises(ValueError, match="not the block"):
        engine.copy_block("r", 3, exported.blocks[0])


def test_the_budget_is_never_exceeded(load: Loader) -> None:
    engine = DecodeEngine(load("tiny"), hbm_tokens=100)
    assert engine.reserve("a", 60)
    assert not engine.reserve("b", 41)
    assert engine.free_tokens == 40
    assert engine.reserve("b", 40)
    assert engine.free_tokens == 0
    with pytest.raises(InvariantViolation, match="twice"):
        engine.reserve("a", 1)
    engine.remove("a")
    engine.remove("a")
    assert engine.free_tokens == 60


def test_joining_needs_a_reservation_and_all_blocks(load: Loader) -> None:
    loaded = load("tiny")
    one, first = computed(loaded, "r", random_prompt(5, 20))
    engine = DecodeEngine(loaded, hbm_tokens=100)
    with pytest.raises(InvariantViolation, match="0 reserved"):
        join(engine, one, first, greedy(4))
    engine.reserve("r", 24)
    with pytest.raises(ValueError, match="1 blocks for 20 tokens"):
        engine.join("r", [*one.prompt, first], one.blocks.blocks[:1], greedy(4), prompt_tokens=20)
    join(engine, one, first, greedy(4))
    with pytest.raises(InvariantViolation, match="joins with"):
        join(engine, one, first, greedy(4))


def test_growing_beyond_the_reservation_is_a_bug(load: Loader) -> None:
    loaded = load("tiny")
    one, first = computed(loaded, "r", random_prompt(5, 20))
    engine = DecodeEngine(loaded, hbm_tokens=100)
    engine.reserve("r", 21)
    join(engine, one, first, greedy(10))
    engine.step()
    with pytest.raises(InvariantViolation, match="outgrew"):
        engine.step()


def test_a_text_ends_at_a_stop_token_and_keeps_its_memory(load: Loader, plain: Plain) -> None:
    loaded, prompt = load("tiny"), random_prompt(6, 20)
    expected = plain("tiny").generate(prompt, 12)
    stop = next(t for t in expected[1:] if t != expected[0])
    until = expected.index(stop)
    one, first = computed(loaded, "r", prompt)
    engine = DecodeEngine(loaded, hbm_tokens=100)
    engine.reserve("r", 40)
    join(engine, one, first, SamplingParams(temperature=0, max_tokens=20, eos_tokens=(stop,)))
    tokens = []
    while engine.running:
        tokens += engine.step()
    assert [t.token for t in tokens] == expected[1 : until + 1]
    assert tokens[-1].finish_reason is FinishReason.STOP
    assert engine.step() == []
    assert engine.free_tokens == 60
    assert engine.kv_tokens("r") == 20 + until
    engine.remove("r")
    assert engine.free_tokens == 100
    with pytest.raises(ValueError, match="not in the decode batch"):
        engine.kv_tokens("r")


def test_sampled_requests_do_not_depend_on_their_company(load: Loader) -> None:
    loaded = load("tiny")
    params = SamplingParams(temperature=1.0, top_p=0.9, seed=7, max_tokens=10, logprobs=2)

    def run(company: int) -> list[tuple[int, int]]:
        engine = DecodeEngine(loaded, hbm_tokens=1000)
        for i in range(company):
            other, token = computed(loaded, f"o{i}", random_prompt(50 + i, 9 + i))
            engine.reserve(other.name, 40)
            join(engine, other, token, greedy(20))
        one, first = computed(loaded, "r", random_prompt(7, 20))
        engine.reserve("r", 40)
        join(engine, one, first, params)
        found = []
        for _ in range(9):
            for t in engine.step():
                if t.name == "r":
                    assert t.logprobs is not None
                    assert len(t.logprobs.top) == 2
                    found.append((t.token, t.logprobs.token))
        return found

    alone = run(0)
    assert len(alone) == 9
    assert all(token == reported for token, reported in alone)
    assert run(3) == alone


def test_step_limit_takes_those_that_joined_first(load: Loader) -> None:
    loaded = load("tiny")
    engine = DecodeEngine(loaded, hbm_tokens=100)
    for name in ("a", "b"):
        one, first = computed(loaded, name, random_prompt(8, 10))
        engine.reserve(name, 20)
        join(engine, one, first, greedy(5))
    assert [t.name for t in engine.step(limit=1)] == ["a"]
    assert [t.name for t in engine.step()] == ["a", "b"]
