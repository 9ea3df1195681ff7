"""Pulls over sockets: each is cut in parts that move at once, on connections of their own.

A lane knows requests, replies and payload of one connection; a channel how to cut a pull. Parts are
queued on each lane in the order of the pulls, so that the pull submitted first is done first. The
lanes' connections carry nothing but KV, and are marked as such; messages have the channel's own.
"""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from dualpath.base.errors import LeaseLost, PeerLost
from dualpath.base.ids import KiB
from dualpath.kv.pool import PoolGeometry
from dualpath.transfer.connection import DialledConnection, PeerContext, SocketChannel
from dualpath.transfer.contract import ChannelCapabilities
from dualpath.transfer.pulls import MAX_OUTSTANDING, Pull
from dualpath.transfer.spans import SpanArray, cut_spans, cut_views, pack_spans
from dualpath.transfer.wire import (
    PULLS_IN_FLIGHT,
    FromOwner,
    Link,
    Pong,
    PullReply,
    PullRequest,
    PullStatus,
    encode_frame,
)

__all__ = ["LanedChannel", "PullLane", "PullPart", "cut_bounds"]

_MIN_PART_BYTES = 256 * KiB


@dataclass(frozen=True, slots=True, eq=False)
class PullPart:
    """The bytes [start, stop) of a pull, in the order of its spans."""

    pull: Pull
    start: int
    stop: int

    @property
    def whole(self) -> bool:
        return self.stop - self.start == self.pull.total_bytes

    def spans(self) -> SpanArray:
        """None of them when the pull has ended."""
        spans = self.pull.spans
        return spans if self.whole or not len(spans) else cut_spans(spans, self.start, self.stop)

    def into(self) -> Sequence[memoryview]:
        """Only while the part is moving."""
        views = self.pull.into
        return views if self.whole else cut_views(self.pull.spans, views, self.start, self.stop)


def cut_bounds(total_bytes: int, n_lanes: int) -> list[int]:
    """Where to cut a pull: as even as can be, for at most `n_lanes`, and no part is tiny.

    Parts begin and end at whole pages of the pull.
    """
    n_parts = max(1, min(n_lanes, total_bytes // _MIN_PART_BYTES))
    return [total_bytes * part // n_parts & -4096 for part in range(n_parts)] + [total_bytes]


class PullLane(DialledConnection):
    """One connection for parts of pulls.

    At most `PULLS_IN_FLIGHT` are asked for at once; more wait here. A part whose pull ends after it
    was asked for keeps its place until the reply came, whose payload is then dropped.
    """

    def __init__(self, link: Link, context: PeerContext, number: int) -> None:
        super().__init__(link, context, f"dualpath-lane-{number}-{context.peer}")
        self._numbers = itertools.count()
        self._flight_lock = threading.Lock()
        self._in_flight: dict[int, PullPart] = {}
        self._waiting: deque[PullPart] = deque()
        self._queued_bytes = 0

    @property
    def queued_bytes(self) -> int:
        """What it still has to move."""
        return self._queued_bytes

    def submit(self, part: PullPart) -> None:
        """Never waits for bytes."""
        with self._flight_lock:
            self._queued_bytes += part.stop - part.start
            if len(self._in_flight) >= PULLS_IN_FLIGHT:
                if len(self._waiting) >= 2 * MAX_OUTSTANDING:  # Most of them have expired.
                    self._drop_ended()
                self._waiting.append(part)
                return
            number = next(self._numbers)
            self._in_flight[number] = part
        self._request(number, part)

    def _drop_ended(self) -> None:
        live = deque(part for part in self._waiting if not part.pull.done)
        self._queued_bytes -= sum(part.stop - part.start for part in self._waiting)
        self._queued_bytes += sum(part.stop - part.start for part in live)
        self._waiting = live

    def _request(self, number: int, part: PullPart) -> None:
        # A pull that ended just now has no spans left: it keeps its turn, and a short reply.
        pull = part.pull
        request = PullRequest(number, pull.name, pull.stamp, pack_spans(part.spans()))
        try:
            self._link.send_frame(encode_frame(request), self._context.patience.send_s)
        except PeerLost:
            pass  # The link is aborted: its reading thread reports it, which ends all pulls.

    def _handle(self, frame: FromOwner) -> None:
        if isinstance(frame, Pong):
            return
        with self._flight_lock:
            part = self._in_flight.get(frame.number)
        if part is None:
            raise PeerLost(f"{self.peer} answered pull {frame.number}, which was not asked for")
        self._receive(part, frame)
        following = None
        with self._flight_lock:
            del self._in_flight[frame.number]
            self._queued_bytes -= part.stop - part.start
            while self._waiting and following is None:
                waiting = self._waiting.popleft()
                if waiting.pull.done:
                    self._queued_bytes -= waiting.stop - waiting.start
                else:
                    following = waiting
            if following is not None:
                number = next(self._numbers)
                self._in_flight[number] = following
        if following is not None:
            self._request(number, following)

    def _receive(self, part: PullPart, reply: PullReply) -> None:
        pull = part.pull
        if not pull.begin():
            self._link.drain(reply.length)
        elif reply.status is PullStatus.LEASE_LOST:
            pull.fail(LeaseLost(f"{pull.name}: {self.peer} says {reply.detail}"))
        elif reply.length != part.stop - part.start:
            error = f"{self.peer} sends {reply.length} bytes where {part.stop - part.start} are due"
            pull.fail(PeerLost(f"{pull.name}: {error}"))
            raise PeerLost(error)
        else:
            try:
                missing = self._link.read_into(part.into(), pull.deadline_s)
            except PeerLost as error:
                pull.fail(PeerLost(f"{pull.name}: {self.peer} is lost: {error}"))
                raise
            if missing:
                pull.fail(pull.late())
                self._link.drain(missing)
            else:
                pull.complete()

    def _broken(self, reason: str) -> None:
        pass  # The channel ends its pulls when the relation ends it, which our end does.


class LanedChannel(SocketChannel):
    """A channel with a connection for messages, and lanes for pulls."""

    def __init__(
        self,
        link: Link,
        lanes: Sequence[PullLane],
        geometry: PoolGeometry,
        capabilities: ChannelCapabilities,
        context: PeerContext,
    ) -> None:
        super().__init__(link, geometry, capabilities, context)
        self.lanes: Sequence[PullLane] = lanes

    def _submit(self, pull: Pull) -> None:
        bounds = cut_bounds(pull.total_bytes, len(self.lanes))
        pull.split(len(bounds) - 1)
        lanes = sorted(self.lanes, key=lambda lane: lane.queued_bytes)
        for lane, (start, stop) in zip(lanes, itertools.pairwise(bounds), strict=False):
            lane.submit(PullPart(pull, start, stop))
