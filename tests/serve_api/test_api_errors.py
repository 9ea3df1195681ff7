"""What clients do wrong is answered in OpenAI's shape, says what to change, and hurts nobody else."""

from __future__ import annotations

from typing import Any

import httpx
import openai
import pytest
from api_kit import EchoGenerator

COMPLETION = {"model": "echo", "prompt": "ab", "max_tokens": 2}
CHAT = {"model": "echo", "messages": [{"role": "user", "content": "x"}], "max_tokens": 2}


def error_of(answer: httpx.Response) -> dict[str, Any]:
    body = answer.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert isinstance(body["error"]["message"], str) and body["error"]["message"]
    assert answer.headers["content-type"] == "application/json"
    assert answer.headers["x-request-id"]
    return body["error"]


@pytest.mark.parametrize(
    ("change", "param", "words"),
    [
        ({"max_tokens": -1}, "max_tokens", ">= 1"),
        ({"max_tokens": 0}, "max_tokens", ">= 1"),
        ({"max_tokens": "ten"}, "max_tokens", "`int"),
        ({"max_tokens": 10**30}, "max_tokens", "<="),
        ({"temperature": 2.1}, "temperature", "<= 2"),
        ({"temperature": -0.1}, "temperature", ">= 0"),
        ({"temperature": "hot"}, "temperature", "float"),
        ({"top_p": 0}, "top_p", "> 0"),
        ({"top_k": -2}, "top_k", ">= -1"),
        ({"min_p": 1.5}, "min_p", "<= 1"),
        ({"n": 0}, "n", ">= 1"),
        ({"n": 129}, "n", "at most 128"),
        ({"n": 17}, None, "takes 16 at once"),
        ({"seed": 2**63}, "seed", "<="),
        ({"stop": ["a"] * 17}, "stop", "length <= 16"),
        ({"stop": ""}, "stop", "length >= 1"),
        ({"stop": 5}, "stop", "got `int`"),
        ({"stop_token_ids": [264]}, "stop_token_ids", "264"),
        ({"logit_bias": {"x": 1}}, "logit_bias", "token ids"),
        ({"logit_bias": {"1": 101}}, "logit_bias[...]", "<= 100"),
        ({"logit_bias": {"999": 1}}, "logit_bias", "999"),
        ({"best_of": 3}, "best_of", "best_of"),
        ({"use_beam_search": True}, "use_beam_search", "beam"),
        ({"prompt_logprobs": 1}, "prompt_logprobs", "prompt"),
        ({"response_format": {"type": "json_object"}}, "response_format", "text"),
        ({"response_format": 3}, "response_format", "text"),
        ({"guided_json": {}, "guided_regex": "a+"}, "guided_regex", "structured"),
        ({"stream": "yes"}, "stream", "bool"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "stream: true"),
        ({"cache_salt": ""}, "cache_salt", "length >= 1"),
        ({"min_tokens": 3}, "min_tokens", "more than the 2"),
        ({"model": 5}, "model", "str"),
    ],
)
@pytest.mark.parametrize("base", ["completions", "chat/completions"])
def test_wrong_field(server, base, change, param, words):
    body = {**(COMPLETION if base == "completions" else CHAT), **change}
    with server.http() as http:
        answer = http.post(f"/v1/{base}", json=body)
    assert answer.status_code == 400
    error = error_of(answer)
    assert error["param"] == param
    assert words in error["message"]
    assert error["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"prompt": []}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": ["a", 1]}, "prompt"),
        ({"prompt": ["a", [1]]}, "prompt"),
        ({"prompt": [264]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [2**70]}, "prompt"),
        ({"prompt": {"a": 1}}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"prompt": [True]}, "prompt[0]"),
        ({"suffix": "x"}, "suffix"),
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": 1, "echo": True}, "echo"),
    ],
)
def test_wrong_completion(server, change, param):
    with server.http() as http:
        answer = http.post("/v1/completions", json={**COMPLETION, **change})
    assert answer.status_code == 400
    assert error_of(answer)["param"] == param


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [{}]}, "messages[0]"),
        ({"messages": [{"role": 1}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"text": "x"}]}]}, "messages[0].content[0]"),
        ({"messages": ["hi"]}, "messages[0]"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"top_logprobs": 21, "logprobs": True}, "top_logprobs"),
        ({"logprobs": 1}, "logprobs"),
        ({"audio": {"voice": "a"}}, "audio"),
        ({"modalities": ["audio"]}, "modalities"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"chat_template": "x"}, "chat_template"),
    ],
)
def test_wrong_chat(server, change, param):
    with server.http() as http:
        answer = http.post("/v1/chat/completions", json={**CHAT, **change})
    assert answer.status_code == 400
    assert error_of(answer)["param"] == param


