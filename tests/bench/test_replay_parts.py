"""The pure parts of the replay: steady state, search, objectives, gaps, loads, progress."""

from __future__ import annotations

import asyncio
import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from replay_kit import make_session

from dualpath.base.errors import ConfigError, InvariantViolation
from dualpath.bench.replay.campaign import (
    Acceptance,
    Arrivals,
    LoadMaker,
    find_max_rate,
    play_all,
)
from dualpath.bench.replay.gaps import GapHistogram
from dualpath.bench.replay.load import OnlineLoad, Tally
from dualpath.bench.replay.progress import remaining_s, show_progress, status_line
from dualpath.bench.replay.records import RequestRecord, Run, SessionRecord
from dualpath.bench.replay.search import RateSearch
from dualpath.bench.replay.server_metrics import label_value, used
from dualpath.bench.replay.slo import Slo, parse_slo
from dualpath.bench.replay.steady import SteadyRule, SteadyState, Verdict
from dualpath.testing import run_virtual
from dualpath.traces.model import Trace

# Steady state.

RULE = SteadyRule(window_s=10.0, min_requests=2, ttft_limit_s=4.0)


def feed(state, ttft_of, seconds, tpot_of=lambda at: 0.05, step=0.5):
    """Observations every `step` seconds; the verdict and when it fell."""
    for i in range(1, int(seconds / step) + 1):
        at = i * step
        verdict = state.look(at)
        if verdict is not Verdict.CONTINUE:
            return verdict, at
        state.observe(at, ttft_of(at), tpot_of(at))
    return Verdict.CONTINUE, None


def test_constant_latencies_are_steady_after_one_window():
    state = SteadyState(RULE)
    assert feed(state, lambda at: 1.0, 60) == (Verdict.STEADY, 10.0)
    assert state.from_s == 0.0


def test_the_halves_of_the_window_are_compared():
    # A step at 7 s. Until the step has left the first half, or is in the first half only, means differ.
    state = SteadyState(RULE)
    assert feed(state, lambda at: 1.0 if at < 7 else 2.0, 60) == (Verdict.STEADY, 17.0)
    assert state.from_s == 7.0


@pytest.mark.parametrize(
    ("second", "verdict"), [(1.0525, Verdict.STEADY), (1.054, Verdict.CONTINUE)]
)
def test_the_tolerance_is_of_the_larger_mean(second, verdict):
    state = SteadyState(RULE)
    for i in range(20):
        state.observe(i / 2, 1.0 if i < 10 else second, None)
    assert state.look(10.0) is verdict


def test_tpot_must_be_steady_too():
    state = SteadyState(RULE)
    verdict, at = feed(state, lambda at: 1.0, 60, tpot_of=lambda at: 0.05 * max(20 - at, 1))
    assert verdict is Verdict.STEADY
    assert at > 20
    assert feed(SteadyState(RULE), lambda at: 1.0, 60, tpot_of=lambda at: None)[1] == 10.0


def test_too_few_requests_are_not_steady():
    state = SteadyState(SteadyRule(window_s=10.0, min_requests=6))
    assert feed(state, lambda at: 1.0, 100, step=1.0) == (Verdict.CONTINUE, None)


def test_a_steady_window_need_not_end_the_run():
    state = SteadyState(SteadyRule(window_s=10.0, min_requests=2, steady_ends=False))
    assert feed(state, lambda at: 1.0, 100) == (Verdict.CONTINUE, None)


def test_a_mean_above_the_limit_is_overload():
    # TTFT grows by 0.4 s a second: its mean over the last 10 s exceeds 4 s once it is 4 + 2 s at their end.
    state = SteadyState(RULE)
    assert feed(state, lambda at: 0.4 * at, 60) == (Verdict.TTFT_LIMIT, 16.0)


def test_no_verdict_before_a_whole_window():
    state = SteadyState(RULE)
    state.observe(0.5, 100.0, None)
    assert state.look(9.9) is Verdict.CONTINUE
    assert state.look(10.0) is Verdict.TTFT_LIMIT


