"""Reads of one engine that share its NIC, and reads that are served one after the other."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from dualpath.policy.config import PolicyConfig, ReadPlanKind
from dualpath.policy.quota import AttentionFit
from dualpath.sim.cluster import Cluster
from dualpath.sim.costs import DecodeCosts, PrefillCosts
from dualpath.sim.simulation import Simulation
from dualpath.sim.workload import Workload, offline
from dualpath.traces import AppendPrompt, Session, Trace, Turn

AGENTS = 4
TOKENS = 1024
READ_S = 2.0
"""Of one agent's stored tokens, alone on a NIC."""

CLUSTER = Cluster(
    prefill_nodes=1,
    decode_nodes=1,
    gpus=1,
    prefill_instance_nodes=1,
    decode_instance_nodes=1,
    kv_bytes_token=1000,
    layers=1,
    prefill=PrefillCosts(
        attention_entry_s=0.0,
        attention_token_s=0.0,
        attention_pair_s=0.0,
        linear_token_s=0.0,
        weights_s=0.0,
        collective_s_token=0.0,
        base_s=0.001,
    ),
    decode=DecodeCosts(
        base_s=0.001, sequence_s=0.0, linear_sequence_s=0.0, weights_s=0.0, context_token_s=0.0
    ),
    fit=AttentionFit(0.0, 0.0, 0.0),
    snic_bytes_s=TOKENS * 1000 / READ_S,
    cnic_bytes_s=1e12,
    prefill_room_tokens=1 << 30,
    decode_buffer_tokens=1 << 30,
    decode_hbm_tokens=1 << 30,
)


def work() -> Workload:
    """All agents start at once and read the same number of tokens."""
    session = Session("a", (Turn(AppendPrompt(TOKENS + 1), 2),))
    made = offline(Trace("t", "trajectories", (session,) * AGENTS), AGENTS)
    return dataclasses.replace(made, reused_tokens=np.full(AGENTS, TOKENS, np.int32))


def read_s(side: ReadPlanKind, *, in_order: bool) -> list[float]:
    """When the reads of each agent were complete."""
    policy = PolicyConfig(block_tokens=16, read_plan=side)
    cluster = dataclasses.replace(CLUSTER, reads_in_order=in_order)
    outcome = Simulation(cluster, policy, work()).run()
    assert outcome.unfinished_agents == 0
    return [float(each) for each in outcome.records.read_s]


@pytest.mark.parametrize("side", [ReadPlanKind.PE, ReadPlanKind.DE])
def test_shared_reads_end_together(side: ReadPlanKind) -> None:
    assert read_s(side, in_order=False) == pytest.approx([AGENTS * READ_S] * AGENTS, rel=1e-5)


@pytest.mark.parametrize("side", [ReadPlanKind.PE, ReadPlanKind.DE])
def test_reads_in_order_end_one_after_the_other(side: ReadPlanKind) -> None:
    expected = [READ_S * (agent + 1) for agent in range(AGENTS)]
    assert read_s(side, in_order=True) == pytest.approx(expected, rel=1e-5)


def test_both_sides_have_an_order_of_their_own() -> None:
    expected = [READ_S / 2 * (agent + 1) for agent in range(AGENTS)]
    assert read_s(ReadPlanKind.SPLIT, in_order=True) == pytest.approx(expected, rel=1e-5)
