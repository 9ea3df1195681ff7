"""A kernel's state at the start of a run, from a cluster, a workload and the policy's batch rules."""

from __future__ import annotations

import math

import numpy as np

from dualpath.policy.config import PolicyConfig
from dualpath.sim.cluster import Cluster
from dualpath.sim.kernel.events import ARRIVAL_EVENT, event_key
from dualpath.sim.kernel.heaps import EVENT, NONE, PAIRING
from dualpath.sim.kernel.jit import Ints, Records
from dualpath.sim.kernel.state import (
    CLOCK,
    DONE,
    ENGINE,
    FLOWS,
    INSTANCE,
    LINK,
    NODE,
    PARAMETERS,
    PARTS,
    RECORD,
    SIDE,
    SLOT,
    State,
    blank,
    nothing,
)
from dualpath.sim.workload import Workload

__all__ = ["make_state"]

_ENTRIES = 3
"""In the log, that one event may need for each agent: it can end the read, the prefill and the request."""
_BETWEEN = 16_384
"""Entries in the log after which `advance` returns; more save calls and cost memory."""


def make_state(
    cluster: Cluster, policy: PolicyConfig, work: Workload, *, window_s: float, windows: int
) -> State:
    """All agents wait for their start; nothing has happened. Storage NICs are the first links and the
    series."""
    agents, parts = work.agents, work.agents * FLOWS * PARTS
    links = _links(cluster)
    instances = _instances(cluster)
    clock = blank(1, CLOCK)
    clock[0].unfinished_agents = agents
    clock[0].log_full = _BETWEEN
    slots = blank(agents, SLOT)
    slots.trajectory = work.trajectory
    slots.first_round_tokens = work.first_round_tokens
    slots.turn = work.first_turn[work.trajectory] - (work.first_round_tokens > 0)
    # A slot waits for its next request, for reads of both sides, or for its copy to the device.
    heap = 2 * agents + len(instances)
    places = 1 << (len(links) - 1).bit_length()
    state = State(
        clock=clock,
        parameters=_parameters(cluster, policy, window_s),
        links=links,
        nodes=_nodes(cluster),
        engines=_engines(cluster),
        instances=instances,
        slots=slots,
        sides=blank(2 * agents, SIDE),
        records=blank(work.requests, RECORD),
        log=blank(_BETWEEN + _ENTRIES * agents, DONE),
        heap=blank(heap, EVENT),
        link_end_s=np.full(places, math.inf),
        link_winners=_winners(places),
        flow_left=np.zeros(agents * FLOWS, np.int64),
        parts=blank(parts, PAIRING),
        ends=blank(agents, PAIRING),
        due=nothing(len(instances)),
        series_bytes=np.zeros((cluster.nodes, windows)),
        attention_s=np.zeros((cluster.prefill_nodes * cluster.gpus, windows)),
        prompt_tokens=work.prompt_tokens.astype(np.int64),
        reused_tokens=work.reused_tokens.astype(np.int64),
        output_tokens=work.output_tokens.astype(np.int64),
        delay_s=work.delay_s,
        first_turn=work.first_turn,
        start_s=work.start_s,
    )
    # Starts are in order, and so a heap.
    starts = state.heap[:agents]
    starts.time_s = work.start_s + cluster.front_end_s
    starts.key = [event_key(ARRIVAL_EVENT, each) for each in range(agents)]
    starts.index = np.arange(agents)
    clock[0].heap_size = clock[0].pushed = agents
    return state


def _winners(places: int) -> Ints:
    """Of a tournament in which all times are equal: the lowest place wins."""
    winners = np.arange(2 * places) - places
    for at in range(places - 1, 0, -1):
        winners[at] = winners[2 * at]
    return winners


