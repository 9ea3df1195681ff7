"""The router in front of real vLLM servers: sessions over the OpenAI API, with the right tokens."""

from __future__ import annotations

import json
import random
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dualpath.bench.server import ServeProcess
from dualpath.bench.vllm_server import BLOCK_TOKENS, VllmPair, VllmServer


@pytest.fixture(scope="module")
def router(pair: VllmPair, logs: Path) -> Iterator[ServeProcess]:
    addresses = [f"http://127.0.0.1:{each.port}#kv={each.kv_port}" for each in (pair.pe, pair.de)]
    arguments = ("--prefill", addresses[0], "--decode", addresses[1])
    command = [sys.executable, "-m", "dualpath", "router"]
    with ServeProcess(arguments, logs / "router.log", command=command) as started:
        yield started


def complete(router: ServeProcess, prompt: list[int], **fields: Any) -> dict[str, Any]:
    body = {"model": "tiny", "prompt": prompt, "temperature": 0, "ignore_eos": True, **fields}
    request = urllib.request.Request(
        f"{router.base_url}/completions",
        json.dumps({**body, "return_token_ids": True}).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=120) as reply:
        answer: dict[str, Any] = json.load(reply)
        return answer


def test_a_session_through_the_router(
    plain: VllmServer, pair: VllmPair, router: ServeProcess
) -> None:
    draw = random.Random(77)
    prompt = [draw.randrange(1000) for _ in range(900)]
    hits = pair.pe.metric("vllm:external_prefix_cache_hits_total")
    for _ in range(3):
        want = plain.complete(prompt, 60)
        answer = complete(router, prompt, max_tokens=60)
        assert answer["choices"][0]["token_ids"] == want.tokens
        cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert cached <= len(prompt) - 1
        prompt = prompt + want.tokens + [draw.randrange(1000) for _ in range(50)]
    assert pair.de.metric("vllm:dualpath_pulled_blocks_total") > 0
    with urllib.request.urlopen(f"{router.base_url.removesuffix('/v1')}/health") as reply:
        holds = {each["kv_capacity_tokens"] for each in json.load(reply)["servers"]}
    blocks = (128 << 20) // (4 * 2 * 2 * 64 * 4 * BLOCK_TOKENS)
    assert holds == {blocks * BLOCK_TOKENS}
    assert pair.pe.metric("vllm:external_prefix_cache_hits_total") > hits