def test_a_server_that_answers_nothing_is_overloaded():
    assert SteadyState(RULE).look(10.0, [9.0, 5.0, 1.0]) is Verdict.TTFT_LIMIT
    assert SteadyState(RULE).look(10.0, [2.0, 1.0]) is Verdict.CONTINUE


def test_failures_end_a_run():
    state = SteadyState(RULE)
    for i in range(10):
        state.observe_failure(i + 0.25)
        state.observe(i + 0.5, 1.0, None)
    assert state.look(10.0) is Verdict.STEADY  # Half is not more than half.
    state = SteadyState(RULE)
    for i in range(10):
        state.observe_failure(i + 0.25)
    state.observe(9.5, 1.0, None)
    assert state.look(10.0) is Verdict.ERRORS


def test_a_verdict_stays():
    state = SteadyState(RULE)
    feed(state, lambda at: 1.0, 60)
    assert state.look(1000.0, [999.0]) is Verdict.STEADY


# Search.


def tried(search, highest):
    rates = []
    while (rate := search.next_rate()) is not None:
        rates.append(rate)
        search.observe(rate, rate <= highest)
    return rates


@given(
    start=st.floats(0.01, 100),
    ratio=st.floats(1 / 1000, 1000),
    precision=st.floats(0.01, 0.5),
)
def test_the_search_converges_to_its_precision(start, ratio, precision):
    highest = start * ratio
    search = RateSearch(start, precision)
    rates = tried(search, highest)
    assert search.best is not None
    assert search.best <= highest < search.best * (1 + precision) * (1 + 1e-9)
    assert search.bounded
    assert len(set(rates)) == len(rates) <= 25


def test_the_search_doubles_then_bisects():
    rates = tried(RateSearch(1.0, 0.05), 5.0)
    assert rates[:5] == [1.0, 2.0, 4.0, 8.0, pytest.approx(math.sqrt(32))]
    rates = tried(RateSearch(1.0, 0.05), 0.3)
    assert rates[:4] == [1.0, 0.5, 0.25, pytest.approx(math.sqrt(0.125))]


def test_a_ceiling_is_not_tried():
    rates = tried(RateSearch(1.0, 0.05, ceiling=1.5), math.inf)
    assert rates[:2] == [1.0, pytest.approx(math.sqrt(1.5))]
    assert max(rates) < 1.5
    search = RateSearch(1.0, 0.05, ceiling=1.5)
    assert search.next_rate() == 1.0
    tried(search, 1.2)
    assert search.bounded
    assert search.best <= 1.2 < search.best * 1.05
    search = RateSearch(1.0, 0.05, ceiling=1.5)
    tried(search, math.inf)
    assert not search.bounded
    assert tried(RateSearch(1.0, 0.05, ceiling=1.5), 0.6)[:2] == [1.0, 0.5]
    with pytest.raises(ValueError, match="ceiling is above the start"):
        RateSearch(1.0, ceiling=1.0)


def test_the_search_gives_up():
    search = RateSearch(1.0)
    assert len(tried(search, 0.0)) == 13
    assert (search.best, search.bounded) == (None, True)
    search = RateSearch(1.0)
    assert tried(search, math.inf)[-1] == 4096.0
    assert (search.best, search.bounded) == (4096.0, False)


def test_only_the_rate_asked_for_is_observed():
    with pytest.raises(InvariantViolation, match="was not asked for"):
        RateSearch(1.0).observe(3.0, True)


# Objectives.


def test_parse_slo():
    slo = parse_slo("ttft=4s, tpot=50ms,e2e=1.5s")
    assert dict(slo.limits_s) == {"ttft": 4.0, "tpot": 0.05, "e2e": 1.5}
    assert str(slo) == "ttft=4s,tpot=0.05s,e2e=1.5s"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "expected METRIC=TIME"),
        ("ttft", "expected METRIC=TIME"),
        ("ttft=4", "needs a unit, one of: s, ms"),
        ("ttft=4h", "needs a unit"),
        ("itl=4s", "unknown metric 'itl', allowed: ttft, ttst, tpot, e2e"),
        ("ttft=4s,ttft=5s", "given twice"),
        ("ttft=0s", "above 0"),
        ("ttft=1.2.3s", "no number"),
        ("ttft=-1s", "expected METRIC=TIME"),
        ("ttft=4s,", "expected METRIC=TIME"),
    ],
)
def test_bad_slo(text, words):
    with pytest.raises(ConfigError, match=words):
        parse_slo(text)


