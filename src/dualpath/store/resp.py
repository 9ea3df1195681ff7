"""The protocol of Redis (RESP2) over one socket: pipelined commands, and values straight into memory.

It knows commands only as words, and no blocks. One thread at a time. Every call ends by its deadline, by
`time.monotonic`; after an exception the connection is out of step: close it, and nothing touches the
caller's memory any more.

A value is received into the caller's memory, not into objects of its own: that is what the Redis clients
of the package index do not offer (docs/dependencies.md).
"""

from __future__ import annotations

import socket
import ssl
import time
from collections.abc import Sequence
from dataclasses import dataclass

from dualpath.base.errors import StoreError
from dualpath.base.ids import KiB, MiB

__all__ = ["ErrorReply", "Reply", "RespConnection", "encode_command"]

_BUFFER_BYTES = 64 * KiB
_LONGEST_REPLY_BYTES = 16 * MiB
"""Of a string that becomes an object; values go into the caller's memory."""
_WAKE_BYTES = 256 * KiB
"""Through a NIC of 400 Mb/s this takes a quarter or more off the CPU time of a read."""
_MOST_ELEMENTS = 1_000_000


@dataclass(frozen=True, slots=True)
class ErrorReply:
    """The server refused a command; `text` starts with a code word such as OOM or WRONGTYPE."""

    text: str

    @property
    def code(self) -> str:
        return self.text.partition(" ")[0]


Reply = bytes | int | ErrorReply | list["Reply"] | None
"""A simple or bulk string, an integer, an error, an array, or nothing (nil)."""


def encode_command(*words: bytes | str | int) -> bytes:
    """One command, as the server reads it."""
    parts = [b"*%d\r\n" % len(words)]
    for word in words:
        raw = word if isinstance(word, bytes) else str(word).encode()
        parts.append(b"$%d\r\n%b\r\n" % (len(raw), raw))
    return b"".join(parts)


class RespConnection:
    """Owns the socket. Replies come in the order of the commands; the caller receives one for each."""

    def __init__(self, connected: socket.socket) -> None:
        self._socket = connected
        self._scatters = not isinstance(connected, ssl.SSLSocket)
        self._wake_bytes = 1
        self._bytes = bytearray(_BUFFER_BYTES)
        self._buffer = memoryview(self._bytes)
        self._start = self._end = 0
        """What of the buffer has come and is not yet used."""

    def send(self, parts: Sequence[bytes | memoryview], deadline: float) -> None:
        """Send the parts one after another, without joining them. Raises OSError."""
        waiting = [view for part in parts if (view := memoryview(part)).nbytes]
        while waiting:
            self._allow(deadline)
            if self._scatters:
                sent = self._socket.sendmsg(waiting)
            else:
                sent = self._socket.send(waiting[0])
            while waiting and sent >= waiting[0].nbytes:
                sent -= waiting.pop(0).nbytes
            if sent:
                waiting[0] = waiting[0][sent:]

    def receive(self, deadline: float) -> Reply:
        """The next reply as an object. Raises OSError, and StoreError for what is no RESP."""
        line = self._line(_BUFFER_BYTES, deadline)
        kind, rest = line[:1], line[1:]
        if kind == b"+":
            return rest
        if kind == b"-":
            return ErrorReply(rest.decode(errors="replace"))
        if kind == b":":
            return _number(rest)
        if kind == b"$":
            return self._bulk(_number(rest), deadline)
        if kind == b"*":
            count = _number(rest)
            if count > _MOST_ELEMENTS:
                raise StoreError(f"expected at most {_MOST_ELEMENTS} elements, got {count}")
            return None if count < 0 else [self.receive(deadline) for _ in range(count)]
        raise StoreError(f"expected a reply in RESP, got {line[:40]!r}: is this a Redis server?")

    def receive_into(
        self, head: memoryview, body: memoryview, deadline: float
    ) -> int | ErrorReply | None:
        """Receive one string into `head` and, what follows, into `body`; returns its size.

        None when there is no such value. A value of another size than both together is not received:
        its size comes back, and the connection must be closed. Raises OSError and StoreError.
        """
        # No more than fits `head`, so that the body never passes through the buffer.
        line = self._line(head.nbytes, deadline)
        if line[:1] == b"-":
            return ErrorReply(line[1:].decode(errors="replace"))
        if line[:1] != b"$":
            raise StoreError(f"expected a string, got {line[:40]!r}")
        size = _number(line[1:])
        if size < 0:
            return None
        if size == head.nbytes + body.nbytes:
            self._fill(head, deadline)
            self._fill(body, deadline)
            self._end_of_string(deadline)
        return size

    def close(self) -> None:
        """Idempotent."""
        self._socket.close()

    def _bulk(self, size: int, deadline: float) -> bytes | None:
        if size < 0:
            return None
        if size > _LONGEST_REPLY_BYTES:
            raise StoreError(f"expected at most {_LONGEST_REPLY_BYTES} bytes, got {size}")
        value = bytearray(size)
        self._fill(memoryview(value), deadline)
        self._end_of_string(deadline)
        return bytes(value)

    def _end_of_string(self, deadline: float) -> None:
        end = bytearray(2)
        self._fill(memoryview(end), deadline)
        if end != b"\r\n":
            raise StoreError(f"expected the end of a string, got {bytes(end)!r}")

    def _line(self, most: int, deadline: float) -> bytes:
        """The next line without its end, asking the socket for at most `most` bytes at a time."""
        searched = self._start
        while True:
            end = self._bytes.find(b"\r\n", searched, self._end)
            if end >= 0:
                line = self._bytes[self._start : end]
                self._start = end + 2
                return bytes(line)
            waiting = self._end - self._start
            if waiting == _BUFFER_BYTES:
                raise StoreError(f"expected a line of RESP, got {bytes(self._bytes[:40])!r}")
            self._bytes[:waiting] = self._bytes[self._start : self._end]
            self._start, self._end = 0, waiting
            self._wake_at(1)
            searched = max(0, waiting - 1)
            self._end += self._receive(self._buffer[waiting : waiting + most], deadline)

    def _fill(self, into: memoryview, deadline: float) -> None:
        buffered = min(self._end - self._start, into.nbytes)
        into[:buffered] = self._buffer[self._start : self._start + buffered]
        self._start += buffered
        filled = buffered
        while filled < into.nbytes:
            self._wake_at(into.nbytes - filled)
            filled += self._receive(into[filled:], deadline)

    def _receive(self, into: memoryview, deadline: float) -> int:
        self._allow(deadline)
        got = self._socket.recv_into(into)
        if got == 0:
            raise ConnectionResetError("the server closed the connection")
        return got

    def _wake_at(self, wanted_bytes: int) -> None:
        """Sleep until so much has come, up to a limit, not until the next packet."""
        wake_bytes = min(wanted_bytes, _WAKE_BYTES) if self._scatters else 1
        if wake_bytes != self._wake_bytes:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, wake_bytes)
            self._wake_bytes = wake_bytes

    def _allow(self, deadline: float) -> None:
        remaining_s = deadline - time.monotonic()
        if remaining_s <= 0:
            raise TimeoutError("timed out")
        self._socket.settimeout(remaining_s)


def _number(text: bytes) -> int:
    try:
        return int(text)
    except ValueError as error:
        raise StoreError(f"expected a number, got {text[:40]!r}") from error
