"""Choosing the transport: shared memory where two engines can share it, TCP elsewhere."""

from __future__ import annotations

from typing import Literal

from dualpath.base.ids import EngineId
from dualpath.kv.pool import BufferPool
from dualpath.transfer.connection import Patience
from dualpath.transfer.contract import Endpoint, EndpointEvents
from dualpath.transfer.endpoint import SocketEndpoint
from dualpath.transfer.shm import ShmEndpoint, ShmTransport
from dualpath.transfer.tcp import TcpEndpoint, TcpTransport

__all__ = ["EndpointKind", "open_endpoint"]

EndpointKind = Literal["auto", "shm", "tcp"]


def open_endpoint(
    kind: EndpointKind,
    engine: EngineId,
    pool: BufferPool,
    secret: bytes,
    events: EndpointEvents,
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    advertise: str | None = None,
    patience: Patience | None = None,
) -> Endpoint:
    """An endpoint of this kind; `host`, `port` and `advertise` are of its TCP side.

    "auto" listens on both. Its address says where it can be reached either way, and `connect`
    takes shared memory when the peer is on this host, else (or when that fails) TCP.
    Raises ConfigError.
    """
    patience = patience or Patience()
    if kind == "shm":
        return ShmEndpoint(engine, pool, secret, events, patience=patience)
    if kind == "tcp":
        return TcpEndpoint(
            engine,
            pool,
            secret,
            events,
            host=host,
            port=port,
            advertise=advertise,
            patience=patience,
        )
    tcp = TcpTransport(secret, patience, host=host, port=port, advertise=advertise)
    return SocketEndpoint(engine, pool, secret, events, [ShmTransport(), tcp], patience=patience)