def request(**fields):
    fields = {"session": 0, "turn": 0, "scheduled_s": 0.0, "sent_s": 0.0} | fields
    return RequestRecord(**fields)


def answered(ttft_s, tpot_s, tokens=11, at_s=0.0, **fields):
    last_s = at_s + ttft_s + tpot_s * (tokens - 1)
    return request(
        scheduled_s=at_s,
        sent_s=at_s,
        first_s=at_s + ttft_s,
        second_s=at_s + ttft_s + tpot_s if tokens > 1 else None,
        last_s=last_s,
        end_s=last_s,
        output_tokens=tokens,
        **fields,
    )


def test_what_meets_an_objective():
    slo = parse_slo("ttft=4s,tpot=50ms")
    assert slo.met_by(answered(4.0, 0.05 - 1e-9))
    assert not slo.met_by(answered(4.1, 0.01))
    assert not slo.met_by(answered(1.0, 0.06))
    assert slo.met_by(answered(1.0, 0.0, tokens=1))  # It has no TPOT.
    assert not slo.met_by(answered(1.0, 0.01, error="timeout"))
    cut = request(first_s=1.0)
    assert not slo.met_by(cut) and not slo.missed_by(cut, 100.0)
    waiting = request()
    assert not slo.missed_by(waiting, 4.0) and slo.missed_by(waiting, 4.5)


# Gaps between tokens.


@given(
    st.lists(st.floats(2e-6, 9000.0), min_size=1, max_size=300),
    st.integers(1, 5),
)
def test_quantiles_of_gaps_are_within_one_percent(gaps, pieces):
    histogram = GapHistogram(1.0)
    for i in range(pieces):
        histogram.add(float(i), gaps[i::pieces])
    exact = np.percentile(gaps, range(101), method="lower")
    assert histogram.quantiles() == pytest.approx(list(exact), rel=0.01)


def test_gaps_of_nothing_and_of_tokens_that_came_together():
    histogram = GapHistogram(1.0)
    assert histogram.quantiles() == []
    histogram.add(0.0, [])
    assert histogram.quantiles() == []
    histogram.add(0.0, [0.0, 0.0, 0.0, 1.0])
    found = histogram.quantiles()
    assert found[:67] == [0.0] * 67
    assert found[100] == pytest.approx(1.0, rel=0.01)
    histogram.add(0.0, [1e9])  # Longer than any bin counts in the last.
    assert histogram.quantiles()[100] > 9000


def test_slices_before_a_time_are_left_out():
    histogram = GapHistogram(2.0)
    histogram.add(1.0, [5.0] * 10)
    histogram.add(2.0, [1.0])
    assert histogram.quantiles(2.0) == pytest.approx([1.0] * 101, rel=0.01)


# The server's metrics.


def test_labels_and_names():
    name = 'dualpath:kv_read_bytes_total{path="pe",x="1"}'
    assert label_value(name, "dualpath:kv_read_bytes_total", "path") == "pe"
    assert label_value(name, "dualpath:kv_read_bytes_total", "group") is None
    assert label_value(name, "dualpath:kv_read", "path") is None
    read = 'dualpath:snic_read_bytes_total{group="p0"}'
    assert used({read: 1.0, "dualpath:engines_up": 2.0, "vllm:prefix_cache_hits_total": 3.0}) == {
        read: 1.0,
        "vllm:prefix_cache_hits_total": 3.0,
    }


# Loads and campaigns.

TRACE = Trace(
    "t", "mooncake", tuple(make_session(f"s{i}", (10, 1, 0.0), start_s=2.0 * i) for i in range(4))
)


