"""Greedy tokens in float32 are those of plain `transformers` generate, on every path through the engine."""

from __future__ import annotations

import pytest
from engine_kit import Conversation, Loader, Plain, decode_all, random_prompt, run_chunk

from dualpath.engine.prefill import LayerwisePrefill

NEW = 12


@pytest.mark.parametrize("cached", [0, 16, 64, 75], ids=lambda n: f"cached{n}")
def test_prefill_on_a_prefix_and_decode(
    family: str, cached: int, load: Loader, plain: Plain
) -> None:
    loaded, prompt = load(family), random_prompt(1, 80)
    one = Conversation.of(loaded, "r", prompt)
    with LayerwisePrefill(loaded) as engine:
        if cached:
            run_chunk(engine, one, cached)
        result = run_chunk(engine, one)
    assert result.logits is not None
    tokens = decode_all(loaded, [one], [int(result.logits.argmax())], NEW)["r"]
    assert tokens == plain(family).generate(prompt, NEW)


def test_chunked_prefill(family: str, load: Loader, plain: Plain) -> None:
    loaded, prompt = load(family), random_prompt(2, 70)
    one = Conversation.of(loaded, "r", prompt)
    with LayerwisePrefill(loaded) as engine:
        for stop in (1, 7, 32, 33, 69):
            assert run_chunk(engine, one, stop).logits is None
        logits = run_chunk(engine, one).logits
    assert logits is not None
    tokens = decode_all(loaded, [one], [int(logits.argmax())], NEW)["r"]
    assert tokens == plain(family).generate(prompt, NEW)


def test_requests_packed_in_one_batch(family: str, load: Loader, plain: Plain) -> None:
    loaded = load(family)
    lengths, cached = [5, 40, 33, 64], [0, 16, 32, 48]
    many = [
        Conversation.of(loaded, f"r{i}", random_prompt(10 + i, n)) for i, n in enumerate(lengths)
    ]
    with LayerwisePrefill(loaded) as engine:
        for one, stop in zip(many, cached, strict=True):
            if stop:
                run_chunk(engine, one, stop)
        results = engine.run([one.chunk() for one in many])
    first = [int(r.logits.argmax()) for r in results if r.logits is not None]
    tokens = decode_all(loaded, many, first, NEW)
    assert tokens == {one.name: plain(family).generate(one.prompt, NEW) for one in many}


@pytest.mark.parametrize("name", ["tiny", "tiny-mha", "tiny-mla"])
def test_32_requests_decode_together(name: str, load: Loader, plain: Plain) -> None:
    loaded = load(name)
    many = [Conversation.of(loaded, f"r{i}", random_prompt(100 + i, 6 + i)) for i in range(32)]
    with LayerwisePrefill(loaded) as engine:
        results = engine.run([one.chunk() for one in many])
    first = [int(r.logits.argmax()) for r in results if r.logits is not None]
    tokens = decode_all(loaded, many, first, NEW)
    assert tokens == {one.name: plain(name).generate(one.prompt, NEW) for one in many}
