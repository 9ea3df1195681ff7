"""What went through the traffic manager, by class and peer. Only what waits or is under way also falls."""

from __future__ import annotations

from dataclasses import dataclass

from dualpath.base.traffic_class import TrafficClass

__all__ = ["DEVICE", "STORE", "PeerTraffic", "TrafficKey"]

STORE = "store"
"""Stands for the store where peers are named."""
DEVICE = "device"
"""Stands for the engine's own device memory (on the CPU: the memory that computing reads)."""


@dataclass(frozen=True, slots=True)
class TrafficKey:
    """`peer` is an engine's id, `STORE` or `DEVICE`."""

    traffic_class: TrafficClass
    peer: str


@dataclass(slots=True)
class PeerTraffic:
    """`n_bytes` of the `transfers` that ended well; `failed` and `withdrawn` did not.

    `queued` and `under_way` now. `wait_s`: from the call to the submission, of all that were
    submitted. `submissions` of one or more transfers; `descriptors` in those of pulls, after merging.
    """

    transfers: int = 0
    n_bytes: int = 0
    failed: int = 0
    withdrawn: int = 0
    queued: int = 0
    under_way: int = 0
    wait_s: float = 0.0
    submissions: int = 0
    descriptors: int = 0
