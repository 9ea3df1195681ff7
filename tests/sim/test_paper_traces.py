"""Chosen sessions against the paper's table of traces."""

from __future__ import annotations

from dataclasses import astuple

import pytest

from dualpath.base.errors import ConfigError
from dualpath.sim.paper_traces import PAPER_TRACES, WITHIN, TraceMeans, matched, paper_trace
from dualpath.traces import AppendPrompt, Session, Trace, Turn, statistics
from dualpath.traces.generated import generate


def means_of(trace):
    """As `dualpath.traces` counts them."""
    figures = statistics(trace)
    return (
        figures.turns_per_session,
        figures.session_append_tokens,
        figures.session_gen_tokens,
        figures.total_tokens,
        figures.session_context_tokens,
    )


@pytest.mark.parametrize(
    ("length", "count", "seed"),
    [(length, 150, seed) for length in PAPER_TRACES for seed in (0, 1)] + [("64k", 500, 0)],
)
def test_all_five_means_are_the_papers(length, count, seed):
    trace = paper_trace(length, count, seed)
    assert len(trace.sessions) == count
    assert means_of(trace) == pytest.approx(astuple(PAPER_TRACES[length]), rel=WITHIN)


def test_the_seed_decides():
    assert paper_trace("32k", 40, 5) == paper_trace("32k", 40, 5)
    assert paper_trace("32k", 40, 5).sessions != paper_trace("32k", 40, 6).sessions


def test_sessions_are_the_generators_unchanged_and_in_order():
    pool = Trace("pool", "generated", generate(16_384, 200, 3))
    turns, append, *others = means_of(pool)
    means = TraceMeans(1.04 * turns, 0.95 * append, *others)
    found = matched(pool, means, 50, seed=3)
    assert (found.name, found.format) == (pool.name, pool.format)
    places = [pool.sessions.index(each) for each in found.sessions]
    assert places == sorted(set(places)) and len(places) == 50
    assert means_of(found) == pytest.approx(astuple(means), rel=WITHIN)


def test_all_sessions_are_chosen_when_all_are_wanted():
    pool = Trace("pool", "generated", generate(4096, 9, 0))
    assert matched(pool, TraceMeans(*means_of(pool)), 9) == pool


def test_means_that_no_sessions_have_are_an_error():
    turns = (Turn(AppendPrompt(100), 10), Turn(AppendPrompt(50), 10))
    pool = Trace("pool", "trajectories", tuple(Session(str(i), turns) for i in range(8)))
    means = TraceMeans(2, 75, 10, 170, 130)
    assert len(matched(pool, means, 4).sessions) == 4
    with pytest.raises(ConfigError, match=r"pool: found no 4 sessions .* one is 25.00% off"):
        matched(pool, TraceMeans(2, 100, 10, 170, 130), 4)


def test_what_is_asked_for_has_to_be_there():
    with pytest.raises(ConfigError, match="expected one of 32k, 48k, 64k, got '16k'"):
        paper_trace("16k")
    pool = Trace("pool", "generated", generate(4096, 3, 0))
    for count in (0, 4):
        with pytest.raises(ConfigError, match=f"expected 1 to 3 of pool, got {count}"):
            matched(pool, PAPER_TRACES["32k"], count)
