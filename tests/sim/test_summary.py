"""Summaries of runs that are written down by hand."""

from __future__ import annotations

import numpy as np
import pytest

from dualpath.sim.kernel.state import RECORD, blank
from dualpath.sim.outcome import Outcome
from dualpath.sim.summary import POINTS, Spread, balance_of, summary_of

FIELDS = (
    "agent",
    "output_tokens",
    "arrived_s",
    "assigned_s",
    "read_s",
    "prefill_s",
    "first_token_s",
    "second_token_s",
    "finished_s",
)


def outcome(*rows, end_s, snic_bytes=((10.0,), (30.0,)), attention_s=((1.0,),)):
    records = blank(len(rows), RECORD)
    for record, row in zip(records, rows, strict=True):
        for name, value in zip(FIELDS, row, strict=True):
            record[name] = value
        record.prompt_tokens, record.hit_tokens = 100, 64
    return Outcome(
        records=records,
        end_s=end_s,
        events=7,
        agents=2,
        unfinished_agents=1,
        was_interrupted=False,
        read_bytes=np.array(snic_bytes, np.float64).sum(axis=1),
        snic_bytes=np.array(snic_bytes, np.float64),
        window_s=1.0,
        snic_bytes_s=100.0,
        prefill_nodes=1,
        attention_s=np.array(attention_s, np.float64),
        prefill_instance_engines=len(attention_s),
        attention_max_mean=1.5,
        prefill_busy_share=0.25,
        decode_busy_share=0.75,
    )


RUN = outcome(
    (0, 12, 0.0, 1.0, 1.5, 2.0, 3.0, 4.0, 9.0),
    (1, 1, 1.0, 2.0, 4.0, 5.0, 6.0, 0.0, 6.0),
    (0, 2, 9.0, 9.5, 9.5, 9.5, 10.0, 11.0, 11.0),
    end_s=20.0,
)


def test_times_of_a_whole_run():
    found = summary_of(RUN)
    assert found.ttft.mean_s == pytest.approx((3 + 5 + 1) / 3)
    assert (found.ttft.p50_s, found.ttft.p99_s) == (3.0, 5.0)
    # The second token, and the others: of requests that have them.
    assert found.ttst == Spread(1.0, 1.0, 1.0, 1.0)
    assert found.tpot == Spread(0.5, 0.5, 0.5, 0.5)
    assert found.request.mean_s == pytest.approx((9 + 5 + 2) / 3)
    assert (found.requests, found.agents, found.unfinished_agents) == (3, 2, 1)
    assert (found.prompt_tokens, found.hit_tokens, found.output_tokens) == (300, 192, 15)


def test_parts_add_up_to_the_first_token():
    found = summary_of(RUN)
    assert sum(found.parts_s.values()) == pytest.approx(found.ttft.mean_s)
    assert found.parts_s["read"] == pytest.approx((0.5 + 2 + 0) / 3)


def test_only_arrivals_of_the_stretch_count():
    found = summary_of(RUN, 0.5, 9.0)
    assert found.requests == 2
    assert (found.from_s, found.until_s) == (0.5, 9.0)


def test_a_request_without_a_token_counts_with_its_waiting():
    waiting = (2, 5, 4.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
    found = summary_of(outcome(waiting, end_s=20.0), 0.0, 10.0)
    assert found.ttft.mean_s == found.request.mean_s == 6.0
    assert found.tpot == Spread(0.0, 0.0, 0.0, 0.0)
    assert found.parts_s == {"queued": 0.0, "read": 0.0, "wait": 0.0, "prefill": 0.0}


def test_halves_of_a_steady_run_agree():
    def request(at_s, ttft_s):
        first = at_s + ttft_s
        return (0, 3, at_s, at_s, at_s, at_s, first, first + 1, first + 2)

    steady = outcome(*(request(at, 1.0) for at in (1.0, 4.0, 6.0, 9.0)), end_s=20.0)
    assert summary_of(steady, 0.0, 10.0).halves_differ == pytest.approx(0.0, abs=1e-6)
    rising = outcome(*(request(at, at) for at in (2.0, 8.0)), end_s=20.0)
    assert summary_of(rising, 0.0, 10.0).halves_differ == pytest.approx(0.75)


def test_use_of_storage_nics_by_role():
    found = summary_of(RUN)
    assert found.prefill_snic == (0.1,) * POINTS
    assert found.decode_snic == (0.3,) * POINTS
    assert found.snic_utilization == pytest.approx(40 / (100 * 2 * 20))


def test_balance_is_of_busy_windows():
    # Ten idle windows in which one unit does all of little, and thirty busy ones.
    series = np.concatenate((np.tile([[1.0], [0.0]], 10), np.tile([[60.0], [40.0]], 30)), axis=1)
    found = balance_of(series, 2)
    assert found.max_mean == pytest.approx(60 / 50)
    assert found.share == pytest.approx(30 / 40)
    assert (found.series[0], found.series[-1]) == (2.0, 1.2)


def test_groups_are_balanced_each_by_itself():
    series = np.array([[3.0], [1.0], [100.0], [100.0]]).repeat(20, axis=1)
    # Sums over groups: the first has 3 by a mean of 2, the second 100 by 100.
    assert balance_of(series, 2).max_mean == pytest.approx(103 / 102)
    assert balance_of(series, 4).max_mean == pytest.approx(100 / 51)


def test_longer_windows_are_more_even():
    # Both units take turns, so that two windows together are even.
    series = np.array([[2.0, 1.0] * 20, [1.0, 2.0] * 20])
    found = balance_of(series, 2)
    assert found.max_mean == 1.0
    assert found.finer == (pytest.approx(2 / 1.5), 1.0, pytest.approx(8 / 7.5))


def test_nothing_is_balanced():
    found = balance_of(np.zeros((4, 5)), 2)
    assert found.max_mean == 1.0
    assert found.finer == (1.0, 1.0, 1.0)
    assert found.series == (1.0,) * POINTS
