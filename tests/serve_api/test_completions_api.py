"""/v1/completions through the real `openai` client and server."""

from __future__ import annotations

from typing import Any

import pytest


def tokens(text: str) -> list[int]:
    """The fixture tokenizer's ids: those of byte-level BPE without merges."""
    from api_kit import make_tokenizer

    return make_tokenizer().encode(text, add_special_tokens=True)


def complete(server: Any, prompt: Any, **arguments: Any) -> Any:
    return server.client().completions.create(model="echo", prompt=prompt, **arguments)


def test_text_prompt_is_answered_with_usage(server):
    answer = complete(server, "abcd", max_tokens=6)
    assert answer.object == "text_completion"
    assert answer.model == "echo"
    assert answer.choices[0].text == "abcdab"
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.prompt_tokens == 4
    assert answer.usage.completion_tokens == 6
    assert answer.usage.total_tokens == 10
    assert answer.usage.prompt_tokens_details.cached_tokens == 2
    assert answer.kv_transfer_params["cached_tokens_by_path"] == {"pe": 1, "de": 1}
    assert answer.kv_transfer_params["timings"]["read_s"] == 0.2


def test_default_is_sixteen_tokens(server):
    assert len(complete(server, "ab").choices[0].text) == 16


def test_token_id_prompts(server):
    assert complete(server, tokens("hey"), max_tokens=3).choices[0].text == "hey"
    several = complete(server, [tokens("hey"), tokens("you")], max_tokens=3)
    assert [choice.text for choice in several.choices] == ["hey", "you"]
    assert several.usage.prompt_tokens == 6
    assert several.usage.completion_tokens == 6


def test_list_of_texts_with_n(server):
    answer = complete(server, ["ab", "cd"], n=2, max_tokens=2, seed=7)
    assert [choice.text for choice in answer.choices] == ["ab", "ab", "cd", "cd"]
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert answer.usage.prompt_tokens == 4
    assert [r.sampling.seed for r in server.generator.requests] == [7, 8, 7, 8]


def test_sampling_parameters_reach_the_generator(server):
    complete(
        server,
        "ab",
        max_tokens=4,
        temperature=0.5,
        top_p=0.9,
        seed=3,
        presence_penalty=0.5,
        frequency_penalty=-0.5,
        logit_bias={"5": 2},
        extra_body={
            "top_k": 5,
            "min_p": 0.1,
            "ignore_eos": True,
            "min_tokens": 2,
            "repetition_penalty": 1.5,
            "stop_token_ids": [9],
            "cache_salt": "tenant",
        },
    )
    (request,) = server.generator.requests
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.5, 0.9, 5)
    assert (sampling.min_p, sampling.seed, sampling.max_tokens) == (0.1, 3, 4)
    assert (sampling.ignore_eos, sampling.min_tokens) == (True, 2)
    assert (sampling.presence_penalty, sampling.frequency_penalty) == (0.5, -0.5)
    assert sampling.repetition_penalty == 1.5
    assert sampling.logit_bias == {5: 2.0}
    assert sampling.stop_token_ids == (9,)
    assert sampling.eos_tokens == (256,)
    assert request.cache_salt == "tenant"


def test_nulls_mean_defaults(server):
    complete(server, "ab", max_tokens=None, temperature=None, stop=None, n=None)
    (request,) = server.generator.requests
    assert request.sampling.temperature == 1.0
    assert request.sampling.max_tokens == 16


def test_temperature_near_zero_is_greedy(server):
    complete(server, "ab", temperature=1e-7)
    complete(server, "ab", temperature=1e-3)
    assert [r.sampling.temperature for r in server.generator.requests] == [0.0, 0.01]


@pytest.mark.parametrize("per_update", [1, 3, 100])
def test_stop_string_across_tokens(server, per_update):
    server.generator.per_update = per_update
    answer = complete(server, "hello world", max_tokens=40, stop=["o w", "zzz"])
    choice = answer.choices[0]
    assert choice.text == "hell"
    assert choice.finish_reason == "stop"
    assert choice.stop_reason == "o w"
    assert answer.usage.completion_tokens == 7
    assert len(server.generator.closed_early) == (1 if per_update < 40 else 0)


def test_stop_string_can_be_kept(server):
    answer = complete(
        server, "hello", max_tokens=9, stop="l", extra_body={"include_stop_str_in_output": True}
    )
    assert answer.choices[0].text == "hel"


def test_stop_strings_do_not_count_before_min_tokens(server):
    answer = complete(server, "abc", max_tokens=9, stop="b", extra_body={"min_tokens": 3})
    assert answer.choices[0].text == "abca"


