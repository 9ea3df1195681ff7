"""The measuring client against a server that answers what the test says."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from dualpath.bench.openai_client import (
    RequestFailed,
    ask,
    complete,
    connect,
    read_metrics,
    tokenize,
)


class CannedServer(ThreadingHTTPServer):
    """Answers every request with `answer`, and keeps the body of the last one."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.status = 200
        self.content_type = "application/json"
        self.answer = b""
        self.missing_bytes = 0
        self.path = ""
        self.body: dict[str, object] = {}

    @property
    def base_url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/v1"

    def stream(self, *chunks: dict[str, object]) -> None:
        self.content_type = "text/event-stream"
        lines = [
            f"data: {json.dumps({'id': 'c', 'object': 'text_completion', **c})}" for c in chunks
        ]
        self.answer = "\n\n".join([*lines, "data: [DONE]", ""]).encode()


class _Handler(BaseHTTPRequestHandler):
    server: CannedServer

    def do_POST(self) -> None:
        size = int(self.headers["Content-Length"])
        self.server.body = json.loads(self.rfile.read(size))
        self.do_GET()

    def do_GET(self) -> None:
        self.server.path = self.path
        self.send_response(self.server.status)
        self.send_header("Content-Type", self.server.content_type)
        self.send_header("Content-Length", str(len(self.server.answer) + self.server.missing_bytes))
        self.end_headers()
        self.wfile.write(self.server.answer)

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[CannedServer]:
    with CannedServer() as made:
        thread = threading.Thread(target=made.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield made
        made.shutdown()
        thread.join(timeout=5)


def choice(tokens, text="", **more):
    return {"choices": [{"index": 0, "text": text, "token_ids": tokens, **more}]}


USAGE = {
    "choices": [],
    "usage": {
        "prompt_tokens": 9,
        "completion_tokens": 3,
        "total_tokens": 12,
        "prompt_tokens_details": {"cached_tokens": 6},
    },
    "kv_transfer_params": {"cached_tokens_by_path": {"pe": 4, "de": 2}, "timings": {"read_s": 0.5}},
}


def run_complete(server, **more):
    async def go():
        async with connect(server.base_url) as client:
            return await complete(client, "m", "prompt", max_tokens=3, **more)

    return asyncio.run(go())


def test_a_stream_is_put_together(server):
    # The chunk with the prompt's tokens comes before anything was computed.
    prompt = {"choices": [{"index": 0, "text": "", "prompt_token_ids": [5, 6]}]}
    server.stream(prompt, choice([1], "a"), choice([2, 3], "bc", finish_reason="length"), USAGE)
    done = run_complete(server, cache_salt="grain")
    assert done.token_ids == (1, 2, 3)
    assert done.text == "abc"
    assert (done.prompt_tokens, done.cached_tokens) == (9, 6)
    assert done.cached_by_path == {"pe": 4, "de": 2}
    assert done.timings == {"read_s": 0.5}
    assert 0 < done.ttft_s <= done.total_s
    assert server.path == "/v1/completions"
    assert server.body["cache_salt"] == "grain"
    assert server.body["temperature"] == 0


def test_other_servers_report_no_paths(server):
    usage = {"choices": [], "usage": {**USAGE["usage"], "prompt_tokens_details": None}}
    server.stream(choice([1, 2, 3]), usage)
    done = run_complete(server)
    assert (done.cached_tokens, done.cached_by_path, done.timings) == (0, {}, {})
    assert "cache_salt" not in server.body


@pytest.mark.parametrize(
    "chunks",
    [(choice([1, 2]), USAGE), (choice([1, 2, 3]),), (USAGE,)],
    ids=["too few tokens", "no usage", "no tokens"],
)
def test_a_stream_that_is_no_complete_answer_is_a_failure(server, chunks):
    server.stream(*chunks)
    with pytest.raises(RequestFailed, match="expected 3 tokens and the usage"):
        run_complete(server)


def test_a_stream_that_breaks_off_is_a_failure(server):
    server.stream(choice([1, 2]))
    server.answer = server.answer.replace(b"data: [DONE]", b"")
    server.missing_bytes = 100
    with pytest.raises(RequestFailed, match="a completion of 3 tokens failed"):
        run_complete(server)


def test_an_error_status_is_a_failure_with_the_message(server):
    server.status, server.answer = 400, b'{"error": {"message": "prompt too long"}}'
    with pytest.raises(RequestFailed, match="prompt too long"):
        run_complete(server)


def test_a_question_is_answered(server):
    message = {"role": "assistant", "content": "Paris."}
    body = {"id": "c", "object": "chat.completion", "created": 0, "model": "m"}
    server.answer = json.dumps(
        {**body, "choices": [{"index": 0, "message": message, "finish_reason": "stop"}]}
    ).encode()

    async def go():
        async with connect(server.base_url) as client:
            return await ask(client, "m", "Capital?", max_tokens=8)

    assert asyncio.run(go()) == "Paris."
    assert server.body["messages"] == [{"role": "user", "content": "Capital?"}]


def test_tokenize_lies_beside_v1(server):
    server.answer = b'{"count": 2, "max_model_len": 64, "tokens": [7, 8]}'
    tokenized = asyncio.run(tokenize(server.base_url, "m", "ab"))
    assert (tokenized.tokens, tokenized.max_model_len) == ([7, 8], 64)
    assert server.path == "/tokenize"
    assert server.body == {"model": "m", "prompt": "ab"}


def test_metrics_without_labels_are_read(server):
    server.answer = (
        b"# HELP dualpath:store_blocks Blocks in the index.\n"
        b"# TYPE dualpath:store_blocks gauge\n"
        b"dualpath:store_blocks 12.0\n"
        b'dualpath:engines_up{role="prefill"} 1.0\n'
        b"dualpath:cache_hit_ratio 0.5\n"
    )
    assert asyncio.run(read_metrics(server.base_url)) == {
        "dualpath:store_blocks": 12.0,
        "dualpath:cache_hit_ratio": 0.5,
    }


def test_a_server_that_is_gone_is_a_failure():
    with pytest.raises(RequestFailed, match="failed"):
        asyncio.run(read_metrics("http://127.0.0.1:9/v1"))
