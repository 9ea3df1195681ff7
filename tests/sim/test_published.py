"""The published numbers are whole and consistent with each other."""

from __future__ import annotations

import pytest
from reproduction_kit import SETTINGS, results

from dualpath.sim import published as module
from dualpath.sim.experiments import EXPERIMENTS
from dualpath.sim.published import CLAIMS, LEFT_OUT, PUBLISHED, Group, published
from dualpath.sim.reproduction import reproduction_of


def test_ids_are_unique_and_begin_with_an_experiment():
    numbers, statements = module._NUMBERS, module._STATEMENTS
    assert len(PUBLISHED) == len(numbers)
    assert len(CLAIMS) == len(statements)
    assert {each.experiment for each in (*numbers, *statements)} <= set(EXPERIMENTS)


def test_no_number_is_zero():
    assert all(each.value > 0 for each in PUBLISHED.values())


def test_every_group_has_a_number():
    assert {each.group for each in PUBLISHED.values()} == set(Group)


def test_published_of_an_experiment_are_in_order():
    assert [each.id for each in published("fig12")] == [
        "fig12.layerwise",
        "fig12.dual-path",
        "fig12.scheduling",
    ]


def test_numbers_that_follow_from_others_do():
    two = (PUBLISHED["fig10.660b.capacity"].value + PUBLISHED["fig10.27b.capacity"].value) / 2
    assert PUBLISHED["fig10.mean"].value == pytest.approx(two)
    change = PUBLISHED["table3.48p96d.jct"].value / PUBLISHED["table3.2p4d.jct"].value
    assert PUBLISHED["table3.jct-change"].value == pytest.approx(change)


def test_every_number_is_reproduced_but_the_one_that_is_measured():
    found = reproduction_of(EXPERIMENTS.values(), SETTINGS, results())
    assert set(PUBLISHED) - set(found.figures) == {"table3.scheduler-cores"}


def test_every_statement_is_checked():
    found = reproduction_of(EXPERIMENTS.values(), SETTINGS, results())
    assert found.checks.keys() == CLAIMS.keys()


def test_what_is_left_out_is_not_compared_and_has_a_reason():
    assert len({each.what for each in LEFT_OUT}) == len(LEFT_OUT)
    assert all(each.value and each.why for each in LEFT_OUT)
    assert not {each.what for each in LEFT_OUT} & {each.what for each in PUBLISHED.values()}
