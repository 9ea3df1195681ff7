"""Every trace of the package loads, with as many sessions and turns as it has lines and requests."""

from __future__ import annotations

from importlib import resources

import pytest

from dualpath.traces import (
    BUILT_IN,
    BlockPrompt,
    TextPrompt,
    limit_context,
    open_trace,
    statistics,
)


@pytest.mark.parametrize(
    ("name", "trace_format", "sessions", "turns"),
    [
        ("coding-agent", "coding-agent", 62, 3_771 + 110),
        ("paper-like-64k", "trajectories", 211, 23_794),
        ("mooncake-conversation", "mooncake", 2_000, 2_000),
        ("mooncake-synthetic", "mooncake", 1_500, 1_500),
        ("azure-conversation", "azure", 5_000, 5_000),
        ("miniswe", "full-text", 3, 73),
        ("smoke", "trajectories", 6, 21),
    ],
)
def test_it_loads_whole(name, trace_format, sessions, turns):
    trace = open_trace(name)
    assert (trace.name, trace.format) == (name, trace_format)
    assert (len(trace.sessions), trace.turns) == (sessions, turns)
    assert len({session.id for session in trace.sessions}) == sessions
    assert min(turn.output_tokens for each in trace.sessions for turn in each.turns) >= 1
    assert min(turn.delay_s for each in trace.sessions for turn in each.turns) >= 0
    starts = [session.start_s for session in trace.sessions]
    assert min(starts) == 0 if None not in starts else starts == [None] * sessions


def test_no_other_trace_is_there():
    assert len(BUILT_IN) == 7


@pytest.mark.parametrize("name", BUILT_IN)
def test_its_source_and_licence_are_beside_it(name):
    directory = BUILT_IN[name].path.split("/")[0]
    text = (resources.files("dualpath.traces") / "data" / directory / "ATTRIBUTION").read_text()
    assert "icence" in text
    assert "https://" in text or name == "smoke"


def test_what_the_paper_like_trace_is_like():
    """Turns, append, gen and total as its authors count them; contexts of the turns that are played."""
    figures = statistics(open_trace("paper-like-64k"))
    assert round(figures.turns_per_session) == 113
    assert round(figures.session_append_tokens) == 396
    assert round(figures.session_gen_tokens) == 172
    assert figures.total_tokens == pytest.approx(57_008, rel=1e-4)
    assert figures.session_context_tokens == pytest.approx(31_716, rel=1e-4)
    assert figures.hit_rate > 0.98


def test_a_coding_agent_goes_on_where_it_was():
    """Most of a prompt is what the one before had, by the ids of the trace."""
    trace = open_trace("coding-agent")
    assert all(isinstance(t.prompt, BlockPrompt) for s in trace.sessions for t in s.turns)
    assert {t.prompt.scope for t in trace.sessions[0].turns} == {trace.sessions[0].id}
    assert 0.95 < statistics(trace).hit_rate < 0.98


def test_full_text_sessions_are_as_recorded():
    sessions = open_trace("miniswe").sessions
    assert [(each.id[:8], len(each.turns)) for each in sessions] == [
        ("0d858f59", 30),
        ("2e9e99a5", 13),
        ("6f1a88fc", 30),
    ]
    texts = [[turn.prompt.text for turn in each.turns] for each in sessions]
    assert all(text.startswith("<pr_description>") for each in texts for text in each)
    assert [sum(map(len, each)) for each in texts] == [490_432, 121_726, 679_922]
    assert all(isinstance(turn.prompt, TextPrompt) for each in sessions for turn in each.turns)


def test_a_smoke_run_is_small():
    trace = open_trace("smoke")
    assert limit_context(trace, 1024).dropped_turns == 0
    turns = [turn for each in trace.sessions for turn in each.turns]
    assert max(turn.delay_s for turn in turns) <= 0.2
    assert {4 <= turn.output_tokens <= 12 for turn in turns} == {True}
