"""HTTP/1.1 for thousands of streams at once from one core: one request at a time on a connection, no queue.

Sockets are asyncio's, the parser is httptools'. What arrives is handed on inside the event loop's callback,
with its time: no task switch lies between, and none of the buffers of 256 KiB that `asyncio.Protocol` takes
for each read. That is half of aiohttp's CPU a token event and a quarter a request (ADR 0013).

Knows no JSON and no events. Invariants: a request goes out at once, on an idle connection or a new one,
since a limit of connections would hold requests back unseen (coordinated omission); nothing is sent twice;
proxies of the environment are not used; a connection whose exchange did not end well is closed. An exchange
has no deadline of its own: the caller sets it, and cancelling closes the connection.

`exchange` pushes an answer to a receiver as it comes; `open` gives an answer to pull from, which reads no
faster than it is taken.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import resource
import socket
import ssl
import time
from collections.abc import AsyncIterator
from typing import cast

from httptools import HttpParserError, HttpParserUpgrade, HttpResponseParser

from dualpath.base.origin import Origin
from dualpath.http.answer import Head, HttpFailed, PulledAnswer, Receiver

__all__ = ["ConnectionPool", "raise_descriptor_limit"]

_READ_BYTES = 64 * 1024
_HEAD_LIMIT_BYTES = 64 * 1024
_IDLE_LIMIT_S = 2.0
"""Servers close idle connections, uvicorn after 5 s. One about to be closed must not be used."""
_CLOSE_DEADLINE_S = 5.0


class ConnectionPool:
    """Connections to one server, as many as there are requests in flight; each is a file descriptor (see
    `raise_descriptor_limit`). Owned by one event loop; close it. Without `connect_timeout_s` the caller's
    deadline is the only one for connecting too."""

    def __init__(self, origin: Origin, *, connect_timeout_s: float | None = None) -> None:
        self._origin = origin
        self._connect_timeout_s = connect_timeout_s
        self._tls = ssl.create_default_context() if origin.scheme == "https" else None
        self._buffer = memoryview(bytearray(_READ_BYTES))
        """One for all: it is emptied in the same callback that filled it."""
        self._addresses: list[tuple[str, int]] = []
        self._idle: list[tuple[_Connection, float]] = []
        self._open: set[_Connection] = set()

    @property
    def open_connections(self) -> int:
        return len(self._open)

    async def exchange(self, request: bytes, receiver: Receiver) -> float:
        """Send, and return when the whole answer was received: the time at which its end came, by
        `time.perf_counter()`, however much later this task runs. Raises HttpFailed."""
        connection = self._take_idle() or await self._connect()
        try:
            return await connection.begin(request, receiver)
        finally:
            self._give_back(connection)

    @contextlib.asynccontextmanager
    async def open(self, request: bytes) -> AsyncIterator[PulledAnswer]:
        """Send, and read the answer inside the context, from its head on. Leaving before its end closes the
        connection, which tells the server. Raises HttpFailed, here and when the answer is read."""
        connection = self._take_idle() or await self._connect()
        answer = PulledAnswer(connection)
        try:
            answer.ends_with(connection.begin(request, answer))
            yield answer
        finally:
            self._give_back(connection)

    async def close(self) -> None:
        """Closes every connection, also of exchanges under way."""
        self._idle.clear()
        connections = list(self._open)
        for connection in connections:
            connection.abort()
        closing = [connection.closed for connection in connections]
        if closing:
            await asyncio.wait(closing, timeout=_CLOSE_DEADLINE_S)

    def _give_back(self, connection: _Connection) -> None:
        connection.end()
        if connection.reusable:
            self._idle.append((connection, time.monotonic()))
        else:
            connection.abort()

    def _take_idle(self) -> _Connection | None:
        """The one used last; if that is too old, all are."""
        while self._idle:
            connection, since_s = self._idle.pop()
            if connection.reusable and time.monotonic() - since_s < _IDLE_LIMIT_S:
                return connection
            connection.abort()
        return None

    async def _connect(self) -> _Connection:
        try:
            async with asyncio.timeout(self._connect_timeout_s):
                return await self._connect_any()
        except TimeoutError:
            raise HttpFailed("connect", f"not within {self._connect_timeout_s:g} s") from None

    async def _connect_any(self) -> _Connection:
        loop = asyncio.get_running_loop()
        failure: OSError | None = None
        try:
            if not self._addresses:
                found = await loop.getaddrinfo(
                    self._origin.host, self._origin.port, type=socket.SOCK_STREAM
                )
                self._addresses = [(str(each[4][0]), int(each[4][1])) for each in found]
        except (OSError, UnicodeError) as error:  # UnicodeError: no name that there can be.
            reason = getattr(error, "strerror", None) or error
            raise HttpFailed("connect", f"{self._origin.host}: {reason}") from error
        for address in self._addresses:
            try:
                _, connection = await loop.create_connection(
                    lambda: _Connection(self._buffer, self._open),
                    *address,
                    ssl=self._tls,
                    server_hostname=self._origin.host if self._tls else None,
                )
            except OSError as error:
                failure = error
                continue
            if address != self._addresses[0]:
                self._addresses = [address]
            return connection
        self._addresses = []  # It may have moved.
        assert failure is not None
        hint = "; raise `ulimit -n`" if failure.errno == errno.EMFILE else ""
        raise HttpFailed("connect", f"{failure}{hint}") from failure


class _Connection(asyncio.BufferedProtocol):
    """One connection, with one exchange at a time: from `begin` to `end`. The parser calls the `on_*`
    methods."""

    def __init__(self, buffer: memoryview, open_: set[_Connection]) -> None:
        self._buffer = buffer
        self._open = open_
        self._transport: asyncio.Transport | None = None
        self._receiver: Receiver | None = None
        self._done: asyncio.Future[float] | None = None
        self._parser = HttpResponseParser(self)
        self._headers: list[tuple[bytes, bytes]] = []
        self._head_bytes = 0
        self._in_head = True
        self._to_the_end = False
        """The body has no length: it ends with the connection."""
        self._complete = False
        self._parts: list[bytes] = []
        """Of the body, in what was received last."""
        self._keep = True
        self.closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @property
    def reusable(self) -> bool:
        return self._done is None and self._keep and self._open_transport is not None

    @property
    def _open_transport(self) -> asyncio.Transport | None:
        """None also where the server's end has come, and the loss has not been told yet."""
        transport = self._transport
        return None if transport is None or transport.is_closing() else transport

    def begin(self, request: bytes, receiver: Receiver) -> asyncio.Future[float]:
        """Send; the future is done when the answer is complete, with the time at which its end came."""
        transport = self._open_transport
        if transport is None:
            raise HttpFailed("connect", "the server closed the connection")
        self._receiver = receiver
        self._in_head, self._complete = True, False
        self._done = asyncio.get_running_loop().create_future()
        transport.write(request)
        return self._done

    def end(self) -> None:
        """The exchange is over, or nobody waits for it any more; then the connection is of no further
        use."""
        if self._done is not None and self._done.done() and not self._done.cancelled():
            self._keep = self._keep and self._done.exception() is None
        else:
            self._keep = False
        self.resume_reading()
        self._done = self._receiver = None

    def pause_reading(self) -> None:
        if self._open_transport is not None:
            self._open_transport.pause_reading()

    def resume_reading(self) -> None:
        if self._open_transport is not None:
            self._open_transport.resume_reading()

    def abort(self) -> None:
        """Close at once; the server sees the connection end."""
        self._keep = False
        self._receiver = None
        if self._transport is not None:
            self._transport.abort()

    # Called by the event loop.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._open.add(self)

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        at_s = time.perf_counter()
        if self._done is None:
            self._fail("bad answer", "more came than the answer")
            return
        try:
            self._parser.feed_data(self._buffer[:nbytes])
        except (HttpParserError, HttpParserUpgrade) as error:
            self._fail("bad answer", f"no HTTP: {error}")
        if self._in_head:
            self._head_bytes += nbytes
            if self._head_bytes > _HEAD_LIMIT_BYTES:
                self._fail("bad answer", "no HTTP: the head does not end")
        parts, self._parts = self._parts, []
        if parts and self._receiver is not None:
            self._receiver.on_body(parts[0] if len(parts) == 1 else b"".join(parts), at_s)
        if self._complete:
            self._finish(at_s, keep=self._keep)

    def eof_received(self) -> None:
        if not self._in_head and self._to_the_end:
            self._finish(time.perf_counter(), keep=False)

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._open.discard(self)
        where = "before the answer" if self._in_head else "before the answer was complete"
        self._fail("stream cut", f"the connection ended {where}{f': {exc}' if exc else ''}")
        self.closed.set_result(None)

    # Called by the parser.

    def on_message_begin(self) -> None:
        if self._complete:
            raise ValueError("more came than the answer")
        self._headers, self._to_the_end = [], True

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._in_head:  # A trailer.
            return
        name = name.lower()
        self._headers.append((name, value))
        if name in (b"content-length", b"transfer-encoding"):
            self._to_the_end = False

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if status < 200:  # Another head follows.
            return
        self._in_head, self._head_bytes = False, 0
        if self._receiver is not None:
            self._receiver.on_head(Head(status, self._headers))

    def on_body(self, body: bytes) -> None:
        self._parts.append(body)

    def on_message_complete(self) -> None:
        # The parser forgets it when the callback returns.
        self._keep = self._parser.should_keep_alive()
        self._complete = not self._in_head

    def _finish(self, at_s: float, *, keep: bool) -> None:
        self._keep = keep
        if self._done is not None and not self._done.done():
            self._done.set_result(at_s)

    def _fail(self, kind: str, detail: str) -> None:
        self._keep = False
        if self._done is not None and not self._done.done():
            self._done.set_exception(HttpFailed(kind, detail))
        self._receiver = None


def raise_descriptor_limit() -> int:
    """Lets this process have as many descriptors as the system allows it: each request in flight is one.
    The limit then."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(OSError, ValueError):  # Not allowed: what was, stays.
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]
