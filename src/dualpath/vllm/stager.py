"""Executes stagings: leases, reads of the store, and blocks that the peer reads or holds.

All methods run on the agent's thread; what store, channels and dialling threads have to say reaches it by
`post`. Whatever fails makes the staged prefix shorter, never wrong: a block counts when its bytes proved
their identity (store) or arrived under the lease they were offered under (peer). Slots are leased in the
order of the stagings."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial

from dualpath.base.errors import TransferError
from dualpath.base.ids import EngineId, RequestId
from dualpath.kv import BufferPool, Fingerprint, KVLayout, Lease
from dualpath.store import BlockRead, BlockResult, Catalog, ReadStatus, Store
from dualpath.traffic import TrafficManager
from dualpath.traffic.pieces import pieces_array
from dualpath.transfer import Channel, TransferName
from dualpath.vllm.agent_stats import AgentStats
from dualpath.vllm.held_prompts import HeldPrompts
from dualpath.vllm.params import KvPeer
from dualpath.vllm.peer_links import PeerLinks, engine_of
from dualpath.vllm.peer_messages import (
    FetchPrompt,
    OfferedBlock,
    PairName,
    PeerMessage,
    PromptOffer,
    PromptReceived,
    ReadForPeer,
    ReadForPeerDone,
    encode_message,
)
from dualpath.vllm.staging import Staging, next_probe, split_reads

__all__ = ["Stager", "StagerParts"]

log = logging.getLogger(__name__)

_MAX_ACTIVE = 4096
"""Stagings under way. vLLM schedules fewer requests; a peer that asks for more gets nothing."""


@dataclass(frozen=True, slots=True)
class StagerParts:
    """What a stager works with; all of it stays its owner's. `links` is None without peers."""

    layout: KVLayout
    fingerprint: Fingerprint
    pool: BufferPool
    traffic: TrafficManager
    store: Store | None
    catalog: Catalog | None
    links: PeerLinks | None
    stats: AgentStats
    post: Callable[[Callable[[], None]], None]


@dataclass(slots=True, eq=False)
class _Reserving:
    staging: Staging
    blocks: Sequence[int]
    then: Callable[[], None]


@dataclass(slots=True, eq=False)
class _Asked:
    """A question to the peer that is not answered yet."""

    staging: Staging
    engine: EngineId
    blocks: range


