"""What becomes of requests when servers fail, vanish, are drained or late, and what the router refuses."""

from __future__ import annotations

import asyncio

import httpx
import pytest
from router_kit import FakeServer, events_of, pair_config, routed, run, until

from dualpath.router.config import RouterConfig

PROMPT = {"model": "fake", "prompt": "Hello", "max_tokens": 3}
STREAM = PROMPT | {"stream": True}


def plain(*servers: FakeServer, **settings: object) -> RouterConfig:
    settings = {"health_interval_s": 30.0} | settings
    return RouterConfig(server=tuple(each.url for each in servers), **settings)


async def states(client: httpx.AsyncClient) -> dict[str, dict[str, object]]:
    answer = await client.get("/health")
    return {each["name"]: each for each in answer.json()["servers"]}


# Before anything reached the client: another server.


@pytest.mark.parametrize("body", [PROMPT, STREAM])
@pytest.mark.parametrize("fault", [{"status": 500}, {"status": 503}, {"cut_after": -1}])
def test_a_decode_server_that_fails_is_replaced(body, fault):
    async def work() -> None:
        async with FakeServer() as pe, FakeServer(**fault) as bad, FakeServer() as good:
            async with routed(pair_config([pe], [bad, good])) as client:
                for _ in range(4):
                    answer = await client.post("/v1/completions", json=body)
                    assert answer.status_code == 200
                    assert answer.headers["x-dualpath-servers"].endswith(good.name)
                metrics = (await client.get("/metrics")).text
            # In doubt after its first failure, so it was asked once.
            assert len(bad.seen) <= 1
            # The prompt was computed once for each request: what was kept served the second attempt.
            assert len(pe.seen) == 4
            assert "dualpath:request_retries_total{" in metrics or not bad.seen

    run(work())


@pytest.mark.parametrize("fault", [{"status": 500}, {"cut_after": -1}])
def test_a_prefill_server_that_fails_is_replaced(fault):
    async def work() -> None:
        async with FakeServer(**fault) as bad, FakeServer() as good, FakeServer() as de:
            async with routed(pair_config([bad, good], [de])) as client:
                for _ in range(4):
                    answer = await client.post("/v1/completions", json=PROMPT)
                    assert answer.headers["x-dualpath-servers"] == f"{good.name}, {de.name}"
            assert len(bad.seen) <= 1
            assert [each.params["attempt"] for each in good.seen][1:] == [1, 1, 1]

    run(work())


def test_without_a_good_prefill_server_decode_servers_do_all():
    async def work() -> None:
        async with FakeServer(status=500) as pe, FakeServer() as de:
            async with routed(pair_config([pe], [de])) as client:
                for _ in range(3):
                    answer = await client.post("/v1/completions", json=PROMPT)
                    assert answer.status_code == 200
                    assert answer.headers["x-dualpath-servers"] == de.name
            assert all("kv_transfer_params" not in each.body for each in de.seen)

    run(work())


def test_a_server_that_breaks_an_answer_that_is_not_streamed_is_replaced():
    async def work() -> None:
        async with (
            FakeServer(hold_after=0) as dying,
            FakeServer(hold_after=0) as other,
            routed(plain(dying, other)) as client,
        ):
            asked = asyncio.create_task(client.post("/v1/completions", json=PROMPT))
            await until(lambda: dying.holding + other.holding == 1)
            first, second = (dying, other) if dying.holding else (other, dying)
            second.hold_after = None
            await first.kill()
            answer = await asked
            assert answer.status_code == 200
            assert answer.headers["x-dualpath-servers"] == second.name

    run(work())


def test_when_all_attempts_fail_the_client_gets_the_last_answer():
    async def work() -> None:
        async with FakeServer(status=500) as one, FakeServer(status=500) as two:
            async with routed(plain(one, two, max_attempts=3)) as client:
                answer = await client.post("/v1/completions", json=PROMPT)
            assert answer.status_code == 500
            assert answer.json() == {"error": {"message": "told 500"}}
            assert len(one.seen) + len(two.seen) == 3

    run(work())


