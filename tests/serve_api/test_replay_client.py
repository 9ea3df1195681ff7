"""The replay's HTTP client against the real API server."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest
from api_kit import MAX_MODEL_LEN, MODEL, EchoGenerator, Server

from dualpath.bench.replay.conversation import Conversation, PromptBody, TokenSource
from dualpath.bench.replay.endpoint import Endpoint, EndpointConfig
from dualpath.traces import AppendPrompt, Session, Turn


def run(work: Awaitable[None]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(20):
            await work

    asyncio.run(bounded())


def test_a_conversation_goes_on_with_the_servers_tokens(server: Server) -> None:
    async def work() -> None:
        config = EndpointConfig(base_url=f"{server.url}/v1")
        session = Session("s", (Turn(AppendPrompt(6), 4), Turn(AppendPrompt(3), 2)))
        async with Endpoint(config) as endpoint:
            facts = await endpoint.probe()
            assert (facts.model, facts.max_model_len) == (MODEL, MAX_MODEL_LEN)
            assert facts.returns_token_ids and facts.reports_timings and facts.takes_extensions
            talk = Conversation(session, TokenSource(0, 0, 256))
            for index, turn in enumerate(talk.turns):
                body = talk.prompt(index)
                answer = await endpoint.send(body, turn.output_tokens)
                assert answer.error == ""
                request = server.generator.requests[-1]
                assert len(request.token_ids) == body.tokens == answer.prompt_tokens
                assert answer.output_tokens == turn.output_tokens
                assert answer.cached_tokens == body.tokens // 2
                assert answer.cached_by_path == {"pe": 1, "de": body.tokens // 2 - 1}
                assert "read_s" in answer.timings
                talk.take_answer(index, answer.token_ids)
                if index == 0:
                    # The server echoes, and token ids are asked for only where they are needed.
                    assert answer.token_ids == request.token_ids[:4]
                    first = [*request.token_ids, *request.token_ids[:4]]
                else:
                    assert request.token_ids[:10] == first and answer.token_ids is None

    run(work())


def test_a_chat_is_answered(server: Server) -> None:
    async def work() -> None:
        config = EndpointConfig(base_url=f"{server.url}/v1", api="chat")
        async with Endpoint(config) as endpoint:
            await endpoint.probe()
            answer = await endpoint.send(PromptBody(b'"seven words"', 2), 5)
            assert (answer.error, answer.output_tokens) == ("", 5)

    run(work())


def test_cancelling_ends_the_request_on_the_server(serving: Callable[..., object]) -> None:
    generator = EchoGenerator(hold_after=1)

    async def work(server: Server) -> None:
        async with Endpoint(EndpointConfig(base_url=f"{server.url}/v1", model=MODEL)) as endpoint:
            sending = asyncio.create_task(endpoint.send(PromptBody(b"[1,2,3]", 3), 5))
            await asyncio.to_thread(generator.holding.wait, 10)
            sending.cancel()
            with pytest.raises(asyncio.CancelledError):
                await sending
            assert await asyncio.to_thread(generator.released.wait, 10)

    with serving(generator) as server:  # type: ignore[attr-defined]
        run(work(server))
    assert len(generator.closed_early) == 1


def test_errors_in_a_stream_and_refusals_are_told(serving: Callable[..., object]) -> None:
    async def work(server: Server) -> None:
        async with Endpoint(EndpointConfig(base_url=f"{server.url}/v1", model=MODEL)) as endpoint:
            answer = await endpoint.send(PromptBody(b"[1,2,3]", 3), 5)
            assert (answer.error, answer.output_tokens) == ("server error", 2)
            assert "no decode engine is left" in answer.detail
            answer = await endpoint.send(PromptBody(b"[1,2,3]", 3), 5000)
            assert answer.error == "http 400" and "window" in answer.detail

    with serving(EchoGenerator(error_after=2)) as server:  # type: ignore[attr-defined]
        run(work(server))
