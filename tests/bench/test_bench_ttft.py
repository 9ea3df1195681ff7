from __future__ import annotations

import json

import pytest

from dualpath.cli import main


@pytest.mark.parametrize(
    ("flag", "value", "message"),
    [
        ("--stored-tokens", "100", "--stored-tokens: expected a multiple of 64"),
        ("--stored-tokens", "0", "--stored-tokens: expected a multiple of 64"),
        ("--misses", "0", "--misses: expected a whole number >= 1"),
        ("--new-tokens", "0", "--new-tokens: expected a whole number >= 1"),
    ],
)
def test_what_cannot_be_measured_is_a_usage_error(flag, value, message, capsys):
    assert main.main(["bench", "ttft", flag, value]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.slow
def test_hits_and_misses_are_measured_on_every_path(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("DUALPATH_CACHE_DIR", str(tmp_path))
    arguments = "--shape tiny --stored-tokens 256 --new-tokens 32 --misses 2 --hits 2 --paths de pe"
    assert main.main(["bench", "ttft", *arguments.split(), "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    figures = result["figures"]
    assert result["bench"] == "ttft"
    assert (len(figures["ttft_misses_ms"]), len(figures["ttft_hits_ms"])) == (2, 4)
    assert figures["ttft_gain"] == pytest.approx(
        figures["ttft_miss_ms"] / figures["ttft_hit_ms"], abs=0.02
    )
    assert list(figures["ttft_hit_ms_by_path"]) == ["de", "pe"]
    parts = "prepare scheduling retry allocation read wait prefill delivery"
    assert list(figures["hit_parts_ms"]) == parts.split()
    assert result["setup"]["read_path"] == "de"
    assert isinstance(result["setup"]["direct_io"], bool)
    assert list(tmp_path.glob("bench-ttft-*")) == []
