"""/v1/chat/completions through the real `openai` client and server."""

from __future__ import annotations

from typing import Any

import openai
import pytest
from api_kit import TOOL_TEMPLATE, make_tokenizer

TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


def chat(server: Any, messages: Any, **arguments: Any) -> Any:
    return server.client().chat.completions.create(model="echo", messages=messages, **arguments)


def prompt_of(server: Any) -> str:
    return make_tokenizer().decode(
        server.generator.requests[-1].token_ids, skip_special_tokens=False
    )


HELLO = [{"role": "user", "content": "hi"}]


def test_template_renders_the_prompt_and_the_answer_comes_back(server):
    answer = chat(server, HELLO, max_tokens=8)
    assert prompt_of(server) == "[user]hi<|eot|>[assistant]"
    assert answer.object == "chat.completion"
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].message.content == "[user]hi"
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.prompt_tokens == 20
    assert answer.usage.prompt_tokens_details.cached_tokens == 10


def test_special_tokens_are_not_shown_unless_asked_for(server):
    assert chat(server, HELLO, max_tokens=10).choices[0].message.content == "[user]hi["
    shown = chat(server, HELLO, max_tokens=10, extra_body={"skip_special_tokens": False})
    assert shown.choices[0].message.content == "[user]hi<|eot|>["


def test_default_fills_the_window(server):
    answer = chat(server, HELLO)
    assert answer.usage.total_tokens == 512


def test_max_completion_tokens_goes_before_max_tokens(server):
    answer = chat(server, HELLO, max_completion_tokens=3, max_tokens=5)
    assert answer.usage.completion_tokens == 3


def test_content_parts_of_text_are_joined(server):
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    chat(server, [{"role": "user", "content": parts}], max_tokens=1)
    assert prompt_of(server) == "[user]one\ntwo<|eot|>[assistant]"


def test_other_parts_are_refused(server):
    parts = [{"type": "image_url", "image_url": {"url": "http://x/y.png"}}]
    with pytest.raises(openai.BadRequestError, match=r"messages\[0\].content\[0\].*image_url"):
        chat(server, [{"role": "user", "content": parts}])


def test_template_refusals_reach_the_client(server):
    with pytest.raises(openai.BadRequestError, match="no such role"):
        chat(server, [{"role": "forbidden", "content": "x"}])


def test_tools_need_a_template_for_them(server):
    with pytest.raises(openai.BadRequestError, match="tools"):
        chat(server, HELLO, tools=[TOOL])
    assert chat(server, HELLO, tools=[TOOL], tool_choice="none", max_tokens=1).choices
    with pytest.raises(openai.BadRequestError, match="tool_choice"):
        chat(server, HELLO, tools=[TOOL], tool_choice="required")


def test_tools_are_given_to_the_template(serving):
    with serving(tokenizer=make_tokenizer(TOOL_TEMPLATE)) as server:
        messages = [
            *HELLO,
            {
                "role": "assistant",
                "tool_calls": [
                    {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
                ],
            },
            {"role": "tool", "tool_call_id": "1", "content": "42"},
        ]
        chat(server, messages, tools=[TOOL], max_tokens=1)
        assert prompt_of(server).startswith('tools:[{"type": "function"')
        assert prompt_of(server).endswith("[assistant]<|eot|>[tool]42<|eot|>[assistant]")
        messages[1]["tool_calls"][0]["function"]["arguments"] = "{"  # type: ignore[index]
        with pytest.raises(openai.BadRequestError, match="not JSON"):
            chat(server, messages, tools=[TOOL])


def test_model_without_template(serving):
    no_template = openai.BadRequestError
    with serving(tokenizer=make_tokenizer(None)) as server, pytest.raises(no_template) as caught:
        chat(server, HELLO)
    assert "/v1/completions" in caught.value.message


def test_stream_starts_with_the_role_and_ends_with_usage(server):
    chunks = list(
        chat(server, HELLO, max_tokens=8, stream=True, stream_options={"include_usage": True})
    )
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[0].choices[0].delta.content == ""
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == "[user]hi"
    assert chunks[-2].choices[0].finish_reason == "length"
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == 8
    assert all(chunk.object == "chat.completion.chunk" for chunk in chunks)


def test_stream_of_several_choices(server):
    texts = {0: "", 1: ""}
    roles = []
    for chunk in chat(server, HELLO, n=2, max_tokens=4, stream=True):
        choice = chunk.choices[0]
        roles += [choice.index] if choice.delta.role else []
        texts[choice.index] += choice.delta.content or ""
    assert roles == [0, 1]
    assert texts == {0: "[use", 1: "[use"}


def test_logprobs(server):
    answer = chat(
        server, [{"role": "é", "content": ""}], max_tokens=3, logprobs=True, top_logprobs=2
    )
    content = answer.choices[0].logprobs.content
    assert [entry.token for entry in content] == ["[", "\ufffd", "\ufffd"]
    assert bytes(byte for entry in content for byte in entry.bytes).decode() == "[é"
    assert content[0].logprob == -0.5
    assert len(content[0].top_logprobs) == 2
    assert content[0].top_logprobs[1].logprob == -9999.0


def test_streamed_logprobs_and_token_ids(server):
    entries, ids, prompts = [], [], []
    for chunk in chat(
        server,
        HELLO,
        max_tokens=5,
        stream=True,
        logprobs=True,
        extra_body={"return_token_ids": True},
    ):
        prompts += [chunk.prompt_token_ids] if hasattr(chunk, "prompt_token_ids") else []
        choice = chunk.choices[0]
        ids += getattr(choice, "token_ids", None) or []
        entries += choice.logprobs.content if choice.logprobs else []
    expected = make_tokenizer().encode("[user", add_special_tokens=False)
    assert ids == expected
    assert [entry.token for entry in entries] == list("[user")
    assert prompts == [server.generator.requests[-1].token_ids]


def test_template_variables(serving):
    template = "{{ mode }}{{ eos_token }}{{ messages[0].content }}"
    with serving(tokenizer=make_tokenizer(template)) as server:
        chat(server, HELLO, max_tokens=1, extra_body={"chat_template_kwargs": {"mode": "fast"}})
        assert prompt_of(server) == "fast<|end|>hi"
