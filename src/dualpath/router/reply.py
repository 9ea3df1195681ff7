"""The answer to a client, over ASGI: whole or streamed, and how it ends when something breaks in between.

Knows no servers. Invariant: once `started`, only more of the same answer follows, or an error event and the
end.
"""

from __future__ import annotations

from collections.abc import Iterable

from starlette.types import Send

from dualpath.base.errors import RequestError
from dualpath.http import Head
from dualpath.serve.api.errors import error_body

__all__ = ["Reply"]

# Of the connection to the server, or set anew on the one to the client.
_NOT_PASSED_ON = frozenset(
    {
        b"connection",
        b"keep-alive",
        b"proxy-authenticate",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
        b"content-length",
        b"date",
        b"server",
        b"x-request-id",
    }
)


class Reply:
    """To one request."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.started = False

    async def whole(self, head: Head, body: bytes, extra: Iterable[tuple[bytes, bytes]]) -> None:
        """A complete answer."""
        length = (b"content-length", b"%d" % len(body))
        await self._start(head, (length, *extra))
        await self._send({"type": "http.response.body", "body": body, "more_body": False})

    async def start(self, head: Head, extra: Iterable[tuple[bytes, bytes]]) -> None:
        """A streamed answer; `part` and `end` follow."""
        # For proxies in front that would gather what should be seen at once.
        await self._start(head, ((b"x-accel-buffering", b"no"), *extra))

    async def part(self, data: bytes) -> None:
        if data:
            await self._send({"type": "http.response.body", "body": data, "more_body": True})

    async def end(self) -> None:
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    async def break_off(self, error: RequestError) -> None:
        """End a stream that cannot go on, with an event that says why."""
        await self.part(b"data: " + error_body(error) + b"\n\ndata: [DONE]\n\n")
        await self.end()

    async def _start(self, head: Head, extra: Iterable[tuple[bytes, bytes]]) -> None:
        self.started = True
        headers = [each for each in head.headers if each[0] not in _NOT_PASSED_ON]
        await self._send(
            {
                "type": "http.response.start",
                "status": head.status,
                "headers": [*headers, *extra],
            }
        )