def test_when_all_attempts_break_the_client_is_told_how():
    async def work() -> None:
        async with FakeServer(cut_after=-1) as server:
            async with routed(plain(server, max_attempts=2)) as client:
                answer = await client.post("/v1/completions", json=PROMPT)
            assert answer.status_code == 502
            assert answer.json()["error"]["code"] == "attempts_failed"
            assert server.name in answer.json()["error"]["message"]

    run(work())


@pytest.mark.parametrize("status", [400, 401, 404, 422])
def test_what_is_the_clients_fault_is_not_tried_again(status):
    async def work() -> None:
        for faulty in ("pe", "de"):
            async with FakeServer() as pe, FakeServer() as de:
                (pe if faulty == "pe" else de).status = status
                async with routed(pair_config([pe], [de])) as client:
                    answer = await client.post("/v1/completions", json=STREAM)
                    state = await states(client)
                assert answer.status_code == status
                assert answer.json() == {"error": {"message": f"told {status}"}}
                assert (len(pe.seen), len(de.seen)) == (1, 0 if faulty == "pe" else 1)
                assert all(each["up"] for each in state.values())

    run(work())


# After something reached the client: a clear end.


def test_a_stream_that_breaks_ends_with_an_error_event():
    async def work() -> None:
        async with FakeServer(cut_after=2) as server:
            async with routed(plain(server)) as client:
                answer = await client.post("/v1/completions", json=STREAM)
            first, second, error, done = events_of(answer.text)
            assert [first["choices"][0]["text"], second["choices"][0]["text"]] == ["word0", "word1"]
            assert error["error"]["code"] == "engine_lost"
            assert server.name in error["error"]["message"]
            assert done == "[DONE]"

    run(work())


# Servers come and go.


def test_a_server_that_died_is_lost_and_joins_again():
    async def work() -> None:
        async with (
            FakeServer() as one,
            FakeServer() as two,
            routed(plain(one, two, health_interval_s=0.05)) as client,
        ):
            await one.kill()
            for _ in range(4):
                answer = await client.post("/v1/completions", json=PROMPT)
                assert answer.headers["x-dualpath-servers"] == two.name
            while (await states(client))[one.name]["up"]:
                pass
            await one.start()
            while not (await states(client))[one.name]["up"]:
                pass
            one.hold_after = two.hold_after = 0
            asked = [
                asyncio.create_task(client.post("/v1/completions", json=PROMPT)) for _ in range(2)
            ]
            await until(lambda: one.holding == two.holding == 1)
            one.release.set()
            two.release.set()
            await asyncio.gather(*asked)

    run(work())


@pytest.mark.parametrize("body", [PROMPT, STREAM])
def test_what_a_vanished_server_had_is_tried_elsewhere(body):
    async def work() -> None:
        async with (
            FakeServer(hold_after=0) as one,
            FakeServer(hold_after=0) as two,
            routed(plain(one, two, health_interval_s=0.05)) as client,
        ):
            asked = asyncio.create_task(client.post("/v1/completions", json=body))
            await until(lambda: one.holding + two.holding == 1)
            gone, other = (one, two) if one.holding else (two, one)
            other.hold_after = None
            # The connection stays open, but nothing will come of it.
            await gone.stop_listening()
            answer = await asked
            assert answer.status_code == 200
            assert answer.headers["x-dualpath-servers"] == other.name
            assert gone.gone == 1

    run(work())


def test_no_request_is_lost_when_one_of_several_servers_is_killed():
    async def work() -> None:
        async with (
            FakeServer() as pe,
            FakeServer() as spare,
            FakeServer(hold_after=0) as one,
            FakeServer(hold_after=0) as two,
            routed(pair_config([pe, spare], [one, two])) as client,
        ):
            asked = [
                asyncio.create_task(client.post("/v1/completions", json=PROMPT)) for _ in range(16)
            ]
            await until(lambda: one.holding + two.holding == 16)
            two.release.set()
            await one.kill()
            await pe.kill()
            asked += [
                asyncio.create_task(client.post("/v1/completions", json=PROMPT)) for _ in range(8)
            ]
            answers = await asyncio.gather(*asked)
            assert {each.status_code for each in answers} == {200}

    run(work())