def test_missing_prompt_names_it(server):
    with server.http() as http:
        answer = http.post("/v1/completions", json={"model": "echo"})
    assert answer.status_code == 400
    assert "prompt" in error_of(answer)["message"]


def test_unknown_fields_are_accepted(server):
    with server.http() as http:
        answer = http.post("/v1/completions", json={**COMPLETION, "metadata": {"a": [1]}})
    assert answer.status_code == 200


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"nope",
        b"[1]",
        b"5",
        b"\xff\xfe",
        b'{"prompt": NaN}',
        b'{"prompt": "\\ud800"}',
        b"[" * 50_000,
        b'{"z":' + b"[" * 50_000,
        b'{"prompt": "ab", "temperature": 1e999}',
    ],
)
def test_bad_json(server, content):
    with server.http() as http:
        headers = {"content-type": "application/json"}
        answer = http.post("/v1/completions", content=content, headers=headers)
        assert answer.status_code == 400
        error_of(answer)
        assert http.post("/v1/completions", json=COMPLETION).status_code == 200


def test_content_type_must_be_json(server):
    with server.http() as http:
        answer = http.post("/v1/completions", content=b"{}", headers={"content-type": "text/plain"})
    assert answer.status_code == 415
    assert "Content-Type: application/json" in error_of(answer)["message"]


def test_unknown_model(server):
    with pytest.raises(openai.NotFoundError) as caught:
        server.client().completions.create(model="gpt-9", prompt="x")
    assert caught.value.code == "model_not_found"
    assert "'echo'" in caught.value.message
    with pytest.raises(openai.NotFoundError):
        server.client().models.retrieve("gpt-9")


def test_prompt_too_long_says_by_how_much(server):
    with pytest.raises(openai.BadRequestError) as caught:
        server.client().completions.create(model="echo", prompt="x" * 600)
    assert caught.value.code == "context_length_exceeded"
    assert "512" in caught.value.message
    assert "600" in caught.value.message
    assert "shorten it by at least 89" in caught.value.message
    with pytest.raises(openai.BadRequestError, match="lower max_tokens to 412"):
        server.client().completions.create(model="echo", prompt="x" * 100, max_tokens=413)
    with pytest.raises(openai.BadRequestError, match="characters cannot fit"):
        server.client().completions.create(model="echo", prompt="x" * 90_000)


def test_body_too_large(server):
    with server.http() as http:
        answer = http.post("/v1/completions", json={**COMPLETION, "prompt": "x" * 200_000})
        assert answer.status_code == 413
        assert "--max-body" in error_of(answer)["message"]
        pieces = (b" " * 50_000 for _ in range(4))  # Chunked: no length is announced.
        headers = {"content-type": "application/json"}
        answer = http.post("/v1/completions", content=pieces, headers=headers)
        assert answer.status_code == 413


def test_no_such_route(server):
    with server.http() as http:
        answer = http.get("/v1/nothing")
        assert answer.status_code == 404
        assert error_of(answer)["type"] == "not_found_error"
        answer = http.get("/v1/completions")
        assert answer.status_code == 405
        assert "POST" in answer.headers["allow"]
        error_of(answer)


