"""Every assumption has its origin, and what was fitted is counted as such."""

from __future__ import annotations

import dataclasses
from collections import Counter

import pytest
from reproduction_kit import SETTINGS, results

from dualpath.sim.calibration import (
    ASSUMED,
    CHOICES,
    FITTED,
    fitted_ids,
    informed_ids,
    value_names,
    value_of,
    with_value,
)
from dualpath.sim.experiments import EXPERIMENTS
from dualpath.sim.published import PUBLISHED
from dualpath.sim.reproduction import Role, reproduction_of, role_of
from dualpath.sim.setting import Assumptions


def test_every_value_is_fitted_or_assumed_once():
    told = Counter(each.name for each in (*FITTED, *ASSUMED))
    assert told == Counter(value_names())


def test_fitted_values_are_in_their_ranges():
    defaults = Assumptions()
    for each in FITTED:
        assert each.low < value_of(defaults, each.name) < each.high, each.name


def test_fitted_values_name_published_figures():
    assert all(each.on for each in FITTED)
    assert fitted_ids() <= PUBLISHED.keys()


def test_choices_name_published_figures():
    assert all(each.ids for each in CHOICES)
    assert informed_ids() <= PUBLISHED.keys()


def test_twice_as_many_figures_are_predicted_as_values_fitted():
    found = reproduction_of(EXPERIMENTS.values(), SETTINGS, results())
    assert found.headline()["identification"] >= 2


def test_figures_that_were_fitted_on_or_looked_at_are_no_predictions():
    found = reproduction_of(EXPERIMENTS.values(), SETTINGS, results())
    by_role = {role: set() for role in Role}
    for each in found.figures.values():
        by_role[role_of(each)].add(each.id)
    assert by_role[Role.FITTED] == fitted_ids()
    assert by_role[Role.INFORMED] == informed_ids() - fitted_ids()
    assert not by_role[Role.PREDICTED] & (informed_ids() | fitted_ids())
    assert all(id.startswith("table1.") for id in by_role[Role.COMPUTED])


@pytest.mark.parametrize("name", value_names())
def test_with_value_changes_that_value_alone(name):
    before = Assumptions()
    after = with_value(before, name, 7)
    changed = {
        each.name
        for each in dataclasses.fields(before)
        if getattr(before, each.name) != getattr(after, each.name)
    }
    assert changed == {name}
    assert value_of(after, name) == 7
    assert type(getattr(after, name)) is type(getattr(before, name))
