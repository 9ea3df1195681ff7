"""POST /v1/chat/completions."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing

import msgspec
from msgspec import UNSET
from starlette.requests import Request
from starlette.responses import Response

from dualpath.base.errors import RequestError
from dualpath.serve.api.body import read_body
from dualpath.serve.api.calls import Call, chat_logprobs, check_model, open_call
from dualpath.serve.api.prompts import chat_tokens
from dualpath.serve.api.protocol import ChatBody, JsonObject
from dualpath.serve.api.responses import (
    ChatChoice,
    ChatChunk,
    ChatDelta,
    ChatLogprobs,
    ChatMessageOut,
    ChatResponse,
    ChunkChoice,
    json_response,
)
from dualpath.serve.api.sequence import Delta, merged
from dualpath.serve.api.settings import ApiContext
from dualpath.serve.api.streaming import EventStream, until_disconnect

__all__ = ["create_chat_completion"]


async def create_chat_completion(request: Request, context: ApiContext) -> Response:
    arrival_s = time.monotonic()
    body = await read_body(request, ChatBody, context.settings)
    check_model(body.model, context)
    if body.top_logprobs and not body.logprobs:
        raise RequestError(
            "top_logprobs: only allowed with logprobs: true",
            param="top_logprobs",
            code="invalid_value",
        )
    prompt = await chat_tokens(
        body.messages,
        _tools(body),
        context,
        add_generation_prompt=body.add_generation_prompt is not False,
        variables=body.chat_template_kwargs or {},
    )
    request_id: str = request.state.request_id
    max_tokens = (
        body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    )
    call = open_call(
        "chatcmpl",
        request,
        body,
        [prompt],
        context,
        max_tokens=max_tokens,
        default_max_tokens=None,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        logprobs_param="top_logprobs",
        prompt_param="messages",
        arrival_s=arrival_s,
    )
    if body.stream:
        events = _stream(call, body, context)
        return EventStream(events, request_id=request_id, on_close=call.places.close)
    with call.places:
        return json_response(await until_disconnect(request, _collect(call, body, context)))


def _tools(body: ChatBody) -> list[JsonObject] | None:
    """The tools that the model may see. What it writes is text: calls in it are not parsed."""
    choice = body.tool_choice
    if choice is None or choice == "auto":
        return body.tools
    if choice == "none":
        return None
    raise RequestError(
        'tool_choice: only "auto" and "none" are supported, as nothing forces the model to call a tool',
        param="tool_choice",
        code="unsupported",
    )


async def _collect(call: Call, body: ChatBody, context: ApiContext) -> ChatResponse:
    choices = [_empty_choice(index, body) for index in range(len(call.sequences))]
    async with aclosing(merged(call.sequences)) as deltas:
        async for delta in deltas:
            choice = choices[delta.index]
            choice.message.content += delta.text
            choice.finish_reason = delta.finish_reason
            choice.stop_reason = delta.stop_reason
            more = _logprobs(delta, body, context)
            if choice.logprobs is not None and more is not None:
                choice.logprobs.content += more.content
            if body.return_token_ids and choice.token_ids is not UNSET:
                choice.token_ids += delta.token_ids
    response = ChatResponse(call.id, call.created, call.model, choices)
    response.system_fingerprint = call.fingerprint
    response.usage = call.usage()
    response.kv_transfer_params = call.kv_transfer_params()
    if body.return_token_ids:
        response.prompt_token_ids = call.prompts[0]
    return response


def _empty_choice(index: int, body: ChatBody) -> ChatChoice:
    return ChatChoice(
        index,
        ChatMessageOut("assistant", ""),
        logprobs=ChatLogprobs([]) if body.logprobs else None,
        token_ids=[] if body.return_token_ids else UNSET,
    )


async def _stream(call: Call, body: ChatBody, context: ApiContext) -> AsyncGenerator[bytes, None]:
    started = False
    async with aclosing(merged(call.sequences)) as deltas:
        async for delta in deltas:
            if not started:
                started = True
                for chunk in _first_chunks(call, body):
                    yield msgspec.json.encode(chunk)
            choice = ChunkChoice(
                index=delta.index,
                delta=ChatDelta(content=delta.text),
                logprobs=_logprobs(delta, body, context),
                finish_reason=delta.finish_reason,
                stop_reason=delta.stop_reason,
                token_ids=delta.token_ids if body.return_token_ids else UNSET,
            )
            # Also without text, which may lag: clients count and time tokens by chunks.
            yield msgspec.json.encode(_chunk(call, [choice]))
    if body.stream_options is not None and body.stream_options.include_usage:
        last = _chunk(call, [])
        last.usage = call.usage()
        last.kv_transfer_params = call.kv_transfer_params()
        yield msgspec.json.encode(last)


def _first_chunks(call: Call, body: ChatBody) -> list[ChatChunk]:
    """What comes before the first token, not earlier: clients take the first chunk's time for the token's."""
    chunks = []
    for index in range(len(call.sequences)):
        chunk = _chunk(call, [ChunkChoice(index, ChatDelta(role="assistant", content=""))])
        if body.return_token_ids:
            chunk.prompt_token_ids = call.prompts[0]
        chunks.append(chunk)
    return chunks


def _logprobs(delta: Delta, body: ChatBody, context: ApiContext) -> ChatLogprobs | None:
    if not body.logprobs or not delta.logprobs:
        return None
    return ChatLogprobs(chat_logprobs(delta.logprobs, body.top_logprobs or 0, context.tokenizer))


def _chunk(call: Call, choices: list[ChunkChoice]) -> ChatChunk:
    return ChatChunk(
        call.id, call.created, call.model, choices, system_fingerprint=call.fingerprint
    )
