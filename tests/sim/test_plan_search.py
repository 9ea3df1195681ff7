from __future__ import annotations

import pickle

import pytest
from plan_kit import ANY, small_question, some_figures

pytest.importorskip("numba")

from dualpath.sim.plan import runs, search
from dualpath.sim.plan.load import AtRate, Capacity, Offline, grid_rate
from dualpath.sim.plan.result import Plan, gain
from dualpath.sim.plan.runs import play, simulate
from dualpath.sim.plan.search import best_of, make_plan, task_of
from dualpath.sim.plan.splits import InstanceNodes, Split
from dualpath.sim.progress import Watch
from dualpath.sim.setting import System
from dualpath.sim.summary import summary_of

ONE, TWO = Split(1, 2, 1, 1), Split(2, 1, 1, 1)


class Told(Watch):
    def __init__(self):
        self.expected = 0
        self.runs = []

    def expect(self, runs):
        self.expected += runs

    def ended(self, sentence):
        self.runs.append(sentence)


@pytest.fixture(scope="module")
def plan() -> Plan:
    return make_plan(small_question(), workers=1, watch=Watch())


def test_every_system_on_every_split(plan):
    assert not plan.was_interrupted
    assert [(each.split, each.system) for each in plan.figures] == [
        (split, system) for split in (ONE, TWO) for system in ("basic", "dual", "split", "oracle")
    ]
    for each in plan.figures:
        # 24 agents, four times the six sessions; all but the first six have a first round.
        assert each.run.agents == 24
        assert each.run.requests == 24 * 5 + 18
        assert each.run.jct_s > 0 and each.rate_aps is None
        assert sum(each.run.parts_s.values()) == pytest.approx(each.run.ttft.mean_s, rel=1e-3)


def test_the_best_is_advised_and_the_orderings_hold(plan):
    assert plan.best in plan.figures
    assert plan.best.run.jct_s == min(
        each.run.jct_s for each in plan.figures if each.system in ("dual", "split")
    )
    by_system = plan.of_split(plan.best.split)
    assert (
        by_system["oracle"].run.jct_s <= by_system["split"].run.jct_s < by_system["basic"].run.jct_s
    )
    assert by_system["basic"].de_read_share == 0.0 < by_system["split"].de_read_share
    assert by_system["oracle"].run.snic_utilization == 0.0
    assert plan.advice.read_path in ("split", "shorter")
    verdict = plan.verdict
    assert (verdict.recommended.system, verdict.recommended.split) == (
        plan.best.system,
        plan.best.split,
    )
    assert verdict.loading_limits and verdict.gain_over_basic > 1 and verdict.slo_met is None
    assert plan.setup["nodes"] == 3


def test_premises_have_sources(plan):
    premises = {each.name: each for each in plan.premises}
    assert premises["node: gpus"].source == "made up"
    assert premises["node: snic bytes s"].source.startswith("not in the hardware file")
    assert premises["snic share"].source.startswith("fitted on ")
    assert "quota s" not in premises
    assert all(each.value for each in plan.premises)


def test_one_more_of_each_part(plan):
    assert [each.extra for each in plan.what_if] == ["storage NIC", "prefill nodes", "decode nodes"]
    now = plan.best.split
    nic, prefill, decode = (each.figures.split for each in plan.what_if)
    assert nic == now
    assert (prefill.prefill_nodes, prefill.decode_nodes) == (
        now.prefill_nodes + 1,
        now.decode_nodes,
    )
    assert (decode.prefill_nodes, decode.decode_nodes) == (now.prefill_nodes, now.decode_nodes + 1)
    for each in plan.what_if:
        assert each.gain == pytest.approx(plan.best.run.jct_s / each.figures.run.jct_s)
    assert plan.what_if[0].gain > 1.1  # Storage is the bottleneck here.


def test_every_run_is_told(plan):
    told = Told()
    assert make_plan(small_question(), workers=1, watch=told) == plan
    assert told.expected == len(told.runs) == 11
    assert sum(each.startswith("1P2D split: JCT, s ") for each in told.runs) >= 1


def test_a_task_does_the_same_in_another_process(plan):
    task = task_of(small_question(), ONE, System.SPLIT)
    sent = pickle.loads(pickle.dumps(task))
    figures = pickle.loads(pickle.dumps(play(sent)))
    assert figures == plan.of_split(ONE)["split"]


def test_ctrl_c_gives_what_there_is(plan, monkeypatch):
    ended = 0

    def interrupted(task):
        nonlocal ended
        if ended == 6:
            raise KeyboardInterrupt
        ended += 1
        return play(task)

    monkeypatch.setattr(search, "play", interrupted)
    part = make_plan(small_question(), workers=1, watch=Watch())
    assert part.was_interrupted
    assert part.figures == plan.figures[:6]
    assert part.best in part.figures[:3] and part.advice is not None
    assert part.what_if == ()


