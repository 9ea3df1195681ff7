"""A recorded coding agent, replayed against a real server: it finds what the trace says, token for token."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, field, replace

import pytest

from dualpath.bench.replay.conversation import Conversation, TokenSource
from dualpath.bench.replay.endpoint import Endpoint, EndpointConfig
from dualpath.bench.replay.load import OfflineLoad
from dualpath.bench.replay.runner import run_load
from dualpath.bench.server import ServeProcess
from dualpath.traces import (
    limit_context,
    open_trace,
    reused_tokens,
    without_delays,
)

BLOCK_TOKENS = 64
DEADLINE_S = 60.0
SESSION = (
    14  # Its second prompt leaves the first before its end, as when a client rewrites its history.
)
TURNS = 4


@dataclass
class SettledStore:
    """Sends a turn only when all of the turns before it has been stored: until then nothing can be found."""

    endpoint: Endpoint
    blocks: set[tuple[int, ...]] = field(default_factory=set)

    async def send(self, prompt, output_tokens, on_first=None):
        await asyncio.wait_for(self._settled(), DEADLINE_S)
        answer = await self.endpoint.send(prompt, output_tokens, on_first)
        tokens = json.loads(prompt.json)
        for end in range(BLOCK_TOKENS, len(tokens) + 1, BLOCK_TOKENS):
            self.blocks.add(tuple(tokens[:end]))
        return answer

    async def metrics(self):
        return {}

    async def _settled(self):
        while True:
            metrics = await self.endpoint.metrics()
            if metrics.get("dualpath:store_blocks", 0) >= len(self.blocks):
                return
            await asyncio.sleep(0.02)


@pytest.mark.slow
def test_a_coding_agent_finds_exactly_what_the_block_ids_say(tmp_path):
    trace = open_trace("coding-agent")
    trace = replace(trace, sessions=(trace.sessions[SESSION],))
    (session,) = without_delays(limit_context(trace, 16_000).trace).sessions
    # One token each: what is generated adds no blocks to those of the prompts.
    session = replace(
        session, turns=tuple(replace(turn, output_tokens=1) for turn in session.turns[:TURNS])
    )
    trace = replace(trace, sessions=(session,))
    (expected,) = reused_tokens(trace)
    assert expected[:2] == (0, 13_184) and len(expected) == TURNS

    arguments = [
        *("tiny", "--block-tokens", str(BLOCK_TOKENS), "--max-model-len", "16384"),
        *("--quota-s", "10", "--threads", "1", "--store", str(tmp_path / "store")),
    ]

    async def replay(base_url):
        async with Endpoint(EndpointConfig(base_url=base_url)) as endpoint:
            facts = await endpoint.probe()
            source = TokenSource(0, 0, min(facts.vocab_size, 256))
            return await run_load(
                OfflineLoad([session]),
                SettledStore(endpoint),
                lambda each: Conversation(each, source),
            )

    with ServeProcess(arguments, tmp_path / "server.log") as server:
        run = asyncio.run(replay(server.base_url))
    assert [each.error for each in run.requests] == [""] * TURNS
    assert [each.prompt_tokens for each in run.requests] == [
        turn.prompt.tokens for turn in session.turns
    ]
    # All of them are whole blocks, and none is a whole prompt.
    assert [each.cached_tokens for each in run.requests] == list(expected)
