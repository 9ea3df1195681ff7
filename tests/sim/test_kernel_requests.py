from __future__ import annotations

from dataclasses import replace as changed
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_kit import BLOCK, CLUSTER, DECODE, POLICY, PREFILL, cluster, many, work
from msgspec.structs import replace

from dualpath.policy.config import PolicyConfig, ReadPlanKind, SchedulerKind
from dualpath.policy.quota import pairs
from dualpath.sim.cluster import Cluster
from dualpath.sim.outcome import Outcome
from dualpath.sim.simulation import Simulation

TURNS = [(150, 3, 0.0), (50, 4, 0.7)]
HIT, NEW, PROMPT, OUTPUT = 144, 59, 203, 4
"""Of the second turn: 153 tokens are known, nine blocks."""
ONE = cluster(gpus=1, fetch_s=0.0)
"""An engine a node, fetching at once."""
PE_READS = replace(POLICY, read_plan=ReadPlanKind.PE)

BYTES = CLUSTER.kv_bytes_token
READ_S = CLUSTER.read_latency_s + HIT * BYTES / CLUSTER.snic_bytes_s
COMPUTE_S = PREFILL.step_s(
    PREFILL.attention_entry_s
    + PREFILL.attention_token_s * NEW
    + PREFILL.attention_pair_s * pairs(HIT, NEW),
    NEW,
)
SUBMIT_S = 13 * CLUSTER.layers * CLUSTER.submit_s
HAND_OVER_S = PROMPT * BYTES / CLUSTER.cnic_bytes_s
DECODE_S = [DECODE.step_s(1, 1, PROMPT + n) for n in (1, 2, 3)]


def second_turn(cluster: Cluster, policy: PolicyConfig = PE_READS) -> dict[str, float]:
    """Its times, from its arrival on."""
    record = Simulation(cluster, policy, work(TURNS)).run().records[1]
    names = ("assigned", "read", "prefill", "first_token", "second_token", "finished")
    return {name: float(record[f"{name}_s"] - record.arrived_s) for name in names}


def timeline(**parts: float) -> dict[str, float]:
    """Times from how long each part takes after the one before; those that are not named take no time."""
    names = ("assigned", "read", "prefill", "first_token", "second_token", "finished")
    ends = np.cumsum([parts.get(name, 0.0) for name in names])
    return dict(zip(names, ends.tolist(), strict=True))


EXPECTED = {
    "read": READ_S,
    "first_token": COMPUTE_S,
    "second_token": SUBMIT_S + HAND_OVER_S + DECODE_S[0],
    "finished": DECODE_S[1] + DECODE_S[2],
}


def test_the_times_of_a_request_that_the_prefill_side_reads() -> None:
    assert second_turn(ONE) == pytest.approx(timeline(**EXPECTED), abs=1e-6)


def test_the_times_of_a_request_that_the_decode_side_reads() -> None:
    times = second_turn(ONE, replace(POLICY, read_plan=ReadPlanKind.DE))
    assert times == pytest.approx(timeline(**EXPECTED), abs=1e-6)


def test_the_times_of_a_request_that_both_sides_read() -> None:
    """Five of nine blocks on one of them."""
    read_s = CLUSTER.read_latency_s + 5 * BLOCK * BYTES / CLUSTER.snic_bytes_s
    times = second_turn(ONE, replace(POLICY, read_plan=ReadPlanKind.SPLIT))
    assert times == pytest.approx(timeline(**EXPECTED | {"read": read_s}), abs=1e-6)


def test_slow_compute_nics_make_a_layerwise_step_wait() -> None:
    """Out go the hits, once to the own device, and with the new KV to the decode engine."""
    rate = 100_000.0
    moved_s = (2 * HIT + NEW) * BYTES / rate
    assert moved_s > COMPUTE_S
    hand_over_s = PROMPT * BYTES / rate
    expected = timeline(
        **EXPECTED | {"first_token": moved_s, "second_token": SUBMIT_S + hand_over_s + DECODE_S[0]}
    )
    assert second_turn(cluster(gpus=1, fetch_s=0.0, cnic_bytes_s=rate)) == pytest.approx(
        expected, abs=2e-5
    )


def test_a_memory_can_be_the_slowest_link() -> None:
    rate = 50_000.0
    times = second_turn(cluster(gpus=1, fetch_s=0.0, memory_bytes_s=rate))
    read_s = CLUSTER.read_latency_s + HIT * BYTES / rate
    assert times["read"] == pytest.approx(read_s, abs=1e-4)


def test_without_layerwise_prefill_the_step_copies() -> None:
    copies_s = (HIT + NEW) * BYTES / CLUSTER.cnic_bytes_s
    expected = timeline(**EXPECTED | {"first_token": COMPUTE_S + copies_s})
    times = second_turn(cluster(gpus=1, fetch_s=0.0, layerwise=False))
    assert times == pytest.approx(expected, abs=1e-6)


def test_the_front_end_takes_its_time_of_every_request() -> None:
    """The scheduler hears of a request later than the agent asked."""
    front_end_s = 0.25
    slower = cluster(gpus=1, fetch_s=0.0, front_end_s=front_end_s)
    expected = timeline(**EXPECTED | {"assigned": front_end_s})
    assert second_turn(slower) == pytest.approx(expected, abs=1e-6)
    first, _ = Simulation(slower, PE_READS, work(TURNS)).run().records
    assert first.arrived_s == 0.0
    assert first.assigned_s == front_end_s


