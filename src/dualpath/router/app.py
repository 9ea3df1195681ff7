"""The router's ASGI application: its routes, and what each does with a request.

A table of paths and no framework: a request costs the router what it has to do, and little more. Knows HTTP
and the API's paths; what becomes of a generation request is the relay's.
"""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import itertools
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from urllib.parse import parse_qs

import msgspec
from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from dualpath.base.errors import RequestError
from dualpath.base.ids import RequestId, Role
from dualpath.http import HttpFailed
from dualpath.monitor.metrics import Metrics
from dualpath.router.body import CHAT, COMPLETIONS, GenerationCall, JsonFields
from dualpath.router.config import RouterConfig
from dualpath.router.relay import Relay
from dualpath.router.reply import Reply
from dualpath.router.seating import Seating
from dualpath.router.upstream import Upstream
from dualpath.serve.api.body import read_body
from dualpath.serve.api.errors import describe_failure
from dualpath.serve.api.middleware import RequestFrame
from dualpath.serve.api.settings import Admission
from dualpath.serve.api.streaming import until_disconnect

__all__ = ["RouterContext", "build_router_app"]

_NOT_FORWARDED = frozenset(
    {
        b"host",
        b"content-length",
        b"transfer-encoding",
        b"connection",
        b"keep-alive",
        b"proxy-connection",
        b"proxy-authorization",
        b"te",
        b"trailer",
        b"upgrade",
        b"expect",
        b"accept-encoding",
        b"x-request-id",
    }
)
"""Of the connection to the client, or set anew on the one to the server."""
_PASS_DEADLINE_S = 60.0
_BODY_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class _Limits:
    max_body_bytes: int
    body_timeout_s: float = _BODY_TIMEOUT_S


class RouterContext:
    """What the handlers share; one a router. It owns none of its parts."""

    def __init__(
        self,
        config: RouterConfig,
        servers: Sequence[Upstream],
        seating: Seating,
        relay: Relay,
        metrics: Metrics,
    ) -> None:
        self.config = config
        self.servers = servers
        self.seating = seating
        self.relay = relay
        self.metrics = metrics
        self.admission = Admission(config.max_concurrent_requests)
        self.limits = _Limits(config.max_body)
        self.numbers = itertools.count()

    def up(self, *roles: Role | None) -> list[Upstream]:
        return [each for each in self.servers if each.up and each.role in roles]