def test_ctrl_c_at_once_gives_a_plan_of_nothing(monkeypatch):
    def interrupted(task):
        raise KeyboardInterrupt

    monkeypatch.setattr(search, "play", interrupted)
    part = make_plan(small_question(), workers=1, watch=Watch())
    assert part.was_interrupted and part.figures == () and part.best is None
    assert part.advice is None and part.loads is None


def test_the_best_of_equals_is_split_and_on_fewest_prefill_nodes():
    goal = Offline(24)
    figures = [
        some_figures(ONE, "dual", jct_s=10.0),
        some_figures(ONE, "split", jct_s=10.005),
        some_figures(TWO, "split", jct_s=10.0),
        some_figures(TWO, "oracle", jct_s=5.0),
    ]
    assert best_of(goal, figures) == figures[1]
    better = some_figures(TWO, "dual", jct_s=9.0)
    assert best_of(goal, [*figures, better]) == better
    assert best_of(goal, figures[3:]) is None


def test_gain_is_how_many_times_as_good():
    slow, fast = some_figures(ONE, "dual", jct_s=10.0), some_figures(ONE, "dual", jct_s=8.0)
    assert gain(Offline(1), slow, fast) == 1.25
    capacity = Capacity({"ttft": 4.0}, 100.0)
    few, many = some_figures(ONE, "dual", rate_aps=1.0), some_figures(ONE, "dual", rate_aps=2.5)
    none = some_figures(ONE, "dual", rate_aps=0.0)
    assert gain(capacity, few, many) == 2.5
    assert gain(capacity, none, few) is None and gain(capacity, none, none) is None


def test_nodes_are_added_by_instances():
    question = small_question(nodes=4, prefill_instance=InstanceNodes(ANY, fixed=2))
    best = some_figures(Split(2, 2, 2, 1), "split", jct_s=1.0)
    changes = search._extra_tasks(question, best)
    assert [(each.extra, each.added, each.task.split.name) for each in changes] == [
        ("storage NIC", 1, "2P2D"), ("prefill nodes", 2, "4P2D"), ("decode nodes", 1, "2P3D"),
    ]  # fmt: skip


@pytest.mark.parametrize("snics", [1, 2])
def test_one_storage_nic_more_has_the_rate_of_one(snics):
    question = small_question(snics=snics)
    change = search._extra_tasks(question, some_figures(ONE, "split", jct_s=1.0))[0]
    now_bytes_s = question.hardware.node.snic_bytes_s
    wider_bytes_s = change.task.deployment.hardware.node.snic_bytes_s
    assert wider_bytes_s - now_bytes_s == pytest.approx(now_bytes_s / snics)


def test_capacity_is_a_rate_of_the_grid_that_holds_and_the_next_does_not():
    goal = Capacity({"ttft": 4.0, "tpot": 0.05}, 60.0)
    task = task_of(small_question(goal), ONE, System.SPLIT)
    found = play(task)
    assert found.rate_aps > 0
    assert found.run.ttft.mean_s <= 4.0 and found.run.tpot.mean_s <= 0.05
    step = next(step for step in range(-160, 240) if grid_rate(step) == found.rate_aps)
    above = simulate(task, grid_rate(step + 1))
    # With those that still wait at the end.
    assert summary_of(above, 40.0, 60.0).ttft.mean_s > 4.0
    assert play(task) == found


def test_a_run_in_stages_is_the_same_run():
    task = task_of(small_question(AtRate(8.0, 60.0)), ONE, System.SPLIT)
    whole = simulate(task, 8.0)
    staged = runs._simulation(task, runs._arriving(task, 8.0, 60.0))
    for until_s in (20.0, 40.0, 60.0):
        last = staged.run(until_s)
    assert last.records.tobytes() == whole.records.tobytes()
    assert last.snic_bytes.tobytes() == whole.snic_bytes.tobytes()
    assert 0.5 < whole.snic_utilization() <= 1.0


def test_impossible_objectives_have_no_capacity():
    goal = Capacity({"ttft": 1e-4}, 20.0)
    found = play(task_of(small_question(goal), ONE, System.DUAL))
    assert found.rate_aps == 0.0 and not found.holds
    assert found.nearest_aps > 0 and found.run.requests > 0 and found.run.ttft.mean_s > 1e-4


def test_a_plan_for_impossible_objectives_advises_nothing():
    told = Told()
    plan = make_plan(small_question(Capacity({"ttft": 1e-4}, 20.0)), workers=1, watch=told)
    assert plan.best is None and plan.loads is None and plan.advice is None and plan.what_if == ()
    assert len(told.runs) == told.expected == 8
    assert plan.verdict.slo_met is False and plan.verdict.recommended is None
    means_s = [
        each.run.ttft.mean_s for each in plan.figures if each.system in ("basic", "dual", "split")
    ]
    assert plan.verdict.nearest.means_s == {"ttft": min(means_s)}


def test_latencies_at_a_rate():
    goal = AtRate(0.5, 60.0)
    found = play(task_of(small_question(goal), ONE, System.DUAL))
    assert found.rate_aps == 0.5
    assert found.score(goal) == found.run.request.mean_s > found.run.ttft.mean_s > 0
