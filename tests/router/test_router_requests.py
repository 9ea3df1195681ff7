"""What happens to requests while all goes well: pairs, plain servers, streams, headers, hints."""

from __future__ import annotations

import asyncio
import json

import httpx
import pytest
from router_kit import FakeServer, events_of, pair_config, routed, run, until

from dualpath.router.config import RouterConfig

PROMPT = {"model": "fake", "prompt": "Hello, who is there?", "max_tokens": 3}


def test_a_request_goes_to_the_prefill_server_and_then_to_the_decode_server():
    async def work() -> None:
        async with FakeServer() as pe, FakeServer() as de:
            async with routed(pair_config([pe], [de])) as client:
                answer = await client.post("/v1/completions", json=PROMPT | {"seed": 7})
            assert answer.status_code == 200
            assert answer.json()["choices"][0]["text"] == "word word word "
            assert answer.headers["x-dualpath-servers"] == f"{pe.name}, {de.name}"
            (first,), (second,) = pe.seen, de.seen
            assert first.body == {
                "model": "fake",
                "prompt": PROMPT["prompt"],
                "max_tokens": 1,
                "stream": False,
                "seed": 7,
                "kv_transfer_params": first.body["kv_transfer_params"],
            }
            assert first.params == {
                "role": "prefill",
                "request": first.params["request"],
                "attempt": 1,
                "peer": {"host": "127.0.0.1", "port": de.port},
                "hit_tokens": 0,
                "pe_tokens": 0,
                "prompt_tokens": 0,
            }
            # What the prefill server said is passed on as it came, also what nobody here knows.
            handed = first.params | {"role": "decode", "prompt_tokens": 7, "kept_by": pe.name}
            given = {"kv_transfer_params": {"dualpath": handed}}
            assert second.body == PROMPT | {"seed": 7} | given

    run(work())


def test_the_prefill_server_is_asked_for_the_prompt_alone():
    async def work() -> None:
        async with FakeServer() as pe, FakeServer() as de:
            body = {
                "model": "fake",
                "messages": [{"role": "user", "content": "Hi"}],
                "tools": [{"type": "function", "function": {"name": "f"}}],
                "tool_choice": "required",
                "max_completion_tokens": 9,
                "stream": True,
                "stream_options": {"include_usage": True},
                "response_format": {"type": "json_object"},
                "logprobs": True,
                "top_logprobs": 2,
                "min_tokens": 4,
                "chat_template_kwargs": {"thinking": False},
            }
            async with routed(pair_config([pe], [de])) as client:
                answer = await client.post("/v1/chat/completions", json=body)
            assert len(events_of(answer.text)) == 4
            assert pe.seen[0].path == de.seen[0].path == "/v1/chat/completions"
            kept = ("model", "messages", "tools", "chat_template_kwargs")
            assert pe.seen[0].body == {name: body[name] for name in kept} | {
                "tool_choice": "none",
                "stream": False,
                "max_tokens": 1,
                "kv_transfer_params": pe.seen[0].body["kv_transfer_params"],
            }
            params = de.seen[0].body["kv_transfer_params"]
            assert de.seen[0].body == body | {"kv_transfer_params": params}

    run(work())


def test_events_reach_the_client_as_they_come():
    async def work() -> None:
        async with (
            FakeServer() as pe,
            FakeServer(hold_after=1) as de,
            routed(pair_config([pe], [de])) as client,
            client.stream("POST", "/v1/completions", json=PROMPT | {"stream": True}) as answer,
        ):
            assert answer.status_code == 200
            assert answer.headers["content-type"].startswith("text/event-stream")
            parts = answer.aiter_text()
            assert [each["choices"][0]["text"] for each in events_of(await anext(parts))] == [
                "word0"
            ]
            assert de.holding == 1
            de.release.set()
            rest = "".join([part async for part in parts])
            assert [each if each == "[DONE]" else "event" for each in events_of(rest)] == [
                "event",
                "event",
                "[DONE]",
            ]

    run(work())


