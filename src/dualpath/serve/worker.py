"""What the processes of both roles share: the actor thread, reservation, reads, and failure.

An engine process has three kinds of threads. The *actor* owns all request state and the control
socket, and never blocks. The *compute* thread (the main thread) runs the model. I/O threads of
store and transfer post to the actor's inbox. Nothing but the actor changes an attempt's state,
but for what a role's module says otherwise, so attempts are not locked.
"""

from __future__ import annotations

import logging
import threading
import time
from abc import ABC, abstractmethod
from collections import OrderedDict, deque
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from dualpath.base.errors import DualPathError, InvariantViolation, PeerLost, TransferError
from dualpath.base.ids import BlockKey, EngineId, Side
from dualpath.kv.chain import BlockIdentity, block_chain
from dualpath.kv.layout import KVLayout
from dualpath.kv.pool import BufferPool, Lease
from dualpath.serve.control import EngineControl, Inbox
from dualpath.serve.engine_config import EngineConfig
from dualpath.serve.messages import (
    Assignment,
    AttemptFailure,
    Decode,
    DecodeReserved,
    EngineStatus,
    FailureCause,
    FromEngine,
    Hello,
    Name,
    PeerMessage,
    Prefill,
    PrefillReserved,
    ReadProgress,
    ReleaseAttempt,
    Shutdown,
    ToEngine,
    unpack_tokens,
)
from dualpath.serve.peers import PeerLinks
from dualpath.store.contract import BlockRead, BlockResult, ReadStatus, Store
from dualpath.traffic import PeerTraffic, TrafficKey, TrafficManager
from dualpath.transfer.contract import Endpoint, EndpointEvents

__all__ = ["Attempt", "EngineWorker", "Load", "WorkerParts"]

log = logging.getLogger(__name__)

_HEARTBEAT_S = 0.25
_JOIN_S = 30.0
_MOST_EARLY = 4096

_CAUSES = {
    ReadStatus.MISS: FailureCause.BLOCK_MISS,
    ReadStatus.CORRUPT: FailureCause.BLOCK_CORRUPT,
    ReadStatus.TIMEOUT: FailureCause.STORE_TIMEOUT,
    ReadStatus.ERROR: FailureCause.STORE_ERROR,
}


@dataclass(slots=True, eq=False, kw_only=True)
class Attempt:
    """One attempt as one engine sees it.

    Owns `lease` until it is released. `holds` keeps the slots for a thread that works on them
    though the attempt may be released meanwhile.
    """

    work: Assignment
    peer: EngineId
    peer_address: str
    tokens: list[int]
    chain: list[BlockIdentity]
    received_s: float
    lease: Lease | None = None
    holds: ExitStack = field(default_factory=ExitStack)
    released: bool = False
    failed: bool = False
    reads_left: int = 0
    unread_tokens: int = 0
    bad_blocks: dict[int, BlockResult] = field(default_factory=dict)
    peer_stamp: int = 0
    peer_slots: tuple[int, ...] | None = None
    reserved_s: float = 0.0

    @property
    def name(self) -> Name:
        return self.work.name

    @property
    def owner(self) -> str:
        """Names the attempt to the traffic manager and in leases."""
        return str(self.work.name)

    @property
    def hit_tokens(self) -> int:
        return self.work.hit_tokens

    @property
    def pe_tokens(self) -> int:
        return self.work.pe_tokens

    def prefill_index(self, block: int, block_tokens: int) -> int:
        """Index in the PE's lease of a block that the PE has: the lease leaves out what the DE reads."""
        if block < self.pe_tokens // block_tokens:
            return block
        return block - (self.hit_tokens - self.pe_tokens) // block_tokens

    @property
    def leased(self) -> Lease:
        """The lease of an attempt that is past its reservation."""
        if self.lease is None:
            raise AssertionError(f"{self.name} has no slots yet")
        return self.lease


AttemptT = TypeVar("AttemptT", bound=Attempt)


@dataclass(frozen=True, slots=True)
class Load:
    """A role's part of the engine's status; the fields are those of `EngineStatus`."""

    requests: int
    tokens: int
    free_hbm_tokens: int = 0
    hbm_tokens: int = 0
    running: int = 0
    busy_s: float = 0.0
    flops: float = 0.0
    bubble_s: float = 0.0
    loads: int = 0
    late_loads: int = 0
    written_bytes: int = 0
    dropped_blocks: int = 0


