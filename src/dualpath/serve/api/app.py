"""The FastAPI application: routes, and how errors are answered."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

import dualpath
from dualpath.base.errors import RequestError
from dualpath.monitor.metrics import Metrics
from dualpath.monitor.tracing import Tracing
from dualpath.serve.api import info
from dualpath.serve.api.chat import create_chat_completion
from dualpath.serve.api.completions import create_completion
from dualpath.serve.api.errors import describe_failure, error_response
from dualpath.serve.api.middleware import RequestFrame
from dualpath.serve.api.protocol import (
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    TokenizeBody,
)
from dualpath.serve.api.schema import body_schema
from dualpath.serve.api.settings import Admission, ApiContext, ApiSettings
from dualpath.serve.generation import Generator
from dualpath.serve.tokenizer import TextTokenizer

__all__ = ["build_app"]

_ORACLE_MARKS = ((b"x-dualpath-oracle", b"answers are not meaningful"),)

Handler = Callable[[Request, ApiContext], Awaitable[Response]]

_ROUTES: tuple[tuple[str, str, Handler, type | None], ...] = (
    ("POST", "/v1/completions", create_completion, CompletionBody),
    ("POST", "/v1/chat/completions", create_chat_completion, ChatBody),
    ("GET", "/v1/models", info.models, None),
    ("GET", "/v1/models/{model:path}", info.model, None),
    ("GET", "/health", info.health, None),
    ("GET", "/version", info.version, None),
    ("GET", "/metrics", info.metrics, None),
    ("POST", "/tokenize", info.tokenize, TokenizeBody),
    ("POST", "/detokenize", info.detokenize, DetokenizeBody),
)


def build_app(
    generator: Generator,
    tokenizer: TextTokenizer,
    settings: ApiSettings,
    metrics: Metrics,
    tracing: Tracing | None = None,
) -> FastAPI:
    """The application over a cluster. It owns none of its collaborators."""
    context = ApiContext(
        generator=generator,
        tokenizer=tokenizer,
        settings=settings,
        metrics=metrics,
        admission=Admission(settings.max_concurrent_sequences),
        started_at=int(time.time()),
        tracing=tracing,
    )
    app = FastAPI(title="dualpath", version=dualpath.__version__, redirect_slashes=False)
    for method, path, handler, body_type in _ROUTES:
        app.add_api_route(
            path,
            _endpoint(handler, context),
            methods=[method],
            name=path,
            response_model=None,
            openapi_extra=None if body_type is None else body_schema(body_type),
        )
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(RequestError, _request_error)
    app.add_middleware(
        RequestFrame,
        metrics=metrics,
        api_key=settings.api_key,
        marks=_ORACLE_MARKS if settings.oracle else (),
    )
    return app


def _endpoint(handler: Handler, context: ApiContext) -> Callable[[Request], Awaitable[Response]]:
    async def endpoint(request: Request) -> Response:
        return await handler(request, context)

    return endpoint


async def _request_error(request: Request, error: Exception) -> Response:
    return error_response(describe_failure(error, request.state.request_id))


async def _http_error(request: Request, error: Exception) -> Response:
    """The framework's own: no such path, or not with this method."""
    assert isinstance(error, HTTPException)
    message = {
        404: f"there is no {request.method} {request.url.path[:200]} here",
        405: f"{request.url.path[:200]} does not answer {request.method}",
    }.get(error.status_code, str(error.detail))
    response = error_response(RequestError(message, status=error.status_code, code="no_such_route"))
    response.headers.update(error.headers or {})
    return response
