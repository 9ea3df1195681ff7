"""`dualpath serve`: a cluster with the OpenAI API in front, until a signal ends it."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Coroutine
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from dualpath.monitor.metrics import Metrics
from dualpath.monitor.tracing import Tracing
from dualpath.serve.api import ApiSettings, build_app, serve_http
from dualpath.serve.cluster import Cluster, ModelFacts, describe_model
from dualpath.serve.config import ServeConfig
from dualpath.serve.tokenizer import TextTokenizer, load_text_tokenizer, read_eos_tokens

__all__ = ["LISTENING", "run"]

log = logging.getLogger(__name__)

LISTENING = "listening on "
"""Standard output gets one line that starts with this, followed by the base URL, once requests are taken."""


def run(config: ServeConfig) -> int:
    """Serve until SIGINT or SIGTERM; Returns the exit code.

    Raises ConfigError when something that was asked for cannot work.
    """
    facts = describe_model(config)
    template = None if config.chat_template is None else Path(config.chat_template)
    tokenizer = load_text_tokenizer(facts.files.directory, chat_template_file=template)
    with ExitStack() as stack:
        tracing = None
        if config.otlp_traces_endpoint is not None:
            tracing = stack.enter_context(Tracing(config.otlp_traces_endpoint))
        return asyncio.run(_serve(config, facts, tokenizer, tracing))


async def _serve(
    config: ServeConfig, facts: ModelFacts, tokenizer: TextTokenizer, tracing: Tracing | None
) -> int:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    metrics = Metrics()
    cluster = Cluster(config, facts, metrics)
    try:
        await _unless(stop, cluster.start(log.info))
        if not stop.is_set():
            settings = ApiSettings.from_config(
                config,
                max_model_len=facts.max_model_len,
                vocab_size=facts.vocabulary,
                eos_tokens=read_eos_tokens(facts.files.directory),
            )
            app = build_app(cluster.driver, tokenizer, settings, metrics, tracing)
            await _until_failed(
                cluster,
                serve_http(
                    app,
                    host=config.host,
                    port=config.port,
                    stop=stop,
                    drain_timeout_s=config.drain_timeout_s,
                    on_started=lambda port: _announce(config, port),
                ),
            )
    finally:
        cut_off = await cluster.stop()
    if cut_off:
        log.warning("%d requests were cut off", cut_off)
    log.info("stopped")
    return 0


async def _unless(stop: asyncio.Event, starting: Coroutine[Any, Any, None]) -> None:
    """Wait for the start, but not longer than until the first signal."""
    start = asyncio.create_task(starting)
    stopped = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait({start, stopped}, return_when=asyncio.FIRST_COMPLETED)
        if start.done():
            await start
    finally:
        start.cancel()
        stopped.cancel()
        await asyncio.gather(start, stopped, return_exceptions=True)


async def _until_failed(cluster: Cluster, serving: Coroutine[Any, Any, None]) -> None:
    """Serve, but not longer than the cluster's own tasks live."""
    server = asyncio.create_task(serving)
    failed = asyncio.create_task(cluster.failed())
    try:
        await asyncio.wait({server, failed}, return_when=asyncio.FIRST_COMPLETED)
        await (server if server.done() else failed)
    finally:
        server.cancel()
        failed.cancel()
        await asyncio.gather(server, failed, return_exceptions=True)


def _announce(config: ServeConfig, port: int) -> None:
    host = f"[{config.host}]" if ":" in config.host else config.host
    print(f"{LISTENING}http://{host}:{port}/v1 (model {config.model_name})", flush=True)
