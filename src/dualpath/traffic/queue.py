"""Which transfer leaves next, and how many at once: the pure half of the traffic manager.

It knows classes, peers, sizes and what is under way; no clock, no threads, no bytes. Invariants:

- a transfer that was added leaves once, or is withdrawn, or is refused because its class's queue is full;
- in a class, what is needed in the earliest layer leaves first, then what arrived first, but the oldest
  is overtaken by at most `overtaken` batches that could have been its own: nothing starves;
- what is under way is bounded for each peer and for each class. A transfer larger than a bound goes alone.
  Classes have bounds of their own, so that no amount of KV keeps model execution from leaving, nor
  the other way round;
- transfers of one batch have the same class, peer and `group`.
"""

from __future__ import annotations

import heapq
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from dualpath.base.errors import InvariantViolation
from dualpath.base.ids import MiB
from dualpath.base.traffic_class import DEFAULT_PLAN, TrafficClass, Urgency

__all__ = ["DEFAULT_LIMITS", "ClassLimits", "TransferQueue", "Wanted"]


class Wanted(msgspec.Struct, frozen=True, gc=False):
    """One transfer as the order sees it.

    `number` tells the order of arrival and is unique. `needed`: the layer that computes with it; 0 where
    no single layer waits. Those of one `group` may be submitted together.
    """

    number: int
    traffic_class: TrafficClass
    peer: str
    group: Hashable
    needed: int
    n_bytes: int


@dataclass(frozen=True, slots=True)
class ClassLimits:
    """Bounds of one class: waiting; under way in all and with one peer; in one submission."""

    queued: int = 65_536
    transfers: int = 512
    n_bytes: int = 256 * MiB
    peer_transfers: int = 128
    peer_bytes: int = 64 * MiB
    batch_transfers: int = 64
    batch_bytes: int = 8 * MiB
    overtaken: int = 64


_STORAGE = ClassLimits(
    # A store has threads and queues of its own; these bounds keep them busy, and no more.
    transfers=512,
    n_bytes=512 * MiB,
    peer_transfers=512,
    peer_bytes=512 * MiB,
    batch_transfers=512,
    batch_bytes=512 * MiB,
)

DEFAULT_LIMITS: Mapping[TrafficClass, ClassLimits] = {
    each: _STORAGE if each is TrafficClass.STORAGE else ClassLimits() for each in TrafficClass
}


@dataclass(slots=True)
class _Load:
    """What is under way somewhere."""

    transfers: int = 0
    n_bytes: int = 0

    def has_room(self, wanted: Wanted, transfers: int, n_bytes: int) -> bool:
        if not self.transfers:
            return True
        return self.transfers < transfers and self.n_bytes + wanted.n_bytes <= n_bytes

    def add(self, wanted: Wanted) -> None:
        self.transfers += 1
        self.n_bytes += wanted.n_bytes

    def take(self, wanted: Wanted) -> None:
        self.transfers -= 1
        self.n_bytes -= wanted.n_bytes
        if self.transfers < 0 or self.n_bytes < 0:
            raise InvariantViolation(f"transfer {wanted.number} to {wanted.peer} ended twice")


@dataclass(slots=True)
class _Line:
    """What waits for one peer in one class."""

    load: _Load = field(default_factory=_Load)
    waiting: dict[int, Wanted] = field(default_factory=dict)
    """In order of arrival."""
    groups: dict[Hashable, dict[int, Wanted]] = field(default_factory=dict)
    heap: list[tuple[int, int]] = field(default_factory=list)
    """(needed, number); also of transfers that are gone."""

    def add(self, wanted: Wanted) -> None:
        self.waiting[wanted.number] = wanted
        self.groups.setdefault(wanted.group, {})[wanted.number] = wanted
        heapq.heappush(self.heap, (wanted.needed, wanted.number))

    def remove(self, wanted: Wanted) -> None:
        del self.waiting[wanted.number]
        group = self.groups[wanted.group]
        del group[wanted.number]
        if not group:
            del self.groups[wanted.group]
        if not self.waiting:
            self.heap.clear()

    def head(self) -> Wanted:
        """Of a line in which something waits: what leaves first."""
        while self.heap[0][1] not in self.waiting:
            heapq.heappop(self.heap)
        return self.waiting[self.heap[0][1]]

    def oldest(self) -> Wanted:
        return next(iter(self.waiting.values()))


