"""Experiments on made-up results whose figures are known by hand, and their rules for themselves."""

from __future__ import annotations

import math

import pytest
from reproduction_kit import JCT_S, SETTINGS, by_system, results, summary

from dualpath.sim.experiments import EXPERIMENTS, fig10
from dualpath.sim.experiments.experiment import about, geometric_mean, grows
from dualpath.sim.experiments.fig10 import capacity
from dualpath.sim.experiments.grid import ds_27b, ds_660b, qwen_32b
from dualpath.sim.experiments.workingset import working_set_bytes
from dualpath.sim.plan.load import AtRate
from dualpath.sim.published import PUBLISHED
from dualpath.sim.reproduction import all_cases, reproduction_of
from dualpath.sim.setting import System, prepare

FOUND = reproduction_of(EXPERIMENTS.values(), SETTINGS, results())


def ours(id):
    return FOUND.figures[id].ours


def test_offline_speedups_are_the_best_of_the_grid():
    assert ours("fig7.660b.best") == pytest.approx(2.0)
    assert ours("fig7.27b.oracle.low") == ours("fig7.27b.oracle.high") == pytest.approx(100 / 96)


def test_a_single_better_point_is_the_best():
    def rule(case):
        faster = case.system is System.DUAL and case.agents == 1024 and case.trace == "paper:48k"
        return summary(jct_s=50.0) if faster else by_system(case)

    found = reproduction_of([EXPERIMENTS["fig7"]], SETTINGS, results(rule))
    assert found.figures["fig7.660b.best"].ours == pytest.approx(4.0)
    assert found.figures["fig7.660b.best"].note.startswith("48k, 1024 agents")


def test_scaled_traces_give_a_range():
    assert ours("fig8.low") == pytest.approx(1.9)
    assert ours("fig8.high") == pytest.approx(2.0)


def test_mean_and_best_over_three_ratios():
    assert ours("fig9.mean") == ours("fig9.best") == pytest.approx(2.0)


def test_capacities_are_where_the_limit_is_reached():
    assert ours("fig10.660b.capacity") == ours("fig10.27b.capacity") == pytest.approx(2.0)
    assert "Basic 0.200, DualPath 0.400" in FOUND.figures["fig10.660b.capacity"].note


def test_ablation_is_by_basic():
    basic = JCT_S[System.BASIC]
    assert ours("fig12.layerwise") == JCT_S[System.LAYERWISE] / basic
    assert ours("fig12.scheduling") == JCT_S[System.DUAL] / basic
    assert FOUND.figures["fig12.layerwise"].note == "-20.00 %"


def test_latencies_are_those_at_the_published_rate():
    assert ours("fig11.ttft") == pytest.approx(4.0)
    assert FOUND.figures["fig11.ttft"].note.startswith("queued 0.10, read 0.20")


def test_working_set_by_hand():
    assert working_set_bytes(0.5, 100.0, 1000, 20) == 0.5 * 100 * 500 * 20
    agent_s = 8.0 * 157
    expected = 0.1 * agent_s * 55_958 / 2 * 42_944 / 1e9
    assert ours("workingset.0.1") == pytest.approx(expected)


def test_table1_is_close_where_nothing_is_open():
    errors = {id: abs(each.error) for id, each in FOUND.figures.items() if id.startswith("table1.")}
    assert max(error for id, error in errors.items() if "deepseek" not in id) <= 0.01
    assert max(errors.values()) <= 0.12


def test_statements_hold_where_they_should():
    wrong = {id for id, each in FOUND.checks.items() if not each.holds}
    # All made-up runs take equally long, so nothing grows, and DualPath 1P1D is not like Basic 2P1D.
    assert wrong == {"fig7.agents", "fig7.length", "fig9.one-more"}


def test_statements_fail_when_the_order_is_another():
    slow = {**JCT_S, System.DUAL: 130.0, System.LAYERWISE: 250.0}
    found = reproduction_of(
        [EXPERIMENTS[name] for name in ("fig7", "fig12")],
        SETTINGS,
        results(lambda case: summary(jct_s=slow[case.system])),
    )
    holds = {id: each.holds for id, each in found.checks.items()}
    assert not holds["fig12.layerwise"]
    assert holds["fig12.dual-path"]
    assert not holds["fig12.scheduling"]
    assert not holds["fig7.oracle"]
    assert holds["fig7.order"]


