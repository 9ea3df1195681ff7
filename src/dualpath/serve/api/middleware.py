"""Around every request: its id, the API key, the last resort for errors, and the count of responses."""

from __future__ import annotations

import hashlib
import hmac
import re
import uuid
from collections.abc import Sequence

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dualpath.base.errors import RequestError
from dualpath.monitor.metrics import Metrics
from dualpath.serve.api.errors import describe_failure, error_response

__all__ = ["RequestFrame"]

_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")


class RequestFrame:
    """ASGI middleware. An `X-Request-Id` of the client is kept if it is a plain word.

    `marks`: headers that every response gets.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        metrics: Metrics,
        api_key: str | None,
        marks: Sequence[tuple[bytes, bytes]] = (),
    ) -> None:
        self._app = app
        self._marks = marks
        self._metrics = metrics
        self._key_digest = None if api_key is None else _digest(api_key.encode())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers: dict[bytes, bytes] = dict(scope["headers"])
        request_id = _request_id(headers)
        scope.setdefault("state", {})["request_id"] = request_id
        started = False

        async def send_framed(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                message["headers"] = [
                    *message["headers"],
                    (b"x-request-id", request_id.encode()),
                    *self._marks,
                ]
                self._metrics.http_response(_route(scope), message["status"])
            await send(message)

        try:
            if not self._allowed(scope, headers):
                raise RequestError(
                    "a valid API key is needed: send the header Authorization: Bearer KEY",
                    status=401,
                    code="invalid_api_key",
                )
            await self._app(scope, receive, send_framed)
        except Exception as error:
            described = describe_failure(error, request_id)
            if started:
                # Too late to say so: the connection is closed, which tells the client.
                raise
            await error_response(described)(scope, receive, send_framed)

    def _allowed(self, scope: Scope, headers: dict[bytes, bytes]) -> bool:
        if self._key_digest is None or not _guarded(scope["path"]):
            return True
        kind, _, key = headers.get(b"authorization", b"").partition(b" ")
        # Digests, so that neither content nor length shows in the time.
        right = hmac.compare_digest(_digest(key.strip()), self._key_digest)
        return right and kind.lower() == b"bearer"


def _guarded(path: str) -> bool:
    return path == "/v1" or path.startswith("/v1/")


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def _request_id(headers: dict[bytes, bytes]) -> str:
    given = headers.get(b"x-request-id", b"").decode("latin-1")
    return given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex


def _route(scope: Scope) -> str:
    """The path as declared: what clients make up would give endlessly many label values."""
    return str(getattr(scope.get("route"), "path", "other"))
