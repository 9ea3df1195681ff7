"""The generator against the paper's table of traces."""

from __future__ import annotations

import pytest

from dualpath.base.errors import ConfigError
from dualpath.traces import AppendPrompt, context_tokens, open_trace, statistics

# Paper, table of traces: turns, append, gen, total, mean context; append and gen are means of the
# trajectories' means.
TABLE = {
    "32k": (60, 608, 148, 28_639, 17_183),
    "48k": (106, 474, 172, 42_607, 25_120),
    "64k": (157, 429, 176, 55_958, 32_721),
}
WITHIN = 0.104


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("length", TABLE)
def test_500_trajectories_are_like_the_papers(length, seed):
    figures = statistics(open_trace(f"generated:{length}", seed=seed))
    assert figures.sessions == 500
    assert (
        figures.turns_per_session,
        figures.session_append_tokens,
        figures.session_gen_tokens,
        figures.total_tokens,
        figures.session_context_tokens,
    ) == pytest.approx(TABLE[length], rel=WITHIN)


def test_the_hit_rate_is_the_papers():
    figures = statistics(open_trace("generated:64k"))
    assert 1 - figures.session_append_tokens / figures.session_context_tokens == pytest.approx(
        0.987, abs=0.002
    )


@pytest.mark.parametrize("length", ["1024", "2k", "20000"])
def test_no_trajectory_is_longer_than_it_may_be_or_without_turns(length):
    limit = {"1024": 1024, "2k": 2048, "20000": 20_000}[length]
    for session in open_trace(f"generated:{length}", generated_sessions=60).sessions:
        assert context_tokens(session)[-1] + session.turns[-1].output_tokens <= limit
        assert all(
            turn.output_tokens >= 1 and turn.prompt.tokens >= 1 and turn.delay_s == 0
            for turn in session.turns
        )


def test_the_seed_decides():
    def generate(seed):
        return open_trace("generated:8k", generated_sessions=5, seed=seed)

    assert generate(3) == generate(3)
    assert generate(3).sessions != generate(4).sessions
    assert generate(3).format == "generated"


def test_the_same_from_machine_to_machine():
    """A result names length, number and seed; they have to give what they gave."""
    first = open_trace("generated:8k", generated_sessions=2, seed=1).sessions[0]
    turns = [(turn.prompt, turn.output_tokens) for turn in first.turns[:3]]
    assert turns == [(AppendPrompt(4096), 74), (AppendPrompt(669), 131), (AppendPrompt(420), 164)]


@pytest.mark.parametrize("length", ["", "k", "64kb", "1023", "-1", "64.5k", "9" * 12, "9" * 40])
def test_a_length_that_cannot_be_is_an_error(length):
    with pytest.raises(ConfigError, match="expected a length of 1024 to"):
        open_trace(f"generated:{length}")


def test_there_are_sessions_and_a_seed():
    with pytest.raises(ConfigError, match="got 0 and 0"):
        open_trace("generated:32k", generated_sessions=0)
    with pytest.raises(ConfigError, match="got 500 and -1"):
        open_trace("generated:32k", seed=-1)
