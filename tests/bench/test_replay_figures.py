"""Figures against values computed by hand."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dualpath.bench.replay.figures import (
    by_run,
    distribution,
    errors_by_kind,
    hit_rate,
    run_figures,
    snic_balance,
    tokens_by_path,
    ttft_at_least,
    ttft_parts,
)
from dualpath.bench.replay.records import RequestRecord, Run, ServerSample, SessionRecord
from dualpath.bench.replay.server_metrics import used
from dualpath.bench.replay.slo import parse_slo


def offline(requests):
    return Run(mode="offline", agents=1, duration_s=99.0, requests=requests)


def answered(session, turn, at_s, ttft_s, gap_s, tokens, **fields):
    """Tokens come `gap_s` apart; sent 1 ms late."""
    first_s = at_s + ttft_s
    last_s = first_s + gap_s * (tokens - 1)
    defaults = {"prompt_tokens": 100, "end_s": last_s}
    return RequestRecord(
        session=session,
        turn=turn,
        scheduled_s=at_s,
        sent_s=at_s + 0.001,
        first_s=first_s,
        second_s=first_s + gap_s if tokens > 1 else None,
        last_s=last_s,
        output_tokens=tokens,
        **(defaults | fields),
    )


def failed(session, turn, at_s, error):
    return RequestRecord(
        session=session, turn=turn, scheduled_s=at_s, sent_s=at_s + 0.001, end_s=at_s, error=error
    )


def session(name, turns, at_s, finished_s=None):
    return SessionRecord(id=name, turns=turns, scheduled_s=at_s, finished_s=finished_s)


RUN = Run(
    mode="online",
    rate_aps=0.5,
    ended="duration",
    from_s=10.0,
    duration_s=30.0,
    client_cpu_s=3.0,
    itl_s=[i / 1000 for i in range(101)],
    sessions=[
        session("warm-up", 1, 5.0, 12.0),
        session("a", 2, 10.0, 18.0),
        session("b", 4, 12.0),
        session("c", 1, 29.0),
    ],
    requests=[
        # Due in the warm-up: in no latency, but what it brought after 10 s counts in the rates.
        answered(0, 0, 5.0, 5.0, 0.5, 5),  # ends at 12
        answered(1, 0, 10.0, 1.0, 0.1, 11, cached_tokens=0),  # ends at 12
        answered(1, 1, 12.0, 3.0, 0.3, 11, cached_tokens=60, cached_by_path={"pe": 40, "de": 20}),
        failed(2, 0, 12.0, "http 503"),
        RequestRecord(session=3, turn=0, scheduled_s=29.0, sent_s=29.001),
    ],
)


def test_figures_by_hand():
    figures = run_figures(RUN, parse_slo("ttft=2s,tpot=200ms"))
    expected = {
        "ended": "duration",
        "duration_s": 30.0,
        "measured_s": 20.0,
        "sessions": 4,
        "sessions_finished": 2,
        "sessions_failed": 1,
        "requests": 3,
        "requests_cut_off": 1,
        "turns_not_run": 3,
        "errors": {"http 503": 1},
        "error_rate": pytest.approx(1 / 3),
        "requests_per_s": pytest.approx(3 / 20),
        "prompt_tokens_per_s": pytest.approx(300 / 20),
        "output_tokens_per_s": pytest.approx(27 / 20),
        "goodput_rps": pytest.approx(1 / 20),  # The first of session a only.
        "slo_attainment": pytest.approx(1 / 3),  # One cut off after 1 s may still have met it.
        "ttft_s_mean": pytest.approx(2.0),
        "ttft_s_p50": pytest.approx(2.0),
        "ttft_s_p90": pytest.approx(2.8),
        "ttft_s_p95": pytest.approx(2.9),
        "ttft_s_p99": pytest.approx(2.98),
        "ttst_s_mean": pytest.approx(0.2),
        "tpot_s_mean": pytest.approx(0.2),
        "tpot_s_p50": pytest.approx(0.2),
        "e2e_s_mean": pytest.approx((2.0 + 6.0) / 2),
        "itl_s_p50": 0.05,
        "itl_s_p90": 0.09,
        "itl_s_p99": 0.099,
        "session_jct_s_mean": pytest.approx(8.0),
        "session_jct_s_p99": pytest.approx(8.0),
        "session_jct_s_max": pytest.approx(8.0),
        "hit_rate": pytest.approx(60 / 200),
        "share_by_path": {"de": pytest.approx(1 / 3), "pe": pytest.approx(2 / 3)},
        "schedule_error_ms_p50": pytest.approx(1.0),
        "schedule_error_ms_p99": pytest.approx(1.0),
        "client_cores": pytest.approx(0.1),
    }
    assert {name: figures[name] for name in expected} == expected
    assert not {"jct_s", "ttft_parts_s", "snic_max_over_mean"} & set(figures)


def test_what_was_not_measured_is_absent():
    figures = run_figures(Run(mode="online", rate_aps=1.0, duration_s=5.0))
    assert figures["errors"] == {}
    assert figures["requests"] == 0
    names = {"error_rate", "ttft_s_mean", "hit_rate", "itl_s_p50", "goodput_rps", "jct_s"}
    assert not names & set(figures)


def test_failed_requests_are_in_no_average():
    slow = [answered(0, 0, 0.0, 1.0, 0.1, 3)]
    with_errors = [*slow, failed(0, 1, 1.0, "timeout"), failed(0, 1, 1.0, "http 500")]
    with_errors.append(answered(0, 0, 0.0, 90.0, 0.1, 3, error="wrong length"))
    sessions = [session("a", 4, 0.0)]
    run = Run(mode="offline", agents=1, duration_s=9.0, requests=with_errors, sessions=sessions)
    figures = run_figures(run)
    assert figures["ttft_s_mean"] == pytest.approx(1.0)
    assert figures["errors"] == {"timeout": 1, "http 500": 1, "wrong length": 1}
    assert figures["error_rate"] == 0.75
    assert figures["output_tokens_per_s"] == pytest.approx(3 / 9)


def test_errors_are_counted_most_frequent_first():
    kinds = ["a", "b", "b", "", "c", "b", "c"]
    counted = errors_by_kind(failed(0, 0, 0.0, kind) for kind in kinds)
    assert list(counted.items()) == [("b", 3), ("c", 2), ("a", 1)]


def test_jct_of_an_offline_run_that_was_played_to_its_end():
    sessions = [session("a", 1, 0.0, 7.0), session("b", 1, 0.0, 9.0)]
    run = Run(mode="offline", agents=2, duration_s=9.0, sessions=sessions)
    figures = run_figures(run)
    assert (figures["jct_s"], figures["session_jct_s_mean"]) == (9.0, 8.0)
    cut = Run(mode="offline", agents=2, duration_s=9.0, ended="interrupted", sessions=sessions)
    assert "jct_s" not in run_figures(cut)


def test_parts_of_the_time_to_the_first_token():
    requests = [
        answered(0, 0, 0.0, 1.0, 0.1, 2, timings={"queue_s": 0.1, "prefill_s": 0.7}),
        answered(0, 1, 0.0, 2.0, 0.1, 2, timings={"queue_s": 0.3, "read_s": 0.2, "prefill_s": 1.3}),
        answered(0, 2, 0.0, 9.0, 0.1, 2),  # The server did not say: left out.
    ]
    assert ttft_parts(offline(requests)) == pytest.approx(
        {"queue": 0.2, "prefill": 1.0, "read": 0.1, "other": 0.2}
    )
    assert ttft_parts(offline(requests[2:])) == {}


def test_parts_and_hits_of_a_server_that_only_counts_them():
    """As vLLM does: sums over all requests, of which the growth during the run is taken."""

    def sample(at_s, requests, queue_s, prefill_s, queries, hits):
        engine = '{engine="0"}'
        values = {
            "request_queue_time_seconds_count": requests,
            "request_queue_time_seconds_sum": queue_s,
            "request_prefill_time_seconds_count": requests,
            "request_prefill_time_seconds_sum": prefill_s,
            "prefix_cache_queries_total": queries,
            "prefix_cache_hits_total": hits,
            "external_prefix_cache_hits_total": hits,
        }
        metrics = {f"vllm:{name}{engine}": float(value) for name, value in values.items()}
        return ServerSample(at_s=at_s, metrics=used(metrics))

    requests = [answered(0, turn, 0.0, ttft_s, 0.1, 2) for turn, ttft_s in enumerate((0.6, 0.8))]
    samples = [sample(0.0, 10, 5.0, 7.0, 100, 0), sample(9.0, 12, 5.2, 7.8, 300, 40)]
    run = Run(mode="offline", agents=1, duration_s=9.0, requests=requests, samples=samples)
    assert ttft_parts(run) == pytest.approx({"queue": 0.1, "prefill": 0.4, "other": 0.2})
    assert hit_rate(run) == pytest.approx(80 / 200)
    assert run_figures(run)["hit_rate"] == pytest.approx(0.4)
    alone = Run(mode="offline", agents=1, duration_s=9.0, requests=requests, samples=samples[:1])
    assert ttft_parts(alone) == {}
    assert hit_rate(alone) is None


def test_hits_only_of_requests_whose_server_counts():
    requests = [
        answered(0, 0, 0.0, 1.0, 0.1, 2, cached_tokens=50),
        answered(0, 1, 0.0, 1.0, 0.1, 2),
    ]
    assert hit_rate(offline(requests)) == 0.5
    assert hit_rate(offline(requests[1:])) is None
    assert tokens_by_path(requests) == {}


def test_cut_off_requests_bound_the_ttft_from_below():
    run = Run(
        mode="online",
        rate_aps=1.0,
        duration_s=10.0,
        requests=[
            answered(0, 0, 0.0, 1.0, 0.1, 2),
            RequestRecord(session=0, turn=0, scheduled_s=2.0, sent_s=2.0),
            RequestRecord(session=0, turn=0, scheduled_s=2.0, sent_s=2.0, first_s=5.0),
            failed(0, 0, 0.0, "timeout"),
        ],
    )
    assert ttft_at_least(run)["ttft_s_mean"] == pytest.approx((1 + 8 + 3) / 3)


@given(st.lists(st.one_of(st.none(), st.floats(0, 1e6)), max_size=200))
def test_distributions_are_those_of_numpy(values):
    known = [each for each in values if each is not None]
    found = distribution("x", values)
    if not known:
        assert found == {}
        return
    assert found.pop("x_mean") == pytest.approx(np.mean(known))
    assert found == {
        f"x_p{cut}": pytest.approx(np.percentile(known, cut)) for cut in (50, 90, 95, 99)
    }


def samples(*rows, step_s=1.0):
    """`rows`: bytes read so far by each group."""
    name = "dualpath:snic_read_bytes_total"
    return [
        ServerSample(
            at_s=i * step_s,
            metrics={f'{name}{{group="g{g}"}}': float(value) for g, value in enumerate(row)},
        )
        for i, row in enumerate(rows)
    ]


def test_snic_balance():
    # Windows of 2 s: (30, 10) of mean 20: 1.5; nothing read: left out; (10, 10): 1.
    rows = [(0, 0), (20, 0), (30, 10), (30, 10), (30, 10), (35, 15), (40, 20)]
    assert snic_balance(samples(*rows), window_s=2.0) == pytest.approx(1.25)
    assert snic_balance(samples(*rows), window_s=2.0, from_s=4.0) == pytest.approx(1.0)
    # A run shorter than the window is one window.
    assert snic_balance(samples(*rows), window_s=60.0) == pytest.approx(40 / 30)
    assert snic_balance(samples((0,), (5,))) is None
    assert snic_balance([]) is None
    assert snic_balance(samples((0, 0))) is None


def test_figures_of_several_runs_are_keyed_by_load():
    runs = [
        Run(mode="offline", agents=agents, duration_s=float(agents), sessions=[])
        for agents in (1, 64)
    ]
    figures = by_run(runs)
    assert figures["jct_s"] == {"1": 1.0, "64": 64.0}
    assert figures["errors"] == {"1": {}, "64": {}}
    assert by_run(runs[:1])["jct_s"] == 1.0
    assert by_run([]) == {}
    rates = [Run(mode="online", rate_aps=rate, duration_s=1.0) for rate in (0.70710678, 1.0)]
    assert list(by_run(rates)["duration_s"]) == ["0.7071", "1"]