def test_what_clients_say_of_transfers_reaches_no_server():
    async def work() -> None:
        evil = {"kv_transfer_params": {"dualpath": {"peer": {"host": "evil", "port": 1}}}}
        async with FakeServer() as pe, FakeServer() as de, FakeServer() as plain:
            async with routed(pair_config([pe], [de])) as client:
                await client.post("/v1/completions", json=PROMPT | evil)
            async with routed(RouterConfig(server=(plain.url,))) as client:
                await client.post("/v1/completions", json=PROMPT | evil)
            for seen in (*pe.seen, *de.seen, *plain.seen):
                assert "evil" not in json.dumps(seen.body)
            assert "kv_transfer_params" not in plain.seen[0].body

    run(work())


@pytest.mark.parametrize("several", [{"n": 2}, {"prompt": ["a", "b"]}, {"best_of": 3}])
def test_several_answers_are_served_without_a_prefill_server(several):
    async def work() -> None:
        async with FakeServer() as pe, FakeServer() as de:
            async with routed(pair_config([pe], [de])) as client:
                answer = await client.post("/v1/completions", json=PROMPT | several)
            assert answer.status_code == 200
            assert (len(pe.seen), len(de.seen)) == (0, 1)
            assert "kv_transfer_params" not in de.seen[0].body

    run(work())


def test_a_prefill_server_without_the_connector_is_told_of(caplog):
    async def work() -> None:
        async with FakeServer(connector=False) as pe, FakeServer() as de:
            async with routed(pair_config([pe], [de])) as client:
                for _ in range(3):
                    answer = await client.post("/v1/completions", json=PROMPT)
                    assert answer.status_code == 200
            assert all("kv_transfer_params" not in each.body for each in de.seen)
            warnings = [each for each in caplog.messages if "DualPathConnector" in each]
            assert len(warnings) == 1 and pe.name in warnings[0]

    run(work())


def test_plain_servers_get_requests_in_balance():
    async def work() -> None:
        async with FakeServer(hold_after=0) as one, FakeServer(hold_after=0) as two:
            config = RouterConfig(server=(one.url, two.url))
            async with routed(config) as client:
                asked = [
                    asyncio.create_task(client.post("/v1/completions", json=PROMPT))
                    for _ in range(8)
                ]
                await until(lambda: one.holding + two.holding == 8)
                assert (one.holding, two.holding) == (4, 4)
                one.release.set()
                two.release.set()
                assert {each.status_code for each in await asyncio.gather(*asked)} == {200}

    run(work())


def test_a_long_prompt_counts_as_many_short_ones():
    async def work() -> None:
        long = PROMPT | {"prompt": list(range(1000))}
        short = PROMPT | {"prompt": [1] * 100}
        async with (
            FakeServer(hold_after=0) as one,
            FakeServer(hold_after=0) as two,
            FakeServer() as de,
            routed(pair_config([one, two], [de])) as client,
        ):
            asked = [asyncio.create_task(client.post("/v1/completions", json=long))]
            await until(lambda: one.holding + two.holding == 1)
            loaded, free = (one, two) if one.holding else (two, one)
            asked += [
                asyncio.create_task(client.post("/v1/completions", json=short)) for _ in range(8)
            ]
            await until(lambda: one.holding + two.holding == 9)
            assert (loaded.holding, free.holding) == (1, 8)
            one.release.set()
            two.release.set()
            await asyncio.gather(*asked)

    run(work())


def test_what_was_sent_before_is_planned_to_be_read():
    async def work() -> None:
        turn = list(range(1000))
        async with FakeServer() as pe, FakeServer() as de:
            async with routed(pair_config([pe], [de])) as client:
                for prompt in (turn, [*turn, *turn], [5, *turn]):
                    await client.post("/v1/completions", json=PROMPT | {"prompt": prompt})
                metrics = (await client.get("/metrics")).text
            hits = [each.params["hit_tokens"] for each in pe.seen]
            # Whole blocks of 64 tokens, of prefixes in units of 128.
            assert hits == [0, 896, 0]
            split = pe.seen[1].params["pe_tokens"]
            assert split in (448, 384, 512)
            assert "dualpath:prefix_cache_hits_total 896.0" in metrics

    run(work())