def test_offline_loads_repeat_the_trace_with_a_first_round():
    load = LoadMaker(trace=TRACE, first_round_tokens=7).offline(6)
    assert [(each.copy, each.first_round_tokens) for each in load.sessions] == [(0, 0)] * 4 + [
        (1, 7)
    ] * 2


def test_poisson_arrivals_at_two_rates_are_of_the_same_draws():
    maker = LoadMaker(trace=TRACE, arrivals=Arrivals(seed=3, max_sessions=50))
    slow, fast = maker.online(1.0), maker.online(4.0)
    assert len(slow.arrivals_s) == len(slow.sessions) == 50
    assert fast.arrivals_s == pytest.approx([each / 4 for each in slow.arrivals_s])
    assert (slow.rate_aps, fast.rate_aps) == (1.0, 4.0)
    limited = LoadMaker(trace=TRACE, arrivals=Arrivals(seed=3, duration_s=20.0)).online(1.0)
    *within, beyond = limited.arrivals_s
    assert within == list(itertools.takewhile(lambda at: at < 20, slow.arrivals_s))
    assert beyond == slow.arrivals_s[len(within)] >= 20


def test_arrivals_of_the_trace():
    own = LoadMaker(trace=TRACE, arrivals=Arrivals(kind="trace")).online(None)
    assert (list(own.arrivals_s), own.rate_aps) == ([0.0, 2.0, 4.0, 6.0], 0.5)
    scaled = LoadMaker(trace=TRACE, arrivals=Arrivals(kind="trace")).online(2.0)
    assert (list(scaled.arrivals_s), scaled.rate_aps) == ([0.0, 0.5, 1.0, 1.5], 2.0)
    more = LoadMaker(trace=TRACE, arrivals=Arrivals(kind="trace", max_sessions=6)).online(None)
    assert list(more.arrivals_s) == [0.0, 2.0, 4.0, 6.0, 8.0, 10.0]
    short = LoadMaker(trace=TRACE, arrivals=Arrivals(kind="trace", duration_s=5.0)).online(None)
    assert [each.id for each in short.sessions] == ["s0", "s1", "s2", "s3"]
    longer = LoadMaker(trace=TRACE, arrivals=Arrivals(kind="trace", duration_s=50.0)).online(None)
    assert longer.arrivals_s == own.arrivals_s


def test_recorded_arrivals():
    arrivals = Arrivals(kind="recorded", times_s=(0.0, 1.0, 4.0), max_sessions=5)
    load = LoadMaker(trace=TRACE, arrivals=arrivals).online(None)
    assert list(load.arrivals_s) == [0.0, 1.0, 4.0, 6.0, 7.0]


def test_poisson_needs_a_rate():
    with pytest.raises(ConfigError, match="--aps"):
        LoadMaker(trace=TRACE).online(None)


def run_of(rate, requests=(), **fields):
    fields = {"mode": "online", "rate_aps": rate, "duration_s": 100.0} | fields
    session = SessionRecord(id="s", turns=1, scheduled_s=0.0)
    return Run(requests=list(requests), sessions=[session], **fields)


ACCEPTANCE = Acceptance(slo=Slo({"ttft": 4.0, "tpot": 0.05}))


@pytest.mark.parametrize(
    ("run", "problem"),
    [
        (run_of(1.0, [answered(1.0, 0.01)]), ""),
        (run_of(1.0), "no request ended"),
        (run_of(1.0, [answered(1.0, 0.01)], ended="ttft limit"), "ended: ttft limit"),
        (run_of(1.0, [answered(1.0, 0.01)], ended="errors"), "ended: errors"),
        (
            run_of(1.0, [answered(1.0, 0.01)] * 3 + [request(error="timeout")]),
            "25.00% errors",
        ),
        (
            run_of(1.0, [answered(1.0, 0.01), answered(9.0, 0.01)]),
            "ttft mean 5 s exceeds 4 s",
        ),
        (run_of(1.0, [answered(1.0, 0.06)]), "tpot mean 0.06 s exceeds 0.05 s"),
        # Cut off after 99 s without a first token.
        (
            run_of(1.0, [answered(1.0, 0.01)] * 9 + [request(scheduled_s=1.0)]),
            "ttft mean is at least 10.8 s with those cut off",
        ),
    ],
)
def test_what_is_sustained(run, problem):
    assert ACCEPTANCE.problem(run) == problem


