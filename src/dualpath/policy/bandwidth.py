"""For which ratios of prefill to decode nodes storage is the only bottleneck. Pure arithmetic.

All storage NICs read at their full rate, every prefill engine works with every decode engine, and the bytes
of each direction of each NIC and of each memory are added up (paper, bottleneck-free analysis). Neglected, as
there: KV of appended tokens, and writing it to storage; with long contexts and short appends both are small.

Hops of stored KV, on each path from the storage NIC to the decode engine's device; "copy" is between the host
and the device of one engine:

    PE path: PE memory -> copy -> PE device -> network -> DE memory -> copy -> DE device
    DE path: DE memory -> network -> PE device, and DE memory -> copy -> DE device

Where copies go through the engine's own compute NIC (GPUDirect RDMA, so that its traffic classes govern them)
they use both directions of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from dualpath.base.errors import ConfigError

__all__ = ["NodeBandwidth", "RatioRange", "Resource", "bottleneck_free_range", "resource_loads"]


class Resource(StrEnum):
    """What could be a bottleneck beside storage. Reads of a NIC are from memory, writes into it."""

    PE_NIC_READ = "PE CNIC read"
    PE_NIC_WRITE = "PE CNIC write"
    DE_NIC_READ = "DE CNIC read"
    DE_NIC_WRITE = "DE CNIC write"
    PE_MEMORY = "PE memory"
    DE_MEMORY = "DE memory"


@dataclass(frozen=True, slots=True)
class NodeBandwidth:
    """A node; prefill and decode nodes are alike. All rates in one unit, NICs each way.

    `gpus` engines with a compute NIC of `cnic` each, one storage NIC (or all together) of `snic`,
    `memory` of the host. `copies_over_cnic`: whether copies between host and device use the compute NIC.
    Raises ConfigError.
    """

    gpus: int
    cnic: float
    snic: float
    memory: float
    copies_over_cnic: bool = True

    def __post_init__(self) -> None:
        if self.gpus < 1 or min(self.cnic, self.snic, self.memory) <= 0:
            raise ConfigError(f"expected one engine or more, and rates above 0, got {self}")

    @property
    def storage_share(self) -> float:
        """The paper's s: storage NIC by compute NIC."""
        return self.snic / self.cnic


@dataclass(frozen=True, slots=True)
class RatioRange:
    """Prefill nodes by decode nodes, from `low` to `high`; what is full at each end."""

    low: float
    high: float
    low_resource: Resource
    high_resource: Resource

    def holds(self, prefill_nodes: int, decode_nodes: int) -> bool:
        return self.low <= prefill_nodes / decode_nodes <= self.high


@dataclass(frozen=True, slots=True)
class _Line:
    """What flows through a resource of a node at a ratio x of prefill to decode nodes, and how much can.

    `fixed + per_ratio * x + per_inverse / x`, in units of the rate of the node's storage NIC. At most one of
    the slopes is not 0.
    """

    fixed: float
    limit: float
    per_ratio: float = 0.0
    per_inverse: float = 0.0

    def load(self, ratio: float) -> float:
        """As a share of what there is."""
        return (self.fixed + self.per_ratio * ratio + self.per_inverse / ratio) / self.limit


def _lines(node: NodeBandwidth) -> Mapping[Resource, _Line]:
    """Each node reads 1 from storage; so the DE path brings each prefill node 1/x, and the PE path each
    decode node x. NICs are all of a node together."""
    copy = 1.0 if node.copies_over_cnic else 0.0
    nics = node.gpus / node.storage_share
    memory = node.memory / node.snic
    return {
        # Copy out of the own buffer, and hand-over.
        Resource.PE_NIC_READ: _Line(copy + 1, nics),
        # Copy into the device, and what decode engines read for it.
        Resource.PE_NIC_WRITE: _Line(copy, nics, per_inverse=1),
        # To prefill engines; then all of it, of both paths, to the own device.
        Resource.DE_NIC_READ: _Line(1 + copy, nics, per_ratio=copy),
        # Handed over; and the same copy's other end.
        Resource.DE_NIC_WRITE: _Line(copy, nics, per_ratio=1 + copy),
        # In from storage, out to the device.
        Resource.PE_MEMORY: _Line(2, memory),
        # In from storage, out to prefill engines and to the device; handed over: in, and out to the device.
        Resource.DE_MEMORY: _Line(3, memory, per_ratio=2),
    }


def resource_loads(
    node: NodeBandwidth, prefill_nodes: int, decode_nodes: int
) -> Mapping[Resource, float]:
    """The share of each resource that is used while all storage NICs read; above 1 it is a bottleneck."""
    ratio = prefill_nodes / decode_nodes
    return {resource: line.load(ratio) for resource, line in _lines(node).items()}


def bottleneck_free_range(node: NodeBandwidth) -> RatioRange | None:
    """Ratios at which nothing but storage limits reading; None when there is none."""
    lows: dict[Resource, float] = {}
    highs: dict[Resource, float] = {}
    for resource, line in _lines(node).items():
        room = line.limit - line.fixed
        if line.per_inverse:
            if room <= 0:
                return None
            lows[resource] = line.per_inverse / room
        elif line.per_ratio:
            highs[resource] = room / line.per_ratio
        elif room < 0:
            return None
    low_resource = max(lows, key=lambda each: lows[each])
    high_resource = min(highs, key=lambda each: highs[each])
    low, high = lows[low_resource], highs[high_resource]
    return RatioRange(low, high, low_resource, high_resource) if low <= high else None