def test_a_server_is_used_once_it_is_up():
    async def work() -> None:
        async with (
            FakeServer(health=503) as server,
            routed(plain(server, health_interval_s=0.05)) as client,
        ):
            answer = await client.post("/v1/completions", json=PROMPT)
            assert answer.status_code == 503
            assert "/health answers HTTP 503" in answer.json()["error"]["message"]
            assert answer.headers["retry-after"]
            assert (await client.get("/health")).status_code == 503
            server.health = 200
            while (await client.get("/health")).status_code != 200:
                pass
            assert (await client.post("/v1/completions", json=PROMPT)).status_code == 200

    run(work())


def test_a_decode_server_gets_what_it_says_it_holds():
    async def work() -> None:
        prompt = {"model": "fake", "prompt": [1] * 100, "max_tokens": 3}
        async with FakeServer() as pe, FakeServer(kv_blocks=10, hold_after=0) as de:
            async with routed(pair_config([pe], [de])) as client:
                first = asyncio.create_task(client.post("/v1/completions", json=prompt))
                second = asyncio.create_task(client.post("/v1/completions", json=prompt))
                await until(lambda: de.holding == 1)
                health = (await client.get("/health")).json()
                assert health["waiting"] == 1
                holds = {each["name"]: each["kv_capacity_tokens"] for each in health["servers"]}
                assert holds == {pe.name: None, de.name: 160}
                de.release.set()
                assert [(await each).status_code for each in (first, second)] == [200, 200]
            assert len(de.seen) == 2

    run(work())


def test_a_server_that_says_it_is_not_ready_gets_nothing_new_and_ends_what_it_has():
    async def work() -> None:
        async with (
            FakeServer(hold_after=1) as leaving,
            FakeServer(hold_after=1) as staying,
            routed(plain(leaving, staying, health_interval_s=0.05)) as client,
        ):
            asked = [
                asyncio.create_task(client.post("/v1/completions", json=STREAM)) for _ in range(2)
            ]
            await until(lambda: leaving.holding == staying.holding == 1)
            leaving.health = 503
            while (await states(client))[leaving.name]["detail"] == "up":
                pass
            staying.release.set()
            for _ in range(5):
                await client.post("/v1/completions", json=PROMPT)
            assert (len(leaving.seen), len(staying.seen)) == (1, 6)
            leaving.release.set()
            for answer in await asyncio.gather(*asked):
                assert answer.text.endswith("data: [DONE]\n\n")
                assert "error" not in answer.text

    run(work())


def test_draining_lets_what_runs_end():
    async def work() -> None:
        async with (
            FakeServer(hold_after=1) as one,
            FakeServer(hold_after=1) as two,
            routed(plain(one, two)) as client,
        ):
            asked = [
                asyncio.create_task(client.post("/v1/completions", json=STREAM)) for _ in range(2)
            ]
            await until(lambda: one.holding == two.holding == 1)
            drained = await client.post(f"/drain?engine={one.name}")
            assert drained.json() == {"engine": one.name, "draining": True, "requests": 1}
            two.release.set()
            for _ in range(3):
                answer = await client.post("/v1/completions", json=STREAM)
                assert answer.headers["x-dualpath-servers"] == two.name
            one.release.set()
            assert all("[DONE]" in each.text for each in await asyncio.gather(*asked))
            assert (await states(client))[one.name]["requests"] == 0
            assert len(one.seen) == 1
            # With all drained nobody serves; one that resumes does.
            await client.post(f"/drain?engine={two.name}")
            assert (await client.post("/v1/completions", json=PROMPT)).status_code == 503
            await client.post(f"/resume?engine={one.name}")
            answer = await client.post("/v1/completions", json=PROMPT)
            assert answer.headers["x-dualpath-servers"] == one.name

    run(work())


def test_draining_the_only_prefill_server_leaves_all_to_decode_servers():
    async def work() -> None:
        async with (
            FakeServer() as pe,
            FakeServer() as de,
            routed(pair_config([pe], [de])) as client,
        ):
            await client.post(f"/drain?engine={pe.name}")
            answer = await client.post("/v1/completions", json=PROMPT)
            assert answer.headers["x-dualpath-servers"] == de.name
            await client.post(f"/resume?engine={pe.name}")
            answer = await client.post("/v1/completions", json=PROMPT)
            assert answer.headers["x-dualpath-servers"] == f"{pe.name}, {de.name}"

    run(work())