Handler = Callable[[RouterContext, Request, Send], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class _Route:
    path: str
    methods: tuple[str, ...]
    handler: Handler


def build_router_app(context: RouterContext) -> ASGIApp:
    """The application, with request ids, the API key and the count of responses around it."""
    config = context.config

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        route = _find(request)
        scope["route"] = route
        await route.handler(context, request, send)

    return RequestFrame(app, metrics=context.metrics, api_key=config.api_key)


def _find(request: Request) -> _Route:
    path = request.url.path
    route = _ROUTES.get(path)
    if route is None and path.startswith("/v1/models/"):
        route = _MODEL
    if route is None:
        raise RequestError(
            f"there is no {path[:200]} here: the router serves {', '.join(_ROUTES)}",
            status=404,
            code="no_such_route",
        )
    if request.method not in route.methods:
        raise RequestError(
            f"{path[:200]} takes {' and '.join(route.methods)}, not {request.method}",
            status=405,
            code="no_such_route",
        )
    return route


async def _generate(context: RouterContext, request: Request, send: Send) -> None:
    fields = await read_body(request, JsonFields, context.limits)
    call = GenerationCall.of(request.url.path, fields)
    request_id: str = request.state.request_id
    # Clients choose request ids and may repeat them.
    name = RequestId(f"{request_id}-{next(context.numbers):x}")
    headers = _forwarded(request)
    reply = Reply(send)
    deadline_s = context.config.request_timeout_s
    try:
        with context.admission.admit(1):
            async with asyncio.timeout(deadline_s):
                await until_disconnect(request, context.relay.serve(name, call, headers, reply))
    except TimeoutError:
        late = RequestError(
            f"not ended within {deadline_s:g} s (--request-timeout-s)", status=504, code="timeout"
        )
        if not reply.started:
            raise late from None
        await reply.break_off(late)
    except Exception as error:
        if not reply.started:
            raise
        described = describe_failure(error, request_id)
        if described.code != "disconnected":
            await reply.break_off(described)


async def _pass(context: RouterContext, request: Request, send: Send) -> None:
    """To any one server: all give the same answer."""
    body = b""
    if request.method == "POST":
        body = bytes(await read_body(request, msgspec.Raw, context.limits))
    query = f"?{request.url.query}" if request.url.query else ""
    failure = "none is up"
    for upstream in context.up(Role.DECODE, None) or context.up(Role.PREFILL):
        try:
            async with asyncio.timeout(_PASS_DEADLINE_S):
                head, content = await upstream.ask(
                    request.method, request.url.path + query, _forwarded(request), body
                )
        except (HttpFailed, TimeoutError) as error:
            failure = f"{upstream.name}: {error or 'no answer in time'}"
            continue
        return await Reply(send).whole(head, content, ())
    raise RequestError(f"no server answers ({failure})", status=503, code="no_engine")


async def _health(context: RouterContext, request: Request, send: Send) -> None:
    """200 while requests can be served, else 503; the body tells people more."""
    ready = any(not each.draining for each in context.up(Role.DECODE, None))
    content = {
        "status": "ok" if ready else "unavailable",
        "servers": [
            {
                "name": each.name,
                "role": each.role or "both",
                "up": each.up,
                "draining": each.draining,
                "detail": each.detail,
                "kv_capacity_tokens": each.kv_capacity_tokens,
                "requests": each.requests,
            }
            for each in context.servers
        ],
        "waiting": context.seating.waiting,
    }
    await _respond(request, send, content, 200 if ready else 503)


async def _metrics(context: RouterContext, request: Request, send: Send) -> None:
    response = Response(context.metrics.render(), media_type=CONTENT_TYPE_PLAIN_0_0_4)
    await response(request.scope, request.receive, send)


async def _drain(context: RouterContext, request: Request, send: Send) -> None:
    """Nothing new goes to the server; what it runs ends. `requests` in the answer, and in /health, says how
    many."""
    await _set_draining(context, request, send, True)


async def _resume(context: RouterContext, request: Request, send: Send) -> None:
    await _set_draining(context, request, send, False)


async def _set_draining(
    context: RouterContext, request: Request, send: Send, draining: bool
) -> None:
    _check_operator(context.config.api_key, request)
    names = parse_qs(request.url.query).get("engine", [])
    known: dict[str, Upstream] = {each.name: each for each in context.servers}
    if len(names) != 1 or names[0] not in known:
        raise RequestError(
            f"expected ?engine=NAME with one of {', '.join(known)}, got {', '.join(names)[:200] or 'none'}",
            status=404,
            param="engine",
            code="no_such_engine",
        )
    upstream = known[names[0]]
    upstream.draining = draining
    context.seating.changed()
    await _respond(
        request,
        send,
        {"engine": upstream.name, "draining": draining, "requests": upstream.requests},
    )


def _check_operator(api_key: str | None, request: Request) -> None:
    """With the router's key, or, where it has none, from this machine."""
    if api_key is None:
        if request.client is not None and _is_loopback(request.client.host):
            return
        raise RequestError(
            "only clients on the router's own machine may do this; start the router with an API key to do "
            "it from elsewhere",
            status=403,
            code="forbidden",
        )
    given = request.headers.get("authorization", "")
    if not hmac.compare_digest(given.encode(), f"Bearer {api_key}".encode()):
        raise RequestError(
            "the router's API key is needed: send the header Authorization: Bearer KEY",
            status=401,
            code="invalid_api_key",
        )


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:  # What a proxy said.
        return False


def _forwarded(request: Request) -> list[tuple[bytes, bytes]]:
    headers = [each for each in request.scope["headers"] if each[0] not in _NOT_FORWARDED]
    headers.append((b"x-request-id", request.state.request_id.encode()))
    return headers


async def _respond(request: Request, send: Send, content: object, status: int = 200) -> None:
    response = Response(
        msgspec.json.encode(content), status_code=status, media_type="application/json"
    )
    await response(request.scope, request.receive, send)


_ROUTES = {
    route.path: route
    for route in (
        _Route(COMPLETIONS, ("POST",), _generate),
        _Route(CHAT, ("POST",), _generate),
        _Route("/v1/models", ("GET",), _pass),
        _Route("/tokenize", ("POST",), _pass),
        _Route("/detokenize", ("POST",), _pass),
        _Route("/version", ("GET",), _pass),
        _Route("/health", ("GET",), _health),
        _Route("/metrics", ("GET",), _metrics),
        _Route("/drain", ("POST",), _drain),
        _Route("/resume", ("POST",), _resume),
    )
}
_MODEL = _Route("/v1/models/{model}", ("GET",), _pass)