def test_sustained_by_a_percentile_and_with_some_errors():
    requests = [answered(1.0, 0.01)] * 19 + [answered(50.0, 0.01)]
    p90 = Acceptance(slo=ACCEPTANCE.slo, statistic="p90")
    p99 = Acceptance(slo=ACCEPTANCE.slo, statistic="p99")
    assert p90.problem(run_of(1.0, requests)) == ""
    assert p99.problem(run_of(1.0, requests)).startswith("ttft p99")
    lenient = Acceptance(slo=ACCEPTANCE.slo, max_error_rate=0.25)
    failing = [answered(1.0, 0.01)] * 3 + [request(error="timeout")]
    assert lenient.problem(run_of(1.0, failing)) == ""


def test_the_search_plays_each_rate_with_other_tokens_and_keeps_every_run():
    played = []

    async def play(load, number, title):
        assert isinstance(load, OnlineLoad)
        played.append(number)
        ttft_s = 1.0 if load.rate_aps <= 3.0 else 10.0
        return run_of(load.rate_aps, [answered(ttft_s, 0.01)])

    maker = LoadMaker(trace=TRACE, arrivals=Arrivals(max_sessions=10))
    found = run_virtual(find_max_rate(maker, RateSearch(1.0, 0.05), ACCEPTANCE, play))
    assert played == list(range(len(found.runs)))
    assert found.best_aps <= 3.0 < found.best_aps * 1.05
    assert list(found.problems) == [run.rate_aps for run in found.runs]
    assert found.problems[4.0] == "ttft mean 10 s exceeds 4 s"
    assert found.bounded


def test_an_interrupted_run_ends_search_and_sweep():
    async def play(load, number, title):
        return run_of(load.rate_aps, [answered(1.0, 0.01)], ended="interrupted")

    maker = LoadMaker(trace=TRACE, arrivals=Arrivals(max_sessions=10))
    found = run_virtual(find_max_rate(maker, RateSearch(1.0), ACCEPTANCE, play))
    assert (found.best_aps, len(found.runs), dict(found.problems)) == (None, 1, {})
    loads = {f"{rate}": maker.online(rate) for rate in (1.0, 2.0)}
    assert len(run_virtual(play_all(loads, play))) == 1


# Progress.


def test_status_line():
    tally = Tally(sessions=1200)
    assert status_line(tally, 0.0) == "0/1,200 agents, 0 requests, 0 in flight, no errors"
    tally = Tally(
        sessions=1200,
        sessions_started=500,
        sessions_ended=300,
        requests=4000,
        in_flight=200,
        output_tokens=60_000,
        answered=4,
        ttft_sum_s=5.0,
        errors={"timeout": 2, "connect": 1},
    )
    assert status_line(tally, 30.0) == (
        "300/1,200 agents, 4,000 requests, 200 in flight, 3 errors, 2,000 tokens/s, TTFT 1.25 s"
    )


def test_remaining_time():
    tally = Tally(turns=1200, requests=280, turns_skipped=20)
    assert remaining_s(tally, 30.0, None) == 90.0
    assert remaining_s(tally, 30.0, 40.0) == 10.0
    assert remaining_s(tally, 30.0, 20.0) == 0.0
    assert remaining_s(Tally(), 30.0, None) is None


def test_progress_is_lines_where_there_is_no_terminal():
    lines = []

    async def main():
        async with show_progress(
            "2 agents", Tally(sessions=4, sessions_ended=1), 90.0, lines.append
        ):
            await asyncio.sleep(11.0)

    run_virtual(main())
    assert lines == [
        "2 agents: 1/4 agents, 0 requests, 0 in flight, no errors, 0 tokens/s, 1:30 left",
        "2 agents: 1/4 agents, 0 requests, 0 in flight, no errors, 0 tokens/s, 1:30 left",
        "2 agents: 1/4 agents, 0 requests, 0 in flight, no errors, 0 tokens/s",
    ]
