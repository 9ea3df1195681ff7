"""The prefill engine's process: reads its side, computes layer by layer, hands each layer over.

Ownership of the PE's slots: the lease lives from reservation until the decode engine has received everything
(`PrefillReceived`) or the frontend releases the attempt. From `StartAttempt` until the compute thread is done
with the attempt a hold keeps the slots, whatever happens to the lease.

Lease order: the slots of the hit blocks that the PE reads, then those of the missed tokens' blocks.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dualpath.base.errors import PeerLost
from dualpath.base.ids import Side
from dualpath.engine.flops import ForwardCost
from dualpath.engine.prefill import (
    ChunkResult,
    LayerSink,
    LayerSource,
    LayerwisePrefill,
    PrefillChunk,
)
from dualpath.engine.sampling import sample
from dualpath.kv.layout import BlockSpan, KVLayout
from dualpath.policy.quota import AttentionFit, PrefillEntry, pack, pairs
from dualpath.serve.messages import (
    DecodeReserved,
    FailureCause,
    FirstToken,
    LayerReady,
    PeerMessage,
    PrefillReceived,
    PrefillReleased,
    PrefillReserved,
    PrefillTimes,
    Tokens,
    encode_peer_message,
)
from dualpath.serve.worker import Attempt, EngineWorker, Load, WorkerParts
from dualpath.traffic import TrafficManager, pieces_array
from dualpath.transfer.contract import Channel, TransferName

__all__ = ["PrefillWorker"]


@dataclass(slots=True, eq=False, kw_only=True)
class _Prefill(Attempt):
    """`computed_tokens` of the missed ones belongs to the compute thread once it has the attempt."""

    computed_tokens: int = 0
    start_asked_s: float | None = None
    peer_reserved_s: float = 0.0
    queued: bool = False
    computed: bool = False
    channel: Channel | None = None
    started_s: float = 0.0

    @property
    def cached_tokens(self) -> int:
        return self.hit_tokens + self.computed_tokens


class _Loader:
    """`LayerSource`: the cached KV of an attempt, from the PE's own slots and the decode engine's."""

    def __init__(
        self, attempt: _Prefill, layout: KVLayout, traffic: TrafficManager, deadline_s: float
    ) -> None:
        self._attempt = attempt
        self._layout = layout
        self._traffic = traffic
        self._deadline_s = deadline_s

    def start_load(self, layer: int, into: memoryview) -> Future[int]:
        """Local Layer Blocks are copied here; the future is that of the remote ones."""
        attempt, layout = self._attempt, self._layout
        cached = len(into) // layout.row_bytes
        target = np.frombuffer(into, dtype=np.uint8)
        remote: list[tuple[int, int, int, int]] = []
        local: list[tuple[int, BlockSpan]] = []
        start = 0
        for part in layout.layer_spans(layer, 0, cached):
            span = part.span
            if attempt.pe_tokens <= part.block * layout.block_tokens < attempt.hit_tokens:
                assert attempt.peer_slots is not None
                slot = attempt.peer_slots[part.block]
                remote.append((slot, span.offset, span.length, start))
            else:
                local.append((start, part))
            start += span.length
        loading = self._pull(layer, remote, into)
        if local:
            with self._traffic.copying(sum(part.span.length for _, part in local)):
                for start, part in local:
                    rows = _rows_in_slot(attempt, part, layout)
                    np.copyto(target[start : start + part.span.length], rows)
        return loading

    def _pull(
        self, layer: int, remote: list[tuple[int, int, int, int]], into: memoryview
    ) -> Future[int]:
        attempt = self._attempt
        if not remote:
            return _nothing_to_load()
        assert attempt.channel is not None
        return self._traffic.pull(
            attempt.channel,
            TransferName(attempt.name.request, attempt.name.attempt, layer),
            attempt.peer_stamp,
            pieces_array(remote),
            into,
            owner=attempt.owner,
            deadline_s=self._deadline_s,
            needed=layer,
            urgent=layer == 0,  # Nothing is computed meanwhile.
        )


class _HandOver:
    """`LayerSink`: new rows go into the PE's slots, and the decode engine is told."""

    def __init__(self, attempt: _Prefill, layout: KVLayout, traffic: TrafficManager) -> None:
        self._attempt = attempt
        self._layout = layout
        self._traffic = traffic

    def hand_over(self, layer: int, first_token: int, rows: memoryview) -> None:
        """`rows` [tokens, row_bytes] of tokens from `first_token` on."""
        attempt, layout = self._attempt, self._layout
        source = np.frombuffer(rows, dtype=np.uint8)
        stop_token = first_token + len(rows) // layout.row_bytes
        start = 0
        with self._traffic.copying(len(rows)):
            for part in layout.layer_spans(layer, first_token, stop_token):
                stop = start + part.span.length
                np.copyto(_rows_in_slot(attempt, part, layout), source[start:stop])
                start = stop
        if first_token == attempt.hit_tokens and attempt.pe_tokens:
            # The decode engine needs the hit KV that only this side has, layer by layer too.
            self._tell(LayerReady(attempt.name, layer, 0, attempt.pe_tokens))
        self._tell(LayerReady(attempt.name, layer, first_token, stop_token))

    def _tell(self, ready: LayerReady) -> None:
        _notify(self._traffic, self._attempt, ready)


