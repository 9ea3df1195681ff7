"""From what the client wrote to token ids: completion prompts and rendered chats."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence

from dualpath.base.errors import RequestError
from dualpath.serve.api.body import convert_field
from dualpath.serve.api.protocol import (
    ChatMessage,
    CompletionBody,
    ContentPart,
    JsonObject,
    Tool,
    ToolCall,
)
from dualpath.serve.api.sampling import check_tokens
from dualpath.serve.api.settings import ApiContext

__all__ = ["chat_tokens", "completion_prompts", "encode_text"]

_SHORT_CHARS = 4096
"""A text so short is encoded at once; a longer one in a thread, so that others are served meanwhile."""


async def completion_prompts(body: CompletionBody, context: ApiContext) -> list[list[int]]:
    """The token ids of each prompt. RequestError (400) for an empty or mixed list."""
    prompt = body.prompt
    if isinstance(prompt, str):
        prompts: list[str | list[int]] = [prompt]
    elif prompt and all(isinstance(each, int) for each in prompt):
        prompts = [[each for each in prompt if isinstance(each, int)]]
    else:
        prompts = [each for each in prompt if not isinstance(each, int)]
        kinds = {type(each) for each in prompt}
        if len(kinds) != 1:
            raise RequestError(
                "prompt: expected a text, token ids, or a list of either, not empty and not mixed",
                param="prompt",
                code="invalid_value",
            )
    tokens: list[list[int]] = []
    for each in prompts:
        if isinstance(each, str):
            special = body.add_special_tokens is not False
            tokens.append(
                await encode_text(each, context, add_special_tokens=special, param="prompt")
            )
        else:
            check_tokens(each, context.settings, "prompt")
            tokens.append(each)
    return tokens


async def chat_tokens(
    messages: list[JsonObject],
    tools: list[JsonObject] | None,
    context: ApiContext,
    *,
    add_generation_prompt: bool,
    variables: JsonObject,
) -> list[int]:
    """The prompt that the model's own template makes of a chat. RequestError (400) says what is wrong."""
    tokenizer = context.tokenizer
    template = tokenizer.tool_chat_template if tools else tokenizer.chat_template
    if template is None:
        raise RequestError(
            "this model has no chat template: use /v1/completions, or start the server with --chat-template",
            code="no_chat_template",
        )
    if tools:
        if not template.supports_tools:
            raise RequestError(
                "tools: the model's chat template has no place for tools; leave them away or describe them "
                "in a message",
                param="tools",
                code="unsupported",
            )
        convert_field(tools, list[Tool], "tools")
    checked = convert_field(messages, list[ChatMessage], "messages")
    plain = [
        _plain_message(raw, message, f"messages[{index}]")
        for index, (raw, message) in enumerate(zip(messages, checked, strict=True))
    ]
    text = template.render(
        plain, tools=tools or None, add_generation_prompt=add_generation_prompt, variables=variables
    )
    return await encode_text(text, context, add_special_tokens=False, param="messages")


async def encode_text(
    text: str, context: ApiContext, *, add_special_tokens: bool, param: str
) -> list[int]:
    """Token ids of a text; one that cannot fit the window is refused before it costs anything."""
    tokenizer, limit = context.tokenizer, context.settings.max_model_len
    if len(text) > limit * tokenizer.longest_token_chars:
        raise RequestError(
            f"the model's window is {limit} tokens, and a text of {len(text)} characters cannot fit; "
            "shorten it",
            param=param,
            code="context_length_exceeded",
        )
    if len(text) <= _SHORT_CHARS:
        return tokenizer.encode(text, add_special_tokens=add_special_tokens)
    return await asyncio.to_thread(tokenizer.encode, text, add_special_tokens=add_special_tokens)


def _plain_message(raw: JsonObject, message: ChatMessage, name: str) -> JsonObject:
    """As templates expect it: the content one text, the arguments of tool calls objects."""
    plain = {**raw, "content": _plain_content(message.content, name)}
    if message.tool_calls:
        raw_calls = raw["tool_calls"]
        assert isinstance(raw_calls, list)
        plain["tool_calls"] = [
            {**raw_call, "function": {**raw_call["function"], "arguments": _arguments(call, name)}}
            for raw_call, call in zip(raw_calls, message.tool_calls, strict=True)
        ]
    return plain


def _plain_content(content: str | Sequence[str | ContentPart] | None, name: str) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    texts = []
    for index, part in enumerate(content):
        if isinstance(part, str):
            texts.append(part)
        elif part.type == "text" and part.text is not None:
            texts.append(part.text)
        else:
            raise RequestError(
                f'{name}.content[{index}]: only parts {{"type": "text", "text": ...}} are supported, got '
                f"type {part.type!r}",
                param=f"{name}.content[{index}]",
                code="unsupported",
            )
    return "\n".join(texts)


def _arguments(call: ToolCall, name: str) -> object:
    arguments = call.function.arguments
    if not isinstance(arguments, str):
        return arguments or {}
    try:
        return json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        raise RequestError(
            f"{name}.tool_calls: the arguments of {call.function.name} are not JSON",
            param=f"{name}.tool_calls",
            code="invalid_value",
        ) from None
