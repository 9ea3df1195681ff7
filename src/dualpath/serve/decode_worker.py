"""The decode engine's process: reads its side, collects the rest, decodes, persists.

Ownership of the DE's slots: the lease holds the whole prompt from reservation until the prompt is
in device memory, or the attempt is released. Pulls, the compute thread and writes hold the slots
while they touch them. Blocks of generated tokens go to the store through a small pool of their own,
so that a slow store can never take memory from prompts; a block that finds no slot there is dropped
and counted, and only costs a later recomputation.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial

from dualpath.base.errors import InvariantViolation
from dualpath.base.ids import BlockKey, Side
from dualpath.engine.decode import DecodedToken, DecodeEngine
from dualpath.engine.flops import ForwardCost
from dualpath.kv.chain import BlockIdentity, block_chain
from dualpath.kv.pool import BufferPool, Lease
from dualpath.serve.messages import (
    BlockNotPersisted,
    BlockPersisted,
    DecodeReserved,
    FailureCause,
    FirstToken,
    LayerReady,
    PeerMessage,
    PrefillReceived,
    PrefillReserved,
    RequestDone,
    Tokens,
)
from dualpath.serve.worker import Attempt, EngineWorker, Load, WorkerParts
from dualpath.store.contract import BlockWrite, WriteResult
from dualpath.traffic import pieces_array
from dualpath.transfer.contract import Channel, TransferName

__all__ = ["DecodeWorker"]

log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False, kw_only=True)
class _Decode(Attempt):
    """`sequence`, `persisted` and `parent` belong to the compute thread from `_join` on."""

    rows_pulled: int = 0
    """Rows of single layers that came from the PE."""
    first_token: Tokens | None = None
    complete: bool = False
    sequence: list[int] = field(default_factory=list)
    """Prompt and output."""
    persisted: int = 0
    """Full blocks of the sequence that are written or given up."""
    parent: BlockKey | None = None

    @property
    def peer_tokens(self) -> int:
        """Tokens whose KV comes from the PE: what it reads and what it computes."""
        return self.pe_tokens + len(self.tokens) - self.hit_tokens

    @property
    def original_prompt_tokens(self) -> int:
        """Without what earlier attempts generated."""
        return len(self.tokens) - self.work.sampled_tokens

    @property
    def reserved_tokens(self) -> int:
        """Device KV it needs at its end: the last token's KV never exists."""
        return len(self.tokens) + self.work.max_new_tokens