def test_draining_needs_a_known_server_and_the_operator():
    async def work() -> None:
        async with FakeServer() as server:
            async with routed(plain(server, api_key="right")) as client:
                url = f"/drain?engine={server.name}"
                wrong = {"Authorization": "Bearer wrong"}
                right = {"Authorization": "Bearer right"}
                assert (await client.post(url)).status_code == 401
                assert (await client.post(url, headers=wrong)).status_code == 401
                assert (await client.post("/drain", headers=right)).status_code == 404
                assert (await client.post("/drain?engine=x", headers=right)).status_code == 404
                assert (await client.post(url, headers=right)).status_code == 200
            async with routed(plain(server)) as client:
                # A proxy on this machine says for whom it asks.
                far = {"X-Forwarded-For": "203.0.113.9"}
                assert (await client.post(url, headers=far)).status_code == 403

    run(work())


# Limits.


def test_more_requests_than_allowed_are_refused():
    async def work() -> None:
        async with (
            FakeServer(hold_after=0) as server,
            routed(plain(server, max_concurrent_requests=2)) as client,
        ):
            asked = [
                asyncio.create_task(client.post("/v1/completions", json=PROMPT)) for _ in range(2)
            ]
            await until(lambda: server.holding == 2)
            refused = await client.post("/v1/completions", json=PROMPT)
            assert refused.status_code == 429
            assert refused.json()["error"]["code"] == "server_busy"
            assert refused.headers["retry-after"]
            server.release.set()
            assert {each.status_code for each in await asyncio.gather(*asked)} == {200}

    run(work())


@pytest.mark.parametrize("held", ["before", "within"])
def test_a_request_that_does_not_end_in_time_is_ended(held):
    async def work() -> None:
        async with (
            FakeServer(hold_after=0 if held == "before" else 1) as server,
            routed(plain(server, request_timeout_s=0.3)) as client,
        ):
            answer = await client.post("/v1/completions", json=STREAM)
            if held == "before":
                assert answer.status_code == 504
                assert answer.json()["error"]["code"] == "timeout"
            else:
                _, error, done = events_of(answer.text)
                assert error["error"]["code"] == "timeout"
                assert done == "[DONE]"
            await until(lambda: server.gone == 1)

    run(work())


def test_the_api_key_is_needed_and_passed_on():
    async def work() -> None:
        async with FakeServer() as server, routed(plain(server, api_key="right")) as client:
            assert (await client.post("/v1/completions", json=PROMPT)).status_code == 401
            key = {"Authorization": "Bearer right"}
            answer = await client.post("/v1/completions", json=PROMPT, headers=key)
            assert answer.status_code == 200
            assert server.seen[0].headers["authorization"] == "Bearer right"

    run(work())


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ("{", 400),
        ("[]", 400),
        ('{"model": "fake"}', 400),
        ('{"prompt": null}', 400),
        ('{"prompt": 7}', 400),
        ('{"prompt": ["a", 7]}', 400),
        ('{"prompt": "' + "x" * 4096 + '"}', 413),
    ],
)
def test_bodies_that_no_server_takes(body, status):
    async def work() -> None:
        async with FakeServer() as server, routed(plain(server, max_body=2048)) as client:
            headers = {"Content-Type": "application/json"}
            answer = await client.post("/v1/completions", content=body, headers=headers)
            assert answer.status_code == status
            assert answer.json()["error"]["message"]
            assert server.seen == []

    run(work())


def test_paths_that_are_not_there():
    async def work() -> None:
        async with FakeServer() as server, routed(plain(server)) as client:
            assert (await client.get("/nothing")).status_code == 404
            assert (await client.get("/v1/completions")).status_code == 405
            metrics = (await client.get("/metrics")).text
            assert 'dualpath:http_responses_total{path="other",status="404"} 1.0' in metrics
            assert 'dualpath:engines_up{role="decode"} 1.0' in metrics

    run(work())
