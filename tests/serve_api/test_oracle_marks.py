"""Every response of a server whose answers mean nothing says so, and no other does."""

from __future__ import annotations

from typing import Any

import pytest

HEADER = "x-dualpath-oracle"
CHAT = {"model": "echo", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}
TEXT = {"model": "echo", "prompt": "abcd", "max_tokens": 3}


@pytest.mark.parametrize(
    ("path", "body"), [("/v1/completions", TEXT), ("/v1/chat/completions", CHAT)]
)
def test_answers_and_their_chunks_are_marked(serving: Any, path: str, body: dict[str, Any]) -> None:
    with serving(oracle=True) as server:
        client = server.client()
        create = client.completions.create if "prompt" in body else client.chat.completions.create
        answer = create(**body)
        assert answer.kv_transfer_params["oracle"] is True
        assert "not-meaningful" in answer.system_fingerprint
        chunks = list(create(**body, stream=True, stream_options={"include_usage": True}))
        assert all("not-meaningful" in chunk.system_fingerprint for chunk in chunks)
        assert chunks[-1].kv_transfer_params["oracle"] is True
        with server.http() as http:
            for each in (http.get("/health"), http.post(path, json=body), http.get("/nowhere")):
                assert each.headers[HEADER] == "answers are not meaningful"


def test_no_other_server_has_a_mark(server: Any) -> None:
    answer = server.client().completions.create(**TEXT)
    assert "oracle" not in answer.kv_transfer_params
    assert getattr(answer, "system_fingerprint", None) is None
    with server.http() as http:
        assert HEADER not in http.get("/health").headers
