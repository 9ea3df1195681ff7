"""Frames over a stream socket, and raw payload between them.

A frame is a 4-byte little-endian length and that many bytes of MessagePack (msgspec structs; never
pickle). After the reply to a pull follow the pulled bytes, received straight into their
destination. `Link` owns the socket; it knows frames and bytes, no peers, pools or pulls.

Invariants: a frame over `MAX_FRAME_BYTES` is refused before memory is taken for it; one thread
reads, any thread sends, and no send or receive waits without a limit; the descriptor is closed
only when no thread can still use it (others `abort`, which wakes them).
"""

from __future__ import annotations

import select
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from enum import StrEnum
from itertools import chain

import msgspec

from dualpath.base.errors import PeerLost
from dualpath.base.ids import KiB, MiB
from dualpath.transfer.contract import TransferName

__all__ = [
    "MAX_FRAME_BYTES",
    "PULLS_IN_FLIGHT",
    "ByteCursor",
    "FromOwner",
    "FromPuller",
    "Link",
    "Notify",
    "Ping",
    "Pong",
    "PullReply",
    "PullRequest",
    "PullStatus",
    "decode_from_owner",
    "decode_from_puller",
    "encode_frame",
]

MAX_FRAME_BYTES = 4 * MiB
"""Holds the longest message, and a pull of the most spans, at 24 bytes each."""

PULLS_IN_FLIGHT = 64
"""Pulls a connection may have asked for and not been answered; an owner drops who exceeds it."""

_LENGTH = struct.Struct("<I")
_BUFFER_BYTES = 64 * KiB
# What one system call is given: more than a socket takes at once, and no more views than IOV_MAX.
_BATCH_BYTES = 4 * MiB
_BATCH_VIEWS = 1024
_SCRATCH_BYTES = 256 * KiB


class Notify(msgspec.Struct, frozen=True, array_like=True, tag="n"):
    message: bytes


class PullRequest(msgspec.Struct, frozen=True, array_like=True, tag="p"):
    number: int
    name: TransferName
    stamp: int
    spans: bytes
    """By `pack_spans`."""


class Ping(msgspec.Struct, frozen=True, array_like=True, tag="i"):
    """Asks for a Pong: a peer that says nothing for too long is lost."""


class PullStatus(StrEnum):
    OK = "ok"
    LEASE_LOST = "lease_lost"


class PullReply(msgspec.Struct, frozen=True, array_like=True, tag="r"):
    """`length` raw bytes follow the frame (0 unless OK)."""

    number: int
    status: PullStatus
    length: int
    detail: str = ""


class Pong(msgspec.Struct, frozen=True, array_like=True, tag="o"):
    """The answer to a Ping."""


FromPuller = Notify | PullRequest | Ping
FromOwner = PullReply | Pong

_encoder = msgspec.msgpack.Encoder()
_from_puller = msgspec.msgpack.Decoder(FromPuller)
_from_owner = msgspec.msgpack.Decoder(FromOwner)


def encode_frame(frame: msgspec.Struct) -> bytearray:
    """Length and body. Raises ValueError when it exceeds `MAX_FRAME_BYTES`."""
    encoded = bytearray(_LENGTH.size)
    _encoder.encode_into(frame, encoded, _LENGTH.size)
    size = len(encoded) - _LENGTH.size
    if size > MAX_FRAME_BYTES:
        raise ValueError(f"a frame of {size} bytes exceeds {MAX_FRAME_BYTES}")
    _LENGTH.pack_into(encoded, 0, size)
    return encoded


def decode_from_puller(body: bytes) -> FromPuller:
    """Raises PeerLost: what sends garbage is not a peer."""
    try:
        return _from_puller.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise PeerLost(f"a peer sent a malformed frame: {error}") from None


def decode_from_owner(body: bytes) -> FromOwner:
    """Raises PeerLost: what sends garbage is not a peer."""
    try:
        return _from_owner.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise PeerLost(f"a peer sent a malformed frame: {error}") from None


