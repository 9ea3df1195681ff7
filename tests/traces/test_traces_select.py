"""Choosing sessions, cutting them to a window, and when they arrive."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dualpath.base.errors import ConfigError
from dualpath.traces import (
    AppendPrompt,
    Session,
    Trace,
    Turn,
    by_start,
    context_tokens,
    limit_context,
    poisson,
    recorded,
    scale_time,
    take_sessions,
    without_delays,
)

turns = st.builds(
    Turn, st.builds(AppendPrompt, st.integers(1, 50)), st.integers(1, 20), st.floats(0, 9)
)


@st.composite
def traces(draw):
    listed = draw(st.lists(st.lists(turns, min_size=1, max_size=5), min_size=1, max_size=5))
    sessions = (Session(str(i), tuple(each), float(i)) for i, each in enumerate(listed))
    return Trace("t", "trajectories", tuple(sessions))


def trace_of(*starts_s):
    turn = Turn(AppendPrompt(10), 5, 2.0)
    return Trace("t", "x", tuple(Session(f"s{i}", (turn,), at) for i, at in enumerate(starts_s)))


@given(traces(), st.integers(1, 150))
def test_no_turn_is_kept_that_does_not_fit_and_none_dropped_that_does(trace, limit):
    def fitting(session):
        lengths = zip(context_tokens(session), session.turns, strict=True)
        return [prompt + turn.output_tokens <= limit for prompt, turn in lengths]

    expected = [each.turns[: sum(fitting(each))] for each in trace.sessions]
    if not any(expected):
        with pytest.raises(ConfigError, match=f"fits into {limit} tokens"):
            limit_context(trace, limit)
        return
    limited = limit_context(trace, limit)
    # Appended prompts only grow, so what fits is at the start.
    assert [each.turns for each in limited.trace.sessions] == [each for each in expected if each]
    assert limited.trace.turns + limited.dropped_turns == trace.turns
    assert len(limited.trace.sessions) + limited.dropped_sessions == len(trace.sessions)


def test_all_after_a_turn_that_is_too_long_goes_too():
    """Later prompts hold what it would have added."""
    long, short = Turn(AppendPrompt(90), 20), Turn(AppendPrompt(10), 1)
    session = Session("a", (short, long, short))
    limited = limit_context(Trace("t", "x", (session,)), 100)
    assert limited.trace.sessions == (Session("a", (short,)),)
    assert (limited.dropped_turns, limited.dropped_sessions) == (2, 0)


@given(traces(), st.integers(1, 30), st.none() | st.integers(0, 3))
def test_as_many_sessions_as_asked_for_no_two_alike(trace, count, seed):
    taken = take_sessions(trace, count, seed=seed, first_round_tokens=9)
    assert taken == take_sessions(trace, count, seed=seed, first_round_tokens=9)
    assert len(taken.sessions) == count
    assert len({each.id for each in taken.sessions}) == count
    of = {each.turns: each for each in trace.sessions}
    size = len(trace.sessions)
    for i, each in enumerate(taken.sessions):
        assert each.turns in of
        assert each.copy == i // size
        assert each.first_round_tokens == (9 if each.copy else 0)
    # Every round has every session once.
    for first in range(0, count - size + 1, size):
        numbers = sorted(each.id.split()[0] for each in taken.sessions[first : first + size])
        assert numbers == sorted(each.id for each in trace.sessions)


def test_without_a_seed_sessions_are_in_order_and_with_one_not():
    trace = trace_of(*range(20))
    assert take_sessions(trace, 5).sessions == trace.sessions[:5]
    shuffled = take_sessions(trace, 20, seed=1).sessions
    assert shuffled != trace.sessions
    assert set(shuffled) == set(trace.sessions)
    assert shuffled != take_sessions(trace, 20, seed=2).sessions


def test_copies_start_when_the_trace_comes_round_again():
    assert [each.start_s for each in take_sessions(trace_of(0.0, 4.0, 6.0), 8).sessions] == [
        *(0.0, 4.0, 6.0),
        *(9.0, 13.0, 15.0),
        *(18.0, 22.0),
    ]
    assert take_sessions(trace_of(None), 2).sessions[1].start_s is None


@pytest.mark.parametrize(("count", "first_round_tokens"), [(0, 1), (1, 0)])
def test_there_is_something_to_take(count, first_round_tokens):
    with pytest.raises(ConfigError, match="expected >= 1"):
        take_sessions(trace_of(0.0), count, first_round_tokens=first_round_tokens)


def test_speed_divides_starts_and_delays():
    turn = Turn(AppendPrompt(10), 5, 0.5)
    assert scale_time(trace_of(0.0, 6.0, None), 4).sessions == (
        Session("s0", (turn,), 0.0),
        Session("s1", (turn,), 1.5),
        Session("s2", (turn,), None),
    )


@pytest.mark.parametrize("speed", [0, -1, float("nan"), float("inf")])
def test_a_speed_is_positive(speed):
    with pytest.raises(ConfigError, match="speed: expected a number > 0"):
        scale_time(trace_of(0.0), speed)


def test_delays_can_be_left_out():
    session = without_delays(trace_of(3.0)).sessions[0]
    assert session == replace(trace_of(3.0).sessions[0], turns=(Turn(AppendPrompt(10), 5, 0.0),))


def test_poisson_arrivals_have_the_rate_and_come_at_random():
    times = list(islice(poisson(4.0, seed=5), 20_000))
    gaps = [b - a for a, b in pairwise([0.0, *times])]
    mean = sum(gaps) / len(gaps)
    assert mean == pytest.approx(0.25, rel=0.03)
    # Exponential gaps: their deviation is their mean, and 1 - 1/e of them are shorter than it.
    assert sum((gap - mean) ** 2 for gap in gaps) / len(gaps) == pytest.approx(mean**2, rel=0.06)
    assert sum(gap < mean for gap in gaps) / len(gaps) == pytest.approx(0.632, abs=0.02)
    assert min(gaps) >= 0
    assert times[:9] == list(islice(poisson(4.0, seed=5), 9))
    assert times[:9] != list(islice(poisson(4.0, seed=6), 9))


def test_recorded_arrivals_go_on_without_end():
    assert list(islice(recorded([5.0, 6.0, 11.0]), 7)) == [0, 1, 6, 9, 10, 15, 18]


@given(
    st.lists(st.floats(0, 1e4), min_size=2, max_size=20).filter(lambda t: max(t) - min(t) > 0.1),
    st.floats(0.01, 100),
)
def test_stretched_arrivals_have_the_rate_and_never_go_back(times, rate):
    count = 10 * len(times)
    *arrivals, end = islice(recorded(sorted(times), rate), count + 1)
    assert count / end == pytest.approx(rate)
    assert all(b >= a - 1e-9 for a, b in pairwise(arrivals))


def test_a_burst_stays_a_burst():
    assert list(islice(recorded([0.0, 1.0, 1.0, 6.0], rate_aps=1.0), 4)) == [0, 0.5, 0.5, 3]


@pytest.mark.parametrize("times", [(), (1.0,), (2.0, 2.0)])
def test_a_rate_needs_two_arrivals(times):
    with pytest.raises(ConfigError, match="at least two at different times"):
        recorded(times)


@pytest.mark.parametrize("rate", [0.0, -2.0, float("nan"), float("inf")])
def test_a_rate_is_positive(rate):
    with pytest.raises(ConfigError, match="rate: expected a number > 0"):
        poisson(rate, seed=0)
    with pytest.raises(ConfigError, match="rate: expected a number > 0"):
        recorded([0.0, 1.0], rate)


def test_sessions_by_their_start():
    sessions = by_start(trace_of(4.0, 0.0, 4.0, 1.0)).sessions
    assert [each.id for each in sessions] == ["s1", "s3", "s0", "s2"]
    with pytest.raises(ConfigError, match="t does not tell when session s1 starts"):
        by_start(trace_of(4.0, None))


def test_copies_end_where_their_first_round_makes_them_too_long():
    fits = Session("a", (Turn(AppendPrompt(80), 10), Turn(AppendPrompt(5), 5)))
    first_turn_only = Session("b", (Turn(AppendPrompt(50), 5), Turn(AppendPrompt(40), 5)))
    neither = Session("c", (Turn(AppendPrompt(95), 5),))
    trace = Trace("t", "trajectories", (fits, first_turn_only, neither))
    # A first round adds its tokens and the one that it generates.
    taken = take_sessions(trace, 7, first_round_tokens=9, max_context=100)
    assert [(each.id, len(each.turns)) for each in taken.sessions] == [
        ("a", 2),
        ("b", 2),
        ("c", 1),
        ("a copy 1", 1),
        ("b copy 1", 1),
        ("a copy 2", 1),
        ("b copy 2", 1),
    ]
    with pytest.raises(ConfigError, match="no session fits into 100 tokens"):
        take_sessions(replace(trace, sessions=(neither,)), 2, max_context=100)
    assert len(take_sessions(replace(trace, sessions=(neither,)), 1, max_context=100).sessions) == 1
