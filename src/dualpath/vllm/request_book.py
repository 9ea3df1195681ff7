"""The connector's scheduler side: what each request has staged, loaded and saved. Pure bookkeeping.

It is told what vLLM's scheduler does, in the order in which it does it, and gives the orders of each step.
It does no I/O and waits for nothing: while the KV of a request is staged, vLLM polls `matched` again.

    arrived -> matched: orders a staging, None -> (reported) -> matched: n -> allocated: orders the load ->
    step: orders saves ... -> ended

A request that is preempted begins anew at `matched`, without its peer. Invariants: a token's KV is never
promised before every rank has it in DRAM; at least one token is left to compute; only blocks whose tokens
are all known are saved, so drafts and placeholders never are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from dualpath.vllm.orders import LoadOrder, SaveOrder, Staged, StageOrder, StepOrders, WorkerReport
from dualpath.vllm.params import KvPeer, PairParams, encode_params

__all__ = ["Ending", "RequestBook", "ScheduledPart"]


class _Phase(StrEnum):
    WAITING = "waiting"
    STAGING = "staging"
    STAGED = "staged"
    RUNNING = "running"


@dataclass(frozen=True, slots=True)
class ScheduledPart:
    """What one step computes of a request: the tokens `[computed_tokens, computed_tokens + new_tokens)`.

    `block_ids`: all blocks of the request, in order.
    """

    request: str
    computed_tokens: int
    new_tokens: int
    block_ids: Sequence[int]


@dataclass(frozen=True, slots=True)
class Ending:
    """`keep_blocks`: the blocks must stay until the worker reported the late save. `answer` is for the
    client."""

    keep_blocks: bool = False
    answer: dict[str, object] | None = None


@dataclass(slots=True)
class _Entry:
    tokens: Sequence[int]
    """vLLM's own list: it grows as tokens are sampled."""
    prompt_tokens: int
    salt: str
    pair: PairParams | None
    phase: _Phase = _Phase.WAITING
    serial: int = 0
    first_token: int = 0
    staged: Staged | None = None
    awaited: int = 0
    """Ranks whose report of this staging is still to come."""
    hit_tokens: int = 0
    saved_tokens: int = 0
    """Up to here nothing is left to save."""
    exported_tokens: int = 0
    """Of a prefill: `[0, exported_tokens)` must yet be copied for the peer, though it need not be saved."""
    known_tokens: int = 0
    """The worker knows the ids of so many tokens."""


@dataclass(slots=True)
class _Orders:
    stages: list[StageOrder] = field(default_factory=list)
    loads: list[LoadOrder] = field(default_factory=list)
    saves: list[SaveOrder] = field(default_factory=list)
    releases: list[str] = field(default_factory=list)
    ended: list[str] = field(default_factory=list)
    aborted: list[str] = field(default_factory=list)


