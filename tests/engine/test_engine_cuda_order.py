"""Which work waits for which on CUDA: the real buffers on stand-ins for streams and events.

A stand-in stream is a list of operations, each with those that it must wait for. What the GPU may overlap
follows from that alone; that CUDA runs it so is not tested here.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from dualpath.engine import buffers
from dualpath.engine.buffers import CudaLayerBuffers
from dualpath.kv.layout import KVLayout, RowPart

LAYERS = 6
CACHED, NEW = 3, 2
LAYOUT = KVLayout("gqa", LAYERS, 4, (RowPart("key", 1, 2), RowPart("value", 1, 2)), "float32", 4)


@dataclass(eq=False)
class Work:
    name: str
    waits_for: list[Work]

    def before(self) -> set[str]:
        """The names of all that has ended when this begins."""
        found: set[str] = set()
        todo = list(self.waits_for)
        while todo:
            work = todo.pop()
            if work.name not in found:
                found.add(work.name)
                todo += work.waits_for
        return found


@dataclass(eq=False)
class Stream:
    last: Work | None = None
    barriers: list[Work] = field(default_factory=list)

    def run(self, name: str) -> Work:
        before = [*self.barriers, *([self.last] if self.last else [])]
        self.last, self.barriers = Work(name, before), []
        return self.last

    def wait_event(self, event: Event) -> None:
        if event.at is not None:
            self.barriers.append(event.at)

    def wait_stream(self, other: Stream) -> None:
        if other.last is not None:
            self.barriers.append(other.last)


class Event:
    def __init__(self) -> None:
        self.at: Work | None = None
        self.waited: list[Work | None] = []

    def record(self, stream: Stream) -> None:
        self.at = stream.last

    def synchronize(self) -> None:
        self.waited.append(self.at)


class Device:
    """`torch`, with streams that are lists and memory that is the host's."""

    def __init__(self) -> None:
        self.compute = Stream()
        self.naming = ""
        self.cuda = self

    def Stream(self, device: object) -> Stream:  # noqa: N802
        return Stream()

    def Event(self) -> Event:  # noqa: N802
        return Event()

    def current_stream(self, device: object) -> Stream:
        return self.compute

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        stream.run(self.naming)
        yield

    def zeros(self, shape: Any, **options: Any) -> torch.Tensor:
        options.pop("pin_memory", None)
        return torch.zeros(shape, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def run_layers(monkeypatch: pytest.MonkeyPatch) -> dict[str, Work]:
    """A prefill batch as `LayerwisePrefill` drives it; everything that ran, by name."""
    device = Device()
    monkeypatch.setattr(buffers, "torch", device)
    made = CudaLayerBuffers(LAYOUT, CACHED + NEW, torch.device("cpu"))
    works: dict[str, Work] = {}

    def note(stream: Stream) -> None:
        assert stream.last is not None
        works[stream.last.name] = stream.last

    for layer in range(2):
        made.before_load(layer)
    for layer in range(LAYERS):
        device.naming = f"in {layer}"
        made.loaded(layer, 0, CACHED)
        note(made._copies_in)
        works[f"rows {layer}"] = device.compute.run(f"rows {layer}")
        device.naming = f"out {layer}"
        made.computed(layer, CACHED, CACHED + NEW)
        note(made._copies_out)
        works[f"attend {layer}"] = device.compute.run(f"attend {layer}")
        if layer + 2 < LAYERS:
            made.before_load(layer + 2)
    return works


def test_computing_waits_for_the_copy_of_its_own_layer_and_of_no_later_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    works = run_layers(monkeypatch)
    for layer in range(LAYERS):
        before = works[f"attend {layer}"].before()
        assert f"in {layer}" in before
        assert not before & {f"in {later}" for later in range(layer + 1, LAYERS)}
        assert not {name for name in before if name.startswith("out")}


def test_the_next_layer_is_copied_while_this_one_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    works = run_layers(monkeypatch)
    for layer in range(1, LAYERS):
        before = works[f"in {layer}"].before()
        assert f"rows {layer - 1}" not in before
        assert f"attend {layer - 1}" not in before
        assert not {name for name in before if name.startswith("out")}


def test_no_rows_are_overwritten_that_attention_still_reads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    works = run_layers(monkeypatch)
    for layer in range(2, LAYERS):
        assert f"attend {layer - 2}" in works[f"in {layer}"].before()
    for layer in range(LAYERS):
        assert f"rows {layer}" in works[f"out {layer}"].before()
