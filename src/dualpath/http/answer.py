"""An HTTP answer: its head, who takes it as it comes, and one that is pulled no faster than it is used.

Knows no connection beyond the calls that hold it back or end it. Invariant of `PulledAnswer`: what is
received and not taken is at most `HELD_BYTES` and one read of the socket.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Protocol

from dualpath.base.errors import DualPathError

__all__ = ["HELD_BYTES", "Flow", "Head", "HttpFailed", "PulledAnswer", "Receiver"]

HELD_BYTES = 256 * 1024


class HttpFailed(DualPathError):
    """An exchange that did not end. `kind`: "connect", "stream cut", "bad answer" or "timeout"."""

    def __init__(self, kind: str, detail: str) -> None:
        super().__init__(f"{kind}: {detail}")
        self.kind = kind
        self.detail = detail


@dataclass(frozen=True, slots=True)
class Head:
    """`headers` in the order they came, names in lower case."""

    status: int
    headers: list[tuple[bytes, bytes]]

    @property
    def content_type(self) -> str:
        """In lower case, with its parameters; "" when there is none."""
        for name, value in self.headers:
            if name == b"content-type":
                return value.decode("latin-1").lower()
        return ""


class Receiver(Protocol):
    """Takes an answer as it comes. Called inside the event loop's callbacks: must be quick and not
    raise."""

    def on_head(self, head: Head) -> None: ...

    def on_body(self, data: bytes, at_s: float) -> None:
        """The next part, received at `at_s` of `time.perf_counter()`."""


class Flow(Protocol):
    """Holds back what a server sends, by not reading it, or ends the exchange. All calls are idempotent."""

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...

    def abort(self) -> None: ...


class PulledAnswer:
    """A `Receiver` that keeps what came until it is taken; then nothing more is read. One task takes."""

    def __init__(self, flow: Flow) -> None:
        self._flow = flow
        self._head: Head | None = None
        self._parts: list[bytes] = []
        self._held_bytes = 0
        self._end: asyncio.Future[float] | None = None
        self._waiter: asyncio.Future[None] | None = None

    @property
    def held_bytes(self) -> int:
        """Received and not taken."""
        return self._held_bytes

    async def head(self) -> Head:
        """Waits for it. Raises HttpFailed when the exchange ends before."""
        while self._head is None:
            self._raise_if_ended()
            await self._more()
        return self._head

    async def part(self) -> bytes:
        """What of the body came since the last call, or comes next; b"" at its end. Raises HttpFailed."""
        while not self._parts:
            if self._end is not None and self._end.done():
                self._end.result()
                return b""
            await self._more()
        parts, self._parts = self._parts, []
        if self._held_bytes > HELD_BYTES:
            self._flow.resume_reading()
        self._held_bytes = 0
        return parts[0] if len(parts) == 1 else b"".join(parts)

    async def body(self, limit_bytes: int) -> bytes:
        """The rest of the body. HttpFailed when it is longer than the limit."""
        content = bytearray()
        while part := await self.part():
            content += part
            if len(content) > limit_bytes:
                raise HttpFailed("bad answer", f"it is longer than {limit_bytes} bytes")
        return bytes(content)

    def cut(self) -> None:
        """End the exchange: whoever waits for the answer gets HttpFailed."""
        self._flow.abort()

    # Called by the connection.

    def ends_with(self, end: asyncio.Future[float]) -> None:
        """`end` is done when the exchange is; set once, before anything is received."""
        self._end = end
        end.add_done_callback(self._wake)

    def on_head(self, head: Head) -> None:
        self._head = head
        self._wake()

    def on_body(self, data: bytes, at_s: float) -> None:
        self._parts.append(data)
        self._held_bytes += len(data)
        if self._held_bytes > HELD_BYTES:
            self._flow.pause_reading()
        self._wake()

    async def _more(self) -> None:
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _wake(self, _: object = None) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _raise_if_ended(self) -> None:
        if self._end is not None and self._end.done():
            self._end.result()
            raise HttpFailed("bad answer", "it ended without a head")
