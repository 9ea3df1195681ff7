from __future__ import annotations

import io
import math

import pytest
from rich.console import Console

from dualpath.bench.demo_report import ComparedTurn, DemoReport, SessionReport, percentile
from dualpath.bench.openai_client import Completion


def completion(tokens=(1, 2), prompt=100, pe=0, de=0, ttft_s=1.0):
    return Completion(
        token_ids=tokens,
        text="",
        prompt_tokens=prompt,
        cached_tokens=pe + de,
        ttft_s=ttft_s,
        total_s=ttft_s + 1,
        cached_by_path={"pe": pe, "de": de},
    )


def compared(stored=(1, 2), computed=(1, 2), replayed=(1, 2), stored_s=0.5, computed_s=4.0):
    return ComparedTurn(
        1,
        completion(replayed),
        completion(stored, ttft_s=stored_s),
        completion(computed, ttft_s=computed_s),
    )


@pytest.mark.parametrize(
    ("percent", "expected"), [(0, 1), (25, 1), (26, 2), (50, 2), (75, 3), (95, 4), (100, 4)]
)
def test_percentiles_are_of_the_nearest_rank(percent, expected):
    assert percentile([3, 1, 4, 2], percent) == expected


def test_no_values_have_no_percentile():
    assert math.isnan(percentile([], 50))


def test_figures():
    one = SessionReport(
        "one",
        [completion(prompt=100), completion(prompt=200, pe=64, de=128, ttft_s=3.0)],
        [compared(stored_s=0.5, computed_s=4.0)],
    )
    two = SessionReport(
        "two", [completion(prompt=100, pe=64, ttft_s=2.0)], [compared(computed_s=1.0)], cut_turns=1
    )
    figures = DemoReport([one, two], start_s=5.0, replay_s=6.0, total_s=20.0).figures()
    assert figures == {
        "hit_rate": 0.64,
        "pe_share": 0.5,
        "de_share": 0.5,
        "tokens_equal": True,
        "sessions": 2,
        "turns": 3,
        "cut_turns": 1,
        "compared_turns": 2,
        "prompt_tokens": 400,
        "cached_tokens": 256,
        "ttft_replay_p50_s": 2.0,
        "ttft_replay_p95_s": 3.0,
        "ttft_stored_p50_s": 0.5,
        "ttft_stored_p95_s": 0.5,
        "ttft_computed_p50_s": 1.0,
        "ttft_computed_p95_s": 4.0,
        "ttft_gain": 5.0,
        "start_s": 5.0,
        "replay_s": 6.0,
        "total_s": 20.0,
    }


@pytest.mark.parametrize("way", ["stored", "computed", "replayed"])
def test_tokens_that_differ_on_any_way_are_found(way):
    fine = SessionReport("fine", [completion()], [compared()])
    bad = SessionReport("bad", [completion()], [compared(), compared(**{way: (1, 3)})])
    assert DemoReport([fine], 0, 0, 0).tokens_equal
    assert not DemoReport([fine, bad], 0, 0, 0).tokens_equal


def test_nothing_compared_is_not_equal():
    assert not DemoReport([SessionReport("one", [completion()])], 0, 0, 0).tokens_equal
    assert not DemoReport([], 0, 0, 0).tokens_equal


def test_nothing_cached_gives_shares_of_zero():
    figures = DemoReport([SessionReport("one", [completion()], [compared()])], 0, 0, 0).figures()
    assert (figures["hit_rate"], figures["pe_share"], figures["de_share"]) == (0, 0, 0)


def test_the_table_has_a_row_for_each_session_and_one_for_all():
    sessions = [
        SessionReport("abcdefghij", [completion(prompt=1000, pe=64, de=192)], [compared()]),
        SessionReport("other", [completion()], [compared(computed=(9, 9))]),
    ]
    console = Console(width=100, file=io.StringIO())
    console.print(DemoReport(sessions, 0, 0, 0).table())
    lines = console.file.getvalue().splitlines()
    words = [line.split() for line in lines]
    rows = [each for each in words if each[-1:] in (["yes"], ["NO"])]
    seconds = "1.00 / 1.00 0.50 / 0.50 4.00 / 4.00"
    assert [" ".join(row) for row in rows] == [
        f"abcdefgh 1 1,000 256 25.6% 25% / 75% {seconds} yes",
        f"other 1 100 0 0.0% 0% / 0% {seconds} NO",
        f"all 2 1,100 256 23.3% 25% / 75% {seconds} NO",
    ]
