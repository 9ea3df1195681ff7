"""What the driver is made of: requests, the roster of engines, the stored prefix, the store's health."""

from __future__ import annotations

import pytest

from dualpath.base.errors import InvariantViolation
from dualpath.base.ids import EngineId, GroupId, RequestId, Role
from dualpath.engine.sampling import SamplingParams
from dualpath.kv.chain import block_chain, root_key
from dualpath.kv.index import TrieIndex
from dualpath.kv.layout import KVLayout, RowPart
from dualpath.monitor.metrics import Metrics
from dualpath.policy.events import Assign, EngineReport, GroupFetched, ReadPlan
from dualpath.serve.generation import (
    GenerationRequest,
    GenerationUpdate,
    Placement,
    RequestTimings,
)
from dualpath.serve.load_gate import LoadGate
from dualpath.serve.messages import EngineStatus, FailureCause, Hello, Name, PrefillTimes, Tokens
from dualpath.serve.request_state import RequestState, failure_update
from dualpath.serve.roster import EngineRoster
from dualpath.serve.store_health import StoreHealth
from dualpath.serve.stored_prefixes import StoredPrefixes
from dualpath.store.catalog import Catalog
from dualpath.testing import MemoryDevice, MemoryStore

REQUEST = RequestId("r")
FINGERPRINT = b"f" * 32
LAYOUT = KVLayout(
    kind="gqa",
    n_layers=1,
    block_tokens=4,
    parts=(RowPart("key", 1, 8), RowPart("value", 1, 8)),
    dtype="float32",
    item_bytes=4,
)


def state_of(prompt: list[int], max_new_tokens: int = 8) -> RequestState:
    request = GenerationRequest(
        request_id=REQUEST,
        token_ids=prompt,
        sampling=SamplingParams(),
        cache_salt="",
        arrival_s=0.0,
    )
    return RequestState(request=request, arrived_s=1.0, max_new_tokens=max_new_tokens)


def tokens(position: int, *ids: int, finish_reason: str | None = None) -> Tokens:
    return Tokens(name=Name(REQUEST, 0), position=position, tokens=ids, finish_reason=finish_reason)


def updates_of(state: RequestState) -> list[GenerationUpdate]:
    return [state.updates.get_nowait() for _ in range(state.updates.qsize())]


def test_the_first_token_counts_once_whoever_sends_it_first() -> None:
    state = state_of([1, 2, 3])
    state.assigned(Assign(REQUEST, 0, EngineId("pe"), EngineId("de"), ReadPlan(64, 128)), 1.5)
    first = Tokens(
        name=Name(REQUEST, 0),
        position=0,
        tokens=(7,),
        prefill=PrefillTimes(reserved_s=0.1, read_s=0.4, started_s=0.5, finished_s=2.0),
    )
    state.take_tokens(first, 4.0)
    state.take_tokens(first, 4.0)
    state.take_tokens(tokens(1, 8), 4.0)
    state.take_tokens(tokens(2, 9, finish_reason="length"), 4.0)
    assert state.output == [7, 8, 9]
    assert state.prompt == [1, 2, 3, 7, 8, 9]
    assert state.left_tokens == 5
    got = updates_of(state)
    assert [update.token_ids for update in got] == [[7], [8], [9]]
    assert [update.finish_reason for update in got] == [None, None, "length"]
    assert (got[0].cached_tokens, got[0].cached_by_path) == (192, {"pe": 64, "de": 128})
    assert got[0].timings == RequestTimings(
        prepare_s=1.0,
        scheduling_s=0.5,
        retry_s=0.0,
        allocation_s=0.1,
        read_s=pytest.approx(0.3),
        wait_s=pytest.approx(0.1),
        prefill_s=1.5,
        delivery_s=0.5,
    )
    assert got[0].placement == Placement(attempt=1, prefill_engine="pe", decode_engine="de")
    assert [(update.cached_tokens, update.timings, update.placement) for update in got[1:]] == [
        (None, None, None)
    ] * 2
    assert state.ended


