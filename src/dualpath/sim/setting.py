"""From a model, hardware and a number of nodes to what is simulated: a cluster and the policy's settings.

`Assumptions` are everything that neither a model file nor a data sheet says; `calibration.py` tells where
each value is from. A `System` is one of those that the paper compares, or ours.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum

from msgspec.structs import replace

from dualpath.policy.bandwidth import NodeBandwidth, Resource, resource_loads
from dualpath.policy.config import PolicyConfig, ReadPlanKind, SchedulerKind
from dualpath.policy.quota import pairs
from dualpath.sim.cluster import Cluster
from dualpath.sim.costs import (
    Efficiency,
    Parallelism,
    PrefillCosts,
    attention_fit,
    decode_costs,
    kv_capacity_tokens,
    prefill_costs,
)
from dualpath.sim.hardware import Hardware
from dualpath.sim.model import ModelShape
from dualpath.sim.paper_traces import PAPER_TRACES

__all__ = ["Assumptions", "Deployment", "System", "prepare"]

_GB = 1e9
_NO_QUOTA_S = 1e9
_TURN = PAPER_TRACES["64k"]
_FULL_MEMORY = 0.9
"""Of host memory; from this load on it is simulated. With less it changed no completion time by 1 %."""


class System(StrEnum):
    """What is compared. Each adds to the one before it, up to `dual`, which is the paper's DualPath."""

    BASIC = "basic"
    """Only prefill engines read, and hold a request's whole KV on the device meanwhile."""
    LAYERWISE = "layerwise"
    """Prefill engines hold one layer's KV."""
    BLIND = "dual-path-blind"
    """Both sides read; engines and sides in turn, batches without quota."""
    DUAL = "dual"
    """The side with the shorter queue reads; scheduling by load, batches under the compute quota."""
    SPLIT = "split"
    """As `dual`, but a request's read is divided between both sides."""
    STEADY = "steady"
    """As `split`, by the rule that keeps all nodes equally busy."""
    ORACLE = "oracle"
    """No reads, no copies, no transfers: what loading can gain at most."""

    @property
    def both_sides(self) -> bool:
        return self in (System.BLIND, System.DUAL, System.SPLIT, System.STEADY)