@dataclass(frozen=True, slots=True)
class WorkerParts:
    """The collaborators of a worker, made by `engine_process`, which also closes them."""

    config: EngineConfig
    control: EngineControl
    pool: BufferPool
    store: Store | None
    open_endpoint: Callable[[EndpointEvents], Endpoint]


class EngineWorker(ABC, Generic[AttemptT]):
    """The actor of an engine process. Subclasses say what an attempt needs and does.

    Reservation is strict FIFO in the order of assignment. As the scheduler sends all assignments
    in one order, an attempt only ever waits for earlier ones, on both engines: no deadlock (case 9).
    """

    side: Side
    make_attempt: type[AttemptT]
    """The role's attempt, which adds only fields with defaults."""

    def __init__(self, parts: WorkerParts) -> None:
        self.config = parts.config
        self.layout: KVLayout = parts.config.layout
        self.pool = parts.pool
        self.store = parts.store
        self.attempts: dict[Name, AttemptT] = {}
        self.stopping = threading.Event()
        self._inbox: Inbox[Callable[[], None]] = Inbox()
        self._control = parts.control
        self._control.watch(self._inbox.fd)
        self._unreserved: deque[AttemptT] = deque()
        self._early: OrderedDict[Name, PeerMessage] = OrderedDict()
        self._seen = 0
        self._read_bytes = 0
        self.pulled_bytes = 0
        self.traffic = TrafficManager()
        self._status_due = True
        self._last_status_s = 0.0
        self._last_traffic_s = 0.0
        self._shutdown_at_s: float | None = None
        self._failure: BaseException | None = None
        self.links = PeerLinks(
            parts.open_endpoint,
            notify=self.traffic.notify,
            post=self.post,
            on_message=self._peer_message,
            on_lost=self._peer_lost,
        )

    # What a role adds. All run on the actor, except `compute`.

    @abstractmethod
    def tokens_held(self, attempt: AttemptT) -> int:
        """Tokens whose KV this side holds in its slots; they are all leased before anything starts."""

    @abstractmethod
    def reserved(self, attempt: AttemptT) -> None:
        """The slots are there: tell the peer."""

    @abstractmethod
    def read_complete(self, attempt: AttemptT) -> None:
        """This side's reads, if there were any, are complete and right."""

    @abstractmethod
    def start(self, attempt: AttemptT) -> None:
        """All reads of both sides are complete (PE only)."""

    @abstractmethod
    def handle_peer(self, attempt: AttemptT, message: PeerMessage) -> None:
        """A message of the attempt's peer."""

    @abstractmethod
    def lost_peer_of(self, attempt: AttemptT, reason: str) -> None:
        """The connection to the attempt's peer broke; it fails if it still needs the peer."""

    @abstractmethod
    def dropped(self, attempt: AttemptT) -> None:
        """The attempt is marked released: stop what runs for it. Its lease is released after this."""

    @abstractmethod
    def measure(self) -> Load:
        """The load now."""

    @abstractmethod
    def quiet(self) -> bool:
        """Whether nothing is under way that a shutdown should wait for (writes)."""

    @abstractmethod
    def compute(self) -> None:
        """Run the model until `stopping` is set; on the main thread."""

    @abstractmethod
    def wake_compute(self) -> None:
        """Let `compute` look at `stopping`; from any thread."""

    # The life of the process.

    def run(self, hello: Hello) -> None:
        """Serve until told to shut down; raises what made any thread fail."""
        actor = threading.Thread(target=self._actor, args=(hello,), name="actor")
        actor.start()
        try:
            self.compute()
        except BaseException as error:
            self._fail_process(error)
        finally:
            self.stopping.set()
            self.post(lambda: None)
            actor.join(timeout=_JOIN_S)
            self.traffic.close()
            self.links.close()
        if self._failure is not None:
            raise self._failure

    def post(self, job: Callable[[], None]) -> None:
        """Run `job` on the actor, after what was posted before; from any thread."""
        self._inbox.put(job)

    def _fail_process(self, error: BaseException) -> None:
        self._failure = self._failure or error

    def _actor(self, hello: Hello) -> None:
        try:
            self.send(hello)
            self._report()
            while not self.stopping.is_set():
                for message in self._control.wait(_HEARTBEAT_S):
                    self._handle(message)
                for job in self._inbox.take():
                    job()
                self._reserve()
                self._report()
                if self._shutdown_at_s is not None and (
                    self.quiet() or time.monotonic() > self._shutdown_at_s
                ):
                    return
        except BaseException as error:
            self._fail_process(error)
        finally:
            self.stopping.set()
            self.wake_compute()

    def _report(self) -> None:
        now = time.monotonic()
        if not self._status_due and now - self._last_status_s < _HEARTBEAT_S:
            return
        if not self.attempts:
            self.pool.check()
        self._status_due = False
        self._last_status_s = now
        load = self.measure()
        self.send(
            EngineStatus(
                seen=self._seen,
                requests=load.requests,
                tokens=load.tokens,
                free_hbm_tokens=load.free_hbm_tokens,
                hbm_tokens=load.hbm_tokens,
                read_queue_tokens=sum(a.unread_tokens for a in self.attempts.values()),
                pool_slots=self.pool.geometry.n_slots,
                pool_free_slots=self.pool.n_free,
                running=load.running,
                busy_s=load.busy_s,
                flops=load.flops,
                bubble_s=load.bubble_s,
                loads=load.loads,
                late_loads=load.late_loads,
                fragmentation=self._fragmentation(),
                read_bytes=self._read_bytes,
                pulled_bytes=self.pulled_bytes,
                written_bytes=load.written_bytes,
                dropped_blocks=load.dropped_blocks,
                traffic=self._traffic(now),
            )
        )

    def _traffic(self, now: float) -> tuple[tuple[TrafficKey, PeerTraffic], ...] | None:
        """No oftener than heartbeats: only monitoring reads it, and it is the largest part of a report."""
        if now - self._last_traffic_s < _HEARTBEAT_S:
            return None
        self._last_traffic_s = now
        return tuple(self.traffic.counts.items())

    def _fragmentation(self) -> float:
        """Share of the places in leased slots that stand for no token: the ends of last blocks."""
        held = leased = 0
        for attempt in self.attempts.values():
            if attempt.lease is not None:
                held += self.tokens_held(attempt)
                leased += len(attempt.lease.slots) * self.layout.block_tokens
        return 1 - held / leased if leased else 0.0

    # Messages of the frontend.

    def send(self, message: FromEngine) -> None:
        """To the frontend; on the actor's thread only."""
        self._control.send(message)

    def changed(self) -> None:
        """Load or memory changed: report at the end of this turn, not at the next heartbeat."""
        self._status_due = True

    def _handle(self, message: ToEngine) -> None:
        match message:
            case Prefill() | Decode():
                self._seen += 1
                self._accept(message)
            case ReleaseAttempt(name=name):
                self.drop(name)
            case Shutdown(grace_s=grace_s):
                self._shutdown_at_s = time.monotonic() + grace_s
                for name in list(self.attempts):
                    self.drop(name)
            case _:
                attempt = self.attempts.get(message.name)
                if attempt is not None and not attempt.failed:
                    self.start(attempt)
        self.changed()

    def _accept(self, message: Prefill | Decode) -> None:
        received_s = time.monotonic()
        work = message.assignment
        tokens = unpack_tokens(work.tokens)
        attempt = self.make_attempt(
            work=work,
            peer=message.peer,
            peer_address=message.peer_address,
            tokens=tokens,
            chain=block_chain(work.root, tokens, self.layout.block_tokens),
            received_s=received_s,
        )
        self.attempts[work.name] = attempt
        self._unreserved.append(attempt)
        early = self._early.pop(work.name, None)
        if early is not None:
            self._peer_message(attempt.peer, early)

    def _reserve(self) -> None:
        while self._unreserved:
            attempt = self._unreserved[0]
            if not attempt.released:
                attempt.lease = self.pool.try_lease(
                    attempt.owner, self.layout.blocks_for(self.tokens_held(attempt))
                )
                if attempt.lease is None:
                    return
                attempt.reserved_s = time.monotonic()
                self.reserved(attempt)
                self._read(attempt)
            self._unreserved.popleft()
            self.changed()

    def drop(self, name: Name) -> None:
        """Release the attempt and all it owns here. Idempotent."""
        attempt = self.attempts.pop(name, None)
        if attempt is None:
            return
        attempt.released = True
        self.traffic.withdraw(attempt.owner)
        self.dropped(attempt)
        if attempt.lease is not None:
            attempt.lease.release()
        self.changed()

    # Reads from storage.

    def _blocks_to_read(self, attempt: AttemptT) -> range:
        """Hit blocks of this side, by their index in the chain, which is also that in the lease."""
        if self.config.oracle:
            return range(0)
        pe_blocks = attempt.pe_tokens // self.layout.block_tokens
        hit_blocks = attempt.hit_tokens // self.layout.block_tokens
        return range(pe_blocks) if self.side is Side.PE else range(pe_blocks, hit_blocks)

    def _read(self, attempt: AttemptT) -> None:
        blocks = self._blocks_to_read(attempt)
        attempt.reads_left = len(blocks)
        attempt.unread_tokens = len(blocks) * self.layout.block_tokens
        if not blocks:
            self.read_complete(attempt)
            return
        index_of = {attempt.chain[block].key: block for block in blocks}

        def done(result: BlockResult) -> None:
            self.post(lambda: self._read_done(attempt, index_of[result.key], result))

        if self.store is None:
            for key in index_of:
                done(BlockResult(key, ReadStatus.MISS, "this engine has no store"))
            return
        lease = attempt.leased
        reads = [
            BlockRead(attempt.chain[block], lease.view(block), lease.hold(block))
            for block in blocks
        ]
        self.traffic.read(
            self.store,
            reads,
            owner=attempt.owner,
            deadline_s=self.config.store_deadline_s,
            done=done,
        )

    def _read_done(self, attempt: AttemptT, block: int, result: BlockResult) -> None:
        attempt.reads_left -= 1
        attempt.unread_tokens -= self.layout.block_tokens
        self.changed()
        if attempt.released:
            return
        if result.status is ReadStatus.OK:
            self._read_bytes += self.layout.full_block_bytes
            elapsed_s = time.monotonic() - attempt.reserved_s
            self.send(ReadProgress(attempt.name, self.side, self.layout.block_tokens, elapsed_s))
        else:
            attempt.bad_blocks[block] = result
        if attempt.reads_left == 0:
            if attempt.bad_blocks:
                self._reads_failed(attempt)
            else:
                self.read_complete(attempt)

    def _reads_failed(self, attempt: AttemptT) -> None:
        first = min(attempt.bad_blocks)
        result = attempt.bad_blocks[first]
        self.fail(
            attempt,
            _CAUSES[result.status],
            f"block {first} of {len(attempt.chain)} ({result.key.hex()[:16]}): {result.detail}",
            bad_keys=tuple(
                bad.key
                for bad in attempt.bad_blocks.values()
                if bad.status in (ReadStatus.MISS, ReadStatus.CORRUPT)
            ),
            loadable_tokens=first * self.layout.block_tokens,
        )

    def fail(
        self,
        attempt: AttemptT,
        cause: FailureCause,
        detail: str,
        *,
        bad_keys: tuple[BlockKey, ...] = (),
        loadable_tokens: int | None = None,
    ) -> None:
        """Report that the attempt cannot go on; it is kept until the frontend releases it."""
        if attempt.released or attempt.failed:
            return
        attempt.failed = True
        log.warning("%s failed on %s: %s: %s", attempt.name, self.config.engine, cause, detail)
        self.send(
            AttemptFailure(
                name=attempt.name,
                cause=cause,
                detail=detail,
                bad_keys=bad_keys,
                loadable_tokens=loadable_tokens,
            )
        )

    # Peers.

    def _peer_message(self, peer: EngineId, message: PeerMessage) -> None:
        attempt = self.attempts.get(message.name)
        if attempt is not None:
            if attempt.peer == peer and not attempt.failed:
                self.handle_peer(attempt, message)
        elif isinstance(message, DecodeReserved | PrefillReserved):
            # The peer may have its assignment, and even its slots, before ours came. Those of
            # attempts that are over come here too, so the oldest go.
            self._early[message.name] = message
            while len(self._early) > _MOST_EARLY:
                self._early.popitem(last=False)

    def _peer_lost(self, peer: EngineId, reason: str) -> None:
        self.traffic.forget(peer)
        for attempt in list(self.attempts.values()):
            if attempt.peer == peer:
                self.lost_peer_of(attempt, reason)

    def tell_peer(self, attempt: AttemptT, message: PeerMessage) -> None:
        self.links.send(attempt.peer, attempt.peer_address, message)

    def work_failed(self, attempt: AttemptT, error: BaseException) -> None:
        """A transfer or computation for this attempt failed; our own bugs are not retried."""
        match error:
            case PeerLost():
                self.fail(attempt, FailureCause.PEER_LOST, str(error))
            case TransferError():
                self.fail(attempt, FailureCause.TRANSFER, str(error))
            case InvariantViolation():
                raise error
            case DualPathError():
                self.fail(attempt, FailureCause.ENGINE_ERROR, str(error))
            case _:
                raise error