class Stager:
    """Of one agent."""

    def __init__(self, parts: StagerParts) -> None:
        self._parts = parts
        self._active: list[Staging] = []
        self._reserving: deque[_Reserving] = deque()
        self._asked: dict[tuple[PairName, int], _Asked] = {}
        self.kept = HeldPrompts(parts.layout.block_tokens)
        """What we read for a peer, for our own staging of that request."""

    # Beginnings.

    def begin(self, staging: Staging, salt: str, packed_tokens: bytes) -> None:
        """Start; `packed_tokens` and `salt` are what a peer needs to read for us."""
        self._active.append(staging)
        if len(self._active) > _MAX_ACTIVE:
            self._end(staging)
            return
        pair = staging.pair
        if pair is not None and pair.role == "decode" and staging.name is not None:
            kept = self.kept.take(staging.name)
            if kept is not None:
                staging.held.absorb(kept)
            staging.peer_asked = True
            self._fetch_prompt(staging)
            return
        self._read_stored(staging, salt, packed_tokens)

    def tick(self, now_s: float) -> None:
        """End what is late, and give slots to those who wait."""
        for staging in [each for each in self._active if each.until_s <= now_s]:
            log.warning("%s: not staged in time, going on with what is there", staging.owner)
            self._end(staging)
        self._reserve_waiting()

    def abandon(self, owner: str) -> None:
        """The request needs its KV no more: end its stagings."""
        for staging in [each for each in self._active if each.owner == owner]:
            self._end(staging)

    # Reads of the store, here and at the peer.

    def _read_stored(self, staging: Staging, salt: str, packed_tokens: bytes) -> None:
        parts = self._parts
        if parts.store is None or parts.catalog is None:
            self._end(staging)
            return
        known = parts.catalog.lookup(staging.chain, _pin(staging))
        hint = staging.pair.hit_tokens // parts.layout.block_tokens if staging.pair else 0
        room = staging.first_block + parts.pool.geometry.n_slots
        staging.wanted_stop = max(
            staging.first_block,
            min(max(known, hint, staging.wanted_stop), len(staging.chain), room),
        )
        staging.known_stop = known
        staging.tried_stop = staging.wanted_stop
        missing = range(staging.filled_stop, staging.wanted_stop)

        def start() -> None:
            split = split_reads(
                missing.start, missing.stop, staging.pair, parts.layout.block_tokens
            )
            staging.parts_left += 1  # Ours, until all are started.
            if len(split.peers) and parts.links is not None:
                self._ask_to_read(staging, split.peers, salt, packed_tokens)
                self._read(staging, split.own)
            else:
                self._read(staging, missing)
            self._part_done(staging)

        self._reserve(staging, staging.held.lacking(missing), start)

    def _read(self, staging: Staging, blocks: range) -> None:
        """Read those of these that are not filled from the store; their slots are reserved."""
        store = self._parts.store
        lacking = staging.held.lacking(blocks)
        if store is None or not lacking or staging.ended:
            return
        staging.parts_left += len(lacking)
        numbers = {staging.chain[block].key: block for block in lacking}
        reads = []
        for block in lacking:
            slot = staging.held.slots[block]
            view = slot.lease.view(slot.index)
            reads.append(BlockRead(staging.chain[block], view, slot.lease.hold(slot.index)))

        def done(result: BlockResult) -> None:
            block = numbers[result.key]
            self._parts.post(lambda: self._read_done(staging, block, result))

        self._parts.traffic.read(
            store,
            reads,
            owner=_pin(staging),
            deadline_s=max(0.001, staging.until_s - time.monotonic()),
            done=done,
        )

    def _read_done(self, staging: Staging, block: int, result: BlockResult) -> None:
        parts = self._parts
        identity = staging.chain[block]
        if result.status is ReadStatus.OK:
            parts.stats.read_blocks += 1
            if not staging.ended:
                staging.held.filled.add(block)
                staging.own_blocks += 1
            if parts.catalog is not None and block >= staging.known_stop:
                parts.catalog.published(
                    identity.key, identity.parent, parts.layout.full_block_bytes
                )
        elif block < staging.known_stop or result.status is not ReadStatus.MISS:
            parts.stats.failed_reads += 1
            log.warning(
                "%s: block %d not read (%s): %s",
                staging.owner,
                block,
                result.status,
                result.detail,
            )
            if parts.catalog is not None and result.status in (
                ReadStatus.MISS,
                ReadStatus.CORRUPT,
            ):
                parts.catalog.invalidate(result.key)
        self._part_done(staging)

    def _probe(self, staging: Staging) -> bool:
        """Try blocks that nobody told us of; False when there is nothing to try, or no room."""
        blocks = next_probe(staging.filled_stop, len(staging.chain), staging.last_probe)
        lacking = staging.held.lacking(blocks)
        lease = self._lease(staging, lacking)
        if self._parts.store is None or not len(blocks) or lease is None:
            return False
        staging.last_probe = len(blocks)
        staging.tried_stop = blocks.stop
        staging.held.reserve(lacking, lease)
        self._read(staging, blocks)
        return True

    def _ask_to_read(
        self, staging: Staging, blocks: range, salt: str, packed_tokens: bytes
    ) -> None:
        assert staging.name is not None
        message = ReadForPeer(
            name=staging.name,
            serial=staging.serial,
            fingerprint=self._parts.fingerprint,
            salt=salt,
            tokens=packed_tokens[: 4 * blocks.stop * self._parts.layout.block_tokens],
            first_block=blocks.start,
            stop_block=blocks.stop,
        )
        self._ask(staging, message, blocks, lambda: self._read(staging, blocks))

    def read_for_peer_done(self, engine: EngineId, answer: ReadForPeerDone) -> None:
        """The peer has read; pull it."""
        asked = self._asked.pop((answer.name, answer.serial), None)
        if asked is None or asked.engine != engine:
            return
        self._pull(asked, answer.blocks)
        self._part_done(asked.staging)

    # The prompt's KV, held by the PE.

    def _fetch_prompt(self, staging: Staging) -> None:
        assert staging.name is not None
        message = FetchPrompt(
            staging.name, staging.serial, self._parts.fingerprint, staging.filled_stop
        )
        self._ask(staging, message, range(0), lambda: None)

    def prompt_offered(self, engine: EngineId, offer: PromptOffer) -> None:
        """The PE says what it holds; pull it, from where our own blocks end."""
        asked = self._asked.pop((offer.name, offer.serial), None)
        if asked is None or asked.engine != engine:
            return
        staging = asked.staging
        staging.peer_tokens = offer.tokens
        lacking = staging.held.lacking(each.block for each in offer.blocks)
        if not lacking:
            self._part_done(staging)
            return
        missing = [each for each in offer.blocks if each.block in lacking]

        def start() -> None:
            self._pull(asked, missing)
            self._part_done(staging)

        self._reserve(staging, lacking, start)

    # Talking to the peer.

    def _ask(
        self,
        staging: Staging,
        message: ReadForPeer | FetchPrompt,
        blocks: range,
        otherwise: Callable[[], None],
    ) -> None:
        """Send a question: one part, that ends with the answer, or with `otherwise` when there is no
        peer."""
        links, peer = self._parts.links, staging.peer
        staging.parts_left += 1
        if links is None or peer is None:
            otherwise()
            self._part_done(staging)
            return
        key = (message.name, message.serial)
        self._asked[key] = _Asked(staging, engine_of(peer), blocks)

        def failed(error: TransferError) -> None:
            if self._asked.pop(key, None) is None:
                return  # Its loss was reported first.
            log.warning("%s: %s does not answer, going on without: %s", staging.owner, peer, error)
            otherwise()
            self._part_done(staging)

        links.send(peer, encode_message(message), failed)

    def peer_lost(self, engine: EngineId) -> None:
        """What it was asked for is read here, or computed."""
        for key, asked in list(self._asked.items()):
            if asked.engine == engine:
                del self._asked[key]
                self._read(asked.staging, asked.blocks)
                self._part_done(asked.staging)

    def _pull(self, asked: _Asked, offered: Sequence[OfferedBlock]) -> None:
        """Copy these blocks of the peer into the slots that are reserved for them."""
        staging, parts = asked.staging, self._parts
        if staging.ended or parts.links is None or staging.peer is None:
            return
        by_stamp: dict[int, list[OfferedBlock]] = {}
        for each in offered:
            if each.block in staging.held.slots:
                by_stamp.setdefault(each.stamp, []).append(each)
        for stamp, blocks in by_stamp.items():
            staging.parts_left += 1
            parts.links.reach(
                staging.peer,
                partial(self._pull_from, staging=staging, stamp=stamp, blocks=blocks),
            )

    def _pull_from(
        self,
        channel: Channel | TransferError,
        staging: Staging,
        stamp: int,
        blocks: Sequence[OfferedBlock],
    ) -> None:
        parts = self._parts
        if isinstance(channel, TransferError) or staging.ended or staging.name is None:
            self._part_done(staging)
            return
        n_bytes = parts.layout.full_block_bytes
        pieces = []
        holds = []
        for each in blocks:
            slot = staging.held.slots[each.block]
            hold = slot.lease.hold(slot.index)
            hold.__enter__()
            holds.append(hold)
            place = parts.pool.geometry.slot_offset(slot.number)
            pieces.append((each.slot, 0, n_bytes, place))
        future = parts.traffic.pull(
            channel,
            TransferName(RequestId(staging.name.request), staging.name.attempt, 0),
            stamp,
            pieces_array(pieces),
            parts.pool.memory,
            owner=_pin(staging),
            deadline_s=max(0.001, staging.until_s - time.monotonic()),
        )

        def done(pulled: Future[int]) -> None:
            for hold in holds:
                hold.__exit__(None, None, None)
            error = pulled.exception()
            parts.post(lambda: self._pulled(staging, blocks, error))

        future.add_done_callback(done)

    def _pulled(
        self, staging: Staging, blocks: Sequence[OfferedBlock], error: BaseException | None
    ) -> None:
        if error is None:
            self._parts.stats.pulled_blocks += len(blocks)
            if not staging.ended:
                staging.held.filled.update(each.block for each in blocks)
        else:
            self._parts.stats.failed_pulls += 1
            log.warning("%s: %d blocks not pulled: %s", staging.owner, len(blocks), error)
        self._part_done(staging)

    def tell(self, peer: KvPeer, message: PeerMessage) -> None:
        """Send a message, if the peer can be reached."""
        if self._parts.links is not None:
            self._parts.links.send(
                peer,
                encode_message(message),
                lambda error: log.warning("%s is not told: %s", peer, error),
            )

    # Slots.

    def _reserve(self, staging: Staging, blocks: Sequence[int], then: Callable[[], None]) -> None:
        """Lease slots for these blocks, in turn, then go on with `then`: one part."""
        staging.parts_left += 1
        self._reserving.append(_Reserving(staging, blocks, then))
        self._reserve_waiting()

    def _reserve_waiting(self) -> None:
        while self._reserving:
            head = self._reserving[0]
            if not head.staging.ended:
                lease = self._lease(head.staging, head.blocks)
                if lease is None:
                    return
                head.staging.held.reserve(head.blocks, lease)
            self._reserving.popleft()
            if not head.staging.ended:
                head.then()
            self._part_done(head.staging)

    def _lease(self, staging: Staging, blocks: Sequence[int]) -> Lease | None:
        if len(blocks) > self._parts.pool.geometry.n_slots:
            return None
        return self._parts.pool.try_lease(staging.owner, len(blocks))

    # Ends.

    def _part_done(self, staging: Staging) -> None:
        staging.parts_left -= 1
        if staging.ended or staging.parts_left > 0:
            return
        if staging.lacks_peers_part:
            staging.peer_asked = False
            self._read_stored(staging, "", b"")
            return
        if staging.wants_more and self._probe(staging):
            return
        self._end(staging)

    def _end(self, staging: Staging) -> None:
        if staging.ended:
            return
        staging.ended = True
        self._active.remove(staging)
        for key in [key for key, asked in self._asked.items() if asked.staging is staging]:
            del self._asked[key]  # What is answered now comes too late.
        self._parts.traffic.withdraw(_pin(staging))
        if self._parts.catalog is not None:
            self._parts.catalog.release(_pin(staging))
        if staging.has_prompt and staging.name is not None and staging.peer is not None:
            self.tell(staging.peer, PromptReceived(staging.name))
        staging.done(staging)


def _pin(staging: Staging) -> RequestId:
    return RequestId(f"{staging.owner}#{staging.serial}")
