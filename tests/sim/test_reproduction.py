"""What is said of a reproduction, and the files it is written to."""

from __future__ import annotations

import csv
import json
import xml.etree.ElementTree as ET
from dataclasses import replace

import pytest
from reproduction_kit import SETTINGS, by_system, results, summary

from dualpath.base.errors import ConfigError
from dualpath.sim import reproduction_files
from dualpath.sim.calibration import CHOICES, FITTED, HOW_FITTED, value_of
from dualpath.sim.experiments import EXPERIMENTS
from dualpath.sim.paper_traces import PAPER_TRACES
from dualpath.sim.published import CLAIMS, LEFT_OUT, PUBLISHED, Group
from dualpath.sim.reproduction import chosen, reproduction_of
from dualpath.sim.reproduction_page import HEADLINE, markdown
from dualpath.sim.sensitivity import BY, FIGURES, moved, sensitivity_cases, variations

FOUND = reproduction_of(EXPERIMENTS.values(), SETTINGS, results())
PART = reproduction_of([EXPERIMENTS["fig12"]], SETTINGS, results())


def test_worst_error_of_a_group():
    errors = {
        id: abs(each.error)
        for id, each in FOUND.figures.items()
        if PUBLISHED[id].group is Group.CORE
    }
    assert FOUND.worst_error(Group.CORE) == max(errors.values())
    assert "fig11.ttst" not in errors


def test_headline_says_everything_that_is_asked_for():
    headline = FOUND.headline()
    assert headline.keys() == HEADLINE.keys()
    assert headline["orderings_hold"] is False
    assert headline["scaleout_change"] == pytest.approx(0.0)
    assert headline["table1_gqa_error"] <= 0.01


def test_headline_of_a_part_leaves_the_rest_open():
    headline = reproduction_of([EXPERIMENTS["fig12"]], SETTINGS, results()).headline()
    assert headline["core_error"] > 0
    assert headline["online_error"] is None
    assert headline["orderings_hold"] is None
    assert headline["scaleout_change"] is None


def test_chosen_experiments_are_in_their_order():
    assert [each.name for each in chosen(["fig12", "table1"])] == ["table1", "fig12"]
    assert [each.name for each in chosen(["all"])] == list(EXPERIMENTS)
    assert chosen([]) == chosen(["all"])


def test_unknown_experiments_are_named():
    with pytest.raises(ConfigError, match=r"fig99.*table1, fig7"):
        chosen(["fig99"])


def test_variations_are_a_fifth_and_no_share_goes_above_one():
    full = replace(SETTINGS, assumptions=replace(SETTINGS.assumptions, snic_share=0.95))
    found = variations(full)
    assert len(found) == 2 * len(FITTED)
    values = [each.value for each in found if each.name == "snic_share"]
    assert values == [pytest.approx(0.95 * (1 - BY)), 1.0]


def test_sensitivity_is_relative_to_nothing_varied():
    slow = variations(SETTINGS)[0]

    def rule(case):
        found = by_system(case)
        if value_of(case.assumptions, slow.name) == pytest.approx(slow.value):
            return summary(jct_s=2 * found.jct_s, ttft_s=3 * found.ttft.mean_s)
        return found

    cases = sensitivity_cases(SETTINGS)
    first, *others = moved(SETTINGS, {case: rule(case) for case in cases})
    assert first.variation == slow
    assert first.changes.keys() == set(FIGURES)
    assert first.changes["table3.2p4d.jct"] == pytest.approx(1.0)
    assert first.changes["fig12.scheduling"] == pytest.approx(0.0)
    assert first.changes["fig11.ttft"] == pytest.approx(2.0)
    assert len(others) == 2 * len(FITTED) - 1
    assert all(not any(each.changes.values()) for each in others)


def test_sensitivity_of_runs_that_ended():
    cases = sensitivity_cases(SETTINGS)
    one_variation = {case: by_system(case) for case in cases[:12]}
    assert len(moved(SETTINGS, one_variation)) == 1
    assert moved(SETTINGS, {}) == []


def page(found=FOUND, sensitivity=()):
    return markdown(
        found,
        SETTINGS,
        traces=PAPER_TRACES,
        sensitivity=sensitivity,
        images={"fig7": ["reproduction/fig7-1.svg"]},
        command="dualpath sim reproduce all",
    )


