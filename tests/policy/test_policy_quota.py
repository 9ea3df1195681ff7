"""Prefill batches: FIFO under the compute quota, the last one cut by binary search."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dualpath.base.ids import RequestId
from dualpath.policy import AttentionFit, Batch, BatchEntry, PrefillEntry, pack, pairs
from dualpath.policy.quota import largest_that_fits

PAIRS = AttentionFit(base_s=0.0, per_entry_s=0.0, per_pair_s=1.0)
"""Seconds are pairs."""


def entry(name: str, cached: int, tokens: int) -> PrefillEntry:
    return PrefillEntry(RequestId(name), cached, tokens)


def packed(
    *entries: PrefillEntry,
    quota: float,
    fit: AttentionFit = PAIRS,
    most: int = 10**6,
    granule: int = 1,
) -> list[tuple[str, int, bool]]:
    batch = pack(entries, fit, quota_s=quota, max_batch_tokens=most, granule_tokens=granule)
    return [(each.request, each.bsz_tokens, each.is_last) for each in batch.entries]


def test_pairs() -> None:
    # By hand: tokens 3 and 4 after 3 cached see 4 and 5 keys.
    assert pairs(3, 2) == 9
    assert pairs(0, 4) == 1 + 2 + 3 + 4
    assert pairs(7, 0) == 0


def test_attention_fit() -> None:
    fit = AttentionFit(base_s=1.0, per_entry_s=0.5, per_pair_s=0.25)
    assert fit.entry_s(3, 2) == 0.5 + 0.25 * 9
    batch = pack([entry("a", 3, 2), entry("b", 0, 1)], fit, quota_s=100, max_batch_tokens=100)
    assert batch == Batch(
        (BatchEntry(RequestId("a"), 3, 2, True), BatchEntry(RequestId("b"), 0, 1, True)),
        1.0 + 2 * 0.5 + 0.25 * (9 + 1),
    )
    assert batch.tokens == 3
    sparse = AttentionFit(base_s=0.0, per_entry_s=0.5, per_pair_s=0.25, per_token_s=2.0)
    assert sparse.entry_s(3, 2) == 0.5 + 2.0 * 2 + 0.25 * 9


def test_nothing_waits() -> None:
    assert pack([], PAIRS, quota_s=1, max_batch_tokens=1) == Batch((), 0.0)


def test_a_batch_fills_exactly_to_the_quota() -> None:
    two = (entry("a", 0, 4), entry("b", 5, 2))  # 10 and 13 pairs.
    assert packed(*two, quota=23) == [("a", 4, True), ("b", 2, True)]
    assert packed(*two, quota=22.9) == [("a", 4, True), ("b", 1, False)]
    assert packed(*two, quota=16) == [("a", 4, True), ("b", 1, False)]
    assert packed(*two, quota=15.9) == [("a", 4, True)]


def test_nothing_follows_the_request_that_was_cut_or_left_out() -> None:
    assert packed(entry("a", 0, 10), entry("b", 0, 1), quota=7) == [("a", 3, False)]
    assert packed(entry("a", 0, 3), entry("b", 9, 1), entry("c", 0, 1), quota=7) == [("a", 3, True)]


def test_the_head_always_progresses() -> None:
    assert packed(entry("a", 1000, 10), entry("b", 0, 1), quota=1) == [("a", 1, False)]
    assert packed(entry("a", 1000, 10), quota=1, granule=4) == [("a", 4, False)]
    assert packed(entry("a", 1000, 3), quota=1, granule=4) == [("a", 3, True)]
    slow = AttentionFit(base_s=5.0, per_entry_s=0.0, per_pair_s=0.0)
    assert packed(entry("a", 0, 3), quota=1, fit=slow) == [("a", 1, False)]


def test_cuts_are_whole_granules_and_ends_are_not() -> None:
    assert packed(entry("a", 0, 100), quota=pairs(0, 50), granule=16) == [("a", 48, False)]
    assert packed(entry("a", 0, 50), quota=pairs(0, 50), granule=16) == [("a", 50, True)]
    two = (entry("a", 0, 8), entry("b", 0, 100))
    assert packed(*two, quota=pairs(0, 8) + pairs(0, 15), granule=16) == [("a", 8, True)]


def test_max_batch_tokens() -> None:
    two = (entry("a", 0, 8), entry("b", 0, 8))
    assert packed(*two, quota=1e9, most=8) == [("a", 8, True)]
    assert packed(*two, quota=1e9, most=11) == [("a", 8, True), ("b", 3, False)]
    assert packed(*two, quota=1e9, most=11, granule=2) == [("a", 8, True), ("b", 2, False)]
    assert packed(*two, quota=1e9, most=16) == [("a", 8, True), ("b", 8, True)]


@pytest.mark.parametrize("granule", [0, 9])
def test_a_granule_must_fit_a_batch(granule: int) -> None:
    with pytest.raises(ValueError, match="granule"):
        packed(entry("a", 0, 8), quota=1, most=8, granule=granule)


@given(
    waiting=st.lists(st.tuples(st.integers(0, 5_000), st.integers(1, 3_000)), max_size=8),
    base_s=st.floats(0, 0.05),
    per_entry_s=st.floats(0, 0.05),
    per_pair_s=st.floats(0, 1e-6),
    quota_s=st.floats(0.001, 1.0),
    most=st.integers(64, 8_192),
    granule=st.integers(1, 64),
)
def test_the_quota_is_kept_and_used(
    waiting: list[tuple[int, int]],
    base_s: float,
    per_entry_s: float,
    per_pair_s: float,
    quota_s: float,
    most: int,
    granule: int,
) -> None:
    fit = AttentionFit(base_s, per_entry_s, per_pair_s)
    entries = [entry(f"r{index}", *each) for index, each in enumerate(waiting)]
    batch = pack(entries, fit, quota_s=quota_s, max_batch_tokens=most, granule_tokens=granule)
    taken = batch.entries
    assert bool(taken) == bool(entries)
    assert batch.tokens <= most
    for got, asked in zip(taken, entries, strict=False):
        assert (got.request, got.cached_tokens) == (asked.request, asked.cached_tokens)
        assert 1 <= got.bsz_tokens <= asked.tokens
        assert got.is_last == (got.bsz_tokens == asked.tokens)
    assert all(each.is_last for each in taken[:-1])
    expected_s = base_s
    for each in taken:
        expected_s += fit.entry_s(each.cached_tokens, each.bsz_tokens)
    if not taken:
        return
    assert batch.attention_s == expected_s
    minimal = len(taken) == 1 and taken[0].bsz_tokens == min(granule, entries[0].tokens)
    assert batch.attention_s <= quota_s or minimal
    # No more would have fitted: neither one more granule of the last, nor one of the next.
    last, asked = taken[-1], entries[len(taken) - 1]
    before_s = base_s
    for each in taken[:-1]:
        before_s += fit.entry_s(each.cached_tokens, each.bsz_tokens)
    if not last.is_last:
        more = last.bsz_tokens + granule
        assert last.bsz_tokens % granule == 0
        if more <= asked.tokens and batch.tokens + granule <= most:
            assert before_s + fit.entry_s(last.cached_tokens, more) > quota_s
    elif len(taken) < len(entries):
        following = entries[len(taken)]
        if granule <= following.tokens and batch.tokens + granule <= most:
            assert batch.attention_s + fit.entry_s(following.cached_tokens, granule) > quota_s


@dataclass(frozen=True)
class Estimate:
    """A fit that `pack` does not know as one."""

    fit: AttentionFit

    @property
    def base_s(self) -> float:
        return self.fit.base_s

    def entry_s(self, cached_tokens: int, bsz_tokens: int) -> float:
        return self.fit.entry_s(cached_tokens, bsz_tokens)


@given(
    waiting=st.lists(st.tuples(st.integers(0, 5_000), st.integers(1, 3_000)), max_size=8),
    fit=st.builds(
        AttentionFit,
        st.floats(0, 0.05),
        st.floats(0, 0.05),
        st.floats(0, 1e-6),
        st.floats(0, 1e-3),
    ),
    quota_s=st.floats(0.001, 1.0),
    most=st.integers(64, 8_192),
    granule=st.integers(1, 64),
)
def test_a_fit_packs_as_any_estimate_that_says_the_same(
    waiting: list[tuple[int, int]], fit: AttentionFit, quota_s: float, most: int, granule: int
) -> None:
    entries = [entry(f"r{index}", *each) for index, each in enumerate(waiting)]
    by_fit, by_estimate = (
        pack(entries, time, quota_s=quota_s, max_batch_tokens=most, granule_tokens=granule)
        for time in (fit, Estimate(fit))
    )
    assert by_fit == by_estimate


def test_the_scalar_search_stands_alone() -> None:
    # It is compiled without what is around it.
    code = largest_that_fits.__code__
    assert set(code.co_names) <= {"min"} and code.co_freevars == ()
    assert largest_that_fits(0, 10, 10, 0.0, 1.0, 0.0, 0.0, 55.0, 4) == 10
    assert largest_that_fits(0, 10, 10, 0.0, 1.0, 0.0, 0.0, 54.9, 4) == 8
    assert largest_that_fits(0, 10, 9, 0.0, 1.0, 0.0, 0.0, 55.0, 4) == 8
    assert largest_that_fits(0, 10, 10, 0.0, 1.0, 0.5, 1.0, 12.9, 1) == 3
    assert largest_that_fits(0, 10, 3, 0.0, 1.0, 0.0, 0.0, 55.0, 4) == 0
    assert largest_that_fits(0, 10, 10, 1.0, 0.0, 0.0, 0.5, 1.4, 1) == 0


@given(
    tokens=st.integers(1, 300),
    cached=st.integers(0, 3_000),
    quota=st.integers(1, 300_000),
)
def test_repeated_packing_computes_each_token_once(tokens: int, cached: int, quota: int) -> None:
    done, left = cached, tokens
    while left:
        (got,) = pack(
            [entry("a", done, left)], PAIRS, quota_s=quota, max_batch_tokens=1_000
        ).entries
        assert got.cached_tokens == done
        done += got.bsz_tokens
        left -= got.bsz_tokens
    assert done == cached + tokens