class _Nowhere:
    """Source and sink of the oracle: takes what lies in the buffers as if it had been loaded."""

    def start_load(self, layer: int, into: memoryview) -> Future[int]:
        return _nothing_to_load()

    def hand_over(self, layer: int, first_token: int, rows: memoryview) -> None:
        pass


class PrefillWorker(EngineWorker[_Prefill]):
    """`engine` runs batches; `fit` estimates their attention time for the compute quota."""

    side = Side.PE
    make_attempt = _Prefill

    def __init__(
        self, parts: WorkerParts, engine: LayerwisePrefill, fit: AttentionFit, cost: ForwardCost
    ) -> None:
        self._engine = engine
        self._fit = fit
        self._queue: list[_Prefill] = []
        self._wake = threading.Condition()
        self._cost = cost
        self._busy_s = 0.0
        self._flops = 0.0
        self._bubble_s = 0.0
        self._loads = 0
        self._late_loads = 0
        super().__init__(parts)

    # On the actor.

    def tokens_held(self, attempt: _Prefill) -> int:
        return attempt.pe_tokens + len(attempt.tokens) - attempt.hit_tokens

    def reserved(self, attempt: _Prefill) -> None:
        lease = attempt.leased
        self.tell_peer(attempt, PrefillReserved(attempt.name, lease.stamp, lease.slots))

    def read_complete(self, attempt: _Prefill) -> None:
        self._start_if_ready(attempt)

    def start(self, attempt: _Prefill) -> None:
        attempt.start_asked_s = time.monotonic()
        self._start_if_ready(attempt)

    def handle_peer(self, attempt: _Prefill, message: PeerMessage) -> None:
        match message:
            case DecodeReserved(stamp=stamp, slots=slots):
                attempt.peer_stamp, attempt.peer_slots = stamp, slots
                attempt.peer_reserved_s = time.monotonic()
                self._start_if_ready(attempt)
            case PrefillReceived():
                self._received(attempt)
            case _:
                pass

    def _received(self, attempt: _Prefill) -> None:
        self.drop(attempt.name)
        self.send(PrefillReleased(attempt.name))

    def lost_peer_of(self, attempt: _Prefill, reason: str) -> None:
        if attempt.computed:
            # The decode engine has everything, or sees the same loss and fails the attempt. Its
            # answer, if it is lost, must not cost our slots.
            self._received(attempt)
        else:
            self.fail(attempt, FailureCause.PEER_LOST, reason)

    def _start_if_ready(self, attempt: _Prefill) -> None:
        """Compute once the frontend said so, the slots are there, and the decode engine's are known."""
        asked = attempt.start_asked_s is not None
        if asked and attempt.lease is not None and attempt.peer_slots is not None:
            self.links.with_channel(
                attempt.peer,
                attempt.peer_address,
                lambda channel: self._enqueue(attempt, channel),
            )

    def _enqueue(self, attempt: _Prefill, channel: Channel | None) -> None:
        if channel is None or attempt.released or attempt.failed or attempt.queued:
            return
        attempt.channel = channel
        attempt.queued = True
        attempt.holds.enter_context(attempt.leased.hold())
        with self._wake:
            self._queue.append(attempt)
            self._wake.notify()

    def dropped(self, attempt: _Prefill) -> None:
        self.wake_compute()

    def measure(self) -> Load:
        unfinished = [a for a in self.attempts.values() if not a.computed]
        return Load(
            requests=len(unfinished),
            tokens=sum(len(a.tokens) for a in unfinished),
            running=len(self._queue),
            busy_s=self._busy_s,
            flops=self._flops,
            bubble_s=self._bubble_s,
            loads=self._loads,
            late_loads=self._late_loads,
        )

    def quiet(self) -> bool:
        return True

    def wake_compute(self) -> None:
        with self._wake:
            self._wake.notify()

    # On the compute thread.

    def compute(self) -> None:
        while not self.stopping.is_set():
            with self._wake:
                self._discard_released()
                if not self._queue:
                    self._wake.wait(timeout=1.0)
                    continue
                waiting = list(self._queue)
            self._run(self._pack(waiting))

    def _discard_released(self) -> None:
        for attempt in [a for a in self._queue if a.released or a.failed]:
            self._queue.remove(attempt)
            attempt.holds.close()

    def _pack(self, waiting: Sequence[_Prefill]) -> list[tuple[_Prefill, int]]:
        """The next batch: attempts in order of arrival, the last one perhaps cut (paper, section 8)."""
        entries = [
            PrefillEntry(a.name.request, a.cached_tokens, len(a.tokens) - a.cached_tokens)
            for a in waiting
        ]
        batch = pack(
            entries,
            self._fit,
            quota_s=self.config.quota_s,
            max_batch_tokens=self.config.max_batch_tokens,
        )
        by_request = {a.name.request: a for a in waiting}
        return [(by_request[entry.request], entry.bsz_tokens) for entry in batch.entries]

    def _run(self, batch: list[tuple[_Prefill, int]]) -> None:
        now = time.monotonic()
        chunks = []
        for attempt, new_tokens in batch:
            attempt.started_s = attempt.started_s or now
            first = attempt.cached_tokens
            chunks.append(
                PrefillChunk(
                    name=str(attempt.name),
                    token_ids=attempt.tokens[first : first + new_tokens],
                    cached_tokens=first,
                    source=self._source(attempt),
                    sink=self._sink(attempt),
                    needs_logits=first + new_tokens == len(attempt.tokens),
                    abandoned=lambda attempt=attempt: attempt.released,  # type: ignore[misc]
                )
            )
        results = self._engine.run(chunks)
        self._busy_s += time.monotonic() - now
        for (attempt, new_tokens), result in zip(batch, results, strict=True):
            seen_pairs = pairs(attempt.cached_tokens, new_tokens)
            self._flops += self._cost.of(new_tokens, seen_pairs)
            self._bubble_s += result.load_wait_s
            self._loads += result.loads
            self._late_loads += result.late_loads
            self._after(attempt, new_tokens, result)

    def _source(self, attempt: _Prefill) -> LayerSource:
        if self.config.oracle:
            return _Nowhere()
        return _Loader(attempt, self.layout, self.traffic, self.config.transfer_deadline_s)

    def _sink(self, attempt: _Prefill) -> LayerSink:
        if self.config.oracle:
            return _Nowhere()
        return _HandOver(attempt, self.layout, self.traffic)

    def _after(self, attempt: _Prefill, new_tokens: int, result: ChunkResult) -> None:
        attempt.computed_tokens += new_tokens
        finished = attempt.cached_tokens == len(attempt.tokens)
        if result.error is None and not result.abandoned and not finished:
            return
        with self._wake:
            self._queue.remove(attempt)
        error = result.error
        if error is not None:
            self.post(lambda: self.work_failed(attempt, error))
        elif not result.abandoned:
            self._first_token(attempt, result)
        attempt.holds.close()

    def _first_token(self, attempt: _Prefill, result: ChunkResult) -> None:
        assert result.logits is not None
        work = attempt.work
        sampled = sample(
            result.logits,
            work.sampling,
            tokens=attempt.tokens,
            prompt_tokens=len(attempt.tokens) - work.sampled_tokens,
        )
        tokens = Tokens(
            name=attempt.name,
            position=work.sampled_tokens,
            tokens=(sampled.token,),
            logprobs=() if sampled.logprobs is None else (sampled.logprobs,),
            finish_reason=sampled.finish_reason,
            prefill=_times(attempt, time.monotonic()),
        )
        self.post(lambda: self._finished(attempt, tokens))

    def _finished(self, attempt: _Prefill, tokens: Tokens) -> None:
        if not attempt.released and not attempt.failed:
            attempt.computed = True
            self.send(tokens)
            # The peer last: its answer ends the attempt here.
            _notify(self.traffic, attempt, FirstToken(attempt.name, tokens))
            self.changed()


