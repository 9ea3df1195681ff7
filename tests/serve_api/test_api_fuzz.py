"""Whatever is sent: never a 5xx, refusals in OpenAI's shape, nothing left open, and the server goes on."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from api_kit import EchoGenerator, running_server
from hypothesis import given, settings
from hypothesis import strategies as st

SETTINGS = settings(max_examples=150, database=None)

scalars = (
    st.none()
    | st.booleans()
    | st.integers(-3, 600)
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8)
    | st.sampled_from(["echo", "user", "text", "auto", "none", "function", "1"])
)
values = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["role", "content", "type", "text", "function", "name", "1", "x"]),
            inner,
            max_size=3,
        )
    ),
    max_leaves=8,
)
FIELDS = [
    "model prompt messages max_tokens max_completion_tokens min_tokens temperature top_p top_k min_p",
    "presence_penalty frequency_penalty repetition_penalty logit_bias seed n stop stop_token_ids echo",
    "include_stop_str_in_output ignore_eos skip_special_tokens stream stream_options return_token_ids",
    "cache_salt user best_of response_format logprobs top_logprobs tools tool_choice suffix modalities",
    "chat_template_kwargs add_generation_prompt add_special_tokens tokens unknown_field",
]
bodies = st.dictionaries(st.sampled_from(" ".join(FIELDS).split()), values, max_size=5)
BASES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "ab", "max_tokens": 3},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "é"}], "max_tokens": 3},
    "/tokenize": {"prompt": "ab"},
    "/detokenize": {"tokens": [1]},
}


@pytest.fixture(scope="module")
def fuzzed():
    with running_server(EchoGenerator()) as server, server.http() as http:
        yield server, http


def check(answer: httpx.Response) -> None:
    assert answer.status_code in (200, 400, 404, 413, 415), answer.text
    if answer.status_code != 200:
        error = answer.json()["error"]
        assert isinstance(error["message"], str) and error["message"]
        assert set(error) == {"message", "type", "param", "code"}
    elif answer.headers["content-type"].startswith("text/event-stream"):
        events = [line[6:] for line in answer.text.split("\n") if line.startswith("data: ")]
        assert events[-1] == "[DONE]"
        assert not any("error" in json.loads(event) for event in events[:-1])
    else:
        answer.json()


@SETTINGS
@given(path=st.sampled_from(sorted(BASES)), change=bodies, keep=st.booleans())
def test_any_fields(fuzzed, path, change, keep):
    server, http = fuzzed
    check(http.post(path, json={**(BASES[path] if keep else {}), **change}))
    assert not server.generator.open


@SETTINGS
@given(path=st.sampled_from(sorted(BASES)), content=st.binary(max_size=60))
def test_any_bytes(fuzzed, path, content):
    _, http = fuzzed
    check(http.post(path, content=content, headers={"content-type": "application/json"}))
    check(http.post(path, json=BASES[path]))


@SETTINGS
@given(
    path=st.sampled_from(sorted(BASES)),
    cut=st.integers(0, 60),
    byte=st.integers(0, 255),
)
def test_damaged_json(fuzzed, path, cut, byte):
    _, http = fuzzed
    content = bytearray(json.dumps(BASES[path]).encode())
    content[cut % len(content)] = byte
    check(http.post(path, content=bytes(content), headers={"content-type": "application/json"}))
