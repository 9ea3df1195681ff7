"""A cluster whose store is a Redis server: hits after a restart, right tokens without the server."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from cluster_kit import BLOCK_TOKENS, Served, prompt_of

from dualpath.testing import RedisServer, redis_server_path

pytestmark = pytest.mark.skipif(
    redis_server_path() is None and os.environ.get("DUALPATH_REQUIRE_TESTBED") != "1",
    reason="no redis-server on PATH: make testbed-tools",
)

BLOCKS = 10
PROMPT = prompt_of(41, BLOCKS * BLOCK_TOKENS + 5)


@pytest.mark.slow
def test_blocks_are_hits_after_a_restart(serve: Callable[..., Served], tmp_path: Path) -> None:
    with RedisServer(tmp_path) as server:
        first = serve(store=server.url)
        first.run(first.store_prompt(PROMPT))
        first.close()
        second = serve(store=server.url)
        answer = second.run(second.ask_right(PROMPT))
        second.run(second.released())
        second.close()
    assert answer.cached_tokens == BLOCKS * BLOCK_TOKENS
    assert sum(answer.by_path.values()) == BLOCKS * BLOCK_TOKENS


def test_server_that_dies_costs_hits_only(serve: Callable[..., Served], tmp_path: Path) -> None:
    with RedisServer(tmp_path, appendonly="yes", appendfsync="always") as server:
        served = serve(store=server.url, store_timeout_s=1.0)

        async def check() -> None:
            await served.store_prompt(PROMPT)
            server.kill()
            for _ in range(3):
                answer = await served.ask_right(PROMPT)
                assert answer.cached_tokens == 0
            server.start()
            # Engines find it again within their pause, store the blocks, and then read them.
            while answer.cached_tokens != BLOCKS * BLOCK_TOKENS:
                answer = await served.ask_right(PROMPT)
            await served.released()

        served.run(check())
        served.close()
