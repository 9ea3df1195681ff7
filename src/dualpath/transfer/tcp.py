"""TCP between hosts, and as the fallback on one host.

A pull is cut over several connections; its bytes come back on the same ones, from the owner's slots
to the destination without a copy of ours in between. The kernel sizes the socket buffers: fixed sizes are
capped by `net.core.*mem_max` and measured slower on loopback.
"""

from __future__ import annotations

import ipaddress
import logging
import socket
from collections.abc import Sequence

from dualpath.base.errors import ConfigError, DeadlineExceeded, PeerLost
from dualpath.base.ids import EngineId
from dualpath.base.socket_marks import mark_socket
from dualpath.base.traffic_class import DEFAULT_PLAN, TrafficClass
from dualpath.kv.pool import BufferPool, PoolGeometry
from dualpath.transfer.connection import Patience, PeerContext, SocketChannel
from dualpath.transfer.contract import ChannelCapabilities, EndpointEvents
from dualpath.transfer.endpoint import MIN_SECRET_BYTES, SocketEndpoint
from dualpath.transfer.lanes import LanedChannel, PullLane
from dualpath.transfer.transport import Transport
from dualpath.transfer.wire import Link

__all__ = ["DEFAULT_CONNECTIONS", "MAX_CONNECTIONS", "TcpEndpoint", "TcpTransport"]

DEFAULT_CONNECTIONS = 2
MAX_CONNECTIONS = 16
_BACKLOG = 128

log = logging.getLogger(__name__)


class TcpTransport(Transport):
    """Listens on `host`:`port` (0: any free one); peers dial `advertise`:port, or `host`:port.

    `connections` to each peer carry what we pull, beside one for messages.
    Raises ConfigError when `host` can be reached from other machines and there is no secret, or
    when it is a wildcard and `advertise` does not say where this machine is.
    """

    kind = "tcp"

    def __init__(
        self,
        secret: bytes,
        patience: Patience,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        advertise: str | None = None,
        connections: int = DEFAULT_CONNECTIONS,
    ) -> None:
        if not 1 <= connections <= MAX_CONNECTIONS:
            raise ConfigError(
                f"{connections} connections to a peer: give 1 to {MAX_CONNECTIONS} for KV"
            )
        self.lanes = connections
        try:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except socket.gaierror as error:
            raise ConfigError(f"transfer host {host!r}: {error}") from None
        self._family: socket.AddressFamily = found[0][0]
        self._bind: tuple[object, ...] = found[0][4]
        address = ipaddress.ip_address(str(self._bind[0]))
        if not address.is_loopback and len(secret) < MIN_SECRET_BYTES:
            raise ConfigError(
                f"transfer host {host} is reachable from other machines: give a secret of at least "
                f"{MIN_SECRET_BYTES} bytes, or bind to 127.0.0.1"
            )
        if address.is_unspecified and advertise is None:
            raise ConfigError(f"transfer host {host} is a wildcard: also say where peers find it")
        self._advertise = advertise or str(address)
        self._patience = patience

    def listen(self) -> socket.socket:
        listener = socket.socket(self._family, socket.SOCK_STREAM)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(self._bind)
            listener.listen(_BACKLOG)
            listener.setblocking(False)
        except OSError:
            listener.close()
            raise
        return listener

    def location(self, listener: socket.socket) -> str:
        return f"{self._advertise}:{listener.getsockname()[1]}"

    def dial(self, location: str, timeout_s: float) -> socket.socket:
        host, _, port = location.rpartition(":")
        if timeout_s <= 0:
            raise DeadlineExceeded(f"no time left to connect to {location}")
        try:
            sock = socket.create_connection((host, int(port)), timeout_s)
        except TimeoutError:
            raise DeadlineExceeded(f"no connection to {location} in time") from None
        except (OSError, ValueError, OverflowError) as error:
            raise PeerLost(f"cannot connect to {location}: {error}") from None
        self._tune(sock)
        return sock

    def mark(self, sock: socket.socket, traffic: TrafficClass) -> None:
        """DSCP in the packets; and the priority, by which this host's own queues tell them apart."""
        try:
            mark_socket(sock, DEFAULT_PLAN.marks(traffic))
        except OSError as error:
            log.warning("the system does not mark %s traffic: %s", traffic, error)

    def accepted(self, sock: socket.socket) -> None:
        self._tune(sock)

    def introduce(self, sock: socket.socket, pool: BufferPool, deadline_s: float) -> None:
        pass  # Pulls need nothing but the connection.

    def channel(
        self,
        socks: Sequence[socket.socket],
        geometry: PoolGeometry,
        context: PeerContext,
        deadline_s: float,
    ) -> SocketChannel:
        links = [Link(sock, stall_s=context.patience.peer_timeout_s) for sock in socks]
        lanes = [PullLane(link, context, number) for number, link in enumerate(links[1:])]
        capabilities = ChannelCapabilities(kind=self.kind, same_host=False)
        return LanedChannel(links[0], lanes, geometry, capabilities, context)

    def close(self) -> None:
        pass  # Channels share nothing.

    def _tune(self, sock: socket.socket) -> None:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # A host that vanished acknowledges nothing: the kernel then breaks the connection.
        timeout_ms = int(self._patience.peer_timeout_s * 1000)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, timeout_ms)


class TcpEndpoint(SocketEndpoint):
    """An endpoint that peers on any host reach by TCP. See `SocketEndpoint`, `TcpTransport`."""

    def __init__(
        self,
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
    ) -> None:
        patience = patience or Patience()
        transport = TcpTransport(
            secret,
            patience,
            host=host,
            port=port,
            advertise=advertise,
            connections=connections,
        )
        super().__init__(engine, pool, secret, events, [transport], patience=patience)