class ByteCursor:
    """Position in views that are sent or filled in order, by part; `n_bytes` in all of them.

    The views are taken as they are needed: the first bytes move before the last view is made.
    """

    __slots__ = ("_source", "_window", "left")

    def __init__(self, views: Iterable[memoryview], n_bytes: int) -> None:
        self._source: Iterator[memoryview] = iter(views)
        self._window: deque[memoryview] = deque()
        self.left = n_bytes

    def batch(self, at_least: int = _BATCH_BYTES) -> list[memoryview]:
        """The next views, for one scatter or gather call: `at_least` so many bytes of what is left."""
        batch: list[memoryview] = []
        size = 0
        for view in self._window:
            batch.append(view)
            size += view.nbytes
            if size >= at_least:
                return batch
        while len(batch) < _BATCH_VIEWS:
            taken = next(self._source, None)
            if taken is None:
                break
            if taken.nbytes:
                self._window.append(taken)
                batch.append(taken)
                size += taken.nbytes
                if size >= at_least:
                    break
        return batch

    def advance(self, n_bytes: int) -> None:
        """So many bytes of the last batch were moved."""
        self.left -= n_bytes
        window = self._window
        while n_bytes:
            view = window.popleft()
            if n_bytes < view.nbytes:
                window.appendleft(view[n_bytes:])
                return
            n_bytes -= view.nbytes

    def fill(self, source: memoryview) -> int:
        """Copy from `source` as much as fits; returns the bytes taken."""
        taken = 0
        while taken < source.nbytes and self.left:
            target = self.batch(1)[0]
            size = min(target.nbytes, source.nbytes - taken)
            target[:size] = source[taken : taken + size]
            self.advance(size)
            taken += size
        return taken