class RequestBook:
    """The requests of one vLLM scheduler. Not thread-safe: that scheduler is one thread.

    `has_store`: without one only peers have KV. `own`: this server's KV endpoint, for the answers of
    prefills."""

    def __init__(
        self,
        block_tokens: int,
        *,
        ranks: int = 1,
        has_store: bool = True,
        own: KvPeer | None = None,
    ) -> None:
        self._block_tokens = block_tokens
        self._ranks = ranks
        self._has_store = has_store
        self._own = own
        self._entries: dict[str, _Entry] = {}
        self._orders = _Orders()

    def __len__(self) -> int:
        return len(self._entries)

    def arrived(
        self, request: str, tokens: Sequence[int], *, salt: str = "", pair: PairParams | None = None
    ) -> None:
        """A new request; `tokens` is read now and later, and must grow only at its end."""
        if self._own is None:
            pair = None  # Without an endpoint there is no peer to talk to.
        self._entries[request] = _Entry(tokens, len(tokens), salt, pair)

    def matched(self, request: str, local_tokens: int) -> int | None:
        """Tokens behind the `local_tokens` on the device that can be loaded; None: ask again next step."""
        entry = self._entries.get(request)
        if entry is None:
            return 0
        if entry.phase is _Phase.STAGING:
            return None
        if entry.phase is _Phase.STAGED and local_tokens >= entry.first_token:
            assert entry.staged is not None
            entry.hit_tokens = max(local_tokens, entry.staged.tokens)
            return max(0, entry.staged.tokens - local_tokens)
        if entry.phase is not _Phase.WAITING:
            self._begin_again(request, entry)
        return self._stage(request, entry, local_tokens)

    def reported(self, report: WorkerReport) -> None:
        """Workers have staged. A prefix counts when all ranks have it: the shortest one does (case 17)."""
        for staged in report.staged:
            entry = self._entries.get(staged.request)
            if entry is None or entry.phase is not _Phase.STAGING or entry.serial != staged.serial:
                continue
            if entry.staged is None or staged.tokens < entry.staged.tokens:
                entry.staged = staged
            entry.awaited -= 1
            if entry.awaited == 0:
                entry.phase = _Phase.STAGED

    def allocated(self, request: str, block_ids: Sequence[int], external_tokens: int) -> None:
        """vLLM gives the request these blocks and takes `external_tokens` of what `matched` said."""
        entry = self._entries.get(request)
        if entry is None:
            return
        staged_tokens = entry.staged.tokens if entry.staged is not None else 0
        if external_tokens:
            first = staged_tokens - external_tokens
            ids = tuple(block_ids[first // self._block_tokens : self._blocks(staged_tokens)])
            self._orders.loads.append(LoadOrder(request, entry.serial, first, staged_tokens, ids))
        elif entry.staged is not None:
            self._orders.releases.append(request)
        entry.phase = _Phase.RUNNING
        stored = entry.staged.stored_tokens if entry.staged is not None else 0
        entry.saved_tokens = self._whole(max(entry.first_token, stored))
        entry.exported_tokens = 0
        if entry.pair is not None and entry.pair.role == "prefill":
            # What was staged is in DRAM already; the rest of the prompt has to get there.
            entry.exported_tokens = entry.first_token if external_tokens else entry.hit_tokens
            entry.saved_tokens = self._whole(max(entry.exported_tokens, stored))

    def step(self, parts: Sequence[ScheduledPart]) -> StepOrders:
        """The orders of the step that computes these parts, and all that were due before."""
        for part in parts:
            entry = self._entries.get(part.request)
            if entry is not None:
                self._save(part, entry)
        taken, self._orders = self._orders, _Orders()
        return StepOrders(
            tuple(taken.stages),
            tuple(taken.loads),
            tuple(taken.saves),
            tuple(taken.releases),
            tuple(taken.ended),
            tuple(taken.aborted),
        )

    def ended(
        self, request: str, block_ids: Sequence[int], computed_tokens: int, *, aborted: bool
    ) -> Ending:
        """The request is over; `block_ids` hold its `computed_tokens`, none if it has no blocks."""
        entry = self._entries.pop(request, None)
        if entry is None:
            return Ending()
        (self._orders.aborted if aborted else self._orders.ended).append(request)
        if aborted:
            return Ending()
        complete = self._whole(min(computed_tokens, len(entry.tokens)))
        first = entry.saved_tokens // self._block_tokens
        keep_blocks = False
        if self._has_store and complete > entry.saved_tokens:
            ids = tuple(block_ids[first : complete // self._block_tokens])
            keep_blocks = self._order_save(request, entry, first, ids, complete, late=True)
        return Ending(keep_blocks, self._answer(entry))

    def _begin_again(self, request: str, entry: _Entry) -> None:
        """Preempted, or blocks on the device that the staging counted on are gone."""
        self._orders.releases.append(request)
        if entry.phase is _Phase.RUNNING and entry.pair is not None and entry.pair.role == "decode":
            entry.pair = None  # The peer was told that its KV had arrived.
        entry.phase = _Phase.WAITING
        entry.staged = None

    def _stage(self, request: str, entry: _Entry, local_tokens: int) -> int | None:
        total = len(entry.tokens)
        first = self._whole(local_tokens)
        entry.first_token = first
        entry.hit_tokens = local_tokens
        from_peer = entry.pair is not None and entry.pair.role == "decode"
        reach = total - 1 if from_peer else self._whole(total - 1)
        if reach <= local_tokens or not (self._has_store or from_peer):
            entry.staged = None
            return 0
        entry.serial += 1
        entry.phase = _Phase.STAGING
        entry.staged = None
        entry.awaited = self._ranks
        entry.known_tokens = total
        self._orders.stages.append(
            StageOrder(request, entry.serial, tuple(entry.tokens), first, entry.salt, entry.pair)
        )
        return None

    def _save(self, part: ScheduledPart, entry: _Entry) -> None:
        after = min(part.computed_tokens + part.new_tokens, len(entry.tokens))
        if entry.exported_tokens:
            stop_block = self._blocks(entry.exported_tokens)
            ids = tuple(part.block_ids[:stop_block])
            self._order_save(part.request, entry, 0, ids, entry.exported_tokens, persist=False)
            entry.exported_tokens = 0
        stop = self._whole(after)
        if self._ends_prompt(part, entry):
            stop = entry.prompt_tokens
        elif not self._has_store and not self._is_prefill(entry):
            return
        if stop > entry.saved_tokens:
            first = entry.saved_tokens // self._block_tokens
            ids = tuple(part.block_ids[first : self._blocks(stop)])
            self._order_save(part.request, entry, first, ids, stop)
            entry.saved_tokens = stop

    def _order_save(
        self,
        request: str,
        entry: _Entry,
        first_block: int,
        block_ids: tuple[int, ...],
        stop_token: int,
        *,
        persist: bool = True,
        late: bool = False,
    ) -> bool:
        if not block_ids:
            return False
        known = entry.known_tokens
        self._orders.saves.append(
            SaveOrder(
                request,
                first_block,
                block_ids,
                known,
                tuple(entry.tokens[known:stop_token]),
                entry.salt,
                stop_token,
                persist=persist and self._has_store,
                pair=entry.pair if self._is_prefill(entry) else None,
                late=late,
            )
        )
        entry.known_tokens = max(known, stop_token)
        return True

    def _answer(self, entry: _Entry) -> dict[str, object] | None:
        """What a prefill's client, the router, passes on to the DE."""
        if entry.pair is None or entry.pair.role != "prefill" or self._own is None:
            return None
        hit = min(entry.hit_tokens, entry.prompt_tokens)
        own = min(entry.staged.own_tokens if entry.staged is not None else 0, hit)
        pair = entry.pair
        return encode_params(
            PairParams(
                "decode", pair.request, pair.attempt, self._own, hit, own, entry.prompt_tokens
            )
        )

    def _is_prefill(self, entry: _Entry) -> bool:
        return entry.pair is not None and entry.pair.role == "prefill"

    def _ends_prompt(self, part: ScheduledPart, entry: _Entry) -> bool:
        after = part.computed_tokens + part.new_tokens
        return self._is_prefill(entry) and part.computed_tokens < entry.prompt_tokens <= after

    def _whole(self, tokens: int) -> int:
        return tokens // self._block_tokens * self._block_tokens

    def _blocks(self, tokens: int) -> int:
        return -(-tokens // self._block_tokens)
