"""Any list of spans is moved exactly, by every kind of endpoint, and nothing else is touched."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from channel_factories import AutoFactory, MemoryFactory, NixlFactory, ShmFactory, TcpFactory
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transfer_kit import LATER_S, NAME, SECRET, Heard, filled_pool

from dualpath.base.ids import EngineId, KiB
from dualpath.kv import BufferPool
from dualpath.testing.channel_peer import ChannelFactory
from dualpath.transfer import Channel, RemoteSpan, nixl_missing

SLOTS = 3
SLOT_BYTES = 128 * KiB
GUARD = b"\xa5" * 16


@dataclass
class Subject:
    channel: Channel
    pool: BufferPool
    stamp: int


@pytest.fixture(params=[TcpFactory, ShmFactory, AutoFactory, MemoryFactory, NixlFactory])
def subject(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Subject]:
    missing = nixl_missing()
    if request.param is NixlFactory and missing is not None:
        pytest.skip(missing)
    monkeypatch.setenv("UCX_NET_DEVICES", "lo")
    factory: ChannelFactory = request.param()
    pool, stamp = filled_pool(SLOTS, SLOT_BYTES, seed=50)
    owner = factory.open(EngineId("owner"), pool, SECRET, Heard().events)
    puller = factory.open(EngineId("puller"), pool, SECRET, Heard().events)
    channel = puller.connect(owner.address, EngineId("owner"), deadline_s=LATER_S)
    yield Subject(channel, pool, stamp)
    puller.close()
    owner.close()
    pool.close()


@st.composite
def span_lists(draw: st.DrawFn) -> list[RemoteSpan]:
    spans = []
    for _ in range(draw(st.integers(0, 40))):
        offset = draw(st.integers(0, SLOT_BYTES))
        length = draw(st.integers(0, min(SLOT_BYTES - offset, draw(st.sampled_from([8, 70_000])))))
        following = spans and draw(st.booleans())
        last = spans[-1] if following else None
        if last is not None and last.offset + last.length + length <= SLOT_BYTES:
            spans.append(RemoteSpan(last.slot, last.offset + last.length, length))
        else:
            spans.append(RemoteSpan(draw(st.integers(0, SLOTS - 1)), offset, length))
    return spans


@settings(
    max_examples=60,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(spans=span_lists())
def test_any_list_of_spans_is_moved_exactly(subject: Subject, spans: list[RemoteSpan]) -> None:
    total = sum(span.length for span in spans)
    memory = bytearray(GUARD * (len(spans) + 1) + bytes(total))
    expected = bytearray()
    into = []
    position = 0
    for span in spans:
        position += len(GUARD)
        into.append(memoryview(memory)[position : position + span.length])
        position += span.length
        content = subject.pool.view(span.slot)[span.offset : span.offset + span.length]
        expected += GUARD + bytes(content)
    position = 0
    for span in spans:
        memory[position : position + len(GUARD)] = GUARD
        position += len(GUARD) + span.length
    memory[position:] = GUARD
    pull = subject.channel.pull(NAME, subject.stamp, spans, into, deadline_s=LATER_S)
    assert pull.result(LATER_S) == total
    assert memory == expected + GUARD