def _parameters(cluster: Cluster, policy: PolicyConfig, window_s: float) -> Records:
    parameters = blank(1, PARAMETERS)
    p = parameters[0]
    for name in (
        "kv_bytes_token",
        "layers",
        "layerwise",
        "isolated",
        "read_latency_s",
        "submit_s",
        "front_end_s",
    ):
        p[name] = getattr(cluster, name)
    p.reads_in_order = cluster.reads_in_order
    p.block_tokens = policy.block_tokens
    p.quota_s, p.max_batch_tokens = policy.quota_s, policy.max_batch_tokens
    fit, prefill, decode = cluster.fit, cluster.prefill, cluster.decode
    p.fit_base_s, p.fit_entry_s = fit.base_s, fit.per_entry_s
    p.fit_token_s, p.fit_pair_s = fit.per_token_s, fit.per_pair_s
    p.prefill_base_s, p.prefill_weights_s = prefill.base_s, prefill.weights_s
    p.attention_entry_s = prefill.attention_entry_s
    p.attention_token_s = prefill.attention_token_s
    p.attention_pair_s = prefill.attention_pair_s
    p.linear_token_s = prefill.linear_token_s
    p.prefill_collective_s = prefill.collective_s_token
    p.copy_bytes_s = cluster.cnic_bytes_s
    p.decode_base_s, p.decode_weights_s = decode.base_s, decode.weights_s
    p.sequence_s, p.linear_sequence_s = decode.sequence_s, decode.linear_sequence_s
    p.context_token_s = decode.context_token_s
    p.decode_collective_s = decode.collective_s_sequence
    p.window_s = window_s
    return parameters


def _links(cluster: Cluster) -> Records:
    """A storage NIC for each node, then a memory for each if it is finite, then two for each engine."""
    nodes = cluster.nodes
    memories = nodes if math.isfinite(cluster.memory_bytes_s) else 0
    links = blank(nodes + memories + 2 * cluster.engines, LINK)
    links.first_part = NONE
    links.series = NONE
    links.flow_cap_bytes_s = math.inf
    links.capacity_bytes_s = cluster.cnic_bytes_s
    links.capacity_bytes_s[:nodes] = cluster.snic_bytes_s
    links.flow_cap_bytes_s[:nodes] = cluster.read_cap_bytes_s
    links.series[:nodes] = np.arange(nodes)
    links.capacity_bytes_s[nodes : nodes + memories] = cluster.memory_bytes_s
    return links


def _nodes(cluster: Cluster) -> Records:
    nodes = blank(cluster.nodes, NODE)
    nodes.snic = np.arange(cluster.nodes)
    nodes.memory = NONE
    if math.isfinite(cluster.memory_bytes_s):
        nodes.memory = cluster.nodes + np.arange(cluster.nodes)
    return nodes


def _engines(cluster: Cluster) -> Records:
    engines = blank(cluster.engines, ENGINE)
    index = np.arange(cluster.engines)
    prefill = cluster.prefill_nodes * cluster.gpus
    first_nic = len(_links(cluster)) - 2 * cluster.engines
    engines.node = index // cluster.gpus
    per_prefill = cluster.prefill_instance_nodes * cluster.gpus
    per_decode = cluster.decode_instance_nodes * cluster.gpus
    decode_instance = prefill // per_prefill + (index - prefill) // per_decode
    engines.instance = np.where(index < prefill, index // per_prefill, decode_instance)
    engines.nic_out = first_nic + 2 * index
    engines.nic_in = first_nic + 2 * index + 1
    engines.free_hbm_tokens = np.where(index < prefill, 0, cluster.decode_hbm_tokens)
    engines.room_tokens = np.where(
        index < prefill, cluster.prefill_room_tokens, cluster.decode_buffer_tokens
    )
    for queue in ("admit", "read", "ready"):
        engines[f"{queue}_head"] = engines[f"{queue}_tail"] = NONE
    return engines


def _instances(cluster: Cluster) -> Records:
    prefill = cluster.prefill_nodes // cluster.prefill_instance_nodes
    decode = cluster.decode_nodes // cluster.decode_instance_nodes
    instances = blank(prefill + decode, INSTANCE)
    index = np.arange(prefill + decode)
    sizes = np.where(
        index < prefill,
        cluster.prefill_instance_nodes * cluster.gpus,
        cluster.decode_instance_nodes * cluster.gpus,
    )
    instances.role = index >= prefill
    instances.engines = sizes
    instances.first_engine = np.cumsum(sizes) - sizes
    instances.spread = np.where(
        index < prefill,
        cluster.prefill_instance_nodes > 1 and cluster.prefill.collective_s_token > 0,
        cluster.decode_instance_nodes > 1 and cluster.decode.collective_s_sequence > 0,
    )
    instances.joining = instances.joined = instances.first_end = NONE
    return instances
