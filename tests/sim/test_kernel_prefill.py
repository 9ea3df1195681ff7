from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_kit import BLOCK, CLUSTER, PREFILL, Kernel, cluster
from msgspec.structs import replace

from dualpath.base.ids import RequestId
from dualpath.policy.quota import AttentionFit, PrefillEntry, largest_that_fits, pack, pairs
from dualpath.sim.kernel.events import HAND_OVER_EVENT, PREFILL_EVENT
from dualpath.sim.kernel.heaps import NONE
from dualpath.sim.kernel.jit import compiled
from dualpath.sim.kernel.prefill import (
    pack_rank,
    prefill_computed,
    prefill_moved,
    start_prefills,
)
from dualpath.sim.kernel.requests import make_due
from dualpath.sim.kernel.state import COPY_IN, COPY_OUT, FLOWS, REMOTE_IN

AGENTS = 6
FIT = AttentionFit(0.01, 0.02, 2e-6, 1e-4)

COSTS = replace(
    PREFILL,
    attention_entry_s=FIT.per_entry_s,
    attention_token_s=FIT.per_token_s,
    attention_pair_s=FIT.per_pair_s,
)
KERNELS = [Kernel.of(cluster(fit=FIT, prefill=COSTS), AGENTS) for _ in range(2)]
"""For all examples of a test, since `queue` writes all that `pack_rank` reads: compiled, and plain."""

_compiled_fits = compiled(largest_that_fits)


def queue(
    kernel: Kernel,
    engine: int,
    entries: list[tuple[int, int]],
    first_slot: int = 0,
    decode: int = 2,
) -> None:
    """Requests with so many cached and new tokens are ready, read on the prefill side, in this order."""
    state, before = kernel.state, NONE
    for slot, (cached, tokens) in enumerate(entries, first_slot):
        each = state.slots[slot]
        each.prompt_tokens = cached + tokens
        each.cached_tokens = each.hit_tokens = cached
        each.output_tokens = 2
        each.prefill, each.decode = engine, decode
        each.next_ready = NONE
        each.record = slot
        state.sides[2 * slot] = (engine, cached, cached, NONE)
        state.sides[2 * slot + 1] = (decode, 0, 0, NONE)
        rank = state.engines[engine]
        if before == NONE:
            rank.ready_head = slot
        else:
            state.slots[before].next_ready = slot
        rank.ready_tail = before = slot
        instance = state.instances[rank.instance]
        instance.ready += 1
        make_due(kernel.handle, rank.instance)


ENTRIES = st.lists(st.tuples(st.integers(0, 900), st.integers(1, 400)), min_size=1, max_size=AGENTS)


@settings(max_examples=60)
@given(
    entries=ENTRIES,
    quota_s=st.floats(0.005, 0.4),
    most=st.integers(BLOCK, 600),
    plain=st.booleans(),
)
def test_a_rank_packs_as_the_policy_does(
    entries: list[tuple[int, int]], quota_s: float, most: int, plain: bool
) -> None:
    kernel = KERNELS[plain]
    p = kernel.state.parameters[0]
    p.quota_s, p.max_batch_tokens = quota_s, most
    queue(kernel, 0, entries)
    expected = pack(
        [PrefillEntry(RequestId(str(n)), *each) for n, each in enumerate(entries)],
        FIT,
        quota_s=quota_s,
        max_batch_tokens=most,
        granule_tokens=BLOCK,
    )
    if plain:
        tokens, copied = vars(pack_rank)["py_func"](kernel.state, 0)
    else:
        tokens, copied = pack_rank(kernel.handle, 0)
    got = [
        (str(slot), int(each.cached_tokens), int(each.batch_tokens))
        for slot, each in enumerate(kernel.state.slots[: kernel.state.engines[0].batch])
    ]
    assert got == [(each.request, each.cached_tokens, each.bsz_tokens) for each in expected.entries]
    assert tokens == expected.tokens
    assert copied == tokens + sum(each.cached_tokens for each in expected.entries)
    costs_s = [FIT.entry_s(each.cached_tokens, each.bsz_tokens) for each in expected.entries]
    assert kernel.state.engines[0].attention_s == pytest.approx(sum(costs_s))


