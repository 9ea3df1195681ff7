"""The two ends of a connection: a channel that pulls and notifies, and the side that serves it.

Each endpoint opens its own connections to a peer: one for its messages, and where pulls go over
sockets, lanes for these. The accepting side serves pulls from its pool and hands messages on. So no
message waits for payload, and nothing of one direction for the other.

Invariants: each connection has one reading thread, which alone reports its end, once, after every
pull on it is done or will be; served slots are held while their bytes are sent.
"""

from __future__ import annotations

import queue
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from dualpath.base.errors import PeerLost
from dualpath.base.ids import EngineId
from dualpath.base.kv_threads import kv_thread
from dualpath.kv.pool import BufferPool, PoolGeometry
from dualpath.transfer.contract import Channel, ChannelCapabilities, RemoteSpan, TransferName
from dualpath.transfer.pulls import Counters, DeadlineClock, Pull, PullTable, check_message
from dualpath.transfer.spans import (
    byte_views,
    check_spans,
    memory_views,
    span_array,
    unpack_spans,
    why_not_held,
)
from dualpath.transfer.wire import (
    PULLS_IN_FLIGHT,
    FromOwner,
    Link,
    Notify,
    Ping,
    Pong,
    PullReply,
    PullRequest,
    PullStatus,
    decode_from_owner,
    decode_from_puller,
    encode_frame,
)

__all__ = ["DialledConnection", "Patience", "PeerContext", "ServedConnection", "SocketChannel"]


@dataclass(frozen=True, slots=True)
class Patience:
    """How long an endpoint waits before a peer counts as lost.

    `ping_interval_s`: an idle channel asks for a sign of life. `peer_timeout_s`: without one for so
    long, or payload that stands still for so long, the peer is lost. `send_s`: it must take a
    message. `handshake_s`: it must have proved itself.
    """

    ping_interval_s: float = 2.0
    peer_timeout_s: float = 30.0
    send_s: float = 1.0
    handshake_s: float = 5.0


@dataclass(frozen=True, slots=True)
class PeerContext:
    """What a connection needs of its endpoint.

    `ended(connection, reason)` is called once, by the connection's reading thread.
    """

    peer: EngineId
    counters: Counters
    clock: DeadlineClock
    patience: Patience
    ended: Callable[[DialledConnection | ServedConnection, str], None]


class DialledConnection(ABC):
    """Our end of a connection that we opened: one thread reads, answers to nobody, and sees it break."""

    def __init__(self, link: Link, context: PeerContext, name: str) -> None:
        self.peer = context.peer
        self._link = link
        self._context = context
        self._thread = kv_thread(self._run, name=name)

    def start(self) -> None:
        self._thread.start()

    def abort(self, reason: str) -> None:
        """End the connection; its reading thread reports it."""
        self._link.abort(reason)

    def join(self, timeout_s: float) -> None:
        """Wait for the reading thread, unless called on it."""
        if self._thread is not threading.current_thread():
            self._thread.join(timeout_s)

    @abstractmethod
    def _handle(self, frame: FromOwner) -> None:
        """On the reading thread. Raises PeerLost."""

    @abstractmethod
    def _broken(self, reason: str) -> None:
        """On the reading thread, after the last frame and before the end is reported."""

    def _run(self) -> None:
        reason = "the connection's reading thread died"
        try:
            self._read_frames()
        except PeerLost as error:
            reason = str(error)
        finally:
            self._link.abort(reason)
            reason = self._link.reason or reason
            self._broken(reason)
            self._context.ended(self, reason)
            self._link.close()

    def _read_frames(self) -> None:
        patience = self._context.patience
        while True:
            body = self._link.read_frame(patience.ping_interval_s)
            if body is not None:
                self._handle(decode_from_owner(body))
            elif time.monotonic() - self._link.heard_s > patience.peer_timeout_s:
                raise PeerLost(f"no sign of life for {patience.peer_timeout_s:g} s")
            else:
                self._link.send_frame(encode_frame(Ping()), patience.send_s)


