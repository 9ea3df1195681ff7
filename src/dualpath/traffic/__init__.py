"""Orders, merges, bounds and counts all KV that enters or leaves an engine."""

from dualpath.traffic.counters import DEVICE, STORE, PeerTraffic, TrafficKey
from dualpath.traffic.jobs import Refusal
from dualpath.traffic.manager import TrafficManager, TransferReport, TransferState
from dualpath.traffic.pieces import PieceArray, coalesced, pieces_array
from dualpath.traffic.queue import DEFAULT_LIMITS, ClassLimits, TransferQueue, Wanted

__all__ = [
    "DEFAULT_LIMITS",
    "DEVICE",
    "STORE",
    "ClassLimits",
    "PeerTraffic",
    "PieceArray",
    "Refusal",
    "TrafficKey",
    "TrafficManager",
    "TransferQueue",
    "TransferReport",
    "TransferState",
    "Wanted",
    "coalesced",
    "pieces_array",
]
