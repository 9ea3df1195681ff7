"""Prompt lengths, what prompts share, and a trace in figures."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dualpath.base.errors import ConfigError
from dualpath.traces import (
    AppendPrompt,
    BlockPrompt,
    Session,
    TextPrompt,
    Trace,
    Turn,
    context_tokens,
    reused_tokens,
    statistics,
)
from dualpath.traces.blocks import common_blocks, cut_runs, to_runs

ids = st.lists(st.integers(0, 6), max_size=12)
"""Few different ones, so that runs and common starts occur."""


def expand(runs):
    return [first + i for first, count in runs for i in range(count)]


def common(a, b):
    pairs = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False))
    return sum(1 for _ in pairs)


@given(ids)
def test_runs_give_the_ids_back_and_are_as_long_as_can_be(block_ids):
    runs = to_runs(block_ids)
    assert expand(runs) == block_ids
    assert all(a[0] + a[1] != b[0] for a, b in itertools.pairwise(runs))
    assert all(count >= 1 for _, count in runs)
    assert list(BlockPrompt("", 1, runs, 1).block_ids()) == block_ids


@given(ids, st.integers(0, 15))
def test_cut_runs_keep_the_first_ids(block_ids, blocks):
    assert expand(cut_runs(to_runs(block_ids), blocks)) == block_ids[:blocks]


@given(ids, ids)
def test_common_blocks_are_those_of_the_ids_however_the_runs_are_split(a, b):
    singles = tuple((each, 1) for each in b)
    assert common_blocks(to_runs(a), to_runs(b)) == common(a, b)
    assert common_blocks(to_runs(a), singles) == common(a, b)


def blocks(*block_ids, tokens=None, scope="", size=4):
    return BlockPrompt(scope, size, to_runs(block_ids), tokens or len(block_ids) * size)


def session(name, *prompts, output_tokens=3, **more):
    return Session(name, tuple(Turn(prompt, output_tokens) for prompt in prompts), **more)


def test_lengths_of_appended_prompts_have_the_answers_in_them():
    turns = session("a", AppendPrompt(10), AppendPrompt(5), blocks(1, 2), AppendPrompt(2))
    assert context_tokens(turns) == (10, 18, 8, 13)
    assert reused_tokens(Trace("t", "trajectories", (turns,))) == ((0, 13, 0, 11),)


def test_a_synthetic_first_round_is_in_all_prompts():
    """Its one generated token is part of the conversation, but not of recorded prompts."""
    copy = {"first_round_tokens": 64, "copy": 1}
    appended = session("a", AppendPrompt(10), AppendPrompt(5), **copy)
    recorded = session("b", blocks(1), TextPrompt("x" * 9), **copy)
    assert context_tokens(appended) == (64 + 1 + 10, 75 + 3 + 5)
    assert context_tokens(recorded) == (64 + 4, 64 + 3)
    trace = Trace("t", "mooncake", (appended, recorded))
    assert reused_tokens(trace) == ((65, 78), (64, 64))


def test_blocks_are_found_in_their_scope_only():
    trace = Trace(
        "t",
        "coding-agent",
        (
            session("a", blocks(1, 2, 3), blocks(1, 2, 9)),
            session("b", blocks(1, 2, 9, 8), blocks(2, 1)),
            session("c", blocks(1, 2, scope="c"), blocks(1, size=8)),
            session("d", blocks(1, 2), first_round_tokens=7, copy=1),
        ),
    )
    assert reused_tokens(trace) == ((0, 8), (12, 0), (0, 0), (7,))


def test_a_block_that_was_cut_short_is_found_as_far_as_it_went():
    trace = Trace(
        "t",
        "mooncake",
        (session("a", blocks(1, 2, tokens=6), blocks(1, 2, 3), blocks(1, 2, 3, tokens=9)),),
    )
    assert reused_tokens(trace) == ((0, 6, 9),)


def test_tokens_beyond_the_ids_are_the_turns_own():
    trace = Trace("t", "mooncake", (session("a", blocks(1, tokens=7), blocks(1, tokens=7)),))
    assert context_tokens(trace.sessions[0]) == (7, 7)
    assert reused_tokens(trace) == ((0, 4),)


def test_text_is_compared_with_the_turn_before():
    trace = Trace(
        "t", "full-text", (session("a", *map(TextPrompt, ("abcdefgh", "abcdefghij", "x"))),)
    )
    assert context_tokens(trace.sessions[0]) == (2, 3, 1)
    assert reused_tokens(trace) == ((0, 2, 0),)


def tokens_of(prompt):
    """The prompt's tokens, told apart as the trace does; its own ones are like no other."""
    size, known = prompt.block_tokens, []
    for block in prompt.block_ids():
        known += [(block, i) for i in range(size)]
    known = known[: prompt.tokens]
    return known + [object() for _ in range(prompt.tokens - len(known))]


prompts = st.builds(
    lambda block_ids, tokens: blocks(*block_ids, tokens=tokens), ids, st.integers(1, 40)
)


@given(st.lists(st.lists(prompts, min_size=1, max_size=4), min_size=1, max_size=4))
def test_what_is_reused_is_the_longest_common_start_of_any_prompt_before(sessions):
    trace = Trace("t", "mooncake", tuple(session(str(i), *each) for i, each in enumerate(sessions)))
    seen, expected = [], []
    for each in sessions:
        found = []
        for prompt in each:
            tokens = tokens_of(prompt)
            found.append(max((common(tokens, before) for before in seen), default=0))
            seen.append(tokens)
        expected.append(tuple(found))
    assert reused_tokens(trace) == tuple(expected)


def test_a_trace_in_figures():
    trace = Trace(
        "t",
        "trajectories",
        (
            session("a", AppendPrompt(10), AppendPrompt(5), output_tokens=2),
            session("b", AppendPrompt(7), output_tokens=4),
        ),
    )
    figures = statistics(trace)
    assert (figures.sessions, figures.turns, figures.turns_per_session) == (2, 3, 1.5)
    assert figures.append_tokens == pytest.approx(22 / 3)
    assert figures.gen_tokens == pytest.approx(8 / 3)
    assert figures.context_tokens == pytest.approx((10 + 17 + 7) / 3)
    assert figures.session_append_tokens == (7.5 + 7) / 2
    assert figures.session_gen_tokens == 3
    assert figures.session_context_tokens == (13.5 + 7) / 2
    assert figures.total_tokens == (19 + 11) / 2
    assert figures.hit_rate == pytest.approx(12 / 34)


def test_an_empty_trace_has_no_figures():
    with pytest.raises(ConfigError, match="t has no sessions"):
        statistics(Trace("t", "mooncake", ()))
