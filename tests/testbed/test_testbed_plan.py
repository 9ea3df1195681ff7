"""The plan of a testbed: exact commands, and what holds for every topology."""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dualpath.base.errors import ConfigError
from dualpath.base.ids import Role
from dualpath.testbed import TestbedConfig, Topology
from dualpath.testbed.plan import Batch, Layout, plan_network
from dualpath.testbed.topology import Addresses

GOLDEN = Path(__file__).parent / "golden"


def layout(topology: str, name: str = "dp-test") -> Layout:
    return Layout(
        name=name,
        topology=Topology.parse(topology),
        snic_bits_s=400 * 10**6,
        cnic_bits_s=3200 * 10**6,
        addresses=Addresses(7),
    )


def text(batches: tuple[Batch, ...]) -> str:
    parts = []
    for batch in batches:
        parts.append(f"# {batch.tool} in {batch.namespace or 'the host'}")
        parts += batch.lines
    return "\n".join(parts) + "\n"


def test_the_commands_of_1p1d() -> None:
    """On purpose a change? Then: python tests/testbed/test_testbed_plan.py"""
    assert text(plan_network(layout("1P1D"))) == (GOLDEN / "1P1D.txt").read_text()


@given(st.integers(1, 16), st.integers(1, 16))
def test_every_nic_of_a_node_is_shaped_on_both_ends_and_nothing_else(
    prefill: int, decode: int
) -> None:
    plan = layout(f"{prefill}P{decode}D")
    shaped = set()
    for batch in plan_network(plan):
        if batch.tool == "tc":
            for line in batch.lines:
                if match := re.fullmatch(r"qdisc add dev (\S+) root handle 1: htb .*", line):
                    shaped.add((batch.namespace, match[1]))
    expected = set()
    for node in plan.topology.nodes:
        for nic in ("cnic", "snic"):
            expected |= {(plan.namespace(node), nic), (plan.fabric, f"{node.name}-{nic}")}
    assert shaped == expected


@given(st.integers(1, 16), st.integers(1, 16), st.integers(1, 254))
def test_addresses_and_names_are_unique_and_fit(prefill: int, decode: int, subnet: int) -> None:
    topology = Topology(prefill, decode)
    plan = Layout("dp-abcdefgh", topology, 10**8, 10**9, Addresses(subnet))
    lines = [
        (batch.namespace, line)
        for batch in plan_network(plan)
        if batch.tool == "ip"
        for line in batch.lines
    ]
    addresses = [line.split()[2] for _, line in lines if line.startswith("addr add")]
    assert len(addresses) == len(set(addresses)) == 3 + 3 * (prefill + decode)
    assert all(address.startswith(("198.18.", "198.19.")) for address in addresses)
    devices = [
        (namespace, line.split()[2]) for namespace, line in lines if line.startswith("link add")
    ]
    assert len(devices) == len(set(devices))
    assert max(len(device) for _, device in devices) <= 15
    assert len(set(plan.namespaces)) == 2 + prefill + decode


def test_only_the_host_the_store_and_the_compute_network_are_not_isolated() -> None:
    lines = next(
        batch.lines for batch in plan_network(layout("1P2D")) if batch.namespace == "dp-test-fab"
    )
    isolated = {line.split()[3] for line in lines if line.endswith("isolated on")}
    assert isolated == {
        "store-mgmt",
        *(f"{node}-{nic}" for node in ("pe0", "de0", "de1") for nic in ("snic", "mgmt")),
    }


def test_a_port_is_isolated_before_it_is_up() -> None:
    for batch in plan_network(layout("2P2D")):
        for line, following in pairwise(batch.lines):
            if line.endswith("isolated on"):
                assert following == f"link set dev {line.split()[3]} up"


def test_a_topology_names_its_nodes_and_their_groups() -> None:
    topology = Topology.parse("1p2D")
    assert str(topology) == "1P2D"
    assert [(node.name, node.role, node.group) for node in topology.nodes] == [
        ("pe0", Role.PREFILL, "pe-node0"),
        ("de0", Role.DECODE, "de-node0"),
        ("de1", Role.DECODE, "de-node1"),
    ]


@pytest.mark.parametrize(
    "topology", ["", "1P", "0P1D", "1P0D", "2D1P", "1P1D1D", "-1P1D", "20P20D"]
)
def test_other_topologies_are_refused(topology: str) -> None:
    with pytest.raises(ConfigError, match=r"--topology: expected .* such as 1P2D"):
        TestbedConfig(topology=topology)


@pytest.mark.parametrize("rate", ["", "400", "fast", "0mbit", "500kbit", "1tbit", "-1mbit"])
@pytest.mark.parametrize("flag", ["snic", "cnic"])
def test_other_rates_are_refused(flag: str, rate: str) -> None:
    with pytest.raises(ConfigError, match=f"--{flag}: expected a rate"):
        TestbedConfig(**{flag: rate})


@pytest.mark.parametrize("name", ["", "Dp", "1a", "a/b", "a b", "a" * 12])
def test_names_that_are_no_device_names_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="--testbed-name: expected"):
        TestbedConfig(testbed_name=name)


if __name__ == "__main__":
    GOLDEN.mkdir(exist_ok=True)
    (GOLDEN / "1P1D.txt").write_text(text(plan_network(layout("1P1D"))))
