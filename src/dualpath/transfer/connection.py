"""The two ends of a connection: a channel that pulls and notifies, and the side that serves it.

Each endpoint opens its own connection to a peer for its pulls and notifies; the accepting side
serves pulls from its pool and hands messages on. So two engines that pull from each other have two
connections, one a direction, and no frame of one waits for payload of the other.

Invariants: each connection has one reading thread, which alone reports its end, once, after every
pull on it is done or will be; served slots are held while their bytes are sent.
"""

from __future__ import annotations

import queue
import threading
import time
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from dualpath.base.errors import LeaseLost, PeerLost
from dualpath.base.ids import EngineId
from dualpath.kv.pool import BufferPool, PoolGeometry
from dualpath.transfer.contract import Channel, ChannelCapabilities, RemoteSpan, TransferName
from dualpath.transfer.pulls import (
    MAX_OUTSTANDING,
    Counters,
    DeadlineClock,
    Pull,
    PullTable,
    byte_views,
    check_message,
    check_spans,
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

__all__ = ["Patience", "PeerContext", "ServedConnection", "SocketChannel", "WireChannel"]


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
    ended: Callable[[SocketChannel | ServedConnection, str], None]


class SocketChannel(Channel):
    """A channel over a socket: messages, pings and the peer's death; subclasses move the bytes."""

    def __init__(
        self,
        link: Link,
        geometry: PoolGeometry,
        capabilities: ChannelCapabilities,
        context: PeerContext,
    ) -> None:
        self.peer = context.peer
        self.capabilities = capabilities
        self._link = link
        self._geometry = geometry
        self._context = context
        self._pulls = PullTable(context.counters, context.clock)
        self._thread = threading.Thread(
            target=self._run, name=f"dualpath-channel-{self.peer}", daemon=True
        )

    def start(self) -> None:
        self._thread.start()

    def abort(self, reason: str) -> None:
        """End the connection; its reading thread reports it."""
        self._link.abort(reason)

    def join(self, timeout_s: float) -> None:
        """Wait for the reading thread, unless called on it."""
        if self._thread is not threading.current_thread():
            self._thread.join(timeout_s)

    def pull(
        self,
        name: TransferName,
        stamp: int,
        spans: Sequence[RemoteSpan],
        into: Sequence[memoryview],
        *,
        deadline_s: float,
    ) -> Future[int]:
        check_spans(self._geometry, spans)
        views = byte_views(spans, into)
        pull = self._pulls.open(name, stamp, spans, views, deadline_s)
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

    @abstractmethod
    def _handle(self, frame: FromOwner) -> None:
        """On the reading thread. Raises PeerLost."""

    def _stop_moving(self) -> None:
        """After every pull was told to stop: give back what moving needed."""

    def _run(self) -> None:
        reason = "the channel's reading thread died"
        try:
            self._read_frames()
        except PeerLost as error:
            reason = str(error)
        finally:
            self._link.abort(reason)
            reason = self._link.reason or reason
            self._pulls.close(PeerLost(f"{self.peer} is lost: {reason}"))
            self._stop_moving()
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


class WireChannel(SocketChannel):
    """Pulls by request and reply on the socket itself.

    At most `PULLS_IN_FLIGHT` are asked for at once; more wait here. A pull that expires after it
    was asked for keeps its place until the reply came, whose payload is then dropped.
    """

    def __init__(
        self,
        link: Link,
        geometry: PoolGeometry,
        capabilities: ChannelCapabilities,
        context: PeerContext,
    ) -> None:
        super().__init__(link, geometry, capabilities, context)
        self._flight_lock = threading.Lock()
        self._in_flight: dict[int, Pull] = {}
        self._waiting: deque[Pull] = deque()

    def _submit(self, pull: Pull) -> None:
        with self._flight_lock:
            if len(self._in_flight) >= PULLS_IN_FLIGHT:
                if len(self._waiting) >= 2 * MAX_OUTSTANDING:  # Most of them have expired.
                    self._waiting = deque(one for one in self._waiting if not one.done)
                self._waiting.append(pull)
                return
            self._in_flight[pull.number] = pull
        self._request(pull)

    def _request(self, pull: Pull) -> None:
        # A pull that ended just now has no spans left: it keeps its turn, and a short reply.
        request = PullRequest(pull.number, pull.name, pull.stamp, list(pull.spans))
        try:
            self._link.send_frame(encode_frame(request), self._context.patience.send_s)
        except PeerLost:
            pass  # The link is aborted: the reading thread fails this pull with all others.

    def _handle(self, frame: FromOwner) -> None:
        if isinstance(frame, Pong):
            return
        with self._flight_lock:
            pull = self._in_flight.get(frame.number)
        if pull is None:
            raise PeerLost(f"{self.peer} answered pull {frame.number}, which was not asked for")
        self._receive(pull, frame)
        with self._flight_lock:
            del self._in_flight[frame.number]
            following = None
            while self._waiting and following is None:
                waiting = self._waiting.popleft()
                following = None if waiting.done else waiting
            if following is not None:
                self._in_flight[following.number] = following
        if following is not None:
            self._request(following)

    def _receive(self, pull: Pull, reply: PullReply) -> None:
        if not pull.begin():
            self._link.drain(reply.length)
        elif reply.status is PullStatus.LEASE_LOST:
            pull.fail(LeaseLost(f"{pull.name}: {self.peer} says {reply.detail}"))
        elif reply.length != pull.total_bytes:
            error = f"{self.peer} sends {reply.length} bytes for a pull of {pull.total_bytes}"
            pull.fail(PeerLost(error))
            raise PeerLost(error)
        else:
            try:
                missing = self._link.read_into(pull.into, pull.deadline_s)
            except PeerLost as error:
                pull.fail(PeerLost(f"{pull.name}: {self.peer} is lost: {error}"))
                raise
            if missing:
                pull.fail(pull.late())
                self._link.drain(missing)
            else:
                pull.complete()


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
        self._sender = threading.Thread(
            target=self._send_replies, name=f"dualpath-serve-{context.peer}", daemon=True
        )

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
                    self._link.send_stream(encode_frame(Pong()), [])
                else:
                    self._serve(frame)
        except PeerLost as error:
            self._link.abort(str(error))  # Wakes the reading thread, which reports it.
        except BaseException:
            self._link.abort("the connection's sending thread died")
            raise

    def _serve(self, request: PullRequest) -> None:
        try:
            total = check_spans(self._pool.geometry, request.spans)
        except ValueError as error:
            raise PeerLost(f"{request.name} asks for what cannot be: {error}") from None
        with self._pool.hold(request.stamp) as lease:
            missing = why_not_held(lease, request.stamp, request.spans)
            if lease is None or missing is not None:
                reply = PullReply(request.number, PullStatus.LEASE_LOST, 0, missing or "")
                self._link.send_stream(encode_frame(reply), [])
                return
            reply = PullReply(request.number, PullStatus.OK, total)
            self._link.send_stream(encode_frame(reply), _views(self._pool, request.spans))
        self._context.counters.served(total)


def _views(pool: BufferPool, spans: Sequence[RemoteSpan]) -> list[memoryview]:
    """The spans' bytes in the pool; spans that follow one another in a slot become one view."""
    merged: list[RemoteSpan] = []
    for span in spans:
        last = merged[-1] if merged else None
        if last is not None and last.slot == span.slot and last.offset + last.length == span.offset:
            merged[-1] = RemoteSpan(last.slot, last.offset, last.length + span.length)
        else:
            merged.append(span)
    return [pool.view(span.slot)[span.offset : span.offset + span.length] for span in merged]
