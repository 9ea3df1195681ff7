"""Answers that end when the client does: event streams, and plain ones watched for a disconnect."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import aclosing
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from dualpath.base.errors import RequestError
from dualpath.serve.api.errors import describe_failure, error_body

__all__ = ["EventStream", "until_disconnect"]

T = TypeVar("T")
log = logging.getLogger(__name__)


class EventStream(Response):
    """Server-sent events: `data: <JSON>` for each of `events`, then `data: [DONE]`.

    An exception becomes an event `{"error": ...}`, as the status is sent already. When the client goes
    away, `events` is closed. `on_close` is called once, at the end of any kind.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        *,
        request_id: str,
        on_close: Callable[[], object],
    ) -> None:
        self.status_code = 200
        self.background = None
        self.init_headers({"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        # A stream has no length.
        self.raw_headers = [each for each in self.raw_headers if each[0] != b"content-length"]
        self._events = events
        self._request_id = request_id
        self._on_close = on_close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with aclosing(self._events):
                await _until_disconnect(receive, self._send(send))
        except _ClientGone:
            log.info("request %s: the client went away", self._request_id)
        finally:
            self._on_close()

    async def _send(self, send: Send) -> None:
        start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        await send(start)
        try:
            async for event in self._events:
                await _send_event(send, event)
        except Exception as error:
            await _send_event(send, error_body(describe_failure(error, self._request_id)))
        await send({"type": "http.response.body", "body": b"data: [DONE]\n\n", "more_body": False})


async def until_disconnect(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled when the client goes away. The body must have been read."""
    try:
        return await _until_disconnect(request.receive, work)
    except _ClientGone:
        raise RequestError("the client went away", status=499, code="disconnected") from None


class _ClientGone(Exception):
    pass


async def _until_disconnect(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    task = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait({task, watcher}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise _ClientGone
    finally:
        task.cancel()
        watcher.cancel()
        await asyncio.gather(task, watcher, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _send_event(send: Send, event: bytes) -> None:
    body = b"data: " + event + b"\n\n"
    await send({"type": "http.response.body", "body": body, "more_body": True})
