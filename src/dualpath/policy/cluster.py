"""What the scheduler believes of engines, groups and nodes: reports plus what is under way.

An engine's figures are those of its last report, plus everything it was chosen for and had not seen
when it reported. Between two reports they never fall for work that the report already counted:
only a new report says that memory is free again, so device memory is never promised twice.

Nothing here decides anything.
"""

from __future__ import annotations

from collections import deque
from typing import Final

from dualpath.base.errors import InvariantViolation
from dualpath.base.ids import EngineId, GroupId, NodeId, Role
from dualpath.policy.events import EngineReport
from dualpath.policy.requests import ArrivalQueue, RequestState

__all__ = ["Capacity", "EngineState", "GroupState", "NodeState"]

_DECODE: Final = Role.DECODE


class NodeState:
    """A storage NIC. `read_queue_tokens`: reported, plus planned reads its engines have not seen.

    `unread_tokens`: what it was given to read and has not said to have read; seen or not. `done_tokens`:
    what it read since it is known; decides between equal queues.
    """

    __slots__ = (
        "done_tokens",
        "engines",
        "id",
        "read_queue_tokens",
        "unread_tokens",
        "unseen_read_tokens",
    )

    def __init__(self, node: NodeId) -> None:
        self.id = node
        self.engines = 0
        self.read_queue_tokens = 0
        self.unseen_read_tokens = 0
        self.unread_tokens = 0
        self.done_tokens = 0

    def report(self, read_queue_tokens: int) -> None:
        self.read_queue_tokens = read_queue_tokens + self.unseen_read_tokens


class EngineState:
    """`tokens`, `requests`, `free_hbm_tokens`: what the policy decides by; `unseen_*` is their part

    that no report covers. `unseen`: assigned, not yet seen, in the order of assignment.
    `pending`: chosen for a request whose other engine is not; the engine does not know of it.
    """

    __slots__ = (
        "buffer_tokens",
        "decodes",
        "free_hbm_tokens",
        "group",
        "hbm_tokens",
        "id",
        "node",
        "pending",
        "requests",
        "seen",
        "tokens",
        "unseen",
        "unseen_hbm_tokens",
        "unseen_requests",
        "unseen_tokens",
    )

    def __init__(
        self,
        engine: EngineId,
        group: GroupState,
        node: NodeState,
        hbm_tokens: int,
        buffer_tokens: int,
    ) -> None:
        self.id = engine
        self.group = group
        self.decodes = group.role is _DECODE
        self.node = node
        self.hbm_tokens = hbm_tokens
        self.buffer_tokens = buffer_tokens
        self.tokens = 0
        self.requests = 0
        self.free_hbm_tokens = hbm_tokens
        self.unseen_tokens = 0
        self.unseen_requests = 0
        self.unseen_hbm_tokens = 0
        self.seen = 0
        self.unseen: deque[RequestState] = deque()
        self.pending: dict[int, RequestState] = {}

    def take(self, request: RequestState) -> None:
        """Chosen for the request."""
        tokens = request.tokens
        self.tokens += tokens
        self.unseen_tokens += tokens
        self.requests += 1
        self.unseen_requests += 1
        self.group.tokens += tokens
        self.pending[request.arrival] = request
        if self.decodes:
            self.free_hbm_tokens -= request.hbm_tokens
            self.unseen_hbm_tokens += request.hbm_tokens
            request.decode = self
            request.decode_counted = True
        else:
            request.prefill = self
            request.prefill_counted = True

    def assign(self, request: RequestState) -> None:
        """The other engine is known too, and who reads what: the engine is told now."""
        del self.pending[request.arrival]
        self.unseen.append(request)
        node = self.node
        read_tokens = self.read_tokens(request)
        node.unseen_read_tokens += read_tokens
        node.read_queue_tokens += read_tokens
        node.unread_tokens += read_tokens

    def counts(self, request: RequestState) -> bool:
        """Whether the request is in this engine's figures on top of its report."""
        return request.decode_counted if self.decodes else request.prefill_counted

    def read_tokens(self, request: RequestState) -> int:
        """What this engine's node is to read for it."""
        return request.de_read_tokens if self.decodes else request.pe_read_tokens

    def drop(self, request: RequestState) -> bool:
        """The request needs the engine no longer. Whether figures fell, which those of a report never do."""
        counted = self.counts(request)
        if self.decodes:
            request.decode = None
        else:
            request.prefill = None
        if counted:
            tokens = request.tokens
            self.tokens -= tokens
            self.requests -= 1
            self.group.tokens -= tokens
            self.node.read_queue_tokens -= self.read_tokens(request)
            if self.decodes:
                self.free_hbm_tokens += request.hbm_tokens
            self._uncount(request)
            self.pending.pop(request.arrival, None)
        return counted

    def report(self, report: EngineReport) -> None:
        """Replace the figures by the report and what it cannot know.

        Raises InvariantViolation when the engine claims to have seen more than it was assigned.
        """
        unseen = self.unseen
        newly_seen = report.seen - self.seen
        if not 0 <= newly_seen <= len(unseen):
            raise InvariantViolation(
                f"engine {self.id} has seen {report.seen} assignments; it was given "
                f"{self.seen + len(unseen)} and had seen {self.seen} before"
            )
        self.seen = report.seen
        for _ in range(newly_seen):
            request = unseen.popleft()
            if self.counts(request):  # It may have been dropped meanwhile.
                self._uncount(request)
        before = self.tokens
        self.tokens = report.tokens + self.unseen_tokens
        self.group.tokens += self.tokens - before
        self.requests = report.requests + self.unseen_requests
        self.free_hbm_tokens = report.free_hbm_tokens - self.unseen_hbm_tokens

    def _uncount(self, request: RequestState) -> None:
        """No longer of what no report covers."""
        self.unseen_requests -= 1
        self.unseen_tokens -= request.tokens
        self.node.unseen_read_tokens -= self.read_tokens(request)
        if self.decodes:
            self.unseen_hbm_tokens -= request.hbm_tokens
            request.decode_counted = False
        else:
            request.prefill_counted = False