@dataclass(frozen=True, slots=True, kw_only=True)
class Assumptions:
    """See `calibration.py` for sources and ranges."""

    prefill_share: float = 0.53
    """Of what kernels reach alone (`Efficiency`), that prefill steps do: products, attention, collectives."""
    decode_share: float = 0.134
    """Likewise of decode, whose batches are small."""
    memory_share: float = 0.8
    """Of HBM's bytes/s, where reading it is what takes the time."""
    prefill_launch_s: float = 1.04e-3
    """A layer of a prefill step: launches, and scheduling between steps."""
    decode_launch_s: float = 50e-6
    """Likewise of decode, whose launches are recorded."""
    snic_share: float = 0.667
    """Of a storage NIC's rate, that reads reach."""
    read_cap_bytes_s: float = 4 * _GB
    """Of one read."""
    read_latency_s: float = 0.1
    submit_s: float = 3.0e-6
    """One Layer Block of the copy to the decode engine's device."""
    reserved_share: float = 0.1
    """Of HBM, for everything but weights and KV."""
    whole_prefill_share: float = 0.133
    """More of it where a prefill engine holds whole requests: activations of all layers' batches."""
    buffer_bytes: float = 80 * _GB
    """Staging buffers of a node."""
    front_end_s: float = 0.45
    """From an agent's request until the scheduler has it."""
    fetch_s: float = 0.5
    """Between two fetches of a group."""
    alpha_s: float = 3.0
    beta_s: float = 5.0
    """Seconds of reading and of processing for the thresholds of the same names (paper, scheduling)."""
    quota_s: float = 0.3
    chunk_tokens: int = 8192
    """Of a batch."""

    @property
    def prefill(self) -> Efficiency:
        return self._efficiency(self.prefill_share, self.prefill_launch_s)

    @property
    def decode(self) -> Efficiency:
        return self._efficiency(self.decode_share, self.decode_launch_s)

    def _efficiency(self, share: float, launch_s: float) -> Efficiency:
        kernels = Efficiency()
        return Efficiency(
            linear=kernels.linear * share,
            attention=kernels.attention * share,
            memory=self.memory_share,
            network=kernels.network * share,
            launch_s=launch_s,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Deployment:
    """`*_instance_nodes`: nodes whose GPUs step together, as one expert-parallel group.

    `tensor`: GPUs of a rank.
    """

    model: ModelShape
    hardware: Hardware
    prefill_nodes: int
    decode_nodes: int
    prefill_instance_nodes: int = 1
    decode_instance_nodes: int = 1
    tensor: int = 1
    block_tokens: int = 64


def prepare(
    deployment: Deployment, system: System, assumptions: Assumptions
) -> tuple[Cluster, PolicyConfig]:
    """An engine is a rank. Raises ConfigError when the model does not fit."""
    model, hardware, a = deployment.model, deployment.hardware, assumptions
    tensor = deployment.tensor
    ranks = hardware.node.gpus // tensor
    prefill_ranks = Parallelism(ranks * deployment.prefill_instance_nodes, tensor)
    decode_ranks = Parallelism(ranks * deployment.decode_instance_nodes, tensor)
    prefill = prefill_costs(model, hardware, prefill_ranks, a.prefill)
    whole = system is System.BASIC
    buffer_tokens = int(a.buffer_bytes / ranks / model.kv_bytes_token)
    room_tokens = buffer_tokens
    if whole:
        reserved = a.reserved_share + a.whole_prefill_share
        room_tokens = min(room_tokens, kv_capacity_tokens(model, hardware, prefill_ranks, reserved))
    snic_bytes_s = hardware.node.snic_bytes_s * a.snic_share
    memory_bytes_s = math.inf
    if _memory_load(deployment, prefill, snic_bytes_s) >= _FULL_MEMORY:
        # Without layerwise prefill the kernel has one flow for each two times that KV passes a memory.
        memory_bytes_s = hardware.node.memory_bytes_s / (2 if whole else 1)
    cluster = Cluster(
        prefill_nodes=deployment.prefill_nodes,
        decode_nodes=deployment.decode_nodes,
        gpus=ranks,
        prefill_instance_nodes=deployment.prefill_instance_nodes,
        decode_instance_nodes=deployment.decode_instance_nodes,
        kv_bytes_token=model.kv_bytes_token,
        layers=model.layers,
        prefill=prefill,
        decode=decode_costs(model, hardware, decode_ranks, a.decode),
        fit=attention_fit(prefill),
        snic_bytes_s=snic_bytes_s,
        cnic_bytes_s=hardware.node.network_bytes_s * tensor,
        memory_bytes_s=memory_bytes_s,
        read_latency_s=a.read_latency_s,
        read_cap_bytes_s=a.read_cap_bytes_s,
        submit_s=a.submit_s,
        layerwise=not whole,
        prefill_room_tokens=room_tokens,
        decode_buffer_tokens=buffer_tokens,
        decode_hbm_tokens=kv_capacity_tokens(model, hardware, decode_ranks, a.reserved_share),
        front_end_s=a.front_end_s,
        fetch_s=a.fetch_s,
    )
    policy = PolicyConfig(
        alpha_tokens=int(a.alpha_s * snic_bytes_s / model.kv_bytes_token),
        beta_tokens=int(a.beta_s * _tokens_per_s(prefill)),
        block_tokens=deployment.block_tokens,
        quota_s=a.quota_s,
        max_batch_tokens=a.chunk_tokens,
    )
    return cluster, _policy_of(system, policy, a)


def _memory_load(deployment: Deployment, prefill: PrefillCosts, snic_bytes_s: float) -> float:
    """Of the fuller of a prefill and a decode node's memory, as a share of its rate, whichever is more: while
    all storage NICs read, or while prefill engines compute as fast as they can and decode nodes' memory
    takes the new KV in and gives it out."""
    node = deployment.hardware.node
    bandwidth = NodeBandwidth(node.gpus, node.network_bytes_s, snic_bytes_s, node.memory_bytes_s)
    loads = resource_loads(bandwidth, deployment.prefill_nodes, deployment.decode_nodes)
    engines = node.gpus // deployment.tensor * deployment.prefill_nodes / deployment.decode_nodes
    new_bytes_s = engines * deployment.model.kv_bytes_token / prefill.linear_token_s
    return max(
        loads[Resource.PE_MEMORY],
        loads[Resource.DE_MEMORY],
        2 * new_bytes_s / node.memory_bytes_s,
    )


def _tokens_per_s(costs: PrefillCosts) -> float:
    """That an engine processes, stored ones included, on the mean turn of the paper's 64K trace."""
    context_tokens, append_tokens = int(_TURN.context_tokens), int(_TURN.append_tokens)
    attention_s = costs.attention_entry_s + costs.attention_token_s * append_tokens
    attention_s += costs.attention_pair_s * pairs(context_tokens, append_tokens)
    step_s = costs.step_s(attention_s, append_tokens)
    return (context_tokens + append_tokens) / step_s


def _policy_of(system: System, policy: PolicyConfig, a: Assumptions) -> PolicyConfig:
    match system:
        case System.DUAL:
            return replace(policy, read_plan=ReadPlanKind.SHORTER)
        case System.SPLIT:
            return replace(policy, read_plan=ReadPlanKind.SPLIT)
        case System.STEADY:
            return replace(policy, read_plan=ReadPlanKind.STEADY)
        case System.ORACLE:
            return replace(policy, scheduler=SchedulerKind.ORACLE)
        case System.BASIC | System.LAYERWISE:
            scheduler = SchedulerKind.BASIC
        case System.BLIND:
            scheduler = SchedulerKind.ROUND_ROBIN
    return replace(policy, scheduler=scheduler, quota_s=_NO_QUOTA_S)
