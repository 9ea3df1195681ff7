"""The null server answers as it is told, in this process and as one of its own."""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import Awaitable

import psutil
import pytest

from dualpath.base.errors import ConfigError
from dualpath.bench.replay.conversation import PromptBody
from dualpath.bench.replay.endpoint import Endpoint, EndpointConfig
from dualpath.bench.replay.null_answers import MODEL, NullConfig, serve_null
from dualpath.bench.replay.null_server import NullServer
from dualpath.bench.replay.null_server import main as serve_main

PROMPT = PromptBody(b"[1,2,3]", 3)


def run(work: Awaitable[None]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(20):
            await work

    asyncio.run(bounded())


async def fetch(base_url: str, path: str, body: object = None) -> tuple[int, object]:
    """Without our own client."""
    host, _, port = base_url.removeprefix("http://").removesuffix("/v1").partition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    content = b"" if body is None else json.dumps(body).encode()
    method = "GET" if body is None else "POST"
    head = f"{method} {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(content)}\r\n\r\n"
    writer.write(head.encode() + content)
    answer = await reader.readuntil(b"\r\n\r\n")
    length = int(answer.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
    content = await reader.readexactly(length)
    writer.close()
    return int(answer.split(b" ")[1]), json.loads(content)


def test_it_has_the_api_that_clients_ask_for() -> None:
    async def work() -> None:
        async with serve_null(NullConfig()) as base_url:
            status, models = await fetch(base_url, "/v1/models")
            assert status == 200
            assert models["data"][0]["id"] == MODEL  # type: ignore[index]
            assert (await fetch(base_url, "/health"))[0] == 200
            assert (await fetch(base_url, "/v1/other"))[0] == 404
            for path, choice in (
                ("completions", {"text": " null null"}),
                ("chat/completions", {"message": {"role": "assistant", "content": " null null"}}),
            ):
                body = {"prompt": "x", "max_tokens": 2}
                status, answer = await fetch(base_url, f"/v1/{path}", body)
                assert status == 200
                assert answer["usage"]["completion_tokens"] == 2  # type: ignore[index]
                assert choice.items() <= answer["choices"][0].items()  # type: ignore[index]

    run(work())


def test_capacity_makes_requests_wait_for_their_turn() -> None:
    async def work() -> None:
        order: list[int] = []
        config = NullConfig(ttft_s=0.02, capacity=1)
        async with (
            serve_null(config) as base_url,
            Endpoint(EndpointConfig(base_url=base_url, model=MODEL)) as endpoint,
        ):

            async def ask(number: int) -> None:
                answer = await endpoint.send(PROMPT, 1)
                assert answer.error == ""
                order.append(number)

            asks = []
            for number in range(4):
                asks.append(asyncio.create_task(ask(number)))
                while endpoint.open_connections <= number:
                    await asyncio.sleep(0)
            # One that waits goes away; the others' turns come all the same.
            asks[2].cancel()
            await asyncio.gather(*asks, return_exceptions=True)
            assert order == [0, 1, 3]

    run(work())


def test_it_stalls_once() -> None:
    async def work() -> None:
        config = NullConfig(stall_after=1, stall_s=0.3)
        async with (
            serve_null(config) as base_url,
            Endpoint(EndpointConfig(base_url=base_url, model=MODEL)) as endpoint,
        ):
            took = []
            for _ in range(3):
                answer = await endpoint.send(PROMPT, 2)
                assert answer.error == "" and answer.end_s is not None
                took.append(answer.end_s - answer.sent_s)
            assert took[1] >= 0.29

    run(work())


@pytest.mark.parametrize("tokens_per_event", [1, 3, 100])
@pytest.mark.parametrize("tpot_s", [0.0, 0.001])
def test_it_sends_the_tokens_asked_for(tokens_per_event: int, tpot_s: float) -> None:
    async def work() -> None:
        config = NullConfig(tokens_per_event=tokens_per_event, tpot_s=tpot_s)
        async with (
            serve_null(config) as base_url,
            Endpoint(EndpointConfig(base_url=base_url, model=MODEL)) as endpoint,
        ):
            for tokens in (1, 3, 7):
                answer = await endpoint.send(PROMPT, tokens)
                assert (answer.error, answer.token_ids) == ("", [7] * tokens)
                assert len(answer.gaps_s) == -(-tokens // tokens_per_event) - 1

    run(work())


def test_flags_give_the_configuration_again() -> None:
    config = NullConfig(ttft_s=0.5, tokens_per_event=4, capacity=2, cut_share=0.25)
    parser = argparse.ArgumentParser()
    NullConfig.add_arguments(parser)
    assert NullConfig.from_arguments(parser.parse_args(config.arguments())) == config
    assert NullConfig.from_arguments(parser.parse_args([])) == NullConfig()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("ttft_s", -1.0),
        ("tpot_s", float("nan")),
        ("tokens_per_event", 0),
        ("capacity", -1),
        ("error_share", 1.5),
    ],
)
def test_configurations_that_cannot_work_are_refused(field: str, value: float) -> None:
    with pytest.raises(ConfigError, match="null server"):
        NullConfig(**{field: value})  # type: ignore[arg-type]


def test_a_flag_that_does_not_exist_is_refused() -> None:
    with pytest.raises(SystemExit):
        serve_main(["--no-such-flag"])


def test_as_a_process_of_its_own_it_answers_and_leaves_nothing() -> None:
    server = NullServer(NullConfig(tpot_s=0.001))
    with server:
        process = psutil.Process(server.pid)

        async def work() -> None:
            async with Endpoint(EndpointConfig(base_url=server.base_url)) as endpoint:
                assert (await endpoint.probe()).model == MODEL
                assert (await endpoint.send(PROMPT, 5)).token_ids == [7] * 5

        run(work())
        assert process.is_running()
    assert not process.is_running()
