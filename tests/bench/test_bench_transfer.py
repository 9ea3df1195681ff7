"""The benchmark of channels, at a size where its rates mean nothing."""

from __future__ import annotations

import argparse
import shutil

import pytest

from dualpath.base.errors import ConfigError
from dualpath.bench import transfer
from dualpath.transfer import nixl_missing

SMALL = ["--slots", "4", "--slot-mib", "1", "--spans", "100", "--rounds", "2"]


def _args(*flags: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    transfer.add_arguments(parser)
    return parser.parse_args([*SMALL, *flags])


def test_every_kind_is_measured_beside_what_the_machine_gives(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("UCX_NET_DEVICES", "lo")
    lines: list[str] = []
    result = transfer.run(_args("--connections", "3"), lines.append)
    kinds = {"memcpy", "shm", "tcp"}
    kinds |= {"nixl"} if nixl_missing() is None else set()
    rates = {f"{kind}_gbps" for kind in kinds} | {f"{kind}_scattered_gbps" for kind in kinds}
    ratios = {"shm_ratio", "shm_scattered_ratio"}
    if shutil.which("iperf3"):
        rates |= {"iperf3_gbps"}
        ratios |= {"tcp_ratio", "tcp_scattered_ratio"}
    assert rates | ratios | {"submit_us"} <= set(result.figures)
    assert all(isinstance(result.figures[name], float) for name in rates | ratios)
    assert result.setup["large_bytes"] == 4 * 2**20
    assert result.setup["scattered_bytes"] == 100 * 16 * 2**10
    assert sum(line.startswith("round ") for line in lines) == 2


def test_wrong_bytes_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """The check cannot pass by accident: each slot is full of a byte of its own."""
    monkeypatch.setattr("dualpath.bench.transfer.nixl_missing", lambda: "not in this test")
    monkeypatch.setattr("dualpath.bench.transfer.fill_value", lambda slot: 77 + slot)
    with pytest.raises(RuntimeError, match="wrong bytes"):
        transfer.run(_args(), lambda line: None)


def test_spans_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ConfigError, match="--spans"):
        transfer.run(_args("--spans", "1000"), lambda line: None)
