"""Which tokens a prefill engine computes next: FIFO packing under the compute quota (paper, intra-engine).

Every data-parallel rank fills its batch until the estimated attention time reaches the same quota, so
that the ranks finish attention together and no device waits. `pack` is pure and returns a frozen
plan; the engine executes it, and repacks what is left. Time is estimated, never measured, here.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import msgspec

from dualpath.base.ids import RequestId

__all__ = [
    "AttentionFit",
    "AttentionTime",
    "Batch",
    "BatchEntry",
    "PrefillEntry",
    "largest_that_fits",
    "pack",
    "pairs",
]


def pairs(cached_tokens: int, bsz_tokens: int) -> int:
    """Query-key pairs of causal attention: a new token sees the cached ones, those before it, itself."""
    return bsz_tokens * cached_tokens + bsz_tokens * (bsz_tokens + 1) // 2


class AttentionTime(Protocol):
    """An estimate of attention time: `base_s` a batch, and `entry_s` for each of its entries.

    `entry_s` must not fall when `bsz_tokens` grows.
    """

    @property
    def base_s(self) -> float: ...

    def entry_s(self, cached_tokens: int, bsz_tokens: int) -> float: ...


class AttentionFit(msgspec.Struct, frozen=True):
    """seconds = base_s + per_entry_s * entries + per_token_s * tokens + per_pair_s * (query-key pairs).

    Entries, new tokens and pairs of the whole batch. The coefficients are profiled on the device or computed,
    over all layers of a forward pass; none is negative. `per_token_s`: of attention that sees a fixed number
    of keys however long the context is (sparse attention, sliding windows).
    """

    base_s: float
    per_entry_s: float
    per_pair_s: float
    per_token_s: float = 0.0

    def entry_s(self, cached_tokens: int, bsz_tokens: int) -> float:
        return (
            self.per_entry_s
            + self.per_token_s * bsz_tokens
            + self.per_pair_s * pairs(cached_tokens, bsz_tokens)
        )


class PrefillEntry(msgspec.Struct, frozen=True):
    """A request that waits to be computed: `cached_tokens` have KV, `tokens` >= 1 have not."""

    request: RequestId
    cached_tokens: int
    tokens: int


class BatchEntry(msgspec.Struct, frozen=True):
    """(cached, bsz) of the paper: compute tokens `[cached_tokens, cached_tokens + bsz_tokens)`.

    `is_last`: the prompt is complete with them.
    """

    request: RequestId
    cached_tokens: int
    bsz_tokens: int
    is_last: bool


class Batch(msgspec.Struct, frozen=True):
    """A plan for one forward pass, in order of the queue. Only the last entry may be cut."""

    entries: tuple[BatchEntry, ...]
    attention_s: float

    @property
    def tokens(self) -> int:
        return sum(each.bsz_tokens for each in self.entries)


def pack(
    waiting: Iterable[PrefillEntry],
    time: AttentionTime,
    *,
    quota_s: float,
    max_batch_tokens: int,
    granule_tokens: int = 1,
) -> Batch:
    """Take requests in order until the estimate reaches `quota_s` or the tokens reach `max_batch_tokens`.

    The request that would overflow is cut to the largest multiple of `granule_tokens` that fits,
    found by binary search, and ends the batch. The head always gets at least one granule, even when
    that exceeds the quota; nothing else ever does. An empty `waiting` gives an empty batch of 0 s.
    """
    if not 1 <= granule_tokens <= max_batch_tokens:
        raise ValueError(f"granule of {granule_tokens} tokens is not in [1, {max_batch_tokens}]")
    entries: list[BatchEntry] = []
    spent_s = time.base_s
    room_tokens = max_batch_tokens
    for each in waiting:
        wanted = min(each.tokens, room_tokens)
        bsz = _largest_that_fits(each, wanted, time, spent_s, quota_s, granule_tokens)
        if bsz == 0 and not entries:
            bsz = min(granule_tokens, each.tokens)
        if bsz == 0:
            break
        spent_s += time.entry_s(each.cached_tokens, bsz)
        room_tokens -= bsz
        entries.append(BatchEntry(each.request, each.cached_tokens, bsz, bsz == each.tokens))
        if bsz < each.tokens or room_tokens == 0:
            break
    return Batch(tuple(entries), spent_s if entries else 0.0)


def largest_that_fits(
    cached_tokens: int,
    tokens: int,
    wanted_tokens: int,
    per_entry_s: float,
    per_pair_s: float,
    per_token_s: float,
    spent_s: float,
    quota_s: float,
    granule_tokens: int,
) -> int:
    """How many of an entry's `tokens` still fit into the quota, by the coefficients of an AttentionFit.

    All that is wanted if that ends the entry and fits, else the most granules that fit; 0 for none. Only
    numbers go in and no other function is called, so that a simulator can compile this one as it is.
    """
    most = -(-wanted_tokens // granule_tokens)
    if wanted_tokens < tokens:
        most = wanted_tokens // granule_tokens
    fitting, too_many, granules = 0, most + 1, most
    while too_many - fitting > 1:
        bsz_tokens = min(granules * granule_tokens, wanted_tokens)
        seen = bsz_tokens * cached_tokens + bsz_tokens * (bsz_tokens + 1) // 2
        entry_s = per_entry_s + per_token_s * bsz_tokens + per_pair_s * seen
        if spent_s + entry_s <= quota_s:
            fitting = granules
        else:
            too_many = granules
        granules = (fitting + too_many) // 2
    return min(fitting * granule_tokens, wanted_tokens)


def _largest_that_fits(
    entry: PrefillEntry,
    wanted_tokens: int,
    time: AttentionTime,
    spent_s: float,
    quota_s: float,
    granule_tokens: int,
) -> int:
    """`largest_that_fits` by any estimate."""
    if isinstance(time, AttentionFit):
        return largest_that_fits(
            entry.cached_tokens,
            entry.tokens,
            wanted_tokens,
            time.per_entry_s,
            time.per_pair_s,
            time.per_token_s,
            spent_s,
            quota_s,
            granule_tokens,
        )

    def fits(bsz_tokens: int) -> bool:
        return spent_s + time.entry_s(entry.cached_tokens, bsz_tokens) <= quota_s

    if wanted_tokens == entry.tokens and fits(wanted_tokens):
        return wanted_tokens
    fitting, too_many = 0, wanted_tokens // granule_tokens + 1
    while too_many - fitting > 1:
        middle = (fitting + too_many) // 2
        if fits(middle * granule_tokens):
            fitting = middle
        else:
            too_many = middle
    return fitting * granule_tokens
