"""Moving KV between engines: pulls out of leased pool slots, messages, and the loss of a peer.

It moves bytes; it knows no requests, tokens or models. Contract: `contract.py`.
"""

from __future__ import annotations

from dualpath.transfer.auto import EndpointKind, open_endpoint
from dualpath.transfer.connection import Patience
from dualpath.transfer.contract import (
    Channel,
    ChannelCapabilities,
    Endpoint,
    EndpointEvents,
    PeerStats,
    RemoteSpan,
    TransferName,
)
from dualpath.transfer.endpoint import MIN_SECRET_BYTES, port_address
from dualpath.transfer.memory import FaultHook, MemoryEndpoint, MemoryFabric, PullFault
from dualpath.transfer.nixl_agent import nixl_missing
from dualpath.transfer.shm import ShmEndpoint
from dualpath.transfer.tcp import TcpEndpoint

__all__ = [
    "MIN_SECRET_BYTES",
    "Channel",
    "ChannelCapabilities",
    "Endpoint",
    "EndpointEvents",
    "EndpointKind",
    "FaultHook",
    "MemoryEndpoint",
    "MemoryFabric",
    "Patience",
    "PeerStats",
    "PullFault",
    "RemoteSpan",
    "ShmEndpoint",
    "TcpEndpoint",
    "TransferName",
    "nixl_missing",
    "open_endpoint",
    "port_address",
]