def test_an_experiment_with_a_run_missing_is_left_out():
    every = results()
    missing = EXPERIMENTS["fig12"].cases(SETTINGS)[1]
    del every[missing]
    found = reproduction_of(EXPERIMENTS.values(), SETTINGS, every, was_interrupted=True)
    assert "fig12" not in found.evaluations
    assert found.evaluations.keys() | {"fig12"} == EXPERIMENTS.keys()
    assert found.headline()["orderings_hold"] is not True


def test_experiments_share_runs():
    asked = sum(len(each.cases(SETTINGS)) for each in EXPERIMENTS.values())
    assert len(all_cases(EXPERIMENTS.values(), SETTINGS)) <= asked - 40


def test_online_runs_are_long_enough():
    loads = [case.load for case in all_cases(EXPERIMENTS.values(), SETTINGS)]
    assert all(load.horizon_s >= 4500 for load in loads if isinstance(load, AtRate))


@pytest.mark.parametrize("deployment", [ds_660b(), ds_27b(), qwen_32b()])
@pytest.mark.parametrize("system", System)
def test_longest_requests_fit(deployment, system):
    cluster, _ = prepare(deployment, system, SETTINGS.assumptions)
    assert min(cluster.prefill_room_tokens, cluster.decode_hbm_tokens) >= 64 * 1024


def test_larger_nodes_buffers_are_the_dense_models_alone():
    buffers = {
        (case.deployment.model.name, case.assumptions.buffer_bytes)
        for case in all_cases(EXPERIMENTS.values(), SETTINGS)
    }
    assert dict(buffers) == {
        ds_660b().model.name: 80e9,
        ds_27b().model.name: 80e9,
        qwen_32b().model.name: 320e9,
    }


def test_capacity_between_two_rates():
    assert capacity((0.1, 0.2, 0.3), (0.25, 0.5, 2.0)) == pytest.approx(0.25)
    assert capacity((0.1, 0.2), (0.5, 1 / math.e**-1)) == pytest.approx(
        0.1 + 0.1 * math.log(2) / (1 + math.log(2))
    )


def test_capacity_stops_at_the_first_rate_that_is_too_much():
    assert capacity((0.1, 0.2, 0.3), (0.5, 1.5, 0.5)) < 0.2


def test_capacity_at_the_ends_of_the_grid():
    assert capacity((0.1, 0.2), (0.5, 0.6)) == 0.2
    assert capacity((0.1, 0.2), (1.5, 2.0)) == 0.1


def test_the_nearer_limit_counts():
    assert fig10.used_share(summary(ttft_s=2.0, tpot_s=0.04)) == pytest.approx(0.8)
    assert fig10.used_share(summary(ttft_s=6.0, tpot_s=0.04)) == pytest.approx(1.5)


def test_about_as_fast_is_within_a_tenth_in_the_geometric_mean():
    assert geometric_mean([0.5, 2.0]) == pytest.approx(1.0)
    assert about("fig9.basic", "", [0.5, 2.0]).holds
    assert about("fig9.basic", "", [1.1]).holds
    assert not about("fig9.basic", "", [1.12]).holds
    assert not about("fig9.basic", "", [0.9]).holds


def test_growing_may_stand_still_but_not_turn():
    assert grows("fig7.agents", "", [1.0, 0.99, 1.2]).holds
    assert not grows("fig7.agents", "", [1.0, 1.2, 1.1]).holds
    assert not grows("fig7.agents", "", [1.0, 1.0]).holds
    assert grows("fig8.append", "", [1.9, 1.5, 1.51], falls=True).holds
    assert not grows("fig8.append", "", [1.5, 1.9], falls=True).holds


def test_published_figures_have_our_number_format():
    for each in FOUND.figures.values():
        assert math.isfinite(each.ours), each.id
        assert each.error == pytest.approx(each.ours / PUBLISHED[each.id].value - 1)
