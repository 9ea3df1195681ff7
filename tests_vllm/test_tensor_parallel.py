"""A prefill and a decode server of two tensor-parallel ranks each: each rank has half of the heads."""

from __future__ import annotations

import random
from contextlib import ExitStack
from pathlib import Path

import pytest
from server_kit import wait_stored

from dualpath.bench.vllm_server import BLOCK_TOKENS, VllmPair, VllmServer

_RANKS = 2


@pytest.mark.timeout(600)
def test_ranks_find_each_other(model: Path, tmp_path: Path) -> None:
    connector = {"store": str(tmp_path / "store"), "buffer_bytes": 64 << 20}
    ranks = ("--tensor-parallel-size", str(_RANKS))
    with ExitStack() as stack:
        made = [
            VllmServer(model, tmp_path / "plain.log", kv_bytes=64 << 20, arguments=ranks),
            *(
                VllmServer(
                    model,
                    tmp_path / f"{name}.log",
                    connector=connector,
                    kv_bytes=64 << 20,
                    arguments=(*ranks, "--no-enable-prefix-caching"),
                )
                for name in ("pe", "de")
            ),
        ]
        for server in made:
            stack.callback(server.stop)
        plain, pe, de = (server.wait_ready() for server in made)
        pair = VllmPair(pe, de)
        draw = random.Random(0)
        prompt = [draw.randrange(1000) for _ in range(1000)]
        stored = 0
        for turn in range(3):
            want = plain.complete(prompt, 40)
            half = stored // 2 // BLOCK_TOKENS * BLOCK_TOKENS
            first, answer = pair.complete(prompt, 40, hit_tokens=stored, pe_tokens=half)
            assert answer.tokens == want.tokens, turn
            assert (first.cached, answer.cached) == (stored, len(prompt) - 1)
            wait_stored(pair)
            stored = (len(prompt) + 39) // BLOCK_TOKENS * BLOCK_TOKENS
            prompt = [*prompt, *answer.tokens, *(draw.randrange(1000) for _ in range(40))]
    assert len(list((tmp_path / "store").iterdir())) == _RANKS, "a folder of blocks for each rank"