class _ClassQueue:
    """The lines of one class, and what of it is under way."""

    def __init__(self, limits: ClassLimits) -> None:
        self.limits = limits
        self.n_waiting = 0
        self.load = _Load()
        self.lines: dict[str, _Line] = {}
        self._oldest = -1
        self._overtaken = 0

    def add(self, wanted: Wanted) -> bool:
        if self.n_waiting >= self.limits.queued:
            return False
        self.lines.setdefault(wanted.peer, _Line()).add(wanted)
        self.n_waiting += 1
        return True

    def remove(self, wanted: Wanted) -> None:
        line = self.lines[wanted.peer]
        line.remove(wanted)
        self.n_waiting -= 1
        self._forget_if_idle(wanted.peer, line)

    def next_batch(self) -> tuple[Wanted, ...]:
        first = self._first()
        if first is None or not self._has_room(first):
            return ()
        line = self.lines[first.peer]
        batch = [first]
        batch_bytes = first.n_bytes
        self._leave(line, first)
        for wanted in list(line.groups.get(first.group, {}).values()):
            batch_bytes += wanted.n_bytes
            if (
                len(batch) >= self.limits.batch_transfers
                or batch_bytes > self.limits.batch_bytes
                or not self._has_room(wanted)
                or not self._peer_has_room(line, wanted)
            ):
                break
            self._leave(line, wanted)
            batch.append(wanted)
        return tuple(batch)

    def ended(self, wanted: Wanted) -> None:
        line = self.lines[wanted.peer]
        self.load.take(wanted)
        line.load.take(wanted)
        self._forget_if_idle(wanted.peer, line)

    def _first(self) -> Wanted | None:
        """The head among the peers that have room, unless the oldest has been overtaken too often."""
        if not self.n_waiting:
            return None
        lines = [line for line in self.lines.values() if line.waiting]
        heads = [line.head() for line in lines if self._peer_has_room(line, line.head())]
        if not heads:
            return None
        head = min(heads, key=lambda wanted: (wanted.needed, wanted.number))
        oldest = min(
            (line.oldest() for line in lines if self._peer_has_room(line, line.oldest())),
            key=lambda wanted: wanted.number,
            default=head,
        )
        if oldest.number != self._oldest:
            self._oldest, self._overtaken = oldest.number, 0
        if head is not oldest:
            if self._overtaken >= self.limits.overtaken:
                return oldest
            if self._has_room(head):
                self._overtaken += 1
        return head

    def _has_room(self, wanted: Wanted) -> bool:
        return self.load.has_room(wanted, self.limits.transfers, self.limits.n_bytes)

    def _peer_has_room(self, line: _Line, wanted: Wanted) -> bool:
        return line.load.has_room(wanted, self.limits.peer_transfers, self.limits.peer_bytes)

    def _leave(self, line: _Line, wanted: Wanted) -> None:
        line.remove(wanted)
        self.n_waiting -= 1
        self.load.add(wanted)
        line.load.add(wanted)

    def _forget_if_idle(self, peer: str, line: _Line) -> None:
        if not line.waiting and not line.load.transfers:
            del self.lines[peer]


class TransferQueue:
    """Transfers of all classes from arrival to end. Not thread-safe."""

    def __init__(self, limits: Mapping[TrafficClass, ClassLimits] = DEFAULT_LIMITS) -> None:
        urgency = {each: DEFAULT_PLAN.marks(each).urgency for each in TrafficClass}
        order = sorted(TrafficClass, key=lambda each: urgency[each] is not Urgency.HIGH)
        self._classes = {each: _ClassQueue(limits[each]) for each in order}

    def add(self, wanted: Wanted) -> bool:
        """Let it wait for its turn; False when as many of its class wait as may."""
        return self._classes[wanted.traffic_class].add(wanted)

    def withdraw(self, wanted: Wanted) -> None:
        """It does not leave any more; it must be waiting."""
        self._classes[wanted.traffic_class].remove(wanted)

    def next_batch(self) -> tuple[Wanted, ...]:
        """What is to be submitted together now, high classes first; it is under way from here on.

        Empty when nothing waits that may leave.
        """
        for queue in self._classes.values():
            batch = queue.next_batch()
            if batch:
                return batch
        return ()

    def ended(self, batch: Sequence[Wanted]) -> None:
        """These are not under way any more, however they ended."""
        for wanted in batch:
            self._classes[wanted.traffic_class].ended(wanted)

    def waiting(self) -> Iterator[Wanted]:
        """All that wait, in no order."""
        for queue in self._classes.values():
            for line in queue.lines.values():
                yield from line.waiting.values()

    @property
    def n_waiting(self) -> int:
        return sum(queue.n_waiting for queue in self._classes.values())

    @property
    def idle(self) -> bool:
        """Nothing waits and nothing is under way."""
        return not any(queue.lines for queue in self._classes.values())

    def under_way_bytes(self, traffic_class: TrafficClass, peer: str | None = None) -> int:
        """Of a class, with one peer or with all."""
        queue = self._classes[traffic_class]
        if peer is None:
            return queue.load.n_bytes
        line = queue.lines.get(peer)
        return 0 if line is None else line.load.n_bytes
