"""The part of a worker that moves KV: one thread that owns all state, whether or not the engine runs.

The model's thread gives it orders and asks for results; the store, the channels and other servers speak to
the same thread. So an idle decode server still reads for a prefill server. It knows no tensors and no vLLM.

Who owns what. A staging's slots are the request's until `release`, or the prompt's if it is a prefill for a
peer. A *prompt* (all KV of one prefill, for the DE) is kept until the DE has it, or for `lease_s` after the
prefill ended; blocks read for a PE are kept as long, for our own part of that request. The model's thread
leases slots for what it saves, fills them, and gives the lease away with `saved`."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from dualpath.base.errors import InvariantViolation
from dualpath.base.ids import BlockKey, EngineId
from dualpath.kv import (
    BlockIdentity,
    Lease,
    block_chain,
    pack_tokens,
    root_key,
)
from dualpath.store import BlockWrite, WriteResult
from dualpath.traffic import TrafficManager
from dualpath.transfer import Endpoint, EndpointEvents, open_endpoint
from dualpath.vllm.agent_parts import AgentParts
from dualpath.vllm.agent_stats import AgentStats
from dualpath.vllm.held_prompts import HeldPrompts
from dualpath.vllm.orders import SaveOrder, Staged, StageOrder
from dualpath.vllm.peer_answers import PeerAnswers
from dualpath.vllm.peer_links import PeerLinks, engine_of
from dualpath.vllm.peer_messages import (
    PairName,
)
from dualpath.vllm.stager import Stager, StagerParts
from dualpath.vllm.staging import Staging

__all__ = ["KvAgent"]

log = logging.getLogger(__name__)

_INBOX = 65_536
_TICK_S = 0.05
_CLOSE_S = 10.0


@dataclass(slots=True)
class _Known:
    """What the agent knows of a request: its tokens so far, and the identities of their complete blocks."""

    tokens: list[int]
    chain: list[BlockIdentity]
    root: BlockKey
    staging: Staging | None = None
    prompt: PairName | None = None


class KvAgent:
    """Starts at once; `close` ends its thread and endpoint. The methods may be called from any thread."""

    def __init__(self, parts: AgentParts) -> None:
        self._parts = parts
        self.stats = AgentStats()
        self._inbox: queue.Queue[Callable[[], None] | None] = queue.Queue(_INBOX)
        self._known: dict[str, _Known] = {}
        self._prompts = HeldPrompts(parts.layout.block_tokens)
        self._lock = threading.Lock()
        self._reported = threading.Condition(self._lock)
        self._under_way = 0
        self._reports: list[Staged] = []
        self._staged: dict[str, Staging] = {}
        self._stored: list[BlockIdentity] = []
        self._failure: BaseException | None = None
        self._closed = False
        self._traffic = TrafficManager()
        self._endpoint = self._open_endpoint()
        self._links = (
            PeerLinks(self._endpoint, parts.transfer, self._traffic.notify, self._post)
            if self._endpoint
            else None
        )
        self._stager = Stager(
            StagerParts(
                layout=parts.layout,
                fingerprint=parts.fingerprint,
                pool=parts.pool,
                traffic=self._traffic,
                store=parts.store,
                catalog=parts.catalog,
                links=self._links,
                stats=self.stats,
                post=self._post,
            )
        )
        self._answers = PeerAnswers(parts, self._stager, self._prompts, self.stats)
        self._thread = threading.Thread(target=self._run, name="dualpath-agent", daemon=True)
        self._thread.start()

    # What the model's thread asks for.

    def stage(self, order: StageOrder) -> None:
        """Start a staging; `take_reports` says when it ended."""
        with self._lock:
            self._under_way += 1
        self._post(lambda: self._stage(order))

    def wait_for_reports(self, timeout_s: float) -> None:
        """Return when a staging has ended, when none is under way, or after `timeout_s`."""
        with self._reported:
            self._reported.wait_for(lambda: self._reports or not self._under_way, timeout_s)

    def take_reports(self) -> tuple[Staged, ...]:
        """The stagings that ended since the last call. Raises what the agent's thread died of."""
        self._check()
        with self._lock:
            reports, self._reports = tuple(self._reports), []
            return reports

    def take_stored(self) -> tuple[BlockIdentity, ...]:
        """The blocks that became durable since the last call."""
        with self._lock:
            stored, self._stored = tuple(self._stored), []
            return stored

    @contextmanager
    def staged_slots(self, request: str, serial: int) -> Iterator[dict[int, int] | None]:
        """The pool's slots of a staging, by block; they stay as they are while inside. None if it is
        gone."""
        with ExitStack() as holds:
            slots: dict[int, int] | None = None
            with self._lock:
                staging = self._staged.get(request)
                if staging is not None and staging.serial == serial:
                    try:
                        for slot in staging.held.slots.values():
                            holds.enter_context(slot.lease.hold(slot.index))
                        slots = {block: slot.number for block, slot in staging.held.slots.items()}
                    except InvariantViolation:
                        slots = None  # Released meanwhile.
            yield slots

    def lease_for_save(self, request: str, n_blocks: int) -> Lease | None:
        """Slots to copy blocks into; None when there is no room, and they are not saved."""
        geometry = self._parts.pool.geometry
        lease = (
            self._parts.pool.try_lease(request, n_blocks) if n_blocks <= geometry.n_slots else None
        )
        if lease is None:
            self._post(lambda: self._count_dropped(n_blocks))
        return lease

    def saved(self, order: SaveOrder, lease: Lease | None) -> None:
        """The order's blocks are in the lease's slots, which become ours. None: they were not copied."""
        self._post(lambda: self._saved(order, lease))

    def release(self, request: str) -> None:
        """What was staged for it is not needed."""
        self._post(lambda: self._release(request))

    def ended(self, request: str, *, aborted: bool) -> None:
        """The request is over. A prompt for a peer goes at once if it was aborted, else with its lease."""
        self._post(lambda: self._ended(request, aborted))

    def close(self) -> None:
        """End the thread, the endpoint and what is under way. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._inbox.put(None)
        self._thread.join(_CLOSE_S)
        if self._links is not None:
            self._links.close()
        self._traffic.close()
        if self._endpoint is not None:
            self._endpoint.close()

    # The thread.

    def _run(self) -> None:
        try:
            next_tick_s = time.monotonic() + _TICK_S
            while True:
                try:
                    work = self._inbox.get(timeout=max(0.0, next_tick_s - time.monotonic()))
                except queue.Empty:
                    now_s = time.monotonic()
                    self._tick(now_s)
                    next_tick_s = now_s + _TICK_S
                    continue
                if work is None:
                    return
                work()
        except BaseException as error:
            log.exception("the KV agent died")
            self._failure = error

    def _post(self, work: Callable[[], None]) -> None:
        self._check()
        if self._closed:
            return
        try:
            self._inbox.put_nowait(work)
        except queue.Full:
            raise InvariantViolation(
                f"the KV agent has {_INBOX} things to do, and does none"
            ) from None

    def _check(self) -> None:
        if self._failure is not None:
            raise InvariantViolation("the KV agent died") from self._failure

    def _tick(self, now_s: float) -> None:
        self._stager.tick(now_s)
        for name in self._prompts.expire(now_s):
            log.warning("the KV of %s was not fetched within %g s", name, self._parts.lease_s)
            self.stats.expired_prompts += 1
        self._stager.kept.expire(now_s)

    # Orders.

    def _stage(self, order: StageOrder) -> None:
        layout = self._parts.layout
        self._release(order.request)
        known = self._know(order.request, order.salt)
        known.tokens = list(order.tokens)
        self._extend(known)
        pair = order.pair.of_rank(self._parts.rank) if order.pair is not None else None
        name = PairName(pair.request, pair.attempt) if pair is not None else None
        first = order.first_token // layout.block_tokens
        known.staging = Staging(
            owner=order.request,
            serial=order.serial,
            name=name,
            pair=pair,
            chain=list(known.chain),
            first_block=first,
            wanted_stop=first,
            until_s=time.monotonic() + self._parts.stage_deadline_s,
            block_tokens=layout.block_tokens,
            done=lambda staging: self._staging_done(staging, len(order.tokens)),
        )
        if name is not None and pair is not None and pair.role == "prefill":
            known.prompt = name
            self._prompts.begin(name)
        self._stager.begin(known.staging, order.salt, pack_tokens(order.tokens))

    def _staging_done(self, staging: Staging, total_tokens: int) -> None:
        tokens = min(staging.staged_tokens, total_tokens - 1)
        known = self._known.get(staging.owner)
        if known is None or known.staging is not staging:
            staging.held.release()
            with self._reported:
                self._under_way -= 1
                self._reported.notify_all()
            return
        report = Staged(
            staging.owner,
            staging.serial,
            tokens,
            own_tokens=staging.own_blocks * staging.block_tokens,
            stored_tokens=staging.whole_tokens,
        )
        with self._reported:
            self._staged[staging.owner] = staging
            self._reports.append(report)
            self._under_way -= 1
            self._reported.notify_all()

    def _release(self, request: str) -> None:
        known = self._known.get(request)
        if known is None or known.staging is None:
            return
        staging, known.staging = known.staging, None
        self._stager.abandon(request)
        with self._lock:
            self._staged.pop(request, None)
            if known.prompt is not None and known.prompt in self._prompts:
                self._prompts.absorb(known.prompt, staging.held, staging.whole_tokens)
            else:
                staging.held.release()

    def _ended(self, request: str, aborted: bool) -> None:
        self._release(request)
        known = self._known.pop(request, None)
        if known is None or known.prompt is None:
            return
        if aborted:
            self._prompts.drop(known.prompt)
        else:
            self._prompts.keep_until(known.prompt, time.monotonic() + self._parts.lease_s)

    def _saved(self, order: SaveOrder, lease: Lease | None) -> None:
        known = self._know(order.request, order.salt)
        del known.tokens[order.known_tokens :]
        known.tokens += order.tokens
        self._extend(known)
        if lease is None:
            return
        blocks = range(order.first_block, order.first_block + len(lease.slots))
        self.stats.saved_blocks += len(blocks)
        complete = order.stop_token // self._parts.layout.block_tokens
        if order.persist:
            self._write(known, range(blocks.start, min(blocks.stop, complete)), lease)
        if order.pair is None:
            lease.release()
            return
        name = PairName(order.pair.request, order.pair.attempt)
        known.prompt = name
        self._prompts.add(name, blocks, lease, order.stop_token)

    def _write(self, known: _Known, blocks: range, lease: Lease) -> None:
        store = self._parts.store
        if store is None or not len(blocks):
            return
        identities = {known.chain[block].key: known.chain[block] for block in blocks}
        writes = [
            BlockWrite(known.chain[block], lease.view(index), lease.hold(index))
            for index, block in enumerate(blocks)
        ]

        def done(result: WriteResult) -> None:
            self._post(lambda: self._written(identities[result.key], result))

        self._traffic.write(
            store, writes, owner="", deadline_s=self._parts.write_deadline_s, done=done
        )

    def _written(self, identity: BlockIdentity, result: WriteResult) -> None:
        catalog = self._parts.catalog
        if not result.durable:
            self.stats.failed_writes += 1
            log.warning("a block was not stored: %s", result.detail)
            if catalog is not None:
                catalog.invalidate(identity.key)
            return
        self.stats.written_blocks += 1
        if catalog is not None:
            catalog.published(identity.key, identity.parent, result.stored_bytes)
        with self._lock:
            self._stored.append(identity)
            del self._stored[:-_INBOX]

    def _count_dropped(self, n_blocks: int) -> None:
        self.stats.dropped_saves += n_blocks

    def _know(self, request: str, salt: str) -> _Known:
        known = self._known.get(request)
        if known is None:
            known = _Known([], [], root_key(self._parts.fingerprint, salt))
            self._known[request] = known
        return known

    def _extend(self, known: _Known) -> None:
        """Bring the chain up to the tokens, which only grow."""
        size = self._parts.layout.block_tokens
        parent = known.chain[-1].key if known.chain else known.root
        known.chain += block_chain(parent, known.tokens[len(known.chain) * size :], size)

    # Peers.

    def _open_endpoint(self) -> Endpoint | None:
        peer = self._parts.peer
        if peer is None:
            return None
        events = EndpointEvents(
            notified=lambda engine, message: self._post(
                lambda: self._answers.heard(engine, message)
            ),
            peer_lost=lambda engine, reason: self._post(lambda: self._peer_lost(engine, reason)),
        )
        return open_endpoint(
            self._parts.transfer,
            engine_of(peer),
            self._parts.pool,
            self._parts.secret,
            events,
            host=self._parts.host,
            port=peer.port,
            advertise=peer.host,
        )

    def _peer_lost(self, engine: EngineId, reason: str) -> None:
        log.warning("peer %s is lost: %s", engine, reason)
        if self._links is not None:
            self._links.lost(engine)
        self._stager.peer_lost(engine)
