"""What a request is told of where its time went, and what nodes are counted to have read, on real engines."""

from __future__ import annotations

import time
from collections.abc import Callable

import msgspec
import pytest
from cluster_kit import BLOCK_TOKENS, Answer, Served, prompt_of

from dualpath.base.ids import EngineId
from dualpath.serve.generation import RequestTimings
from dualpath.serve.messages import FromEngine, StartAttempt, Tokens

Serve = Callable[..., Served]

BLOCKS = 6
PROMPT_TOKENS = BLOCKS * BLOCK_TOKENS + 3
SLOW_S = 0.3


def parts_of(answer: Answer) -> RequestTimings:
    """The timings, after checks that hold for all."""
    assert answer.timings is not None
    parts = msgspec.structs.asdict(answer.timings)
    assert all(seconds >= 0 for seconds in parts.values()), parts
    assert answer.timings.prefill_s > 0
    assert sum(parts.values()) == pytest.approx(answer.timings.total_s)
    return answer.timings


def moments_of_the_first_token(served: Served) -> list[float]:
    """Filled with times just before and just after the driver takes the first token of a request."""
    moments: list[float] = []

    def before(message: FromEngine) -> FromEngine:
        if isinstance(message, Tokens) and not moments:
            moments.append(time.monotonic())
        return message

    def after(engine: EngineId, message: FromEngine) -> None:
        if isinstance(message, Tokens) and len(moments) == 1:
            moments.append(time.monotonic())

    served.wire.rewrite = before
    served.wire.received.append(after)
    return moments


@pytest.mark.parametrize("path", ["pe", "de", "split"])
def test_the_parts_sum_up_to_the_first_token_and_reads_count_as_reads(
    serve: Serve, path: str
) -> None:
    """Every read takes SLOW_S at least, on whichever side."""
    served = serve(read_path=path, store_faults=f"fault=read:slow:1;slow_s={SLOW_S};seed=1")
    prompt = prompt_of(1, PROMPT_TOKENS)

    async def ask() -> tuple[Answer, list[float]]:
        served.wire.received.clear()
        moments = moments_of_the_first_token(served)
        return await served.ask_right(prompt), moments

    async def miss_and_hit() -> None:
        miss, moments = await ask()
        parts = parts_of(miss)
        assert moments[0] - miss.arrival_s <= parts.total_s <= moments[1] - miss.arrival_s
        assert (parts.read_s, parts.retry_s) == (0.0, 0.0)

        await served.stored(prompt)
        hit, moments = await ask()
        parts = parts_of(hit)
        assert hit.cached_tokens == BLOCKS * BLOCK_TOKENS
        assert moments[0] - hit.arrival_s <= parts.total_s <= moments[1] - hit.arrival_s
        # Reads start when the side has memory, which may be before the prefill engine knows of it.
        assert parts.delivery_s + parts.allocation_s + parts.read_s >= SLOW_S
        assert parts.read_s > 0
        assert parts.retry_s == 0.0
        (placement,) = hit.placements
        assert (placement.attempt, placement.prefill_engine[:2], placement.decode_engine[:2]) == (
            1,
            "pe",
            "de",
        )

    served.run(miss_and_hit())


def test_failed_attempts_count_as_retries(serve: Serve) -> None:
    served = serve(prefill=2)
    prompt = prompt_of(2, PROMPT_TOKENS)
    killed: list[EngineId] = []

    def kill_first(engine: EngineId, message: object) -> None:
        if isinstance(message, StartAttempt) and not killed:
            killed.append(engine)
            served.kill(engine)

    async def lose_one() -> None:
        moments = moments_of_the_first_token(served)
        served.wire.sent.append(kill_first)
        answer = await served.ask_right(prompt)
        # More than two where an attempt met the dying engine again.
        (placement,) = answer.placements
        if placement.attempt == 1:
            pytest.skip("the engine was faster than its killer")
        parts = parts_of(answer)
        assert parts.retry_s > 0
        assert moments[0] - answer.arrival_s <= parts.total_s <= moments[1] - answer.arrival_s
        assert placement.prefill_engine != killed[0]

    served.run(lose_one())


def test_what_a_node_reads_is_counted_while_requests_run(serve: Serve) -> None:
    served = serve(read_path="pe")
    prompt = prompt_of(3, PROMPT_TOKENS)
    block_bytes = served.cluster.facts.layout.full_block_bytes
    at_first_token: list[float] = []

    def read_bytes(group: str) -> float:
        return served.metric("snic_read_bytes_total", group=group)

    def look(engine: EngineId, message: object) -> None:
        # Of the prefill engine, whose reports of reading came before.
        if isinstance(message, Tokens) and engine.startswith("pe") and not at_first_token:
            at_first_token.append(read_bytes("pe-node0"))

    async def read() -> None:
        await served.store_prompt(prompt)
        assert read_bytes("pe-node0") == 0
        served.wire.received.append(look)
        await served.ask_right(prompt, 40)
        assert at_first_token == [BLOCKS * block_bytes]
        assert read_bytes("de-node0") == 0

    assert served.metrics.registry.get_sample_value(
        "dualpath:snic_read_bytes_total", {"group": "de-node0"}
    ) == pytest.approx(0)
    served.run(read())