class Link:
    """A connected stream socket. One thread reads; any thread may send or abort.

    `stall_s`: a receive or send of payload that makes no progress for so long ends the link.
    """

    def __init__(self, sock: socket.socket, *, stall_s: float) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._stall_s = stall_s
        self._readable = select.poll()
        self._readable.register(sock, select.POLLIN)
        self._writable = select.poll()
        self._writable.register(sock, select.POLLOUT)
        self._send_lock = threading.Lock()
        self._buffer = memoryview(bytearray(_BUFFER_BYTES))
        self._start = 0
        self._stop = 0
        self._scratch: memoryview | None = None
        self._reason: str | None = None
        self._closed = False
        self.heard_s = time.monotonic()
        """When bytes last came."""
        self.sent_s = self.heard_s
        """When the socket last took bytes."""

    @property
    def reason(self) -> str | None:
        """Why the link was aborted; None while it works."""
        return self._reason

    def abort(self, reason: str) -> None:
        """End the link and wake every thread that waits on it; the first reason stays."""
        if self._reason is None:
            self._reason = reason
        if not self._closed:
            try:
                self._sock.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass  # The peer was faster.

    def close(self) -> None:
        """Close the descriptor. Only the reading thread calls it, when it reads no more."""
        self.abort("closed")
        with self._send_lock:
            self._closed = True
            self._sock.close()

    def read_frame(self, wait_s: float) -> bytes | None:
        """The next frame's body; None when nothing arrived for `wait_s`. Raises PeerLost."""
        while True:
            have = self._stop - self._start
            need = _LENGTH.size
            if have >= need:
                (size,) = _LENGTH.unpack_from(self._buffer, self._start)
                if size > MAX_FRAME_BYTES:
                    raise PeerLost(f"a peer announced a frame of {size} bytes")
                need += size
                if have >= need:
                    body = bytes(self._buffer[self._start + _LENGTH.size : self._start + need])
                    self._consume(need)
                    return body
            self._make_room(need)
            if not self._receive_some(wait_s):
                return None

    def read_into(self, views: Sequence[memoryview], deadline_s: float) -> int:
        """Fill the views with what comes next, until `deadline_s` (monotonic).

        Returns the bytes that had not come by then (0: all came). Raises PeerLost.
        """
        cursor = ByteCursor(views, sum(view.nbytes for view in views))
        if self._stop > self._start:
            self._consume(cursor.fill(self._buffer[self._start : self._stop]))
        while cursor.left:
            now_s = time.monotonic()
            if now_s >= deadline_s:
                return cursor.left
            try:
                received = self._sock.recvmsg_into(cursor.batch())[0]
            except BlockingIOError:
                until_s = min(deadline_s, self.heard_s + self._stall_s)
                if not _wait(self._readable, until_s - now_s):
                    self._check_progress()
                continue
            except OSError as error:
                raise self._lost(error) from None
            if not received:
                raise self._lost(None)
            self.heard_s = time.monotonic()
            cursor.advance(received)
        return 0

    def drain(self, n_bytes: int) -> None:
        """Read and drop payload nobody waits for any more. Raises PeerLost."""
        if self._scratch is None:
            self._scratch = memoryview(bytearray(_SCRATCH_BYTES))
        while n_bytes:
            size = min(n_bytes, _SCRATCH_BYTES)
            self.read_into([self._scratch[:size]], float("inf"))
            n_bytes -= size

    def send_frame(self, encoded: bytearray, limit_s: float) -> None:
        """Send within `limit_s`; a peer that does not take it is lost. Raises PeerLost."""
        until_s = time.monotonic() + limit_s
        if not self._send_lock.acquire(timeout=limit_s):
            raise self._clogged(limit_s)
        try:
            cursor = ByteCursor([memoryview(encoded)], len(encoded))
            while cursor.left:
                if not self._send_some(cursor, until_s - time.monotonic()):
                    raise self._clogged(limit_s)
        finally:
            self._send_lock.release()

    def send_stream(
        self, encoded: bytearray, payload: Iterable[memoryview] = (), n_bytes: int = 0
    ) -> None:
        """Send a frame and its payload of `n_bytes`, however long it takes while it goes on.

        Raises PeerLost.
        """
        with self._send_lock:
            views = chain([memoryview(encoded)], payload)
            cursor = ByteCursor(views, len(encoded) + n_bytes)
            while cursor.left:
                if not self._send_some(cursor, self._stall_s):
                    raise self._clogged(self._stall_s)

    def _send_some(self, cursor: ByteCursor, wait_s: float) -> bool:
        """Send what the socket takes now, after waiting for room at most `wait_s`."""
        if self._reason is not None:
            raise PeerLost(self._reason)
        try:
            sent = self._sock.sendmsg(cursor.batch())
        except BlockingIOError:
            return wait_s > 0 and _wait(self._writable, wait_s)
        except OSError as error:
            raise self._lost(error) from None
        self.sent_s = time.monotonic()
        cursor.advance(sent)
        return True

    def _receive_some(self, wait_s: float) -> bool:
        while True:
            try:
                received = self._sock.recv_into(self._buffer[self._stop :])
            except BlockingIOError:
                if not _wait(self._readable, wait_s):
                    return False
                continue
            except OSError as error:
                raise self._lost(error) from None
            if not received:
                raise self._lost(None)
            self.heard_s = time.monotonic()
            self._stop += received
            return True

    def _consume(self, n_bytes: int) -> None:
        self._start += n_bytes
        if self._start == self._stop:
            self._start = self._stop = 0
            if len(self._buffer) > _BUFFER_BYTES:
                self._buffer = memoryview(bytearray(_BUFFER_BYTES))

    def _make_room(self, frame_bytes: int) -> None:
        """Have the buffer hold a frame of `frame_bytes` from its start on."""
        if self._start + frame_bytes <= len(self._buffer) and self._stop < len(self._buffer):
            return
        unread = bytes(self._buffer[self._start : self._stop])
        if frame_bytes > len(self._buffer):
            self._buffer = memoryview(bytearray(frame_bytes))
        self._buffer[: len(unread)] = unread
        self._start, self._stop = 0, len(unread)

    def _check_progress(self) -> None:
        if time.monotonic() - self.heard_s >= self._stall_s:
            self.abort(f"nothing moved for {self._stall_s:g} s")
            raise PeerLost(self._reason)

    def _clogged(self, limit_s: float) -> PeerLost:
        self.abort(f"the peer took nothing for {limit_s:g} s")
        return PeerLost(self._reason)

    def _lost(self, error: OSError | None) -> PeerLost:
        self.abort("the peer closed the connection" if error is None else str(error))
        return PeerLost(self._reason)


def _wait(poll: select.poll, wait_s: float) -> bool:
    """Whether the socket became ready (or broke) within `wait_s`."""
    timeout_ms = None if wait_s == float("inf") else max(0, int(wait_s * 1000) + 1)
    return bool(poll.poll(timeout_ms))
