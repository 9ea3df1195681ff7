"""Layerwise prefill: right KV handed over, two layers resident, failures kept to their request."""

from __future__ import annotations

from concurrent.futures import Future

import numpy as np
import pytest
import torch
from engine_kit import (
    Conversation,
    FailingSource,
    Loader,
    Plain,
    decode_all,
    random_prompt,
    run_chunk,
)

from dualpath.base.errors import DeadlineExceeded, TransferError
from dualpath.engine.host_blocks import HostBlocks
from dualpath.engine.hostmem import layer_tensor
from dualpath.engine.prefill import LayerwisePrefill


def test_rows_handed_over_are_those_of_a_dynamic_cache(
    family: str, load: Loader, plain: Plain
) -> None:
    loaded, prompt = load(family), random_prompt(3, 50)
    one = Conversation.of(loaded, "r", prompt)
    with LayerwisePrefill(loaded) as engine:
        for stop in (16, 20, None):
            run_chunk(engine, one, stop)
    for layer, expected in enumerate(plain(family).kv_rows(prompt)):
        rows = bytearray(len(prompt) * loaded.layout.row_bytes)
        one.blocks.start_load(layer, memoryview(rows))
        torch.testing.assert_close(
            layer_tensor(memoryview(rows), loaded.layout), expected, rtol=1e-4, atol=1e-4
        )


def test_device_kv_is_two_layers_of_the_batch(load: Loader) -> None:
    loaded = load("tiny")
    one = Conversation.of(loaded, "r", random_prompt(4, 1024))
    with LayerwisePrefill(loaded) as engine:
        run_chunk(engine, one, 512)
        run_chunk(engine, one)
        assert engine.peak_kv_bytes == 2 * 1024 * loaded.layout.row_bytes


class _Journal:
    """A source and sink that write down the order of calls."""

    def __init__(self, blocks: HostBlocks) -> None:
        self.blocks = blocks
        self.calls: list[tuple[str, int]] = []

    def start_load(self, layer: int, into: memoryview) -> Future[int]:
        self.calls.append(("load", layer))
        return self.blocks.start_load(layer, into)

    def hand_over(self, layer: int, first_token: int, rows: memoryview) -> None:
        self.calls.append(("hand over", layer))
        self.blocks.hand_over(layer, first_token, rows)


def test_every_layer_is_loaded_and_handed_over_once_and_in_order(load: Loader) -> None:
    loaded = load("tiny")
    one = Conversation.of(loaded, "r", random_prompt(5, 40))
    with LayerwisePrefill(loaded) as engine:
        run_chunk(engine, one, 16)
        journal = _Journal(one.blocks)
        engine.run([one.chunk(source=journal, sink=journal)])
    layers = list(range(loaded.layout.n_layers))
    assert [layer for kind, layer in journal.calls if kind == "load"] == layers
    assert [layer for kind, layer in journal.calls if kind == "hand over"] == layers
    # Two layers ahead at most: layer i + 2 takes the memory of layer i.
    assert journal.calls[:2] == [("load", 0), ("load", 1)]


@pytest.mark.parametrize("at_once", [True, False], ids=["at once", "in the future"])
@pytest.mark.parametrize("layer", [0, 2, 3])
@pytest.mark.parametrize("name", ["tiny", "tiny-mla"])
def test_a_failed_load_fails_its_request_only(
    name: str, layer: int, at_once: bool, load: Loader, plain: Plain
) -> None:
    loaded = load(name)
    good = Conversation.of(loaded, "good", random_prompt(6, 40))
    bad = Conversation.of(loaded, "bad", random_prompt(7, 40))
    with LayerwisePrefill(loaded) as engine:
        for one in (good, bad):
            run_chunk(engine, one, 32)
        source = FailingSource(bad.blocks, layer, at_once=at_once)
        results = engine.run([bad.chunk(source=source), good.chunk()])
        assert isinstance(results[0].error, TransferError)
        assert results[0].logits is None
        assert results[1].error is None
        assert results[1].logits is not None
        first = int(results[1].logits.argmax())
        assert decode_all(loaded, [good], [first], 6)["good"] == plain(name).generate(
            good.prompt, 6
        )
        # The same engine serves the failed request when its KV is there again.
        again = run_chunk(engine, bad)
    assert again.logits is not None
    first = int(again.logits.argmax())
    assert decode_all(loaded, [bad], [first], 6)["bad"] == plain(name).generate(bad.prompt, 6)


class _FailingSink:
    def __init__(self, layer: int) -> None:
        self.layer = layer
        self.layers: list[int] = []

    def hand_over(self, layer: int, first_token: int, rows: memoryview) -> None:
        self.layers.append(layer)
        if layer == self.layer:
            raise TransferError("the peer is gone")


