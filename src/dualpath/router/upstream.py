"""One server behind the router: its connections, and whether it may be given requests.

Knows no policy and no request's meaning. Times are in seconds of the event loop's clock. A server is

- *up* from the first good look at its /health until it is lost;
- *draining* when the operator wants it free: what runs ends, nothing new comes;
- *in doubt* for a while after it failed a request: nothing new comes as long as another server can take it.
  The while doubles with each failure in a row, so that a server that answers every request with an error,
  faster than its neighbours answer well, does not attract all of them.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager

from dualpath.base.ids import EngineId, NodeId, Role
from dualpath.http import ConnectionPool, Head, PulledAnswer
from dualpath.router.address import ServerAddress

__all__ = ["Headers", "Upstream"]

Headers = Iterable[tuple[bytes, bytes]]

_FIRST_DOUBT_S = 0.5
_LONGEST_DOUBT_S = 30.0
_ANSWER_LIMIT_BYTES = 64 * 1024 * 1024


class Upstream:
    """`role` None: it prefills and decodes. Owns its connections; `close` it."""

    def __init__(
        self, address: ServerAddress, role: Role | None, *, connect_timeout_s: float
    ) -> None:
        self.address = address
        self.role = role
        self.name = EngineId(address.name)
        self.node = NodeId(address.origin.host)
        self.up = False
        self.draining = False
        self.detail = "not looked at yet"
        """Why it is not up."""
        self.kv_capacity_tokens: int | None = None
        """KV that its device memory holds; None while it does not say."""
        self.requests = 0
        """Exchanges under way, looks at its health left out."""
        self._failures = 0
        self._doubt_until_s = 0.0
        self._pool = ConnectionPool(address.origin, connect_timeout_s=connect_timeout_s)
        self._fixed_head = (
            f"Host: {address.origin.authority}\r\nAccept-Encoding: identity\r\n".encode("latin-1")
        )

    def in_doubt(self, now_s: float) -> bool:
        return now_s < self._doubt_until_s

    def failed(self, now_s: float) -> float:
        """It failed a request; the time for which it is in doubt."""
        doubt_s = min(_FIRST_DOUBT_S * 2.0**self._failures, _LONGEST_DOUBT_S)
        self._failures = min(self._failures + 1, 16)
        self._doubt_until_s = now_s + doubt_s
        return doubt_s

    def doubt(self, until_s: float) -> None:
        """It says itself that it is not ready."""
        self._doubt_until_s = max(self._doubt_until_s, until_s)

    def succeeded(self) -> None:
        """It served a request well."""
        self._failures = 0
        self._doubt_until_s = 0.0

    @asynccontextmanager
    async def open(
        self, method: str, path: str, headers: Headers = (), body: bytes = b""
    ) -> AsyncIterator[PulledAnswer]:
        """Send a request and read its answer inside the context. Raises HttpFailed."""
        self.requests += 1
        try:
            async with self._pool.open(self._request(method, path, headers, body)) as answer:
                yield answer
        finally:
            self.requests -= 1

    async def look(self, path: str) -> tuple[Head, bytes]:
        """GET, outside the count of requests. Raises HttpFailed."""
        async with self._pool.open(self._request("GET", path, (), b"")) as answer:
            head = await answer.head()
            return head, await answer.body(_ANSWER_LIMIT_BYTES)

    async def ask(
        self, method: str, path: str, headers: Headers, body: bytes
    ) -> tuple[Head, bytes]:
        """The whole answer. Raises HttpFailed."""
        async with self.open(method, path, headers, body) as answer:
            head = await answer.head()
            return head, await answer.body(_ANSWER_LIMIT_BYTES)

    async def close(self) -> None:
        await self._pool.close()

    def _request(self, method: str, path: str, headers: Headers, body: bytes) -> bytes:
        target = f"{method} {self.address.origin.path}{path} HTTP/1.1\r\n".encode("latin-1")
        lines = [target, self._fixed_head]
        lines += [b"%b: %b\r\n" % (name, value) for name, value in headers]
        if method != "GET":
            lines.append(b"Content-Length: %d\r\n" % len(body))
        return b"".join([*lines, b"\r\n", body])
