"""Where storage is the only bottleneck: by the published formulas, and by flows added up hop by hop."""

from __future__ import annotations

import re
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dualpath.base.errors import ConfigError
from dualpath.policy import NodeBandwidth, Resource, bottleneck_free_range, resource_loads

PAGE = Path(__file__).parents[2] / "docs" / "network.md"
PUBLISHED = NodeBandwidth(gpus=8, cnic=50, snic=50, memory=500)
WORKED = NodeBandwidth(gpus=4, cnic=25, snic=25, memory=200)
TESTBED = NodeBandwidth(gpus=1, cnic=3200, snic=400, memory=80_000, copies_over_cnic=False)

rates = st.integers(1, 1000)
nodes = st.builds(NodeBandwidth, st.integers(1, 16), rates, rates, rates, st.booleans())


def test_the_published_example() -> None:
    found = bottleneck_free_range(PUBLISHED)
    assert found is not None
    assert (found.low, found.high) == (1 / 7, 7 / 2)
    assert found.low_resource is Resource.PE_NIC_WRITE
    assert found.high_resource in (Resource.DE_NIC_WRITE, Resource.DE_MEMORY)
    assert found.holds(1, 7) and found.holds(7, 2)
    assert not found.holds(1, 8) and not found.holds(4, 1)


@given(rates, rates, rates, st.integers(1, 16))
def test_the_published_formulas(cnic: int, snic: int, memory: int, gpus: int) -> None:
    node = NodeBandwidth(gpus, cnic, snic, memory)
    g, s = gpus, snic / cnic
    found = bottleneck_free_range(node)
    high = min((g - 2 * s) / s, (g - s) / (2 * s), (memory / snic - 3) / 2)
    if s < g and s <= g / 2 and 2 * snic <= memory and s / (g - s) < high:
        assert found is not None
        assert found.low == pytest.approx(s / (g - s))
        assert found.high == pytest.approx(high)
    elif found is not None:  # Equal but for rounding.
        assert found.low == pytest.approx(found.high)


def added_up(node: NodeBandwidth, prefill: int, decode: int) -> dict[Resource, Fraction]:
    """Loads by walking each pair's two paths, hop by hop."""
    g, snic = node.gpus, Fraction(node.snic)
    pe_path, de_path = snic / (decode * g * g), snic / (prefill * g * g)
    read, write = {"pe": Fraction(0), "de": Fraction(0)}, {"pe": Fraction(0), "de": Fraction(0)}
    memory = {"pe": snic, "de": snic}
    pairs = {"pe": decode * g, "de": prefill * g}
    for rate, hops in (
        (pe_path, [("pe", "pe", "copy"), ("pe", "de", "net"), ("de", "de", "copy")]),
        (de_path, [("de", "pe", "net"), ("de", "de", "copy")]),
    ):
        for source, target, kind in hops:
            if kind == "net" or node.copies_over_cnic:
                read[source] += rate * pairs[source]
                write[target] += rate * pairs[target]
            # Host memory is where a copy, or a decode engine's sending, comes from; hand-over goes into it.
            if kind == "copy" or source == "de":
                memory[source] += rate * pairs[source] * g
            if kind == "net" and target == "de":
                memory[target] += rate * pairs[target] * g
    cnic, host = Fraction(node.cnic), Fraction(node.memory)
    return {
        Resource.PE_NIC_READ: read["pe"] / cnic,
        Resource.PE_NIC_WRITE: write["pe"] / cnic,
        Resource.DE_NIC_READ: read["de"] / cnic,
        Resource.DE_NIC_WRITE: write["de"] / cnic,
        Resource.PE_MEMORY: memory["pe"] / host,
        Resource.DE_MEMORY: memory["de"] / host,
    }


@given(nodes, st.integers(1, 64), st.integers(1, 64))
def test_loads_are_the_sum_of_flows_and_the_range_is_where_none_exceeds_one(
    node: NodeBandwidth, prefill: int, decode: int
) -> None:
    exact = added_up(node, prefill, decode)
    assert resource_loads(node, prefill, decode) == pytest.approx(
        {resource: float(load) for resource, load in exact.items()}
    )
    most = max(exact.values())
    found = bottleneck_free_range(node)
    if abs(most - 1) > 1e-9:
        assert (found is not None and found.holds(prefill, decode)) == (most < 1)


@pytest.mark.parametrize("values", [(0, 1, 1, 1), (1, 0, 1, 1), (1, 1, -1, 1), (1, 1, 1, 0)])
def test_what_is_no_node_is_refused(values: tuple[int, int, int, int]) -> None:
    with pytest.raises(ConfigError, match="rates above 0"):
        NodeBandwidth(*values)


def fraction(value: float) -> str:
    return str(Fraction(value).limit_denominator(100))


@pytest.mark.parametrize("node", [PUBLISHED, WORKED, TESTBED])
def test_the_page_has_the_computed_range(node: NodeBandwidth) -> None:
    found = bottleneck_free_range(node)
    assert found is not None
    assert f"{fraction(found.low)} <= P/D <= {fraction(found.high)}" in PAGE.read_text(
        encoding="utf-8"
    )


def test_the_worked_example_is_limited_by_what_decode_nodes_take_in() -> None:
    found = bottleneck_free_range(WORKED)
    assert found is not None and found.holds(1, 2) and found.holds(1, 1) and not found.holds(2, 1)
    over = {resource: load for resource, load in resource_loads(WORKED, 2, 1).items() if load > 1}
    assert over == {Resource.DE_NIC_WRITE: 5 / 4}


def test_the_page_has_the_computed_loads() -> None:
    """Its table of loads, at 1P2D and 4P1D of the published node."""
    rows = re.findall(
        r"^\| (.+?) \| ([\d.]+) \| ([\d.]+) \|$", PAGE.read_text(encoding="utf-8"), re.MULTILINE
    )
    expected = {
        resource.value: (
            f"{resource_loads(PUBLISHED, 1, 2)[resource]:.2f}",
            f"{resource_loads(PUBLISHED, 4, 1)[resource]:.2f}",
        )
        for resource in Resource
    }
    assert {name: (first, second) for name, first, second in rows} == expected