class DecodeWorker(EngineWorker[_Decode]):
    """`engine` holds device KV and steps; `write_pool` has the slots for generated blocks."""

    side = Side.DE
    make_attempt = _Decode

    def __init__(
        self, parts: WorkerParts, engine: DecodeEngine, cost: ForwardCost, write_pool: BufferPool
    ) -> None:
        self._engine = engine
        self._write_pool = write_pool
        self._joining: deque[_Decode] = deque()
        self._running: dict[str, _Decode] = {}
        self._wake = threading.Condition()
        self._cost = cost
        self._busy_s = 0.0
        self._flops = 0.0
        self._writes = 0
        self._written_bytes = 0
        self._dropped_blocks = 0
        self._writes_work = True
        super().__init__(parts)

    # On the actor: collecting the prompt.

    def tokens_held(self, attempt: _Decode) -> int:
        return len(attempt.tokens)

    def reserved(self, attempt: _Decode) -> None:
        lease = attempt.leased
        self.tell_peer(attempt, DecodeReserved(attempt.name, lease.stamp, lease.slots))

    def read_complete(self, attempt: _Decode) -> None:
        pass  # The frontend learns it from the progress of the reads.

    def start(self, attempt: _Decode) -> None:
        pass

    def handle_peer(self, attempt: _Decode, message: PeerMessage) -> None:
        match message:
            case PrefillReserved(stamp=stamp, slots=slots):
                attempt.peer_stamp, attempt.peer_slots = stamp, slots
            case LayerReady():
                self.links.with_channel(
                    attempt.peer,
                    attempt.peer_address,
                    lambda channel: self._pull(attempt, message, channel),
                )
            case FirstToken(tokens=tokens):
                attempt.first_token = tokens
                self._check_complete(attempt)
            case _:
                pass

    def _pull(self, attempt: _Decode, ready: LayerReady, channel: Channel | None) -> None:
        if channel is None or attempt.released or attempt.failed:
            return
        if attempt.peer_slots is None:
            self.fail(
                attempt, FailureCause.TRANSFER, "a layer was ready before its slots were known"
            )
            return
        pieces: list[tuple[int, int, int, int]] = []
        geometry = self.pool.geometry
        for part in self.layout.layer_spans(ready.layer, ready.first_token, ready.stop_token):
            index = attempt.prefill_index(part.block, self.layout.block_tokens)
            span = part.span
            place = geometry.slot_offset(attempt.leased.slots[part.block]) + span.offset
            pieces.append((attempt.peer_slots[index], span.offset, span.length, place))
        hold = attempt.leased.hold()
        hold.__enter__()
        # No single layer waits here: decoding begins when all have come, so the order is that of arrival.
        future = self.traffic.pull(
            channel,
            TransferName(attempt.name.request, attempt.name.attempt, ready.layer),
            attempt.peer_stamp,
            pieces_array(pieces),
            self.pool.memory,
            owner=attempt.owner,
            deadline_s=self.config.transfer_deadline_s,
        )

        def done(future: Future[int]) -> None:
            hold.__exit__(None, None, None)
            rows = ready.stop_token - ready.first_token
            self.post(lambda: self._pulled(attempt, rows, future.exception()))

        future.add_done_callback(done)

    def _pulled(self, attempt: _Decode, rows: int, error: BaseException | None) -> None:
        if error is not None:
            if not attempt.released:
                self.work_failed(attempt, error)
            return
        attempt.rows_pulled += rows
        self.pulled_bytes += rows * self.layout.row_bytes
        self._check_complete(attempt)

    def _check_complete(self, attempt: _Decode) -> None:
        if (
            attempt.first_token is None
            or attempt.rows_pulled < self._rows_due(attempt)
            or attempt.complete
            or attempt.released
            or attempt.failed
        ):
            return
        attempt.complete = True
        self.tell_peer(attempt, PrefillReceived(attempt.name))
        self.send(attempt.first_token)
        self._persist_prompt(attempt)
        if attempt.first_token.finish_reason is not None:
            self._ended(attempt)
            return
        attempt.holds.enter_context(attempt.leased.hold())
        with self._wake:
            self._joining.append(attempt)
            self._wake.notify()

    def _rows_due(self, attempt: _Decode) -> int:
        """Rows of single layers that the PE has to hand over."""
        return 0 if self.config.oracle else attempt.peer_tokens * self.layout.n_layers

    def _persist_prompt(self, attempt: _Decode) -> None:
        """Write the prompt's blocks that were computed, straight from the slots they lie in."""
        first = attempt.hit_tokens // self.layout.block_tokens
        attempt.persisted = len(attempt.chain)
        attempt.parent = attempt.chain[-1].key if attempt.chain else attempt.work.root
        if self.config.oracle:
            self._claim_stored(attempt.chain[first:])
            return
        lease = attempt.leased
        self._write(
            [
                BlockWrite(attempt.chain[block], lease.view(block), lease.hold(block))
                for block in range(first, len(attempt.chain))
            ]
        )

    # Writing; from the actor and from the compute thread.

    def _write(self, writes: Sequence[BlockWrite]) -> None:
        if self.store is None or not writes:
            return
        parents = {write.identity.key: write.identity.parent for write in writes}

        def done(result: WriteResult) -> None:
            self.post(lambda: self._write_done(result, parents[result.key]))

        self.post(lambda: self._writes_started(len(writes)))
        # In no attempt's name: what it computed is worth keeping when it is over.
        self.traffic.write(
            self.store, writes, owner="", deadline_s=self.config.store_deadline_s, done=done
        )

    def _claim_stored(self, blocks: Sequence[BlockIdentity]) -> None:
        """The oracle writes nothing, and finds later what a real engine would have written."""

        def claim() -> None:
            for block in blocks:
                self.send(BlockPersisted(block.key, block.parent, self.layout.full_block_bytes))

        self.post(claim)

    def _writes_started(self, n: int) -> None:
        self._writes += n

    def _write_done(self, result: WriteResult, parent: BlockKey) -> None:
        self._writes -= 1
        if result.durable:
            self._written_bytes += result.stored_bytes
            self.send(BlockPersisted(result.key, parent, result.stored_bytes))
            if not self._writes_work:
                self._writes_work = True
                log.info("blocks are stored again")
            return
        self._dropped_blocks += 1
        self.send(BlockNotPersisted(result.key))
        if self._writes_work:
            self._writes_work = False
            log.warning("blocks are not stored: %s", result.detail)

    # On the actor: the end.

    def lost_peer_of(self, attempt: _Decode, reason: str) -> None:
        if not attempt.complete:
            self.fail(attempt, FailureCause.PEER_LOST, reason)

    def dropped(self, attempt: _Decode) -> None:
        self.wake_compute()

    def _ended(self, attempt: _Decode) -> None:
        """The request ended by itself: give back everything and say so."""
        if not attempt.released:
            self.drop(attempt.name)
            self.send(RequestDone(attempt.name))

    def measure(self) -> Load:
        reserved = sum(a.reserved_tokens for a in self.attempts.values())
        return Load(
            requests=len(self.attempts),
            tokens=sum(len(a.tokens) for a in self.attempts.values()),
            free_hbm_tokens=max(0, self.config.hbm_tokens - reserved),
            hbm_tokens=self.config.hbm_tokens,
            running=len(self._running),
            busy_s=self._busy_s,
            flops=self._flops,
            written_bytes=self._written_bytes,
            dropped_blocks=self._dropped_blocks,
        )

    def quiet(self) -> bool:
        return self._writes == 0

    def wake_compute(self) -> None:
        with self._wake:
            self._wake.notify()

    # On the compute thread.

    def compute(self) -> None:
        while not self.stopping.is_set():
            with self._wake:
                if not self._joining and not self._running:
                    self._wake.wait(timeout=1.0)
            self._leave()
            self._join()
            if self._running:
                started_s = time.monotonic()
                outputs = self._engine.step()
                self._busy_s += time.monotonic() - started_s
                seen_pairs = sum(len(attempt.sequence) for attempt in self._running.values())
                self._flops += self._cost.of(len(self._running), seen_pairs)
                self._after_step(outputs)

    def _leave(self) -> None:
        for key, attempt in list(self._running.items()):
            if attempt.released or attempt.failed:
                self._engine.remove(key)
                del self._running[key]

    def _join(self) -> None:
        """Take requests into the running batch, in order, while device memory and places last."""
        while len(self._running) < self.config.max_running:
            with self._wake:
                if not self._joining:
                    return
                attempt = self._joining[0]
                gone = attempt.released or attempt.failed
                key = str(attempt.name)
                if not gone and not self._engine.reserve(key, attempt.reserved_tokens):
                    return
                self._joining.popleft()
            if not gone:
                self._take_in(key, attempt)
            attempt.holds.close()
            self.post(partial(self._joined, attempt))

    def _take_in(self, key: str, attempt: _Decode) -> None:
        assert attempt.first_token is not None
        attempt.sequence = [*attempt.tokens, *attempt.first_token.tokens]
        lease = attempt.leased
        blocks, tokens = None, 0
        if not self.config.oracle:
            blocks = [lease.view(i) for i in range(len(lease.slots))]
            tokens = len(attempt.tokens)
        with self.traffic.copying(tokens * self.layout.row_bytes * self.layout.n_layers):
            self._engine.join(
                key,
                attempt.sequence,
                blocks,
                attempt.work.sampling,
                prompt_tokens=attempt.original_prompt_tokens,
            )
        self._running[key] = attempt

    def _joined(self, attempt: _Decode) -> None:
        """The prompt is in device memory: its slots are free once its blocks are written."""
        if attempt.lease is not None:
            attempt.lease.release()
        self.changed()

    def _after_step(self, outputs: Sequence[DecodedToken]) -> None:
        messages: list[Tokens] = []
        ended: list[_Decode] = []
        for output in outputs:
            attempt = self._running[output.name]
            messages.append(
                Tokens(
                    name=attempt.name,
                    position=len(attempt.sequence) - attempt.original_prompt_tokens,
                    tokens=(output.token,),
                    logprobs=() if output.logprobs is None else (output.logprobs,),
                    finish_reason=output.finish_reason,
                )
            )
            attempt.sequence.append(output.token)
            self._persist_generated(output.name, attempt, last=output.finish_reason is not None)
            if output.finish_reason is not None:
                self._engine.remove(output.name)
                del self._running[output.name]
                ended.append(attempt)
        self.post(lambda: self._stepped(messages, ended))

    def _stepped(self, messages: Sequence[Tokens], ended: Sequence[_Decode]) -> None:
        for message in messages:
            self.send(message)
        for attempt in ended:
            self._ended(attempt)

    def _persist_generated(self, key: str, attempt: _Decode, *, last: bool) -> None:
        """Write every block that is complete now; the last token has no KV yet."""
        per_block = self.layout.block_tokens
        known = len(attempt.sequence) - 1
        while (attempt.persisted + 1) * per_block <= known:
            if self.config.oracle:
                self._claim_stored([self._next_block(attempt)])
                continue
            lease = self._write_pool.try_lease(f"{attempt.name} write", 1)
            if lease is None:
                if last:
                    self._give_up_blocks(known // per_block - attempt.persisted)
                return
            self._write_block(key, attempt, lease)

    def _write_block(self, key: str, attempt: _Decode, lease: Lease) -> None:
        first = attempt.persisted * self.layout.block_tokens
        identity = self._next_block(attempt)
        with self.traffic.copying(self.layout.full_block_bytes):
            self._engine.copy_block(key, first, lease.view(0))
        self._write([BlockWrite(identity, lease.view(0), lease.hold())])
        lease.release()

    def _next_block(self, attempt: _Decode) -> BlockIdentity:
        """The block after those that are written or given up; now it counts as one of them."""
        per_block = self.layout.block_tokens
        first = attempt.persisted * per_block
        block = attempt.sequence[first : first + per_block]
        if attempt.parent is None:
            raise InvariantViolation(f"{attempt.name} generates before its prompt is complete")
        identity = block_chain(attempt.parent, block, per_block)[0]
        attempt.persisted += 1
        attempt.parent = identity.key
        return identity

    def _give_up_blocks(self, n: int) -> None:
        def count() -> None:
            self._dropped_blocks += n

        self.post(count)
