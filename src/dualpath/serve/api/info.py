"""What is not generation: models, health, version, metrics, tokenize and detokenize."""

from __future__ import annotations

import asyncio

from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4
from starlette.requests import Request
from starlette.responses import Response

import dualpath
from dualpath.base.errors import RequestError
from dualpath.serve.api.body import read_body
from dualpath.serve.api.calls import check_model
from dualpath.serve.api.prompts import chat_tokens, encode_text
from dualpath.serve.api.protocol import DetokenizeBody, TokenizeBody
from dualpath.serve.api.responses import json_response
from dualpath.serve.api.sampling import check_tokens
from dualpath.serve.api.settings import ApiContext

__all__ = ["detokenize", "health", "metrics", "model", "models", "tokenize", "version"]


async def models(request: Request, context: ApiContext) -> Response:
    return json_response({"object": "list", "data": [_card(context)]})


async def model(request: Request, context: ApiContext) -> Response:
    check_model(str(request.path_params["model"]), context)
    return json_response(_card(context))


async def health(request: Request, context: ApiContext) -> Response:
    """200 while requests can be served, else 503; the body tells people more."""
    state = context.generator.health()
    content = {
        "status": "ok" if state.ready else "unavailable",
        "detail": state.detail,
        "prefill_engines": state.prefill_engines,
        "decode_engines": state.decode_engines,
        "store_up": state.store_up,
    }
    return json_response(content, 200 if state.ready else 503)


async def version(request: Request, context: ApiContext) -> Response:
    return json_response({"version": dualpath.__version__})


async def metrics(request: Request, context: ApiContext) -> Response:
    return Response(context.metrics.render(), media_type=CONTENT_TYPE_PLAIN_0_0_4)


async def tokenize(request: Request, context: ApiContext) -> Response:
    body = await read_body(request, TokenizeBody, context.settings)
    check_model(body.model, context)
    if (body.prompt is None) == (body.messages is None):
        raise RequestError("give either prompt or messages", param="prompt", code="invalid_value")
    if body.prompt is not None:
        special = body.add_special_tokens is not False
        tokens = await encode_text(body.prompt, context, add_special_tokens=special, param="prompt")
    else:
        tokens = await chat_tokens(
            body.messages or [],
            body.tools,
            context,
            add_generation_prompt=body.add_generation_prompt is not False,
            variables=body.chat_template_kwargs or {},
        )
    content: dict[str, object] = {
        "count": len(tokens),
        "max_model_len": context.settings.max_model_len,
        "tokens": tokens,
    }
    if body.return_token_strs:
        content["token_strs"] = [context.tokenizer.token_text(token) for token in tokens]
    return json_response(content)


async def detokenize(request: Request, context: ApiContext) -> Response:
    body = await read_body(request, DetokenizeBody, context.settings)
    check_model(body.model, context)
    check_tokens(body.tokens, context.settings, "tokens")
    text = await asyncio.to_thread(context.tokenizer.decode, body.tokens, skip_special_tokens=False)
    return json_response({"prompt": text})


def _card(context: ApiContext) -> dict[str, object]:
    settings = context.settings
    return {
        "id": settings.model_name,
        "object": "model",
        "created": context.started_at,
        "owned_by": "dualpath",
        "root": settings.model_root or settings.model_name,
        "parent": None,
        "max_model_len": settings.max_model_len,
        # Ours: token ids of a prompt are below.
        "vocab_size": settings.vocab_size,
    }