def test_what_failed_attempts_took_is_a_part_of_the_time_to_the_first_token() -> None:
    state = state_of([1, 2, 3])
    plan = ReadPlan(0, 0)
    state.assigned(Assign(REQUEST, 0, EngineId("pe0"), EngineId("de"), plan), 1.5)
    state.attempt = 1
    state.assigned(Assign(REQUEST, 1, EngineId("pe1"), EngineId("de"), plan), 5.5)
    times = PrefillTimes(reserved_s=0.25, read_s=0.25, started_s=0.5, finished_s=2.0)
    state.take_tokens(Tokens(name=Name(REQUEST, 1), position=0, tokens=(7,), prefill=times), 8.0)
    state.attempt = 2
    state.assigned(Assign(REQUEST, 2, EngineId("pe1"), EngineId("de1"), plan), 9.0)
    state.take_tokens(Tokens(name=Name(REQUEST, 2), position=1, tokens=(8,), prefill=times), 12.0)
    first, second = updates_of(state)
    assert first.timings == RequestTimings(
        prepare_s=1.0,
        scheduling_s=0.5,
        retry_s=4.0,
        allocation_s=0.25,
        read_s=0.0,
        wait_s=0.25,
        prefill_s=1.5,
        delivery_s=0.5,
    )
    assert first.timings.total_s == 8.0
    assert first.placement == Placement(attempt=2, prefill_engine="pe1", decode_engine="de")
    assert second.timings is None
    assert second.placement == Placement(attempt=3, prefill_engine="pe1", decode_engine="de1")


def test_a_token_that_comes_farther_makes_its_delivery_longer() -> None:
    timings = RequestTimings(
        prepare_s=1.0,
        scheduling_s=0.5,
        retry_s=0.0,
        allocation_s=0.25,
        read_s=0.0,
        wait_s=0.25,
        prefill_s=1.5,
        delivery_s=0.5,
    )
    assert timings.total_s == 4.0
    later = timings.delivered_after(4.75)
    assert (later.delivery_s, later.total_s) == (1.25, 4.75)


def test_a_gap_in_the_tokens_is_a_bug() -> None:
    state = state_of([1])
    with pytest.raises(InvariantViolation, match="position 1"):
        state.take_tokens(tokens(1, 5), 4.0)


def test_a_request_ends_once() -> None:
    state = state_of([1])
    state.end(failure_update("first", status=503, code="no_engine"))
    state.end(failure_update("second"))
    state.take_tokens(tokens(0, 5), 4.0)
    (update,) = updates_of(state)
    assert (update.error, update.error_status, update.error_code) == ("first", 503, "no_engine")


def test_only_failures_of_engines_wait_before_the_next_attempt() -> None:
    state = state_of([1])
    assert state.retry_delay_s(FailureCause.BLOCK_MISS) == 0
    assert state.retry_delay_s(FailureCause.ENGINE_LOST) == 0
    delays = [state.retry_delay_s(FailureCause.PEER_LOST) for _ in range(9)]
    assert delays == [0, 0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 2.0, 2.0]


def hello_of(name: str, group: str, role: Role = Role.PREFILL) -> Hello:
    return Hello(
        engine=EngineId(name),
        group=GroupId(group),
        role=role,
        address=f"at {name}",
        buffer_tokens=1000,
        hbm_tokens=0,
    )


def status_of(tokens: int, read_queue_tokens: int = 0, read_bytes: int = 0) -> EngineStatus:
    return EngineStatus(
        seen=3,
        requests=2,
        tokens=tokens,
        free_hbm_tokens=5,
        read_queue_tokens=read_queue_tokens,
        pool_slots=8,
        pool_free_slots=8,
        hbm_tokens=0,
        running=0,
        busy_s=0.0,
        flops=0.0,
        bubble_s=0.0,
        loads=0,
        late_loads=0,
        fragmentation=0.0,
        read_bytes=read_bytes,
        pulled_bytes=0,
        written_bytes=0,
        dropped_blocks=0,
    )


def test_a_group_fetches_when_all_its_members_have_reported() -> None:
    roster = EngineRoster()
    node, pe0, pe1 = GroupId("node"), EngineId("pe0"), EngineId("pe1")
    roster.join(hello_of("pe0", "node"), 0.0)
    roster.join(hello_of("pe1", "node"), 0.0)
    roster.heard(pe0, 1.0, status_of(10, read_queue_tokens=64))
    assert roster.fetch(node, 1.0) is None
    roster.heard(pe1, 1.0, status_of(20, read_queue_tokens=128))
    assert roster.fetch(node, 1.5) == GroupFetched(
        node, (EngineReport(pe0, 3, 2, 10, 5), EngineReport(pe1, 3, 2, 20, 5)), 192, 1.5
    )
    assert roster.read_queues == {node: 192}
    # Something said without a report keeps the last one; a member that left is not waited for.
    roster.heard(pe0, 2.0, None)
    assert roster.statuses[pe0].tokens == 10
    left = roster.leave(pe1)
    assert left is not None
    assert left.role is Role.PREFILL
    assert roster.leave(pe1) is None
    assert roster.fetch(node, 2.0) == GroupFetched(node, (EngineReport(pe0, 3, 2, 10, 5),), 64, 2.0)