def test_tenants_do_not_share_what_was_sent():
    async def work() -> None:
        prompt = {"prompt": list(range(1000))}
        async with FakeServer() as pe, FakeServer() as de:
            async with routed(pair_config([pe], [de])) as client:
                for salt in ("a", "b", "a"):
                    await client.post(
                        "/v1/completions", json=PROMPT | prompt | {"cache_salt": salt}
                    )
            assert [each.params["hit_tokens"] for each in pe.seen] == [0, 0, 896]

    run(work())


def test_headers_pass_but_those_of_the_connection():
    async def work() -> None:
        async with FakeServer() as pe, FakeServer() as de:
            async with routed(pair_config([pe], [de])) as client:
                headers = {
                    "Authorization": "Bearer secret",
                    "X-Request-Id": "trace-7",
                    "traceparent": "00-1-2-01",
                    "Accept-Encoding": "gzip",
                }
                answer = await client.post("/v1/completions", json=PROMPT, headers=headers)
                unnamed = await client.post("/v1/completions", json=PROMPT)
            assert answer.headers["x-request-id"] == "trace-7"
            for server in (pe, de):
                got = server.seen[0].headers
                assert got["authorization"] == "Bearer secret"
                assert got["x-request-id"] == "trace-7"
                assert got["traceparent"] == "00-1-2-01"
                assert got["host"] == server.name
                assert got["accept-encoding"] == "identity"
                assert server.seen[1].headers["x-request-id"] == unnamed.headers["x-request-id"]

    run(work())


def test_a_client_that_goes_away_ends_the_request_everywhere():
    async def work(pe: FakeServer, de: FakeServer, held: FakeServer) -> None:
        async with pe, de, routed(pair_config([pe], [de])) as client:
            asked = asyncio.create_task(
                client.post("/v1/completions", json=PROMPT | {"stream": True})
            )
            await until(lambda: held.holding == 1)
            asked.cancel()
            await asyncio.gather(asked, return_exceptions=True)
            await until(lambda: held.gone == 1)
            await until_idle(client)

    run(work(pe := FakeServer(hold_after=0), FakeServer(), pe))
    run(work(FakeServer(), de := FakeServer(hold_after=1), de))


async def until_idle(client: httpx.AsyncClient) -> None:
    while True:
        state = (await client.get("/health")).json()
        if not any(each["requests"] for each in state["servers"]) and not state["waiting"]:
            return


def test_a_slow_client_holds_the_server_back():
    async def work() -> None:
        # More than all buffers on the way hold.
        async with FakeServer(tokens=200_000) as server:
            config = RouterConfig(server=(server.url,))
            async with (
                routed(config) as client,
                client.stream("POST", "/v1/completions", json=PROMPT | {"stream": True}) as answer,
            ):
                received = 0
                async for part in answer.aiter_bytes():
                    received += len(part)
                assert received > 10_000_000

    run(work())


def test_models_and_tokens_come_from_a_server():
    async def work() -> None:
        async with FakeServer() as pe, FakeServer() as de:
            async with routed(pair_config([pe], [de])) as client:
                models = await client.get("/v1/models", headers={"Authorization": "Bearer k"})
                await client.post("/tokenize", json={"prompt": "Hi"})
            assert models.json()["data"] == [{"id": "fake"}]
            assert [(each.path, each.body) for each in de.seen] == [
                ("/v1/models", {}),
                ("/tokenize", {"prompt": "Hi"}),
            ]
            assert de.seen[0].headers["authorization"] == "Bearer k"
            assert pe.seen == []

    run(work())
