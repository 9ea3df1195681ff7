"""A cluster to simulate, in the terms of its kernel: seconds, bytes and tokens. Pure data.

Where the numbers come from, a model and a hardware file or measured rates, is for others to know.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

import msgspec

from dualpath.base.errors import ConfigError
from dualpath.policy.quota import AttentionFit
from dualpath.sim.costs import DecodeCosts, PrefillCosts

__all__ = ["Cluster"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """Nodes of `gpus` engines each; a node is one group, and has one storage NIC. Raises ConfigError.

    `*_instance_nodes`: nodes whose engines form one instance, that is, step together; they divide the nodes.
    """

    prefill_nodes: int
    decode_nodes: int
    gpus: int
    prefill_instance_nodes: int
    decode_instance_nodes: int

    kv_bytes_token: int
    """All layers, stored and moved."""
    layers: int
    prefill: PrefillCosts
    decode: DecodeCosts
    fit: AttentionFit
    """What the compute quota goes by."""

    snic_bytes_s: float
    """That storage NICs really bring, as the next two."""
    cnic_bytes_s: float
    """Of one engine, each way; KV gets what collectives of instances that span nodes leave of it."""
    memory_bytes_s: float = inf
    """Of a node's host memory, for the flows that pass it; infinite where it is no bottleneck, which also is
    faster to simulate."""
    read_latency_s: float = 0.0
    read_cap_bytes_s: float = inf
    """Of one read, however idle the NIC is."""
    reads_in_order: bool = False
    """An engine's reads are served one after the other, as by one of the product's stores, instead of
    sharing the NIC with each other."""
    submit_s: float = 0.0
    """To submit one Layer Block of a copy to the decode engine's device."""

    isolated: bool = True
    """Collectives have precedence on compute NICs. Otherwise KV flows slow them."""
    layerwise: bool = True
    """Prefill engines hold one layer's KV at a time; otherwise all of a request, from the start of its
    read."""
    prefill_room_tokens: int
    """Of one engine: its staging buffer with layerwise prefill, otherwise its device's KV."""
    decode_buffer_tokens: int
    decode_hbm_tokens: int

    front_end_s: float = 0.0
    """From an agent's request until the scheduler has it: HTTP, tokenising, hashing, lookup of its blocks."""
    fetch_s: float = 0.0
    """A group's leader fetches work so often; 0: at once, when anything may have changed."""

    def __post_init__(self) -> None:
        for name in ("prefill", "decode"):
            nodes, instance = (
                getattr(self, f"{name}_nodes"),
                getattr(self, f"{name}_instance_nodes"),
            )
            if nodes < 1 or instance < 1 or nodes % instance:
                raise ConfigError(
                    f"{name} nodes: expected a multiple of the {instance} of an instance, got {nodes}"
                )
        for field in (
            "gpus",
            "kv_bytes_token",
            "layers",
            "prefill_room_tokens",
            "decode_buffer_tokens",
            "decode_hbm_tokens",
        ):
            if not getattr(self, field) >= 1:
                raise ConfigError(f"{field}: expected 1 or more, got {getattr(self, field)}")
        for field in ("snic_bytes_s", "cnic_bytes_s", "memory_bytes_s", "read_cap_bytes_s"):
            if not getattr(self, field) > 0:
                raise ConfigError(f"{field}: expected more than 0, got {getattr(self, field)}")
        finite = {
            field: getattr(self, field)
            for field in (
                "snic_bytes_s",
                "cnic_bytes_s",
                "read_latency_s",
                "submit_s",
                "front_end_s",
                "fetch_s",
            )
        }
        for part in ("prefill", "decode", "fit"):
            for field, value in msgspec.structs.asdict(getattr(self, part)).items():
                finite[f"{part}.{field}"] = value
        for field, value in finite.items():
            if not 0 <= value < inf:
                raise ConfigError(f"{field}: expected a finite number of 0 or more, got {value}")

    @property
    def nodes(self) -> int:
        return self.prefill_nodes + self.decode_nodes

    @property
    def engines(self) -> int:
        return self.nodes * self.gpus
