"""The benchmark of traffic classes, in a size that says nothing about speed."""

from __future__ import annotations

import argparse
import os

import pytest

from dualpath.base.errors import ConfigError
from dualpath.bench import qos
from dualpath.bench.qos import ClassPackets, check_classes, pull_rate
from dualpath.bench.qos_ends import MESSAGE_BYTES, PullRun
from dualpath.testbed import existing_testbeds

SHORT = ["--rounds", "1", "--seconds", "0.3"]


def _args(*flags: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    qos.add_arguments(parser)
    return parser.parse_args([*SHORT, *flags])


def test_each_setting_uses_the_classes_it_is_about(testbed_possible: None) -> None:
    lines: list[str] = []
    result = qos.run(_args(), lines.append)
    figures = result.figures
    for name in ("high_p50_ratio", "same_class_p50_ratio", "idle_share", "low_alone_share"):
        assert isinstance(figures[name], float)
    share = figures["low_share_backlogged"]
    assert isinstance(share, float) and 0 <= share <= 1
    for setting in ("alone", "low", "same_class"):
        p50, p99 = figures[f"{setting}_p50_us"], figures[f"{setting}_p99_us"]
        assert isinstance(p50, float) and isinstance(p99, float)
        assert 0 < p50 <= p99
    packets = figures["packets_by_class"]
    assert isinstance(packets, dict)
    assert set(packets) == {"alone", "low", "same_class", "low_alone", "backlogged"}
    # What the network decides, whatever the speed: KV sends nothing by the class it is not in. Beside KV
    # there are messages of the channel (signs of life), and neighbours that ask for an address.
    few = 200
    assert packets["alone"]["low"] < few < packets["alone"]["high"]
    assert packets["low"]["low"] > few and packets["low"]["high"] > few
    assert packets["same_class"]["low"] < few < packets["same_class"]["high"]
    assert packets["low_alone"]["high"] < few < packets["low_alone"]["low"]
    assert packets["backlogged"]["high"] > few and packets["backlogged"]["low"] > few
    assert result.setup["message_bytes"] == MESSAGE_BYTES == 65536
    assert len(lines) == 1 and lines[0].startswith("round 1 of 1: ")
    owners = [state.owner.pid for state, _ in existing_testbeds() if state.owner is not None]
    assert os.getpid() not in owners


def test_without_a_testbed_it_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dualpath.bench.qos.why_no_testbed", lambda: "no such thing here")
    with pytest.raises(ConfigError, match="on a testbed: no such thing here"):
        qos.run(_args(), print)


@pytest.mark.parametrize(
    "flags", [["--rounds", "0"], ["--seconds", "0"], ["--seconds", "21"], ["--interval-ms", "-1"]]
)
def test_what_measures_nothing_is_refused(flags: list[str]) -> None:
    with pytest.raises(ConfigError, match="bench qos: expected"):
        qos.run(_args(*flags), print)


def test_a_rate_counts_the_pulls_that_ended_in_the_time() -> None:
    run = PullRun(span_bytes=100, done_s=[0.5, 1.0, 1.5, 2.5, 3.0])
    assert pull_rate(run, 1.0, 3.0) == 3 * 100 / 2
    assert pull_rate(run, 5.0, 6.0) == 0


def test_bytes_that_cannot_have_gone_by_a_class_are_an_error() -> None:
    check_classes("low", ClassPackets(high=2, low=3), low_bytes=3 * 1460, high_bytes=2 * 1460)
    with pytest.raises(RuntimeError, match="low: 4381 bytes should have left by the low class"):
        check_classes("low", ClassPackets(high=9, low=3), low_bytes=3 * 1460 + 1, high_bytes=0)
    with pytest.raises(RuntimeError, match="alone: 1 bytes should have left by the high class"):
        check_classes("alone", ClassPackets(high=0, low=9), low_bytes=0, high_bytes=1)