@given(
    cached=st.integers(0, 2000),
    tokens=st.integers(1, 500),
    wanted=st.integers(1, 500),
    spent_s=st.floats(0, 0.5),
)
def test_the_quota_is_the_same_compiled(
    cached: int, tokens: int, wanted: int, spent_s: float
) -> None:
    given = (cached, tokens, min(tokens, wanted), 0.02, 2e-6, 1e-4, spent_s, 0.4, BLOCK)
    assert _compiled_fits(*given) == largest_that_fits(*given)


SPREAD = {"prefill_nodes": 2, "prefill_instance_nodes": 2}
"""Four prefill ranks in one instance on two nodes; the decode ranks are 4 and 5."""


def attention_s(cached: int, tokens: int) -> float:
    return (
        PREFILL.attention_entry_s
        + PREFILL.attention_token_s * tokens
        + PREFILL.attention_pair_s * pairs(cached, tokens)
    )


def step_s(kernel: Kernel) -> float:
    start_prefills(kernel.handle)
    (ends_s,) = kernel.events_s(PREFILL_EVENT)
    return ends_s


def test_a_step_waits_for_its_slowest_rank() -> None:
    kernel = Kernel.of()
    queue(kernel, 0, [(320, 40)], decode=3)
    queue(kernel, 1, [(0, 30), (160, 20)], 1, decode=3)
    slowest_s = max(attention_s(320, 40), attention_s(0, 30) + attention_s(160, 20))
    assert step_s(kernel) == pytest.approx(PREFILL.step_s(slowest_s, 45.0))
    instance = kernel.state.instances[0]
    assert instance.attention_max_s == pytest.approx(slowest_s)
    total_s = attention_s(320, 40) + attention_s(0, 30) + attention_s(160, 20)
    assert instance.attention_mean_s == pytest.approx(total_s / 2)
    assert kernel.state.attention_s[:, 0].sum() == pytest.approx(total_s)


def test_a_step_reads_the_weights_at_least() -> None:
    kernel = Kernel.of()
    queue(kernel, 0, [(16, 1)])
    attention = attention_s(16, 1)
    assert PREFILL.linear_token_s * 0.5 < PREFILL.weights_s
    assert step_s(kernel) == pytest.approx(PREFILL.step_s(attention, 0.5))


def test_without_layerwise_prefill_copies_take_time_of_the_step() -> None:
    kernel = Kernel.of(cluster(layerwise=False))
    queue(kernel, 0, [(320, 40)])
    copies_s = 360 * CLUSTER.kv_bytes_token / CLUSTER.cnic_bytes_s
    assert step_s(kernel) == pytest.approx(PREFILL.step_s(attention_s(320, 40), 20.0) + copies_s)
    assert kernel.next_end_s() == float("inf")


def test_layerwise_prefill_moves_beside_the_step() -> None:
    """Read on the prefill side, on the decode side, and on both."""
    kernel = Kernel.of()
    queue(kernel, 0, [(320, 40), (160, 20), (320, 10)])
    for slot, pe_tokens in ((1, 0), (2, 80)):
        kernel.state.sides[2 * slot].read_tokens = pe_tokens
    start_prefills(kernel.handle)
    flows = {}
    for link in range(len(kernel.state.links)):
        each = kernel.state.links[link]
        flows[link] = each.active, each.finish_sum_bytes / CLUSTER.kv_bytes_token
    first = 2  # After the storage NICs: out and in of each rank.
    expected = {
        # Own hits out of the buffer; computed KV and own hits to the decode engine.
        first: (5, (320 + 80) + (40 + 320) + 20 + (10 + 80)),
        first + 1: (4, (320 + 80) + (160 + 240)),
        first + 4: (2, 160 + 240),
        first + 5: (3, (40 + 320) + 20 + (10 + 80)),
    }
    assert flows == {link: expected.get(link, (0, 0)) for link in flows}
    assert kernel.state.instances[0].transfers == 2 + 2 + 3
    assert set(kernel.ends()) == {
        COPY_IN, COPY_OUT, FLOWS + REMOTE_IN, FLOWS + COPY_OUT,
        2 * FLOWS + COPY_IN, 2 * FLOWS + REMOTE_IN, 2 * FLOWS + COPY_OUT,
    }  # fmt: skip