def test_end_token_ends_and_is_not_shown(server):
    answer = complete(server, [*tokens("ab"), 256], max_tokens=9)
    assert answer.choices[0].text == "ab"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.choices[0].stop_reason is None
    assert answer.usage.completion_tokens == 3


def test_stop_token_id_is_reported(server):
    b = tokens("b")[0]
    answer = complete(server, "abc", max_tokens=9, extra_body={"stop_token_ids": [b]})
    assert answer.choices[0].text == "a"
    assert answer.choices[0].stop_reason == b


def test_echo_comes_before_the_answer(server):
    answer = complete(server, "abc", max_tokens=2, echo=True)
    assert answer.choices[0].text == "abcab"


def test_logprobs(server):
    answer = complete(server, "aé", max_tokens=3, logprobs=1)
    logprobs = answer.choices[0].logprobs
    assert logprobs.tokens == ["a", "\ufffd", "\ufffd"]
    assert logprobs.text_offset == [0, 1, 2]
    assert logprobs.token_logprobs == [-0.5, -0.5, -0.5]
    assert logprobs.top_logprobs[0] == {"a": -0.5}


def test_logprobs_of_impossible_tokens_are_finite(server):
    answer = complete(server, "a", max_tokens=1, logprobs=2)
    assert -9999.0 in answer.choices[0].logprobs.top_logprobs[0].values()


def test_token_ids_can_be_returned(server):
    answer = complete(server, "ab", max_tokens=3, extra_body={"return_token_ids": True})
    a, b = tokens("ab")
    assert answer.choices[0].token_ids == [a, b, a]
    assert answer.choices[0].prompt_token_ids == [a, b]
    without = complete(server, "ab", max_tokens=3)
    assert not hasattr(without.choices[0], "token_ids")


def test_stream_is_the_same_text_with_usage(server):
    text = "wörld 🌍 ok"
    chunks = list(
        complete(server, text, max_tokens=20, stream=True, stream_options={"include_usage": True})
    )
    whole = complete(server, text, max_tokens=20)
    shown = "".join(chunk.choices[0].text for chunk in chunks if chunk.choices)
    assert shown == whole.choices[0].text
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "length"
    assert chunks[-1].choices == []
    assert chunks[-1].usage == whole.usage
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert len({chunk.id for chunk in chunks}) == 1


def test_stream_of_several_choices(server):
    texts = {0: "", 1: "", 2: "", 3: ""}
    for chunk in complete(server, ["abc", "xyz"], n=2, max_tokens=5, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert texts == {0: "abcab", 1: "abcab", 2: "xyzxy", 3: "xyzxy"}


def test_stream_holds_back_what_may_be_a_stop_string(server):
    stream = complete(server, "ab stop now", max_tokens=30, stop="stop!", stream=True)
    pieces = [chunk.choices[0].text for chunk in stream]
    assert "".join(pieces).startswith("ab stop nowab stop")
    stream = complete(server, "ab stop now", max_tokens=30, stop="stop", stream=True)
    assert "".join(chunk.choices[0].text for chunk in stream) == "ab "


def test_stream_returns_token_ids_and_logprobs(server):
    ids: list[int] = []
    logprobs: list[str] = []
    offsets: list[int] = []
    prompt_ids: list[list[int]] = []
    for chunk in complete(
        server, "é", max_tokens=4, stream=True, logprobs=0, extra_body={"return_token_ids": True}
    ):
        choice = chunk.choices[0]
        ids += getattr(choice, "token_ids", None) or []
        prompt_ids += [choice.prompt_token_ids] if hasattr(choice, "prompt_token_ids") else []
        if choice.logprobs is not None:
            logprobs += choice.logprobs.tokens
            offsets += choice.logprobs.text_offset
    assert ids == tokens("é") * 2
    assert prompt_ids == [tokens("é")]
    assert offsets == [0, 1, 2, 3]
    assert len(logprobs) == 4


def test_request_id_is_kept(server):
    with server.http() as http:
        body = {"model": "echo", "prompt": "ab", "max_tokens": 1}
        answer = http.post("/v1/completions", json=body, headers={"X-Request-Id": "mine-1"})
        assert answer.headers["x-request-id"] == "mine-1"
        assert answer.json()["id"] == "cmpl-mine-1"
        answer = http.post("/v1/completions", json=body, headers={"X-Request-Id": "no good\x7f"})
        assert len(answer.headers["x-request-id"]) == 32
