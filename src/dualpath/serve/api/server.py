"""Serves an ASGI application on a socket until told to stop."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable, Iterator

import uvicorn
from starlette.types import ASGIApp

from dualpath.base.errors import ConfigError

__all__ = ["serve_http"]

_KEEP_ALIVE_S = 75
"""Longer than proxies and clients keep idle connections, so that they and not we close them."""
_BACKLOG = 2048


class _Server(uvicorn.Server):
    """Leaves signals to whoever runs the loop."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def serve_http(
    app: ASGIApp,
    *,
    host: str,
    port: int,
    stop: asyncio.Event,
    drain_timeout_s: float,
    on_started: Callable[[int], None] | None = None,
) -> None:
    """Serve until `stop` is set, then let running requests end for at most `drain_timeout_s`.

    `port` 0 takes a free one; `on_started` is called with the real one once connections are accepted.
    ConfigError when the address cannot be bound.
    """
    listener = _bind(host, port)
    config = uvicorn.Config(
        app,
        # Not "auto", which takes what is installed: httptools has no limit for the size of a head.
        http="h11",
        log_config=None,
        access_log=False,
        lifespan="off",
        timeout_keep_alive=_KEEP_ALIVE_S,
        timeout_graceful_shutdown=max(1, round(drain_timeout_s)),
        server_header=False,
    )
    server = _Server(config)
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    stopping = asyncio.create_task(stop.wait())
    try:
        while not server.started and not serving.done():
            await asyncio.sleep(0.005)
        if on_started is not None and not serving.done():
            on_started(listener.getsockname()[1])
        await asyncio.wait({serving, stopping}, return_when=asyncio.FIRST_COMPLETED)
        server.should_exit = True
        await serving
    finally:
        stopping.cancel()
        if not serving.done():
            server.should_exit = server.force_exit = True
            await asyncio.gather(serving, return_exceptions=True)
        listener.close()


def _bind(host: str, port: int) -> socket.socket:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise ConfigError(f"--host {host}: {error}") from error
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(_BACKLOG)
        listener.setblocking(False)
    except OSError as error:
        listener.close()
        raise ConfigError(
            f"cannot listen on {host} port {port}: {error.strerror or error}; choose another with --port"
        ) from error
    return listener
