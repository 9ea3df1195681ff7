"""`dualpath router`: its parts put together, from the configuration to the socket, until a signal."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from starlette.types import ASGIApp

from dualpath.base.ids import Role
from dualpath.http import raise_descriptor_limit
from dualpath.monitor.metrics import Metrics
from dualpath.router.app import RouterContext, build_router_app
from dualpath.router.config import RouterConfig
from dualpath.router.health import HealthWatch
from dualpath.router.relay import Relay
from dualpath.router.seating import Seating
from dualpath.router.upstream import Upstream
from dualpath.serve.api import serve_http

__all__ = [
    "LISTENING",
    "ROUTER_METRICS",
    "RunningRouter",
    "run",
    "running_router",
    "serve_router",
    "stop_on_signals",
    "until_ended",
]

log = logging.getLogger(__name__)

LISTENING = "listening on "
"""Standard output gets one line that starts with this, followed by the base URL, once requests are
taken."""

ROUTER_METRICS = frozenset(
    {
        "time_to_first_token_seconds",
        "request_queue_time_seconds",
        "request_prefill_time_seconds",
        "http_responses",
        "num_requests_running",
        "num_requests_waiting",
        "request_attempts",
        "request_retries",
        "prefix_cache_queries",
        "prefix_cache_hits",
        "cache_hit_ratio",
        "read_queue_length",
        "engines_up",
        "engine_requests",
        "engine_tokens",
    }
)
"""What a router knows; the rest its servers export."""

_OBSERVE_S = 1.0


def run(config: RouterConfig) -> int:
    """Route until SIGINT or SIGTERM; returns the exit code. ConfigError when the address cannot be bound."""
    raise_descriptor_limit()
    return asyncio.run(_run(config))


async def _run(config: RouterConfig) -> int:
    stop = stop_on_signals()
    async with running_router(config) as router:
        if not config.paired:
            log.info("servers that do both: requests are balanced, no KV goes between servers")
        await until_ended(serve_router(config, router, stop), router.supervision)
    log.info("stopped")
    return 0


def stop_on_signals() -> asyncio.Event:
    """Set by SIGINT or SIGTERM from now on."""
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    return stop


async def serve_router(config: RouterConfig, router: RunningRouter, stop: asyncio.Event) -> None:
    """Until `stop` is set and what runs has ended. ConfigError when the address cannot be bound."""
    await serve_http(
        router.app,
        host=config.host,
        port=config.port,
        stop=stop,
        drain_timeout_s=config.drain_timeout_s,
        on_started=lambda port: _announce(config, port),
    )


async def until_ended(serving: Coroutine[Any, Any, None], *failures: asyncio.Task[None]) -> None:
    """Serve, but not longer than the tasks live that end only when something failed."""
    server = asyncio.create_task(serving)
    try:
        ended, _ = await asyncio.wait({server, *failures}, return_when=asyncio.FIRST_COMPLETED)
        for task in ended:
            await task
    finally:
        server.cancel()
        await asyncio.gather(server, return_exceptions=True)


@dataclass(frozen=True, slots=True)
class RunningRouter:
    """`supervision` ends only when a bug ended it."""

    app: ASGIApp
    servers: Sequence[Upstream]
    supervision: asyncio.Task[None]


@asynccontextmanager
async def running_router(config: RouterConfig) -> AsyncIterator[RunningRouter]:
    """A router whose health checks run inside the context. All servers were looked at once."""
    servers = _servers(config)
    metrics = Metrics(only=ROUTER_METRICS)
    clock: Callable[[], float] = asyncio.get_running_loop().time
    seating = Seating(config.policy(), metrics, clock)
    seating.watch(servers)
    seating.changed()
    health = HealthWatch(
        servers, seating, interval_s=config.health_interval_s, timeout_s=config.health_timeout_s
    )
    relay = Relay(seating, health, metrics)
    context = RouterContext(config, servers, seating, relay, metrics)
    await health.look_once()
    for each in servers:
        if not each.up:
            log.warning("%s is not up yet: %s", each.name, each.detail)
    supervision = asyncio.create_task(_supervise(health, seating))
    try:
        yield RunningRouter(build_router_app(context), servers, supervision)
    finally:
        supervision.cancel()
        await asyncio.gather(supervision, return_exceptions=True)
        await asyncio.gather(*(each.close() for each in servers))


def _servers(config: RouterConfig) -> list[Upstream]:
    roles: dict[str, Role | None] = {
        "prefill": Role.PREFILL,
        "decode": Role.DECODE,
        "server": None,
    }
    return [
        Upstream(address, role, connect_timeout_s=config.connect_timeout_s)
        for flag, role in roles.items()
        for address in config.addresses(flag)
    ]


async def _supervise(health: HealthWatch, seating: Seating) -> None:
    async with asyncio.TaskGroup() as group:
        group.create_task(health.run())
        group.create_task(_observe(seating))


async def _observe(seating: Seating) -> None:
    while True:
        seating.observe()
        await asyncio.sleep(_OBSERVE_S)


def _announce(config: RouterConfig, port: int) -> None:
    host = f"[{config.host}]" if ":" in config.host else config.host
    print(f"{LISTENING}http://{host}:{port}/v1", flush=True)
