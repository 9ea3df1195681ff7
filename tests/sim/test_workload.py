"""Workloads against hand-computed lengths, and against what the traces say of their sessions."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dualpath.base.errors import ConfigError
from dualpath.sim.workload import Workload, offline, online, scaled
from dualpath.traces import (
    FIRST_ROUND_TOKENS,
    AppendPrompt,
    BlockPrompt,
    Session,
    TextPrompt,
    Trace,
    Turn,
    context_tokens,
    open_trace,
    poisson,
    recorded,
    reused_tokens,
    take_sessions,
)


def appended(*turns):
    """Of (append, output) each; a delay of 1.5 s before every turn."""
    return tuple(Turn(AppendPrompt(append), output, 1.5) for append, output in turns)


def trace_of(*sessions):
    return Trace("t", "trajectories", sessions)


TWO = trace_of(Session("a", appended((10, 3), (5, 2))), Session("b", appended((7, 4))))


def blocks(*ids, size=4, scope=""):
    return BlockPrompt(scope, size, tuple((each, 1) for each in ids), len(ids) * size)


def lengths(work, agent):
    """What an agent asks for, its first round left out: prompts, what is reused of them, outputs."""
    turns = slice(*work.first_turn[work.trajectory[agent] :][:2])
    own = work.first_round_tokens[agent]
    return (
        tuple((work.prompt_tokens[turns] + own).tolist()),
        tuple((work.reused_tokens[turns] + own).tolist()),
        tuple(work.output_tokens[turns].tolist()),
    )


def test_turns_lie_after_each_other():
    work = offline(TWO, 2)
    assert work.prompt_tokens.tolist() == [10, 10 + 3 + 5, 7]
    assert work.reused_tokens.tolist() == [0, 13, 0]
    assert work.output_tokens.tolist() == [3, 2, 4]
    assert work.delay_s.tolist() == [0, 1.5, 0]
    assert work.first_turn.tolist() == [0, 2, 3]
    assert work.trajectory.tolist() == [0, 1]
    assert work.first_round_tokens.tolist() == [0, 0]
    assert work.start_s.tolist() == [0, 0]
    assert (work.agents, work.requests) == (2, 3)


def test_arrays_are_as_a_compiled_kernel_wants_them():
    work = offline(TWO, 5)
    dtypes = {name: getattr(work, name).dtype.str[1:] for name in Workload.__slots__}
    assert dtypes == {
        "prompt_tokens": "i4",
        "reused_tokens": "i4",
        "output_tokens": "i4",
        "delay_s": "f8",
        "first_turn": "i8",
        "trajectory": "i4",
        "first_round_tokens": "i4",
        "start_s": "f8",
    }
    assert all(getattr(work, name).flags.c_contiguous for name in dtypes)


def test_fewer_agents_than_sessions_play_the_first_ones():
    work = offline(TWO, 1)
    assert work.first_turn.tolist() == [0, 2]
    assert (work.agents, work.requests) == (1, 2)


def test_more_agents_play_copies_behind_a_first_round():
    """Its generated token is in what an appended turn goes on with."""
    work = offline(TWO, 7)
    assert work.trajectory.tolist() == [0, 1, 2, 3, 2, 3, 2]
    assert work.first_round_tokens.tolist() == [0, 0] + [FIRST_ROUND_TOKENS] * 5
    assert lengths(work, 0) == ((10, 18), (0, 13), (3, 2))
    assert lengths(work, 2) == lengths(work, 6) == ((64 + 1 + 10, 83), (65, 78), (3, 2))
    assert lengths(work, 5) == ((72,), (65,), (4,))
    assert work.requests == 2 + 1 + 3 * (1 + 2) + 2 * (1 + 1)


def test_what_sessions_share_is_reused_by_later_ones_but_not_by_copies():
    sessions = [
        Session(name, tuple(Turn(blocks(*ids), 2) for ids in turns))
        for name, turns in {"a": [(1, 2), (1, 2, 3)], "b": [(1, 2, 3, 9)], "c": [(4,)]}.items()
    ]
    work = offline(trace_of(*sessions), 6)
    assert [lengths(work, each)[1] for each in range(3)] == [(0, 8), (12,), (0,)]
    assert [lengths(work, each)[1] for each in range(3, 6)] == [(64, 72), (64,), (64,)]
    assert lengths(work, 4)[0] == (64 + 16,)


def test_text_is_counted_at_four_characters_a_token():
    texts = ("x" * 40, "x" * 40 + "y" * 9)
    work = offline(trace_of(Session("a", tuple(Turn(TextPrompt(each), 2) for each in texts))), 1)
    assert lengths(work, 0) == ((10, 13), (0, 10), (2, 2))


def agrees(trace, agents):
    """Every agent asks for what its session of the trace has."""
    work, taken = offline(trace, agents), take_sessions(trace, agents)
    assert work.requests == taken.turns + sum(1 for each in taken.sessions if each.copy)
    for agent, (session, reused) in enumerate(
        zip(taken.sessions, reused_tokens(taken), strict=True)
    ):
        outputs = tuple(turn.output_tokens for turn in session.turns)
        assert lengths(work, agent) == (context_tokens(session), reused, outputs)


@pytest.mark.parametrize(
    ("name", "sessions", "agents"),
    [
        ("generated:8k", 6, 20),
        ("paper-like-64k", 5, 12),
        ("coding-agent", 4, 9),
        ("mooncake-conversation", 300, 700),
        ("azure-conversation", 50, 120),
        ("miniswe", 2, 5),
        ("smoke", 6, 3),
    ],
)
def test_it_agrees_with_the_trace(name, sessions, agents):
    trace = open_trace(name, generated_sessions=sessions)
    agrees(replace(trace, sessions=trace.sessions[:sessions]), agents)


prompts = st.one_of(
    st.builds(AppendPrompt, st.integers(1, 30)),
    st.builds(
        lambda ids, scope: blocks(*ids, scope=scope),
        st.lists(st.integers(0, 3), min_size=1, max_size=5),
        st.sampled_from(["", "s"]),
    ),
)
turns = st.lists(st.builds(Turn, prompts, st.integers(1, 9), st.just(0.5)), min_size=1, max_size=5)


@given(st.lists(turns, min_size=1, max_size=4), st.integers(1, 13))
def test_any_trace_agrees_and_keeps_the_invariants(sessions, agents):
    trace = trace_of(*(Session(str(i), tuple(each)) for i, each in enumerate(sessions)))
    agrees(trace, agents)
    work = offline(trace, agents)
    assert work.first_turn[0] == 0 and work.first_turn[-1] == len(work.prompt_tokens)
    assert (np.diff(work.first_turn) >= 1).all()
    assert (work.reused_tokens >= 0).all() and (work.reused_tokens <= work.prompt_tokens).all()
    assert not work.delay_s[work.first_turn[:-1]].any()
    assert work.trajectory.max() < len(work.first_turn) - 1


def test_agents_arrive_in_a_number_and_before_a_horizon():
    times_s = list(islice(poisson(2.0, seed=3), 200))
    assert online(TWO, poisson(2.0, seed=3), agents=5).start_s.tolist() == times_s[:5]
    work = online(TWO, poisson(2.0, seed=3), horizon_s=10.0)
    assert work.start_s.tolist() == [each for each in times_s if each < 10]
    assert work.trajectory.tolist()[:4] == [0, 1, 2, 3]
    both = online(TWO, poisson(2.0, seed=3), horizon_s=10.0, agents=7)
    assert both.start_s.tolist() == times_s[:7]


def test_recorded_arrivals_stretch_to_a_rate_and_repeat():
    work = online(TWO, recorded([5.0, 6.0, 9.0], rate_aps=1.0), agents=5)
    assert work.start_s.tolist() == [0, 0.5, 2, 3, 3.5]


def test_agents_of_a_trace_can_start_as_recorded():
    trace = open_trace("mooncake-conversation")
    starts_s = [each.start_s for each in trace.sessions]
    work = online(trace, recorded(starts_s), horizon_s=60.0)
    assert work.start_s.tolist() == [each for each in starts_s if each < 60]
    assert 10 < work.agents < len(trace.sessions)


def test_longer_appends_and_outputs_end_earlier():
    trace = trace_of(
        Session("a", appended((10, 3), (5, 2), (1, 1))), Session("b", appended((9, 9)))
    )
    assert scaled(trace, max_tokens=100) == trace
    longer = scaled(trace, max_tokens=40, append=2.0, output=1.5)
    first, second = longer.sessions
    # 20 + 4, 24 + 10 + 3, then 37 + 2 + 2 > 40.
    assert first.turns == appended((20, 4), (10, 3))
    assert second.turns == appended((18, 14))
    assert scaled(trace, max_tokens=40, append=0.01).sessions[0].turns[0].prompt == AppendPrompt(1)


def test_a_session_whose_first_turn_gets_too_long_is_left_out():
    assert [each.id for each in scaled(TWO, max_tokens=32, append=4.0).sessions] == ["b"]
    with pytest.raises(ConfigError, match="fits into 20 tokens"):
        scaled(TWO, max_tokens=20, append=4.0)


def test_only_appends_can_be_scaled():
    trace = trace_of(Session("a", (Turn(blocks(1), 2),)))
    with pytest.raises(ConfigError, match="session 'a': only appended prompts can be scaled"):
        scaled(trace, max_tokens=100, append=2.0)


@pytest.mark.parametrize("factor", [0.0, -1.0, float("nan"), float("inf")])
def test_scales_are_numbers_above_zero(factor):
    with pytest.raises(ConfigError, match="scale: expected numbers > 0"):
        scaled(TWO, max_tokens=100, output=factor)


def test_what_cannot_be_a_workload_is_an_error():
    with pytest.raises(ConfigError, match="agents: expected a whole number >= 1, got 0"):
        offline(TWO, 0)
    with pytest.raises(ConfigError, match="got -1"):
        online(TWO, [1.0], agents=-1)
    with pytest.raises(ConfigError, match="a number of agents or a horizon, got neither"):
        online(TWO, [1.0])
    with pytest.raises(ConfigError, match="no agent arrives"):
        online(TWO, [1.0], horizon_s=0.5)
    with pytest.raises(ConfigError, match="t has no sessions"):
        offline(trace_of(), 1)
    long = trace_of(Session("a", appended(*[(2**27, 1)] * 16)))
    with pytest.raises(ConfigError, match="2147483664 tokens is too long"):
        offline(long, 1)
