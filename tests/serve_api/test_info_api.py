from __future__ import annotations

import asyncio
import json

import httpx
import pytest

import dualpath
from dualpath.base.errors import ConfigError
from dualpath.serve.api import serve_http


def test_models(server):
    (model,) = server.client().models.list().data
    assert model.id == "echo"
    assert model.max_model_len == 512
    assert model.vocab_size == 264
    assert server.client().models.retrieve("echo").id == "echo"


def test_health_and_version(server):
    with server.http() as http:
        health = http.get("/health")
        assert health.status_code == 200
        assert health.json()["prefill_engines"] == 1
        assert http.get("/version").json() == {"version": dualpath.__version__}


def test_metrics_count_what_was_served(server):
    def read(name: str, **labels: str) -> float:
        return server.metrics.registry.get_sample_value(f"dualpath:{name}", labels) or 0.0

    before = read("generation_tokens_total"), read("time_to_first_token_seconds_count")
    server.client().completions.create(model="echo", prompt="abcd", max_tokens=5)
    assert read("generation_tokens_total") == before[0] + 5
    assert read("time_to_first_token_seconds_count") == before[1] + 1
    assert read("request_queue_time_seconds_count") >= 1
    assert read("http_responses_total", path="/v1/completions", status="200") >= 1
    with server.http() as http:
        answer = http.get("/metrics")
        assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
        assert "dualpath:inter_token_latency_seconds_bucket" in answer.text


def test_tokenize_and_back(server):
    with server.http() as http:
        answer = http.post("/tokenize", json={"prompt": "é!", "return_token_strs": True}).json()
        assert answer["count"] == 3
        assert answer["max_model_len"] == 512
        assert answer["token_strs"][-1] == "!"
        back = http.post("/detokenize", json={"tokens": answer["tokens"]}).json()
        assert back == {"prompt": "é!"}
        chat = http.post("/tokenize", json={"messages": [{"role": "user", "content": "hi"}]}).json()
        text = http.post("/detokenize", json={"tokens": chat["tokens"]}).json()
        assert text == {"prompt": "[user]hi<|eot|>[assistant]"}
        assert http.post("/tokenize", json={}).status_code == 400
        assert http.post("/detokenize", json={"tokens": [-1]}).status_code == 400


def test_openapi_describes_the_bodies(server):
    with server.http() as http:
        paths = http.get("/openapi.json").json()["paths"]
    body = paths["/v1/chat/completions"]["post"]["requestBody"]
    properties = body["content"]["application/json"]["schema"]["properties"]
    assert properties["temperature"]["anyOf"][0]["maximum"] == 2


def test_port_in_use_is_a_config_error(server):
    port = int(server.url.rsplit(":", 1)[1])

    async def serve() -> None:
        async def app(scope, receive, send):
            raise AssertionError

        await serve_http(app, host="127.0.0.1", port=port, stop=asyncio.Event(), drain_timeout_s=0)

    with pytest.raises(ConfigError, match=f"port {port}.*--port"):
        asyncio.run(serve())


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "prompt"),
    [
        ("/v1/completions", {"prompt": "abcd"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "abcd"}]}),
    ],
)
def test_every_kind_of_answer_tells_its_times(server, path, prompt, stream):
    body = {"model": "echo", "max_tokens": 2, **prompt}
    if stream:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    with server.http() as http:
        answer = http.post(path, json=body).raise_for_status()
    if stream:
        *_, last, done = answer.text.strip().split("\n\n")
        assert done == "data: [DONE]"
        content = json.loads(last.removeprefix("data: "))
    else:
        content = answer.json()
    params = content["kv_transfer_params"]
    assert params["cached_tokens_by_path"]["pe"] == 1
    assert list(params["timings"]) == [
        *("prepare_s", "scheduling_s", "retry_s", "allocation_s"),
        *("read_s", "wait_s", "prefill_s", "delivery_s"),
    ]
    ttft_s = server.metrics.registry.get_sample_value("dualpath:time_to_first_token_seconds_sum")
    assert sum(params["timings"].values()) <= ttft_s + 1e-9


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_a_stream_says_nothing_before_the_first_token_and_an_event_for_each(server, path):
    """Clients take the first event for the first token, and count events."""
    server.generator.hold_after = 0
    # Three bytes that are one character: the first two tokens have no text.
    body = {"model": "echo", "max_tokens": 3, "stream": True, "prompt": [0xE2, 0x82, 0xAC]}
    body["messages"] = [{"role": "user", "content": "abcd"}]
    with server.http() as http:
        patience = httpx.Timeout(20, read=0.2)
        with http.stream("POST", path, json=body, timeout=patience) as answer:
            assert server.generator.holding.wait(20)
            with pytest.raises(httpx.ReadTimeout):
                next(answer.iter_raw())
        server.generator.hold_after = None
        events = http.post(path, json=body).text.strip().split("\n\n")
    role = 1 if "chat" in path else 0
    assert len(events) == role + 3 + 1