def test_the_page_has_every_number_and_statement():
    text = page()
    for each in PUBLISHED.values():
        assert f"| {each.what} |" in text
    for claim in CLAIMS.values():
        assert f"| {claim.what} |" in text
    for fitted in FITTED:
        assert f"`{fitted.name}`" in text
    for choice in CHOICES:
        assert choice.what in text
    assert "not simulated" in text
    assert "![Offline job completion time](reproduction/fig7-1.svg)" in text
    assert "## Sensitivity" not in text


def test_the_page_says_what_is_not_compared_and_how_values_were_fitted():
    text = page()
    for each in LEFT_OUT:
        assert f"| {each.what} | {each.value} | {each.why} |" in text
    assert HOW_FITTED in text
    assert "moved by hand" in HOW_FITTED


def test_the_page_says_why_numbers_are_off_beside_them():
    text = page()
    for name, experiment in EXPERIMENTS.items():
        part = text.partition(f"(`{name}`)\n")[2].partition("\n## ")[0]
        assert (experiment.gap in part) if experiment.gap else ("What is off" not in part)


def test_groups_that_have_no_target_or_a_wide_one_are_explained():
    explained = {Group.OPEN, Group.TABLE1, Group.WORKINGSET, Group.ARTICLES}
    names = {each.experiment for each in PUBLISHED.values() if each.group in explained}
    assert {name for name in names if not EXPERIMENTS[name].gap} == set()


def test_a_part_and_what_was_interrupted_are_not_whole():
    assert FOUND.is_whole
    assert not PART.is_whole
    assert not replace(FOUND, was_interrupted=True).is_whole


def test_the_page_has_the_sensitivity():
    cases = sensitivity_cases(SETTINGS)
    changes = moved(SETTINGS, {case: by_system(case) for case in cases})
    text = page(sensitivity=changes)
    assert "## Sensitivity" in text
    assert text.count("+0.0 %") >= len(FIGURES) * len(changes)


def write(directory, found):
    return reproduction_files.write_reproduction(
        directory, found, SETTINGS, (), line='{"bench":"sim-reproduce"}', command="dualpath"
    )


@pytest.mark.parametrize("found", [PART, replace(FOUND, was_interrupted=True)])
def test_the_page_is_written_of_all_only(tmp_path, found):
    for name in reproduction_files.PAGE_FILES:
        (tmp_path / name).write_text("kept")
    written = write(tmp_path, found)
    assert {each.parent.name for each in written} == {"reproduction"}
    assert {each.stem.partition("-")[0] for each in written} == found.evaluations.keys()
    assert all((tmp_path / name).read_text() == "kept" for name in reproduction_files.PAGE_FILES)


def test_charts_that_are_no_more_are_removed(tmp_path):
    folder = tmp_path / "reproduction"
    folder.mkdir()
    for name in ("fig12-9.svg", "fig7-9.svg", "fig12-mine.svg"):
        (folder / name).touch()
    write(tmp_path, PART)
    assert not (folder / "fig12-9.svg").exists()
    assert (folder / "fig7-9.svg").exists() and (folder / "fig12-mine.svg").exists()
    assert (folder / "fig12-1.svg").exists()


def test_files(tmp_path, monkeypatch):
    monkeypatch.setattr(reproduction_files, "_played", lambda settings: PAPER_TRACES)
    written = write(tmp_path, FOUND)
    assert set(written) == {each for each in tmp_path.rglob("*") if each.is_file()}
    folder = tmp_path / "reproduction"
    body = json.loads((folder / "fig12.json").read_text())
    first = body["figures"][0]
    assert first["id"] == "fig12.layerwise"
    assert first["published"] == PUBLISHED["fig12.layerwise"].value
    assert first["role"] == "fitted"
    with (folder / "fig12.csv").open(newline="") as file:
        rows = list(csv.reader(file))
    assert rows[0] == ["step", "jct_s", "by_basic"]
    assert rows[1] == ["basic", "200", "1"]
    for image in folder.glob("*.svg"):
        ET.parse(image)
    links = (tmp_path / "reproduction.md").read_text()
    assert all(f"(reproduction/{image.name})" in links for image in folder.glob("*.svg"))
