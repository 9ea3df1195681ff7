from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from plan_kit import ANY

from dualpath.base.errors import ConfigError
from dualpath.sim.plan.splits import InstanceNodes, Split, splits

FROM_TWO = dict.fromkeys(range(2, 17), 1.0)


def names(found):
    return [each.name for each in found]


def test_all_divisions_of_few_nodes():
    found = splits(4, InstanceNodes(ANY), InstanceNodes(ANY), 9)
    assert found == [Split(1, 3, 1, 1), Split(2, 2, 1, 1), Split(3, 1, 1, 1)]
    assert names(found) == ["1P3D", "2P2D", "3P1D"]
    assert all(each.nodes == 4 for each in found)


def test_instances_are_the_smallest_that_fit_and_divide():
    sizes = [InstanceNodes(FROM_TWO).of(nodes) for nodes in (1, 2, 3, 4, 6, 9, 17)]
    assert sizes == [None, 2, 3, 2, 2, 3, None]
    found = splits(6, InstanceNodes(FROM_TWO), InstanceNodes(FROM_TWO), 9)
    assert found == [Split(2, 4, 2, 2), Split(3, 3, 3, 3), Split(4, 2, 2, 2)]


def test_instances_are_those_that_do_most():
    sizes = InstanceNodes({1: 100.0, 2: 150.0, 3: 160.0, 4: 152.0})
    assert [sizes.of(nodes) for nodes in (1, 2, 3, 4, 5, 6)] == [1, 2, 3, 2, 1, 3]
    assert sizes.least == 1


def test_instances_of_the_operator():
    found = splits(6, InstanceNodes(ANY, fixed=2), InstanceNodes(ANY, fixed=4), 9)
    assert found == [Split(2, 4, 2, 4)]


def test_many_nodes_are_divided_in_a_few_ways_with_both_ends():
    found = splits(144, InstanceNodes(ANY), InstanceNodes(ANY), 5)
    assert names(found) == ["1P143D", "37P107D", "72P72D", "107P37D", "143P1D"]
    assert names(splits(9, InstanceNodes(ANY), InstanceNodes(ANY), 1)) == ["5P4D"]


def test_a_model_that_is_too_large():
    with pytest.raises(
        ConfigError, match=r"--nodes 3: an instance needs 2 prefill and 2 decode nodes"
    ):
        splits(3, InstanceNodes(FROM_TWO), InstanceNodes(FROM_TWO), 9)


@given(st.integers(2, 200), st.integers(1, 8), st.integers(1, 8), st.integers(1, 20))
def test_splits_are_whole_and_differ(nodes, prefill, decode, most):
    rates = [dict.fromkeys(range(least, 250), 1.0) for least in (prefill, decode)]
    try:
        found = splits(nodes, InstanceNodes(rates[0]), InstanceNodes(rates[1]), most)
    except ConfigError:
        assert nodes < prefill + decode
        return
    assert 1 <= len(set(found)) == len(found) <= most
    for each in found:
        assert each.nodes == nodes
        assert each.prefill_nodes % each.prefill_instance_nodes == 0
        assert each.decode_nodes % each.decode_instance_nodes == 0
        assert each.prefill_instance_nodes >= prefill and each.decode_instance_nodes >= decode