class SocketChannel(DialledConnection, Channel):
    """A channel whose messages go over one connection, its own; subclasses move the bytes of pulls."""

    lanes: Sequence[DialledConnection] = ()
    """Further connections that belong to it, and start with it."""

    def __init__(
        self,
        link: Link,
        geometry: PoolGeometry,
        capabilities: ChannelCapabilities,
        context: PeerContext,
    ) -> None:
        super().__init__(link, context, f"dualpath-channel-{context.peer}")
        self.capabilities = capabilities
        self._geometry = geometry
        self._pulls = PullTable(context.counters, context.clock)

    def start(self) -> None:
        for lane in self.lanes:
            lane.start()
        super().start()

    def join(self, timeout_s: float) -> None:
        for lane in self.lanes:
            lane.join(timeout_s)
        super().join(timeout_s)

    def pull(
        self,
        name: TransferName,
        stamp: int,
        spans: Sequence[RemoteSpan],
        into: Sequence[memoryview],
        *,
        deadline_s: float,
    ) -> Future[int]:
        array = span_array(spans)
        check_spans(self._geometry, array)
        pull = self._pulls.open(name, stamp, array, byte_views(array, into), deadline_s)
        if not pull.done:
            self._submit(pull)
        return pull.future

    def notify(self, message: bytes) -> None:
        check_message(message)
        try:
            self._link.send_frame(encode_frame(Notify(message)), self._context.patience.send_s)
        except PeerLost as error:
            raise PeerLost(f"{self.peer} is lost: {error}") from None
        self._context.counters.notified(sent=1)

    @abstractmethod
    def _submit(self, pull: Pull) -> None:
        """Start moving a waiting pull; never waits for its bytes."""

    def _handle(self, frame: FromOwner) -> None:
        if not isinstance(frame, Pong):
            raise PeerLost(f"{self.peer} sent {frame}, which was not asked for")

    def _broken(self, reason: str) -> None:
        self._pulls.close(PeerLost(f"{self.peer} is lost: {reason}"))


class ServedConnection:
    """The accepting side: serves the peer's pulls from the pool, hands its messages on.

    `run` is the body of the reading thread; a second thread sends, so that a message never waits
    behind payload. `notified` is called in order.
    """

    def __init__(
        self,
        link: Link,
        pool: BufferPool,
        context: PeerContext,
        notified: Callable[[bytes], None],
    ) -> None:
        self.peer = context.peer
        self._link = link
        self._pool = pool
        self._context = context
        self._notified = notified
        # Pulls in flight, and one pong: pings are answered in turn, one more is not needed.
        self._to_send: queue.Queue[PullRequest | Ping | None] = queue.Queue(PULLS_IN_FLIGHT + 2)
        self._sender = kv_thread(self._send_replies, name=f"dualpath-serve-{context.peer}")

    def abort(self, reason: str) -> None:
        """End the connection; its reading thread reports it."""
        self._link.abort(reason)

    def run(self) -> None:
        reason = "the connection's reading thread died"
        self._sender.start()
        try:
            self._read_frames()
        except PeerLost as error:
            reason = str(error)
        finally:
            self._link.abort(reason)
            self._stop_sender()
            self._context.ended(self, self._link.reason or reason)
            self._link.close()

    def _stop_sender(self) -> None:
        try:
            self._to_send.put_nowait(None)
        except queue.Full:
            pass  # Its next send fails, because the link is aborted.
        self._sender.join()

    def _read_frames(self) -> None:
        patience = self._context.patience
        while True:
            body = self._link.read_frame(patience.ping_interval_s)
            if body is None:
                silent_s = time.monotonic() - max(self._link.heard_s, self._link.sent_s)
                if silent_s > patience.peer_timeout_s:
                    raise PeerLost(f"no sign of life for {patience.peer_timeout_s:g} s")
                continue
            frame = decode_from_puller(body)
            if isinstance(frame, Notify):
                self._context.counters.notified(received=1)
                self._notified(frame.message)
                continue
            try:
                self._to_send.put_nowait(frame)
            except queue.Full:
                if isinstance(frame, PullRequest):
                    raise PeerLost(f"more than {PULLS_IN_FLIGHT} pulls in flight") from None

    def _send_replies(self) -> None:
        try:
            while True:
                frame = self._to_send.get()
                if frame is None:
                    return
                if isinstance(frame, Ping):
                    self._link.send_stream(encode_frame(Pong()))
                else:
                    self._serve(frame)
        except PeerLost as error:
            self._link.abort(str(error))  # Wakes the reading thread, which reports it.
        except BaseException:
            self._link.abort("the connection's sending thread died")
            raise

    def _serve(self, request: PullRequest) -> None:
        try:
            spans = unpack_spans(request.spans)
            total = check_spans(self._pool.geometry, spans)
        except ValueError as error:
            raise PeerLost(f"{request.name} asks for what cannot be: {error}") from None
        with self._pool.hold(request.stamp) as lease:
            missing = why_not_held(lease, request.stamp, spans)
            if missing is not None:
                reply = PullReply(request.number, PullStatus.LEASE_LOST, 0, missing)
                self._link.send_stream(encode_frame(reply))
                return
            reply = PullReply(request.number, PullStatus.OK, total)
            self._link.send_stream(encode_frame(reply), memory_views(self._pool, spans), total)
        self._context.counters.served(total)