def test_groups_with_less_to_do_fetch_first() -> None:
    roster = EngineRoster()
    for engine, group in (("pe0", "a"), ("pe1", "a"), ("pe2", "b"), ("pe3", "c"), ("pe4", "d")):
        roster.join(hello_of(engine, group), 0.0)
    assert roster.by_load == ["a", "b", "c", "d"]
    for engine, tokens in (("pe0", 10), ("pe1", 30), ("pe2", 25), ("pe3", 19), ("pe4", 20)):
        roster.heard(EngineId(engine), 1.0, status_of(tokens))
    assert roster.by_load == ["c", "a", "d", "b"]


def test_an_engine_that_is_silent_gets_nothing() -> None:
    roster = EngineRoster()
    roster.join(hello_of("de0", "node", Role.DECODE), 0.0)
    roster.heard(EngineId("de0"), 1.0, status_of(0))
    assert roster.fetch(GroupId("node"), 2.9) is not None
    assert roster.fetch(GroupId("node"), 3.1) is None
    assert roster.silent(20.0, now_s=20.9) == []
    assert roster.silent(20.0, now_s=21.1) == [EngineId("de0")]
    assert (roster.count(Role.DECODE), roster.count(Role.PREFILL)) == (1, 0)


def test_read_bandwidth_is_compared_with_the_best_so_far() -> None:
    roster = EngineRoster()
    node, pe0 = GroupId("node"), EngineId("pe0")
    roster.join(hello_of("pe0", "node"), 0.0)
    assert roster.read_utilization(0.0) == {}
    shares = []
    for at_s, read_bytes in ((1.0, 100), (2.0, 500), (3.0, 600), (4.0, 600), (5.0, 50), (6.0, 450)):
        roster.heard(pe0, at_s, status_of(0, read_bytes=read_bytes))
        shares.append(roster.read_utilization(at_s)[node])
    assert shares == [1.0, 1.0, 0.25, 0.0, 0.0, 1.0]


def test_reads_are_counted_from_report_to_report() -> None:
    roster = EngineRoster()
    pe0 = EngineId("pe0")
    roster.join(hello_of("pe0", "node"), 0.0)
    counted = []
    for read_bytes in (100, 100, 350):
        status = status_of(0, read_bytes=read_bytes)
        counted.append(roster.newly_read_bytes(pe0, status))
        roster.heard(pe0, 1.0, status)
    assert counted == [100, 0, 250]


def prefixes_with(prompt: list[int], blocks: int) -> tuple[StoredPrefixes, Catalog]:
    """A store that has the first blocks, of 4 tokens, of a prompt."""
    catalog = Catalog(MemoryStore(MemoryDevice(), FINGERPRINT, LAYOUT), TrieIndex(), 2**20)
    prefixes = StoredPrefixes(catalog, FINGERPRINT, 4, Metrics())
    for block in block_chain(prefixes.root(""), prompt, 4)[:blocks]:
        prefixes.persisted(block.key, block.parent, 4096)
    return prefixes, catalog


def test_a_stored_prefix_is_pinned_until_it_is_released() -> None:
    prompt = list(range(16))
    prefixes, catalog = prefixes_with(prompt, 3)
    assert prefixes.root("") == root_key(FINGERPRINT, "")
    assert prefixes.pin(REQUEST, "", prompt[:15], 0.0) == 12
    assert catalog.stats.pinned_requests == 1
    assert prefixes.pin(REQUEST, "another tenant", prompt[:15], 0.0) == 0
    assert prefixes.pin(REQUEST, "", prompt[:7], 0.0) == 4
    prefixes.release(REQUEST)
    prefixes.release(REQUEST)
    assert catalog.stats.pinned_requests == 0