def test_a_step_ends_when_both_parts_are_done() -> None:
    kernel = Kernel.of()
    queue(kernel, 0, [(320, 40)])
    start_prefills(kernel.handle)
    prefill_computed(kernel.handle, 0)
    assert kernel.state.instances[0].stepping
    prefill_moved(kernel.handle, 0)
    assert kernel.state.instances[0].stepping
    prefill_moved(kernel.handle, 0)
    assert not kernel.state.instances[0].stepping
    assert len(kernel.events_s(HAND_OVER_EVENT)) == 1


def test_the_last_entry_can_be_computed_in_chunks() -> None:
    kernel = Kernel.of(cluster(layerwise=False))
    queue(kernel, 0, [(0, 40), (0, 500)])
    queue(kernel, 1, [(0, 10)], 2)
    chunks = []
    while kernel.state.instances[0].ready:
        start_prefills(kernel.handle)
        chunks.append([int(each.batch_tokens) for each in kernel.state.slots[:2]])
        prefill_computed(kernel.handle, 0)
    assert [second for _, second in chunks] == [208, 256, 36]
    assert chunks[0][0] == 40
    engines = kernel.state.engines[:2]
    assert (engines.ready_head == NONE).all()
    assert (engines.ready_tail == NONE).all()
    assert len(kernel.events_s(HAND_OVER_EVENT)) == 3


def test_a_later_chunk_sends_what_it_computed_and_gets_all_before_it() -> None:
    kernel = Kernel.of()
    queue(kernel, 0, [(320, 400)])
    start_prefills(kernel.handle)
    kernel.ends()
    kernel.state.instances[0].transfers = 0
    prefill_computed(kernel.handle, 0)
    start_prefills(kernel.handle)
    sizes = {
        link: float(kernel.state.links[link].finish_sum_bytes) / CLUSTER.kv_bytes_token
        for link in (2, 3, 6, 7)
    }
    # Of the prefill rank out and in, of the decode rank out and in.
    assert sizes == {2: 320 + 144, 3: 320 + 256, 6: 256, 7: 144}


@pytest.mark.parametrize("isolated", [True, False])
def test_collectives_take_their_share_of_compute_nics(isolated: bool) -> None:
    """The instance spans nodes. With isolation its step takes as long as if there were no KV flows."""
    kernel = Kernel.of(cluster(**SPREAD, isolated=isolated))
    queue(kernel, 0, [(320, 40)], decode=4)
    alone_s = PREFILL.step_s(attention_s(320, 40), 10.0)
    collective_s = PREFILL.collective_s_token * 10.0
    # The step's own flows: hits in from the own buffer and KV out, both on the way out.
    expected_s = alone_s if isolated else alone_s + 2 * collective_s
    assert step_s(kernel) == pytest.approx(expected_s)
    nics = kernel.state.links[3 : 3 + 8]
    assert nics.high_share == pytest.approx(collective_s / expected_s)
    kernel.state.instances[0].transfers = 0
    prefill_computed(kernel.handle, 0)
    assert (kernel.state.links.high_share == 0).all()


def test_collectives_within_a_node_leave_compute_nics_alone() -> None:
    kernel = Kernel.of(cluster(isolated=False))
    queue(kernel, 0, [(320, 40)])
    assert step_s(kernel) == pytest.approx(PREFILL.step_s(attention_s(320, 40), 20.0))
    assert (kernel.state.links.high_share == 0).all()