class Capacity:
    """Which requests a set of engines could hold when empty. Engines of one kind cost one entry."""

    __slots__ = ("_engines",)

    def __init__(self) -> None:
        self._engines: dict[tuple[int, int], int] = {}

    def __bool__(self) -> bool:
        return bool(self._engines)

    def add(self, engine: EngineState) -> None:
        kind = (engine.hbm_tokens, engine.buffer_tokens)
        self._engines[kind] = self._engines.get(kind, 0) + 1

    def remove(self, engine: EngineState) -> bool:
        """Whether it was the last of its kind."""
        kind = (engine.hbm_tokens, engine.buffer_tokens)
        self._engines[kind] -= 1
        if self._engines[kind]:
            return False
        del self._engines[kind]
        return True

    def holds(self, hbm_tokens: int, buffer_tokens: int) -> bool:
        for engine_hbm_tokens, engine_buffer_tokens in self._engines:
            if hbm_tokens <= engine_hbm_tokens and buffer_tokens <= engine_buffer_tokens:
                return True
        return False


class GroupState:
    """Engines that fetch together, in order of their ids.

    `queue`: the private queue (decode). `tokens`: those of its engines and of its queue.
    """

    __slots__ = ("capacity", "engines", "id", "nodes", "queue", "role", "tokens")

    def __init__(self, group: GroupId, role: Role) -> None:
        self.id = group
        self.role = role
        self.engines: list[EngineState] = []
        self.nodes: list[NodeState] = []
        self.capacity = Capacity()
        self.queue = ArrivalQueue()
        self.tokens = 0

    def add(self, engine: EngineState) -> None:
        self.engines.append(engine)
        self.engines.sort(key=lambda each: each.id)
        self.capacity.add(engine)
        self._refresh_nodes()

    def remove(self, engine: EngineState) -> None:
        self.engines.remove(engine)
        self.capacity.remove(engine)
        self.tokens -= engine.tokens
        self._refresh_nodes()

    def _refresh_nodes(self) -> None:
        self.nodes = list({each.node.id: each.node for each in self.engines}.values())

    def enqueue(self, request: RequestState) -> None:
        self.queue.push(request)
        self.tokens += request.tokens
        request.group = self

    def dequeue(self, request: RequestState) -> None:
        self.queue.remove(request)
        self.tokens -= request.tokens
        request.group = None
