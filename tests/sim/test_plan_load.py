from __future__ import annotations

from itertools import takewhile

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from plan_kit import small_trace

from dualpath.sim.plan.load import (
    Sessions,
    grid_rate,
    highest_rate,
    nearest_step,
    steady_horizon_s,
)
from dualpath.sim.workload import online
from dualpath.traces import poisson


@given(st.integers(-160, 240), st.integers(-160, 240))
def test_the_highest_rate_that_holds_is_found_and_no_rate_tried_twice(first, highest):
    tried = []

    def holds(step):
        tried.append(step)
        return step <= highest

    assert highest_rate(first, holds) == highest
    assert len(tried) == len(set(tried))
    assert len(tried) <= 2 + abs(first - highest) / 12 + 5


def test_no_rate_holds():
    assert highest_rate(0, lambda step: False) is None


def test_the_grid_is_one_of_rates_that_are_easy_to_say():
    assert [grid_rate(step) for step in (-40, 0, 1, 12, 40)] == [0.1, 1.0, 1.06, 2.0, 10.0]
    assert all(nearest_step(grid_rate(step)) == step for step in range(-80, 80))


@pytest.mark.parametrize("rate_aps", [0.5, 3.0])
def test_agents_play_what_those_of_an_online_workload_do(rate_aps):
    trace, horizon_s = small_trace(), 8.0
    expected = online(trace, poisson(rate_aps, 7), horizon_s=horizon_s)
    times_s = takewhile(lambda at_s: at_s < horizon_s, poisson(rate_aps, 7))
    work = Sessions.of(trace).starting(np.fromiter(times_s, np.float64))
    assert work.agents == expected.agents
    assert np.array_equal(work.start_s, expected.start_s)
    assert np.array_equal(work.first_round_tokens, expected.first_round_tokens)
    for agent in range(work.agents):
        first, last = (
            [
                each.prompt_tokens[slice(*each.first_turn[each.trajectory[agent] :][:2])]
                for each in pair
            ]
            for pair in ((work,), (expected,))
        )
        assert np.array_equal(first, last)


def test_a_horizon_is_some_sessions_at_their_limits():
    work = Sessions.of(small_trace(turns=5)).work
    assert steady_horizon_s(work, {"ttft": 2.0}) == pytest.approx(2.25 * 5 * (2.0 + 20 * 0.05))
    assert steady_horizon_s(work, {}) == pytest.approx(2.25 * 5 * (4.0 + 20 * 0.05))
