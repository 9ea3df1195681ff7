"""Policies are tried with what they change and nothing else; figures come from the runs they name."""

from __future__ import annotations

import dataclasses
import json
import signal

import msgspec
import pytest
from interrupt_kit import interrupting

from dualpath.base.errors import ConfigError
from dualpath.base.ids import Role
from dualpath.cli import sim_policies
from dualpath.cli.main import main
from dualpath.sim.case import Case, play, workload_of
from dualpath.sim.experiments import (
    adaptive_thresholds,
    policies,
    policies_order,
    policies_split,
    policies_thresholds,
)
from dualpath.sim.experiments.adaptive_thresholds import (
    BOUNDS,
    AdaptiveScheduler,
    Threshold,
    factor,
)
from dualpath.sim.experiments.experiment import Settings
from dualpath.sim.experiments.grid import ds_27b, ds_660b
from dualpath.sim.experiments.policies import POLICIES, chosen_policies, play_trial
from dualpath.sim.experiments.trial import (
    Measured,
    PolicyExperiment,
    Trial,
    measured_of,
    name_of,
    play_with,
)
from dualpath.sim.plan.load import AtRate, Offline
from dualpath.sim.setting import Assumptions, System, prepare
from dualpath.sim.simulation import Simulation

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


@pytest.mark.parametrize(
    ("used", "busy_grows", "steps"),
    [(0.81, False, 0.9), (0.49, False, 1.1), (0.81, True, 1.1), (0.49, True, 0.9), (0.5, True, 1)],
)
def test_a_threshold_moves_by_a_tenth_within_bounds(used, busy_grows, steps):
    assert factor(1.0, used, grows_when_busy=busy_grows) == pytest.approx(steps)
    low, high = BOUNDS
    for end in BOUNDS:
        assert low <= factor(end, used, grows_when_busy=busy_grows) <= high


@pytest.fixture
def often(monkeypatch):
    """Adapts many times in a small run."""
    for module in (adaptive_thresholds, policies_thresholds):
        monkeypatch.setattr(module, "EVERY_S", 0.5)


def adaptive(grow_when_busy):
    """A scheduler after the whole small run, whose quota stays that of its configuration."""
    cluster, policy = prepare(SPLIT.deployment, SPLIT.system, SPLIT.assumptions)
    scheduler = AdaptiveScheduler(policy, grow_when_busy)
    outcome = Simulation(cluster, policy, workload_of(SPLIT), scheduler=scheduler).run()
    scheduler.validate()
    return scheduler, policy, measured_of(SPLIT, outcome)


def test_without_thresholds_the_adaptive_scheduler_is_the_scheduler(often):
    assert adaptive({})[2] == play_with(SPLIT)


def test_an_idle_cluster_moves_only_what_is_adapted(often):
    scheduler, policy, _ = adaptive({Threshold.QUOTA: False})
    assert scheduler.factors.keys() == {Threshold.QUOTA}
    assert scheduler.factors[Threshold.QUOTA] > 1
    assert scheduler.quota_s == policy.quota_s * scheduler.factors[Threshold.QUOTA]
    assert adaptive({Threshold.BETA: False})[0].quota_s == policy.quota_s


def test_use_is_what_was_read_and_computed_by_what_could_have_been():
    scheduler, policy, _ = adaptive({})
    members, seconds = scheduler._members, 2.0
    scheduler._changed_s = 100.0
    scheduler._read_tokens = scheduler._done_tokens() - int(
        policy.alpha_tokens / policy.alpha_s * len(members.nodes) * seconds / 2
    )
    scheduler._computed_tokens = int(
        policy.beta_tokens / policy.beta_s * len(members.by_role[Role.PREFILL]) * seconds / 4
    )
    assert scheduler._storage_use(100.0 + seconds) == pytest.approx(0.5, rel=1e-3)
    assert scheduler._gpu_use(100.0 + seconds) == pytest.approx(0.25, rel=1e-3)


def test_a_run_in_stretches_is_the_run(often):
    assert policies_thresholds._play_adaptive(SPLIT, {}) == play_with(SPLIT)


def test_a_changed_quota_is_that_of_the_batches():
    simulation = Simulation(
        *prepare(TINY.deployment, TINY.system, TINY.assumptions), workload_of(TINY)
    )
    simulation.set_quota_s(0.01)
    other = play_with(TINY, configure=lambda config: msgspec.structs.replace(config, quota_s=0.01))
    assert measured_of(TINY, simulation.run()) == other
    assert other != play_with(TINY)


