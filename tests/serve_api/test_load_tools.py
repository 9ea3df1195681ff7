"""Requests as other people's load generators send them, and what these read from the answers."""

from __future__ import annotations

import json
from typing import Any

import pytest

USAGE = {"include_usage": True}

BODIES: dict[str, tuple[str, dict[str, Any]]] = {
    "vllm-completions": (
        "/v1/completions",
        {
            "prompt": [72, 101, 108, 108, 111],
            "repetition_penalty": 1.0,
            "max_tokens": 4,
            "logprobs": None,
            "stream": True,
            "stream_options": USAGE,
            "ignore_eos": True,
            "temperature": 0.0,
            "min_tokens": 4,
        },
    ),
    "vllm-chat": (
        "/v1/chat/completions",
        {
            "messages": [{"role": "user", "content": [{"type": "text", "text": "Hello"}]}],
            "max_completion_tokens": 4,
            "stream": True,
            "stream_options": USAGE,
            "ignore_eos": True,
        },
    ),
    "aiperf-completions": (
        "/v1/completions",
        {
            "prompt": "Hello",
            "stream": True,
            "max_tokens": 4,
            "temperature": 0,
            "ignore_eos": True,
            "min_tokens": 4,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        },
    ),
    "aiperf-chat": (
        "/v1/chat/completions",
        {
            "messages": [{"role": "user", "name": "user", "content": "Hello"}],
            "stream": True,
            "max_completion_tokens": 4,
            "ignore_eos": True,
            "stream_options": USAGE,
        },
    ),
}


@pytest.mark.parametrize("name", BODIES)
def test_streams_are_what_load_generators_read(server, name):
    path, body = BODIES[name]
    with server.http() as http:
        answer = http.post(path, json={"model": "echo", **body}).raise_for_status()
    *events, done = [
        line.removeprefix("data: ")
        for line in answer.text.split("\n\n")
        if line.startswith("data: ")
    ]
    assert done == "[DONE]"
    *chunks, last = [json.loads(event) for event in events]
    if "chat" in path:
        role, *chunks = chunks
        assert role["choices"][0]["delta"] == {"role": "assistant", "content": ""}
        texts = [chunk["choices"][0]["delta"]["content"] for chunk in chunks]
    else:
        texts = [chunk["choices"][0]["text"] for chunk in chunks]
    assert len(texts) == 4
    if isinstance(body.get("prompt"), str):
        assert "".join(texts) == "Hell"
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None] * 3 + ["length"]
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 4