def test_a_bypass_reads_and_moves_nothing() -> None:
    oracle = replace(POLICY, scheduler=SchedulerKind.ORACLE)
    simulation = Simulation(ONE, oracle, work(TURNS))
    record = simulation.run().records[1]
    assert record.read_s == record.arrived_s
    assert record.first_token_s - record.arrived_s == pytest.approx(COMPUTE_S)
    assert record.second_token_s - record.first_token_s == pytest.approx(DECODE_S[0])
    assert simulation._state.links.served_bytes.sum() == 0


def test_one_token_is_all_from_prefill() -> None:
    record = Simulation(ONE, PE_READS, work([(150, 1, 0.0)])).run().records[0]
    assert record.finished_s == record.first_token_s > 0
    assert record.second_token_s == 0


def test_all_that_is_planned_is_read() -> None:
    outcome = Simulation(CLUSTER, POLICY, many(12, 5, seed=3)).run()
    hit_bytes = int(outcome.records.hit_tokens.sum()) * CLUSTER.kv_bytes_token
    assert outcome.read_bytes.sum() == pytest.approx(hit_bytes, rel=1e-6)
    assert outcome.snic_bytes.sum() == pytest.approx(hit_bytes, rel=1e-6)


def test_nothing_is_left_when_all_agents_have_ended() -> None:
    simulation = Simulation(CLUSTER, POLICY, many(12, 5, seed=4))
    simulation.run()
    state = simulation._state
    for name in ("requests", "tokens", "used_tokens", "context_tokens", "batch"):
        assert (state.engines[name] == 0).all(), name
    assert (state.engines.free_hbm_tokens[2:] == CLUSTER.decode_hbm_tokens).all()
    assert (state.nodes.waiting_tokens == 0).all()
    assert (state.links.active == 0).all()
    assert (state.flow_left == 0).all()
    assert state.clock[0].live == 0
    assert state.clock[0].heap_size == 0


@settings(max_examples=25)
@given(
    seed=st.integers(0, 10_000),
    room=st.sampled_from([1, 60, 500]),
    buffer=st.sampled_from([1, 100, 500]),
    layerwise=st.booleans(),
    in_order=st.booleans(),
    plan=st.sampled_from(ReadPlanKind),
)
def test_every_request_is_admitted_in_the_end(
    seed: int, room: int, buffer: int, layerwise: bool, in_order: bool, plan: ReadPlanKind
) -> None:
    """Also if no buffer holds even one of them; prompts of one block and answers of one token among them."""
    tight = cluster(
        prefill_room_tokens=room,
        decode_buffer_tokens=buffer,
        decode_hbm_tokens=700,
        layerwise=layerwise,
        reads_in_order=in_order,
    )
    asked = many(20, 3, seed)
    outcome = Simulation(tight, replace(POLICY, read_plan=plan), asked).run()
    check_complete(outcome, asked.requests)


def check_complete(outcome: Outcome, requests: int) -> None:
    """All came to their end, in the order of a request's life."""
    assert outcome.unfinished_agents == 0
    assert len(outcome.records) == requests
    records = outcome.records
    marks = ("arrived", "assigned", "read", "prefill", "first_token", "finished")
    for before, after in pairwise(marks):
        assert (records[f"{before}_s"] <= records[f"{after}_s"]).all(), f"{before}, {after}"
    second = records[records.output_tokens > 1]
    assert (second.first_token_s < second.second_token_s).all()
    assert (second.second_token_s <= second.finished_s).all()


def test_a_buffer_holds_what_just_fits() -> None:
    """Of three equal requests at once; the others are read when one of them leaves."""
    new = work(*[[(PROMPT, OUTPUT, 0.0)]] * 3)
    three = changed(new, reused_tokens=np.full(3, HIT, np.int32))
    for room, read_at_once in ((2 * HIT, 2), (2 * HIT - 1, 1), (3 * HIT, 3)):
        one = cluster(gpus=1, fetch_s=0.0, prefill_room_tokens=room)
        records = Simulation(one, PE_READS, three).run().records
        assert (records.assigned_s == 0).all()
        first_s = records.first_token_s.min()
        assert (records.read_s <= first_s).sum() == read_at_once, room


def test_reads_in_order_do_not_share_the_nic() -> None:
    """Two requests of equal length on one engine: the first is read as if it were alone."""
    two = work(TURNS, TURNS, starts_s=[0.0, 0.0])
    ends = []
    for in_order in (True, False):
        one = cluster(gpus=1, fetch_s=0.0, reads_in_order=in_order)
        outcome = Simulation(one, PE_READS, two).run()
        records = outcome.records[outcome.records.turn == 1]
        assert np.ptp(records.arrived_s) < HIT * BYTES / CLUSTER.snic_bytes_s
        ends.append(np.sort(records.read_s - records.assigned_s))
    assert ends[0][0] == pytest.approx(READ_S)
    assert ends[1][0] > READ_S + 0.1


def test_a_first_round_is_one_token_and_known_afterwards() -> None:
    outcome = Simulation(ONE, PE_READS, work(TURNS, first_round_tokens=33)).run()
    rows = outcome.records[["turn", "prompt_tokens", "hit_tokens", "output_tokens"]].tolist()
    assert rows == [(-1, 33, 0, 1), (0, 183, 32, 3), (1, 236, 176, 4)]
