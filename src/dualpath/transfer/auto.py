"""Choosing the transport: shared memory where two engines can share it, TCP elsewhere."""

from __future__ import annotations

import secrets
from typing import Literal

from dualpath.base.ids import EngineId
from dualpath.kv.pool import BufferPool
from dualpath.transfer.connection import Patience
from dualpath.transfer.contract import Endpoint, EndpointEvents
from dualpath.transfer.endpoint import SocketEndpoint
from dualpath.transfer.nixl import NixlTransport
from dualpath.transfer.shm import ShmEndpoint, ShmTransport
from dualpath.transfer.tcp import DEFAULT_CONNECTIONS, TcpEndpoint, TcpTransport

__all__ = ["EndpointKind", "open_endpoint"]

EndpointKind = Literal["auto", "shm", "tcp", "nixl"]


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
    connections: int = DEFAULT_CONNECTIONS,
    patience: Patience | None = None,
) -> Endpoint:
    """An endpoint of this kind; `host`, `port`, `advertise` and `connections` are of its TCP side.

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
            connections=connections,
            patience=patience,
        )
    if kind == "nixl":
        name = f"{engine}-{secrets.token_hex(8)}"
        nixl = NixlTransport(
            name, pool, secret, patience, host=host, port=port, advertise=advertise
        )
        return SocketEndpoint(engine, pool, secret, events, [nixl], patience=patience)
    tcp = TcpTransport(
        secret, patience, host=host, port=port, advertise=advertise, connections=connections
    )
    return SocketEndpoint(engine, pool, secret, events, [ShmTransport(), tcp], patience=patience)
