"""The package's own endpoints, as the channel contract suite opens them."""

from __future__ import annotations

from typing import ClassVar

from dualpath.base.ids import EngineId
from dualpath.kv import BufferPool
from dualpath.testing.channel_peer import ChannelFactory
from dualpath.transfer import Endpoint, EndpointEvents, EndpointKind, MemoryFabric, open_endpoint


class _SocketFactory(ChannelFactory):
    kind: ClassVar[EndpointKind]

    def open(
        self, engine: EngineId, pool: BufferPool, secret: bytes, events: EndpointEvents
    ) -> Endpoint:
        return open_endpoint(self.kind, engine, pool, secret, events)


class TcpFactory(_SocketFactory):
    kind = "tcp"


class ShmFactory(_SocketFactory):
    kind = "shm"


class AutoFactory(_SocketFactory):
    kind = "auto"


class NixlFactory(_SocketFactory):
    kind = "nixl"


class MemoryFactory(ChannelFactory):
    authenticated = False
    crosses_processes = False

    def __init__(self) -> None:
        self.fabric = MemoryFabric()

    def open(
        self, engine: EngineId, pool: BufferPool, secret: bytes, events: EndpointEvents
    ) -> Endpoint:
        return self.fabric.endpoint(engine, pool, events)