def _times(attempt: _Prefill, finished_s: float) -> PrefillTimes:
    """Of an attempt that is computed; all on this process's clock."""
    reserved_s = max(attempt.reserved_s, attempt.peer_reserved_s)
    read_s = reserved_s
    if attempt.hit_tokens and attempt.start_asked_s is not None:
        read_s = max(reserved_s, attempt.start_asked_s)
    return PrefillTimes(
        reserved_s=reserved_s - attempt.received_s,
        read_s=read_s - attempt.received_s,
        started_s=attempt.started_s - attempt.received_s,
        finished_s=finished_s - attempt.received_s,
    )


def _rows_in_slot(attempt: _Prefill, part: BlockSpan, layout: KVLayout) -> npt.NDArray[np.uint8]:
    """The bytes of a part of a block that the PE itself has, writable."""
    view = attempt.leased.view(attempt.prefill_index(part.block, layout.block_tokens))
    return np.frombuffer(view, np.uint8, part.span.length, part.span.offset)


def _nothing_to_load() -> Future[int]:
    done: Future[int] = Future()
    done.set_result(0)
    return done


def _notify(traffic: TrafficManager, attempt: _Prefill, message: PeerMessage) -> None:
    """From the compute or hand-over thread; the loss of the peer is an event of its own."""
    assert attempt.channel is not None
    try:
        traffic.notify(attempt.channel, encode_peer_message(message))
    except PeerLost:
        pass