@pytest.mark.parametrize("variant", policies_thresholds._ADAPTIVE)
def test_adaptive_thresholds_serve_everybody(variant, often):
    assert play_trial(Trial("thresholds", variant, SPLIT)).summary.unfinished_agents == 0


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


SMALLER = dataclasses.replace(TINY, load=Offline(2))


@pytest.fixture
def interrupted(tiny, monkeypatch):
    """Sets after how many runs Ctrl-C comes, of `tiny` and of two more of another experiment."""
    trials = [Trial("pair", each, SMALLER) for each in ("first", "second")]
    pair = PolicyExperiment(
        "pair", "Pair", lambda settings: trials, lambda trial: play_with(trial.case), _never
    )
    monkeypatch.setitem(policies.POLICIES, "pair", pair)

    return lambda after: monkeypatch.setattr(
        policies, "play_trial", interrupting(play_trial, after=after)
    )


def _never(settings, results):
    raise AssertionError("evaluated without all of its runs")


RUN = ["sim", "policies", "tiny", "pair", "--workers", "1"]


def test_ctrl_c_gives_the_runs_that_ended(interrupted, capsys):
    interrupted(after=2)
    assert main(RUN) == 130
    jct_s = round(play(SMALLER).jct_s, 1)
    complete, figures, title, case, run, last = capsys.readouterr().out.splitlines()
    assert (complete, title) == ("tiny", "pair, runs that ended")
    assert figures.startswith("  by: jct_s ")
    assert case == "  DS 27B 2P1D generated:2k 2 agents, seed 0"
    assert run.startswith(f"    first: jct_s {jct_s}, request_s ")
    assert last == "interrupted; missing: pair (1 of 2 runs ended)"


def test_ctrl_c_before_a_run_ended_says_so(interrupted, capsys):
    interrupted(after=0)
    assert main(RUN) == 130
    (line,) = capsys.readouterr().out.splitlines()
    assert line == "interrupted; missing: tiny (0 of 1 runs ended), pair (0 of 2 runs ended)"


def test_ctrl_c_prints_its_line_of_json(interrupted, capsys):
    interrupted(after=2)
    assert main([*RUN, "--json"]) == 130
    found = json.loads(capsys.readouterr().out)
    assert found["setup"]["interrupted"] is True
    assert found["setup"]["policies"] == ["tiny"]
    assert found["setup"]["missing"] == {"pair": {"ended": 1, "runs": 2}}
    ended = found["figures"]["ended_runs"]["pair"]["DS 27B 2P1D generated:2k 2 agents, seed 0"]
    assert ended.keys() == {"first"}
    assert ended["first"]["jct_s"] == round(play(SMALLER).jct_s, 1)


def test_ctrl_c_while_figures_are_made_keeps_the_runs(tiny, capsys, monkeypatch):
    def evaluate(settings, results):
        signal.raise_signal(signal.SIGINT)

    slow = dataclasses.replace(policies.POLICIES["tiny"], evaluate=evaluate)
    monkeypatch.setitem(policies.POLICIES, "tiny", slow)
    assert main(["sim", "policies", "tiny", "--workers", "1"]) == 130
    title, _, run, last = capsys.readouterr().out.splitlines()
    assert title == "tiny, runs that ended"
    assert run.startswith("    only: jct_s ")
    assert last == "interrupted; missing: tiny (1 of 1 runs ended)"


def test_runs_that_ended_have_names_of_their_own():
    settings = Settings(Assumptions())
    needed = {name: each.trials(settings) for name, each in POLICIES.items()}
    measured = play_with(SMALLER)
    results = {trial: measured for each in needed.values() for trial in each}
    ended = sim_policies.ended_runs(needed, results)
    kept = [run for by_case in ended.values() for runs in by_case.values() for run in runs]
    assert len(kept) == len(results)


@pytest.mark.parametrize("flags", [["--workers", "0"], ["--seed", "-1"], ["nothing"]])
def test_the_command_names_what_is_wrong(flags, capsys):
    assert main(["sim", "policies", *flags]) != 0
    assert flags[0] in capsys.readouterr().err
