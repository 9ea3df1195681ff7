"""The text that is printed, exactly. After an intended change write the files in golden/ again with the
commands in `GOLDEN`."""

from __future__ import annotations

import json
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from dualpath.base.errors import ConfigError
from dualpath.base.traffic_class import (
    DEFAULT_PLAN,
    LaneArbitration,
    QosPlan,
    TrafficClass,
    Urgency,
)
from dualpath.cli.main import main
from dualpath.qos import (
    compute_egress,
    format_rate,
    infiniband_config,
    parse_rate,
    roce_config,
    storage_egress,
)
from dualpath.qos.infiniband import low_lane_share, low_table_share
from dualpath.qos.roce import ets_weights

FOLDER = Path(__file__).parent / "golden"
INTERFACES = "--dev cnic --rate 3200mbit --snic snic --snic-rate 400mbit"
GOLDEN = {
    "infiniband.conf": "qos infiniband",
    "roce.sh": "qos roce --dev ens1f0np0 --rdma-dev mlx5_0",
    "ethernet.sh": f"qos ethernet {INTERFACES}",
    "ethernet.batch": f"qos ethernet {INTERFACES} --batch",
    "ethernet-90-10.batch": "qos ethernet --dev eth1 --rate 25gbit --low-weight 10 --dscp kv=1 --batch",
}


def printed(command: str, capsys: pytest.CaptureFixture[str]) -> str:
    assert main(command.split()) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("name", GOLDEN)
