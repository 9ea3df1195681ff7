"""The table for people."""

from __future__ import annotations

from dualpath.bench.replay.summary import rows_of_runs, table_rows

FIGURES = {
    "ended": {"1": "complete", "2": "interrupted"},
    "requests": {"1": 1200, "2": 7},
    "errors": {"1": {}, "2": {"http 503": 2, "timeout": 1}},
    "jct_s": {"1": 12.345},
    "ttft_s_mean": {"1": 0.1234, "2": 2.0},
    "ttft_s_p50": {"1": 0.1, "2": 1.0},
    "ttft_s_p99": {"1": 0.2, "2": 9.0},
    "tpot_s_mean": {"1": 0.0501, "2": 0.06},
    "itl_s_p50": {"1": 0.01, "2": 0.02},
    "ttft_parts_s": {"1": {"queue": 0.0, "prefill": 0.1, "other": 0.0234}},
    "hit_rate": {"1": 0.5, "2": 0.25},
    "output_tokens_per_s": {"1": 12345.6, "2": 3.0},
}


def test_a_row_a_figure():
    assert table_rows(FIGURES, ["1", "2"]) == [
        ("ended", ["complete", "interrupted"]),
        ("requests", ["1,200", "7"]),
        ("errors", ["none", "http 503 2\ntimeout 1"]),
        ("JCT, s", ["12.3", ""]),
        ("TTFT, s: mean / p50 / p99", ["0.123 / 0.1 / 0.2", "2 / 1 / 9"]),
        ("TPOT, ms: mean", ["50.1", "60"]),
        ("ITL, ms: p50", ["10", "20"]),
        ("TTFT by part, ms", ["prefill 100\nother 23.4", ""]),
        ("output tokens/s", ["12,346", "3"]),
        ("prefix hits", ["50.0%", "25.0%"]),
    ]


def test_one_run_has_plain_figures():
    plain = {name: each["1"] for name, each in FIGURES.items()}
    both = table_rows(FIGURES, ["1", "2"])
    assert table_rows(plain, ["1"]) == [(name, cells[:1]) for name, cells in both]


def test_many_runs_have_a_row_each():
    header = ["requests", "errors", "JCT, s", "TTFT, s", "its p99", "TPOT, s", "tokens/s"]
    first = ["1", "1,200", "none", "12.3", "0.123", "0.2", "0.0501", "12,346"]
    second = ["2", "7", "http 503 2\ntimeout 1", "", "2", "9", "0.06", "3"]
    assert rows_of_runs(FIGURES, ["1", "2"], "agents") == [
        ["agents", *header, "ended"],
        [*first, "complete"],
        [*second, "interrupted"],
    ]
    figures = FIGURES | {"tried_aps": {"1": "sustained", "2": "30.00% errors"}}
    assert rows_of_runs(figures, ["1", "2"], "agents/s") == [
        ["agents/s", *header, ""],
        [*first, "sustained"],
        [*second, "30.00% errors"],
    ]
