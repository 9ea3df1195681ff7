"""The benchmarks on a testbed, as a user runs them, in a size that says nothing about speed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

DEADLINE_S = 280.0


def bench(*arguments: str) -> dict[str, Any]:
    """The result of `dualpath bench ARGUMENTS --json`."""
    ended = subprocess.run(
        [sys.executable, "-m", "dualpath", "bench", *arguments, "--json"],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    result: dict[str, Any] = json.loads(ended.stdout.splitlines()[-1])
    return result


@pytest.mark.slow
def test_pooling(testbed_possible: None, tmp_path: Path) -> None:
    result = bench(
        *("pooling", "--model", "tiny", "--topologies", "1P1D", "--systems", "split,shorter"),
        *("--agents", "3", "--turns", "2", "--context", "256", "--snic", "10mbit"),
        *("--reference", "3", "--directory", str(tmp_path)),
    )
    figures = result["figures"]
    assert figures["wrong_tokens"] == 0
    assert figures["tokens_compared_with_transformers"] == 3 * 2 * 2
    assert set(figures["jct_s"]["1P1D"]) == {"split", "shorter"}
    assert all(each > 0.9 for each in figures["hit_rate"]["1P1D"].values())
    assert set(figures["utilisation"]["1P1D"]["split"]) == {"pe0", "de0"}
    assert result["setup"]["kv_bytes_token"] == 2048
    assert json.loads((tmp_path / "pooling.json").read_text())["figures"] == figures
    assert "Storage NICs over time" in (tmp_path / "pooling.html").read_text()


@pytest.mark.slow
def test_online(testbed_possible: None, tmp_path: Path) -> None:
    result = bench(
        *("online", "--model", "tiny", "--systems", "basic", "--agents", "6", "--turns", "2"),
        *("--context", "256", "--snic", "10mbit", "--precision", "0.5"),
        *("--directory", str(tmp_path)),
    )
    figures = result["figures"]
    assert figures["wrong_tokens"] == 0
    assert figures["hit_rate"]["basic"] > 0.9
    assert set(figures["max_aps"]) == {"basic"}
    assert figures["tried_aps"]["basic"]
    assert result["setup"]["slo"].keys() == {"ttft", "tpot"}
    assert (tmp_path / "online.html").is_file()
