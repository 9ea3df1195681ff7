"""POST /v1/completions."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing

import msgspec
from msgspec import UNSET
from starlette.requests import Request
from starlette.responses import Response

from dualpath.base.errors import RequestError
from dualpath.engine.sampling import TokenLogprobs
from dualpath.serve.api.body import read_body
from dualpath.serve.api.calls import Call, check_model, open_call, shown_logprob
from dualpath.serve.api.prompts import completion_prompts
from dualpath.serve.api.protocol import CompletionBody
from dualpath.serve.api.responses import (
    CompletionChoice,
    CompletionLogprobs,
    CompletionResponse,
    json_response,
)
from dualpath.serve.api.sequence import Delta, merged
from dualpath.serve.api.settings import ApiContext
from dualpath.serve.api.streaming import EventStream, until_disconnect
from dualpath.serve.tokenizer import TextTokenizer

__all__ = ["create_completion"]

_DEFAULT_MAX_TOKENS = 16
"""OpenAI's."""


async def create_completion(request: Request, context: ApiContext) -> Response:
    arrival_s = time.monotonic()
    body = await read_body(request, CompletionBody, context.settings)
    check_model(body.model, context)
    if body.echo and body.logprobs is not None:
        raise RequestError(
            "echo: log probabilities of the prompt are not supported; leave echo or logprobs away",
            param="echo",
            code="unsupported",
        )
    request_id: str = request.state.request_id
    call = open_call(
        "cmpl",
        request,
        body,
        await completion_prompts(body, context),
        context,
        max_tokens=body.max_tokens,
        default_max_tokens=_DEFAULT_MAX_TOKENS,
        logprobs=body.logprobs,
        logprobs_param="logprobs",
        prompt_param="prompt",
        arrival_s=arrival_s,
    )
    if body.stream:
        events = _stream(call, body, context)
        return EventStream(events, request_id=request_id, on_close=call.places.close)
    with call.places:
        return json_response(await until_disconnect(request, _collect(call, body, context)))


async def _collect(call: Call, body: CompletionBody, context: ApiContext) -> CompletionResponse:
    builders = [_Builder(call, index, body, context) for index in range(len(call.sequences))]
    choices = [CompletionChoice(each.index, each.echoed) for each in builders]
    async with aclosing(merged(call.sequences)) as deltas:
        async for delta in deltas:
            _append(choices[delta.index], builders[delta.index].choice(delta))
    for choice, builder in zip(choices, builders, strict=True):
        if body.return_token_ids:
            choice.prompt_token_ids = builder.prompt
    response = _response(call, choices)
    response.usage = call.usage()
    response.kv_transfer_params = call.kv_transfer_params()
    return response


async def _stream(
    call: Call, body: CompletionBody, context: ApiContext
) -> AsyncGenerator[bytes, None]:
    builders = [_Builder(call, index, body, context) for index in range(len(call.sequences))]
    started: set[int] = set()
    async with aclosing(merged(call.sequences)) as deltas:
        async for delta in deltas:
            builder = builders[delta.index]
            choice = builder.choice(delta)
            if delta.index not in started:
                # With the first token, not before: clients take the first chunk's time for the token's.
                started.add(delta.index)
                choice.text = builder.echoed + choice.text
                if body.return_token_ids:
                    choice.prompt_token_ids = builder.prompt
            # Also without text, which may lag: clients count and time tokens by chunks.
            yield msgspec.json.encode(_response(call, [choice]))
    if body.stream_options is not None and body.stream_options.include_usage:
        last = _response(call, [])
        last.usage = call.usage()
        last.kv_transfer_params = call.kv_transfer_params()
        yield msgspec.json.encode(last)


class _Builder:
    """Makes the choices of one sequence from its deltas."""

    def __init__(self, call: Call, index: int, body: CompletionBody, context: ApiContext) -> None:
        self.index = index
        self.prompt = call.prompts[index // call.choices]
        self._body = body
        self._tokenizer = context.tokenizer
        self.echoed = ""
        if body.echo:
            skip = body.skip_special_tokens is not False
            self.echoed = self._tokenizer.decode(self.prompt, skip_special_tokens=skip)
        self._offset = len(self.echoed)

    def choice(self, delta: Delta) -> CompletionChoice:
        logprobs = None
        if self._body.logprobs is not None and delta.logprobs:
            logprobs = _logprobs(delta.logprobs, self._body.logprobs, self._offset, self._tokenizer)
            self._offset = logprobs.text_offset[-1] + len(logprobs.tokens[-1])
        return CompletionChoice(
            index=delta.index,
            text=delta.text,
            logprobs=logprobs,
            finish_reason=delta.finish_reason,
            stop_reason=delta.stop_reason,
            token_ids=delta.token_ids if self._body.return_token_ids else UNSET,
        )


def _append(choice: CompletionChoice, more: CompletionChoice) -> None:
    choice.text += more.text
    choice.finish_reason = more.finish_reason
    choice.stop_reason = more.stop_reason
    if more.token_ids is not UNSET:
        if choice.token_ids is UNSET:
            choice.token_ids = more.token_ids
        else:
            choice.token_ids += more.token_ids
    if more.logprobs is not None:
        if choice.logprobs is None:
            choice.logprobs = more.logprobs
        else:
            choice.logprobs.text_offset += more.logprobs.text_offset
            choice.logprobs.token_logprobs += more.logprobs.token_logprobs
            choice.logprobs.tokens += more.logprobs.tokens
            choice.logprobs.top_logprobs += more.logprobs.top_logprobs


def _logprobs(
    entries: list[TokenLogprobs], top: int, offset: int, tokenizer: TextTokenizer
) -> CompletionLogprobs:
    result = CompletionLogprobs([], [], [], [])
    for entry in entries:
        text = tokenizer.token_text(entry.token)
        result.text_offset.append(offset)
        result.tokens.append(text)
        result.token_logprobs.append(shown_logprob(entry.logprob))
        alternatives = {
            tokenizer.token_text(each.token): shown_logprob(each.logprob)
            for each in entry.top[:top]
        }
        # The drawn token is always among them, as in OpenAI's API.
        result.top_logprobs.append({text: shown_logprob(entry.logprob)} | alternatives)
        offset += len(text)
    return result


def _response(call: Call, choices: list[CompletionChoice]) -> CompletionResponse:
    return CompletionResponse(
        call.id, call.created, call.model, choices, system_fingerprint=call.fingerprint
    )
