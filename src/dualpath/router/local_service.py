"""`dualpath serve --engine vllm`: vLLM servers on this host and the router before them, until a signal."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections.abc import Sequence

from dualpath.http import raise_descriptor_limit
from dualpath.router.config import RouterConfig
from dualpath.router.local_plan import (
    LocalServer,
    free_ports,
    host_gpus,
    plan_servers,
    router_config,
    with_local_model,
)
from dualpath.router.local_servers import LocalServers, running_servers
from dualpath.router.service import (
    RunningRouter,
    running_router,
    serve_router,
    stop_on_signals,
    until_ended,
)
from dualpath.serve.config import ServeConfig

__all__ = ["run_with_servers"]

log = logging.getLogger(__name__)

_POLL_S = 0.1


def run_with_servers(config: ServeConfig, command: Sequence[str] = (sys.executable,)) -> int:
    """Start vLLM servers on this host, and route to them until SIGINT or SIGTERM; returns the exit code.

    `command`: the Python that has vLLM. ConfigError for what cannot work, EngineLost when a server does not
    stay up. No server is left running.
    """
    raise_descriptor_limit()
    config = with_local_model(config)
    gpus = host_gpus(os.environ) if config.gpus_per_server else []
    planned = plan_servers(config, free_ports(max(1, config.gpus_per_server)), gpus)
    return asyncio.run(_run_with_servers(router_config(config, planned), planned, command))


async def _run_with_servers(
    config: RouterConfig, planned: Sequence[LocalServer], command: Sequence[str]
) -> int:
    stop = stop_on_signals()
    async with (
        running_servers(LocalServers(planned, command=command)) as servers,
        running_router(config) as router,
    ):
        await until_ended(_serve_once_up(config, router, stop), router.supervision, servers)
    log.info("stopped")
    return 0


async def _serve_once_up(config: RouterConfig, router: RunningRouter, stop: asyncio.Event) -> None:
    """Loading a model takes what it takes: a signal or a server that is given up ends the wait."""
    log.info("waiting for %d servers", len(router.servers))
    while not all(each.up for each in router.servers):
        if stop.is_set():
            return
        await asyncio.sleep(_POLL_S)
    await serve_router(config, router, stop)