def test_bad_blocks_and_failed_writes_leave_the_index() -> None:
    prompt = list(range(16))
    prefixes, _ = prefixes_with(prompt, 4)
    chain = block_chain(prefixes.root(""), prompt, 4)
    prefixes.forget([chain[2].key])
    assert prefixes.pin(REQUEST, "", prompt, 0.0) == 8
    prefixes.not_persisted(chain[1].key)
    assert prefixes.pin(REQUEST, "", prompt, 0.0) == 4
    prefixes.not_persisted(chain[1].key)  # Not there any more: nothing happens.
    assert prefixes.pin(REQUEST, "", prompt, 0.0) == 4


def test_nothing_is_found_while_the_store_fails() -> None:
    prompt = list(range(16))
    prefixes, _ = prefixes_with(prompt, 4)
    assert prefixes.store_up
    for _ in range(3):
        prefixes.failed("hung", 10.0)
    assert prefixes.store_up is False
    assert prefixes.pin(REQUEST, "", prompt, 10.0) == 0
    prefixes.answered()
    assert prefixes.store_up
    assert prefixes.pin(REQUEST, "", prompt, 10.0) == 16


def test_without_a_store_nothing_is_ever_found() -> None:
    prefixes = StoredPrefixes(None, FINGERPRINT, 4, Metrics())
    assert prefixes.store_up is None
    assert prefixes.pin(REQUEST, "", list(range(16)), 0.0) == 0
    prefixes.release(REQUEST)
    prefixes.observe()


def test_the_circuit_opens_after_failures_in_a_row_and_tries_again_after_a_pause() -> None:
    health = StoreHealth(failures_to_open=3, first_pause_s=5.0, longest_pause_s=12.0)
    assert [health.failed(0.0), health.failed(0.0)] == [False, False]
    assert not health.succeeded()
    assert [health.failed(0.0), health.failed(0.0), health.failed(1.0)] == [False, False, True]
    assert not health.up
    assert not health.usable(5.9)
    assert health.usable(6.0)  # One request tries,
    assert not health.usable(6.0)  # and no other meanwhile.
    assert not health.failed(6.5)
    assert not health.usable(16.4)  # The pause has doubled,
    assert health.usable(16.5)
    assert not health.failed(17.0)
    assert health.usable(29.0)  # up to a limit.
    assert health.succeeded()
    assert health.up
    assert health.usable(29.0)


def test_a_hit_is_loaded_unless_computing_was_measured_to_be_clearly_faster() -> None:
    """A disk hit that takes 40 s where computing takes 0.9 s."""
    gate = LoadGate(margin=2.0, probe_s=10.0)
    assert gate.worth_loading(8192, 0.0)  # Nothing is known yet.
    gate.computed(8192, 0.9)
    assert gate.worth_loading(8192, 0.0)
    gate.loaded(8192, 40.0)
    assert gate.worth_loading(8192, 1.0)  # One request in a while tries all the same.
    assert not gate.worth_loading(8192, 1.0)
    assert not gate.worth_loading(8192, 10.9)
    assert gate.worth_loading(64, 10.9)  # 0.3 s at most: too little to matter.
    assert gate.worth_loading(8192, 11.0)
    for _ in range(20):
        gate.loaded(8192, 0.5)
    assert gate.worth_loading(8192, 11.0)
    assert gate.worth_loading(8192, 11.0)


def test_loading_that_is_a_little_slower_than_computing_is_still_loading() -> None:
    """It keeps the engines free for others."""
    gate = LoadGate(margin=2.0)
    gate.computed(8192, 1.0)
    gate.loaded(8192, 1.9)
    assert all(gate.worth_loading(8192, 0.0) for _ in range(3))
    gate.loaded(8192, 100.0)
    assert [gate.worth_loading(8192, 0.0) for _ in range(2)] == [True, False]


def test_small_measurements_say_nothing() -> None:
    gate = LoadGate()
    gate.loaded(255, 100.0)
    gate.computed(255, 0.001)
    assert (gate.load_rate, gate.compute_rate) == (None, None)


def test_a_hit_that_is_not_worth_loading_is_not_pinned() -> None:
    prompt = list(range(1024))
    prefixes, catalog = prefixes_with(prompt, 256)
    prefixes.gate.computed(1024, 0.01)
    prefixes.gate.loaded(1024, 10.0)
    assert prefixes.pin(REQUEST, "", prompt, 0.0) == 1024  # The probe.
    prefixes.release(REQUEST)
    assert prefixes.pin(REQUEST, "", prompt, 0.0) == 0
    assert catalog.stats.pinned_requests == 0