def test_failing_generator_is_a_500_with_the_request_id_and_the_server_goes_on(server, caplog):
    server.generator.failure = ZeroDivisionError("secret detail")
    with server.http() as http:
        headers = {"x-request-id": "req-7"}
        answer = http.post("/v1/completions", json=COMPLETION, headers=headers)
        assert answer.status_code == 500
        error = error_of(answer)
        assert "req-7" in error["message"]
        assert "secret" not in error["message"]
        assert error["type"] == "server_error"
        server.generator.failure = None
        assert http.post("/v1/completions", json=COMPLETION).status_code == 200
    assert any("req-7" in record.getMessage() and record.exc_info for record in caplog.records)


def test_refusal_by_the_generator_keeps_its_status(server, refused):
    server.generator.failure = refused
    with server.http() as http:
        answer = http.post("/v1/completions", json=COMPLETION)
    assert answer.status_code == 400
    assert error_of(answer)["code"] == "refused"


def test_error_update_has_its_status_or_comes_in_the_stream(server):
    server.generator.error_after = 1
    with pytest.raises(openai.InternalServerError) as caught:
        server.client().completions.create(model="echo", prompt="abc", max_tokens=3)
    assert caught.value.status_code == 503
    assert caught.value.response.headers["retry-after"] == "1"
    stream = server.client().completions.create(model="echo", prompt="abc", stream=True)
    assert next(stream).choices[0].text == "a"
    with pytest.raises(openai.APIError, match="no decode engine is left"):
        list(stream)


def test_crash_inside_a_stream_is_told_in_it(server):
    server.generator.failure = ZeroDivisionError("x")
    stream = server.client().completions.create(model="echo", prompt="abc", stream=True)
    with pytest.raises(openai.APIError, match="request id"):
        list(stream)


def test_not_ready_is_503(server):
    server.generator.ready = False
    with server.http() as http:
        assert http.get("/health").status_code == 503
        answer = http.post("/v1/completions", json=COMPLETION)
    assert answer.status_code == 503
    assert "engines are starting" in error_of(answer)["message"]
    assert answer.headers["retry-after"] == "1"


def test_api_key(serving):
    with serving(api_key="s3cret") as server:
        with server.http() as http:
            for headers in (
                {},
                {"authorization": "Bearer wrong"},
                {"authorization": "s3cret"},
                {"authorization": "Basic s3cret"},
                {"authorization": b"Bearer \xff\xfe"},
            ):
                answer = http.get("/v1/models", headers=headers)
                assert answer.status_code == 401
                error = error_of(answer)
                assert error["type"] == "authentication_error"
                assert answer.headers["www-authenticate"] == "Bearer"
            assert http.get("/health").status_code == 200
            assert http.get("/metrics").status_code == 200
        assert server.client("s3cret").models.list().data[0].id == "echo"
        with pytest.raises(openai.AuthenticationError):
            server.client("other").completions.create(model="echo", prompt="x")


def test_concurrency_is_bounded(serving):
    generator = EchoGenerator(hold_after=1)
    with serving(generator, max_concurrent_sequences=2) as server, server.http() as http:
        body = {**COMPLETION, "stream": True, "n": 2}
        with http.stream("POST", "/v1/completions", json=body) as held:
            lines = held.iter_lines()
            next(lines)
            answer = http.post("/v1/completions", json=COMPLETION)
            assert answer.status_code == 429
            assert answer.headers["retry-after"] == "1"
            assert error_of(answer)["type"] == "rate_limit_error"
            generator.released.clear()
        assert generator.released.wait(10)
        generator.hold_after = None
        with server.http() as other:
            assert _until_ok(other, COMPLETION)


def _until_ok(http: httpx.Client, body: dict[str, Any]) -> bool:
    """The places come back when the server has seen the disconnect, a moment later."""
    return any(http.post("/v1/completions", json=body).status_code == 200 for _ in range(200))