@pytest.mark.parametrize("layer", [0, 3])
def test_a_failed_hand_over_fails_its_request_only(layer: int, load: Loader, plain: Plain) -> None:
    loaded = load("tiny")
    good = Conversation.of(loaded, "good", random_prompt(8, 24))
    bad = Conversation.of(loaded, "bad", random_prompt(9, 24))
    sink = _FailingSink(layer)
    with LayerwisePrefill(loaded) as engine:
        failed, done = engine.run([bad.chunk(sink=sink), good.chunk()])
    assert isinstance(failed.error, TransferError)
    assert failed.logits is None
    assert sink.layers == list(range(layer + 1))
    assert done.error is None
    assert done.logits is not None
    assert int(done.logits.argmax()) == plain("tiny").generate(good.prompt, 1)[0]


def test_an_abandoned_request_stops_and_the_others_go_on(load: Loader, plain: Plain) -> None:
    loaded = load("tiny")
    good = Conversation.of(loaded, "good", random_prompt(8, 24))
    gone = Conversation.of(loaded, "gone", random_prompt(9, 24))
    journal = _Journal(gone.blocks)
    with LayerwisePrefill(loaded) as engine:
        left, done = engine.run([gone.chunk(sink=journal, abandoned=lambda: True), good.chunk()])
    assert left.abandoned
    assert left.error is None
    assert left.logits is None
    assert journal.calls == []
    assert done.logits is not None
    assert int(done.logits.argmax()) == plain("tiny").generate(good.prompt, 1)[0]


def test_a_batch_of_which_nothing_is_left_ends_early(load: Loader) -> None:
    loaded = load("tiny")
    one = Conversation.of(loaded, "r", random_prompt(8, 40))
    with LayerwisePrefill(loaded) as engine:
        run_chunk(engine, one, 16)
        source = FailingSource(one.blocks, 1, at_once=False)
        journal = _Journal(one.blocks)
        (result,) = engine.run([one.chunk(source=source, sink=journal)])
    assert isinstance(result.error, TransferError)
    assert journal.calls in ([], [("hand over", 0)])


class _HangingSource:
    """Its loads never end by themselves; later they may still write."""

    def __init__(self) -> None:
        self.into: list[memoryview] = []

    def start_load(self, layer: int, into: memoryview) -> Future[int]:
        self.into.append(into)
        return Future()


def test_a_load_that_never_ends_fails_its_request_and_its_memory_is_left_alone(
    load: Loader, plain: Plain
) -> None:
    loaded = load("tiny")
    good = Conversation.of(loaded, "good", random_prompt(8, 40))
    hung = Conversation.of(loaded, "hung", random_prompt(9, 40))
    source = _HangingSource()
    with LayerwisePrefill(loaded, load_deadline_s=0.05) as engine:
        run_chunk(engine, good, 16)
        hung.cached = 16
        failed, done = engine.run([hung.chunk(source=source), good.chunk()])
        assert isinstance(failed.error, DeadlineExceeded)
        assert done.logits is not None
        assert int(done.logits.argmax()) == plain("tiny").generate(good.prompt, 1)[0]
        # The late write goes into memory that is no longer the engine's.
        for into in source.into:
            np.frombuffer(into, dtype=np.uint8)[:] = 0xFF
        (again,) = engine.run([good.chunk()])
    assert again.logits is not None
    np.testing.assert_allclose(again.logits, done.logits, rtol=1e-4, atol=1e-4)


class _BrokenSource:
    def start_load(self, layer: int, into: memoryview) -> Future[int]:
        raise KeyError("a bug")


def test_a_bug_of_a_source_is_not_a_failed_request(load: Loader) -> None:
    loaded = load("tiny")
    one = Conversation.of(loaded, "r", random_prompt(8, 40))
    one.cached = 16
    with LayerwisePrefill(loaded) as engine, pytest.raises(KeyError, match="a bug"):
        engine.run([one.chunk(source=_BrokenSource())])


def test_load_wait_is_reported(load: Loader) -> None:
    loaded = load("tiny")
    one = Conversation.of(loaded, "r", random_prompt(8, 40))
    with LayerwisePrefill(loaded) as engine:
        run_chunk(engine, one, 16)
        result = run_chunk(engine, one)
    assert result.load_wait_s >= 0
    assert 0 < result.attention_s < result.compute_s


def test_an_empty_batch(load: Loader) -> None:
    with LayerwisePrefill(load("tiny")) as engine:
        assert engine.run([]) == []