def test_exact_text(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert printed(GOLDEN[name], capsys) == (FOLDER / name).read_text(encoding="utf-8")


def bare(text: str) -> list[str]:
    return [line for line in text.splitlines() if line and not line.startswith("#")]


def test_the_published_arbitration() -> None:
    assert set(bare(infiniband_config(DEFAULT_PLAN).to_text())) == {
        "qos TRUE",
        "qos_max_vls 4",
        "qos_high_limit 240",
        "qos_vlarb_high 0:192,1:192,2:0,3:192",
        "qos_vlarb_low 0:192,1:192,2:64,3:192",
        "qos_sl2vl 0,1,2,3,2,2,2,2,2,2,2,2,2,2,2,2",
    }


def test_arbitration_follows_the_plan() -> None:
    plan = replace(DEFAULT_PLAN, lanes=LaneArbitration(99, 128, 32))
    lines = bare(infiniband_config(plan).to_text())
    assert "qos_high_limit 99" in lines
    assert "qos_vlarb_low 0:128,1:128,2:32,3:128" in lines
    assert low_table_share(plan) == 0.01
    assert low_lane_share(plan) == 32 / (3 * 128 + 32)


def test_lanes_have_no_gap() -> None:
    classes = tuple(
        replace(each, virtual_lane=5) if each.traffic_class is TrafficClass.DISPATCH else each
        for each in DEFAULT_PLAN.classes
    )
    with pytest.raises(ConfigError, match=r"without a gap, got \[0, 1, 2, 5\]"):
        infiniband_config(QosPlan(classes=classes))


def test_opensm_reads_the_configuration(tmp_path: Path) -> None:
    opensm = shutil.which("opensm", path="/usr/sbin:/sbin:/usr/bin") or shutil.which("opensm")
    if opensm is None:
        pytest.skip("no opensm on this machine")
    (tmp_path / "ours.conf").write_text(infiniband_config(DEFAULT_PLAN).to_text())
    done = subprocess.run(
        [opensm, "-F", "ours.conf", "-c", "read.conf", "-f", "log"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=30,
        check=True,
    )
    assert "Unrecognized" not in done.stdout + done.stderr
    there = (tmp_path / "read.conf").read_text().splitlines()
    assert set(bare(infiniband_config(DEFAULT_PLAN).to_text())) <= set(there)


@pytest.mark.parametrize("low_weight", [1, 2, 5, 10, 15])
def test_weights_of_roce_add_up(low_weight: int) -> None:
    plan = replace(DEFAULT_PLAN, low_weight=low_weight)
    weights = ets_weights(plan)
    assert sum(weights) == 100
    high = {each.priority for each in plan.of_urgency(Urgency.HIGH)}
    assert min(weights[each] for each in high) > low_weight
    assert weights[plan.marks(TrafficClass.KV).priority] == weights[0] == low_weight


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [("priority", 0, "priority 0"), ("priority", 6, "priority 6"), ("dscp", 48, "DSCP 48")],
)
def test_roce_keeps_what_it_needs_itself(field: str, value: int, words: str) -> None:
    classes = tuple(
        replace(each, **{field: value}) if each.traffic_class is TrafficClass.DISPATCH else each
        for each in DEFAULT_PLAN.classes
    )
    with pytest.raises(ConfigError, match=words):
        roce_config(QosPlan(classes=classes), "eth0", "mlx5_0")
    with pytest.raises(ConfigError, match="leaves"):
        ets_weights(replace(DEFAULT_PLAN, low_weight=25))


def test_the_measured_recipe() -> None:
    lines = compute_egress(DEFAULT_PLAN, "cnic", 3_200_000_000).commands()
    assert lines[:5] == (
        "qdisc add dev cnic root handle 1: htb default 20",
        "class add dev cnic parent 1: classid 1:1 htb rate 3200mbit burst 256k cburst 256k quantum 60000",
        "class add dev cnic parent 1:1 classid 1:10 htb rate 3168mbit ceil 3200mbit prio 0 "
        "burst 256k cburst 256k quantum 198000",
        "class add dev cnic parent 1:1 classid 1:20 htb rate 32mbit ceil 3200mbit prio 1 "
        "burst 64k cburst 256k quantum 2000",
        "filter add dev cnic parent 1: protocol ip prio 1 u32 match ip dsfield 0xb8 0xfc flowid 1:10",
    )


def test_rates_of_both_classes_are_all_of_the_link() -> None:
    for rate_bit_s in (10**6, 3_333_333_333, 25 * 10**9):
        root, high, low = compute_egress(DEFAULT_PLAN, "eth0", rate_bit_s).classes
        assert high.rate_bit_s + low.rate_bit_s == root.rate_bit_s == rate_bit_s
        assert low.rate_bit_s == rate_bit_s // 100


@pytest.mark.parametrize(("rate", "mib"), [("10mbit", 4), ("800mbit", 8), ("100gbit", 16)])
def test_the_queue_of_a_storage_nic_is_bounded(rate: str, mib: int) -> None:
    fifo_bytes = storage_egress("snic", parse_rate(rate)).fifo_bytes
    assert fifo_bytes is not None and abs(fifo_bytes - mib * 2**20) < 2**19


@pytest.mark.parametrize(
    ("text", "rate", "written"),
    [
        ("3200mbit", 3_200_000_000, "3200mbit"),
        ("3.2gbit", 3_200_000_000, "3200mbit"),
        ("400Gbit", 400_000_000_000, "400gbit"),
        ("1500kbit", 1_500_000, "1500kbit"),
        ("3gbit", 3_000_000_000, "3000mbit"),
        ("1001bit", 1001, "1001bit"),
    ],
)
def test_rates(text: str, rate: int, written: str) -> None:
    assert parse_rate(text) == rate
    assert format_rate(rate) == written


@pytest.mark.parametrize("text", ["", "3200", "fast", "-1mbit", "3200mbps", "0mbit", "0.1bit"])
def test_what_is_no_rate(text: str) -> None:
    with pytest.raises(ConfigError, match="--rate: expected a rate"):
        parse_rate(text, "--rate")


@pytest.mark.parametrize("command", GOLDEN.values())
def test_json_is_one_line_with_all_of_it(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    (line,) = printed(f"{command} --json", capsys).splitlines()
    config = json.loads(line)
    assert config["text"] == printed(command, capsys)
    assert len(config["plan"]["classes"]) == 5
    assert "NOT" in config["tested"]


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("qos infiniband --high-limit 255", "255 lets the high table starve"),
        ("qos infiniband --dscp kv", "--dscp: expected CLASS=N"),
        ("qos infiniband --dscp fast=1", "with one of control, execution"),
        ("qos roce --dscp kv=64", "expected dscp from 0 to 63"),
        ("qos roce --low-weight 0", "low weight from 1 to 49"),
        ("qos ethernet", "expected --dev or --snic"),
        ("qos ethernet --dev eth0", "--dev and --rate belong together"),
        ("qos ethernet --snic-rate 1gbit", "--snic and --snic-rate belong together"),
        ("qos ethernet --dev eth0 --rate 1kbit", "1mbit or more"),
        ("qos ethernet --dev a/b --rate 1gbit", "name of a network interface"),
        ("qos ethernet --dev eth0 --rate 3200", "--rate: expected a rate"),
    ],
)
def test_wrong_flags(command: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(command.split()) == 2
    assert words in capsys.readouterr().err
