"""Policies are tried with what they change and nothing else; figures come from the runs they name."""

from __future__ import annotations

import dataclasses
import json

import msgspec
import pytest

from dualpath.base.errors import ConfigError
from dualpath.cli.main import main
from dualpath.sim.case import Case, play
from dualpath.sim.experiments import policies, policies_order, policies_split, policies_thresholds
from dualpath.sim.experiments.experiment import Settings
from dualpath.sim.experiments.grid import ds_27b, ds_660b
from dualpath.sim.experiments.policies import POLICIES, chosen_policies, play_trial
from dualpath.sim.experiments.trial import Measured, PolicyExperiment, Trial, name_of, play_with
from dualpath.sim.plan.load import AtRate, Offline
from dualpath.sim.setting import Assumptions, System

TINY = Case(
    deployment=ds_27b(2, 1),
    system=System.DUAL,
    assumptions=Assumptions(),
    trace="generated:2k",
    load=Offline(6),
)
SPLIT = dataclasses.replace(TINY, system=System.SPLIT)


def test_what_changes_nothing_gives_what_the_case_gives():
    found = play_with(TINY)
    assert found.summary == play(TINY)
    assert found.balance >= 1
    assert 0 < found.long_ttft_s <= found.longest_ttft_s
    assert 0 <= found.in_time <= 1


@pytest.mark.parametrize("variant", ["dual", "steady"])
def test_the_two_that_can_be_selected_are_the_systems_own(variant):
    found = play_trial(Trial("split", variant, TINY))
    assert found.summary == play(dataclasses.replace(TINY, system=System(variant)))


@pytest.mark.parametrize("rule", policies_split.RULES)
def test_each_rule_plays_to_the_end_and_is_another(rule):
    found = play_trial(Trial("split", rule, TINY)).summary
    assert found.unfinished_agents == 0
    assert found.output_tokens == play(SPLIT).output_tokens


def test_first_come_first_served_is_what_the_scheduler_does():
    assert play_trial(Trial("order", "fifo", SPLIT)).summary == play(SPLIT)


@pytest.mark.parametrize("order", ["slack", "shortest"])
def test_orders_serve_everybody(order):
    assert play_trial(Trial("order", order, SPLIT)).summary.unfinished_agents == 0


def test_thresholds_are_scaled_one_at_a_time():
    rule = play_trial(Trial("thresholds", "rule", SPLIT))
    # A group is a node, whose engines have one read queue: alpha chooses between equals.
    assert play_trial(Trial("thresholds", "alpha x0.25", SPLIT)) == rule
    slow = play_trial(Trial("thresholds", "quota x0.25", SPLIT))
    assert slow.summary.unfinished_agents == 0


@pytest.mark.parametrize("module", [policies_split, policies_order, policies_thresholds])
def test_figures_need_the_trials_and_no_others(module):
    experiment: PolicyExperiment = module.EXPERIMENT
    settings = Settings(Assumptions())
    trials = experiment.trials(settings)
    assert len(set(trials)) == len(trials)
    assert {each.experiment for each in trials} == {experiment.name}
    found = play_with(TINY)
    figures = experiment.evaluate(settings, dict.fromkeys(trials, found))
    assert msgspec.json.decode(msgspec.json.encode(figures))


def test_gains_are_the_old_by_the_new():
    settings = Settings(Assumptions())
    found = play_with(TINY)

    def faster(trial: Trial) -> Measured:
        if trial.variant != "steady":
            return found
        spread = msgspec.structs.replace(found.summary.ttft, p50_s=found.summary.ttft.p50_s / 2)
        summary = msgspec.structs.replace(found.summary, jct_s=found.summary.jct_s / 4, ttft=spread)
        return msgspec.structs.replace(found, summary=summary, balance=1.1)

    trials = policies_split.EXPERIMENT.trials(settings)
    figures = policies_split.EXPERIMENT.evaluate(
        settings, {trial: faster(trial) for trial in trials}
    )
    assert (figures["split_jct_gain"], figures["split_ttft_gain"]) == (4.0, 2.0)
    assert figures["split_balance"] == 1.1


def test_names():
    assert name_of(TINY) == "DS 27B 2P1D generated:2k 6 agents"
    online = dataclasses.replace(
        TINY, deployment=ds_660b(), trace="paper:64k", load=AtRate(0.4, 10.0)
    )
    assert name_of(online) == "DeepSeek-V3.2 2P4D 64k 0.4 APS"
    assert chosen_policies([]) == chosen_policies(["all"]) == list(POLICIES.values())
    assert [each.name for each in chosen_policies(["order", "split", "order"])] == [
        "order",
        "split",
    ]
    with pytest.raises(ConfigError, match="'nothing'; expected split"):
        chosen_policies(["nothing"])


def _tiny_trials(settings: Settings) -> list[Trial]:
    return [Trial("tiny", "only", TINY)]


@pytest.fixture
def tiny(monkeypatch):
    experiment = PolicyExperiment(
        "tiny",
        "Tiny",
        _tiny_trials,
        lambda trial: play_with(trial.case),
        lambda settings, results: {
            "by": {"jct_s": results[_tiny_trials(settings)[0]].summary.jct_s}
        },
    )
    monkeypatch.setitem(policies.POLICIES, "tiny", experiment)


def test_the_command_prints_a_line_of_json(tiny, capsys):
    assert main(["sim", "policies", "tiny", "--workers", "1", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["figures"]["tiny"]["by"]["jct_s"] == play(TINY).jct_s
    assert found["setup"]["runs"] == 1


def test_the_command_prints_an_outline(tiny, capsys):
    assert main(["sim", "policies", "tiny", "--workers", "1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines == ["tiny", f"  by: jct_s {play(TINY).jct_s}"]


@pytest.mark.parametrize("flags", [["--workers", "0"], ["--seed", "-1"], ["nothing"]])
def test_the_command_names_what_is_wrong(flags, capsys):
    assert main(["sim", "policies", *flags]) != 0
    assert flags[0] in capsys.readouterr().err
