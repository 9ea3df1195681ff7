"""A client that goes away closes its generator, which is what aborts the request."""

from __future__ import annotations

import json
import socket

import pytest
from api_kit import EchoGenerator


def abort_count(server) -> float:
    value = server.metrics.registry.get_sample_value(
        "dualpath:request_success_total", {"finished_reason": "abort"}
    )
    return value or 0.0


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("hold_after", [0, 2])
def test_stream(server, n, hold_after):
    before = abort_count(server)
    server.generator.hold_after = hold_after
    body = {"model": "echo", "prompt": "abcdef", "max_tokens": 6, "stream": True, "n": n}
    with server.http() as http, http.stream("POST", "/v1/completions", json=body):
        assert server.generator.holding.wait(10)
        assert len(server.generator.closed_early) == 0
    _wait_until(server, lambda: len(server.generator.closed_early) == n)
    _wait_until(server, lambda: abort_count(server) == before + n)


@pytest.mark.parametrize("path", ["completions", "chat/completions"])
def test_answer_that_is_not_streamed(server, path):
    server.generator.hold_after = 0
    body = {"model": "echo", "max_tokens": 6, "prompt": "abc"}
    if path != "completions":
        body["messages"] = [{"role": "user", "content": "x"}]
    content = json.dumps(body).encode()
    head = f"POST /v1/{path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(content)}\r\n"
    with _connect(server) as connection:
        connection.sendall(f"{head}Content-Type: application/json\r\n\r\n".encode() + content)
        assert server.generator.holding.wait(10)
        assert server.generator.closed_early == []
    _wait_until(server, lambda: len(server.generator.closed_early) == 1)


def test_stopping_the_server_ends_what_does_not_end_by_itself(serving):
    generator = EchoGenerator(hold_after=1)
    body = {"model": "echo", "prompt": "abc", "max_tokens": 3, "stream": True}
    with serving(generator) as server:
        http = server.http()
        stream = http.send(http.build_request("POST", "/v1/completions", json=body), stream=True)
        assert generator.holding.wait(10)
    assert len(generator.closed_early) == 1
    assert not generator.open
    stream.close()
    http.close()


def test_body_that_never_ends(server):
    with _connect(server) as connection:
        connection.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            b'Content-Length: 1000\r\n\r\n{"prompt": '
        )
    with server.http() as http:
        assert http.get("/health").status_code == 200
    assert server.generator.requests == []


def test_slow_body_is_given_up(serving):
    with serving(body_timeout_s=0.05) as server, _connect(server) as connection:
        connection.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            b"Content-Length: 1000\r\n\r\n{"
        )
        assert connection.recv(100).startswith(b"HTTP/1.1 408")


def _connect(server) -> socket.socket:
    host, port = server.url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=10)


def _wait_until(server, reached) -> None:
    """Each turn is one request, so the server's loop gets on between looks."""
    with server.http() as http:
        for _ in range(2000):
            if reached():
                return
            http.get("/health")
    raise AssertionError("not reached")
