from __future__ import annotations

import io

import msgspec
import pytest
from plan_kit import some_figures
from rich.console import Console

from dualpath.report.chart import BarChart, LineChart
from dualpath.sim.hardware import NodeSpec
from dualpath.sim.plan.advice import loads_of
from dualpath.sim.plan.load import AtRate, Capacity, Offline
from dualpath.sim.plan.report import plan_page, write_report
from dualpath.sim.plan.result import Advice, Plan, Premise, WhatIf
from dualpath.sim.plan.splits import Split
from dualpath.sim.plan.table import print_plan
from dualpath.sim.plan.verdict import verdict_of

SPLITS = (Split(1, 2, 1, 1), Split(2, 1, 1, 1))
SCORES = {"basic": 20.0, "dual": 11.0, "split": 10.0, "oracle": 8.0}
ADVICE = Advice(
    read_path="split",
    block_tokens=64,
    layer_block_bytes=65_536,
    pe_buffer_bytes=1 << 30,
    de_buffer_bytes=2 << 30,
    node_buffer_bytes=16 << 30,
    node_buffer_share=0.1,
    kv_device_bytes=3 << 30,
    alpha_tokens=1_000_000,
    beta_tokens=500_000,
    quota_s=0.3,
    max_running=12,
    reasons={
        name: f"because of {name}"
        for name in (
            "read_path", "block_tokens", "buffers", "kv_device", "alpha_tokens", "beta_tokens", "quota_s",
            "max_running",
        )
    },
    serve=("--prefill", "8", "--decode", "16"),
)  # fmt: skip


def some_plan(goal=None, scores=SCORES) -> Plan:
    goal = goal or Offline(24)
    field = "rate_aps" if isinstance(goal, Capacity) else "jct_s"
    figures = tuple(
        some_figures(split, system, **{field: score * (1 + place / 10)})
        for place, split in enumerate(SPLITS)
        for system, score in scores.items()
    )
    best = figures[2]
    more = some_figures(Split(1, 3, 1, 1), "split", **{field: 8.0})
    return Plan(
        goal=goal,
        figures=figures,
        best=best,
        verdict=verdict_of(goal, figures, best, was_interrupted=False),
        loads=loads_of(NodeSpec(), 1, 2),
        advice=ADVICE,
        what_if=(
            WhatIf(extra="storage NIC", added=1, figures=best, gain=1.0),
            WhatIf(extra="prefill nodes", added=2, figures=more, gain=1.25),
            WhatIf(extra="decode nodes", added=1, figures=more, gain=1.25),
        ),
        was_interrupted=False,
        setup={"model": "M", "gpu": "G", "nodes": 3},
        premises=(Premise("node: gpus", "8", "a <datasheet>"),),
    )


def printed(plan: Plan) -> str:
    file = io.StringIO()
    print_plan(plan, Console(file=file, width=140))
    return file.getvalue()


def test_the_table_says_what_is_best_and_why():
    text = printed(some_plan())
    for words in (
        "1P2D *", "2.00x", "JCT, s", "because of buffers", "P/D from 0.14", "which is in it", "1.25x",
        "dualpath serve MODEL --prefill 8 --decode 16", "2 prefill nodes more", "1 decode node more",
        "one storage NIC more a node",
    ):  # fmt: skip
        assert words in text, words


def test_a_plan_of_nothing_and_of_a_part():
    nothing = msgspec.structs.replace(
        some_plan(),
        figures=(),
        best=None,
        verdict=verdict_of(Offline(24), (), None, was_interrupted=True),
        loads=None,
        advice=None,
        what_if=(),
        was_interrupted=True,
    )
    assert "no advice" in printed(nothing)
    part = msgspec.structs.replace(some_plan(), what_if=(), was_interrupted=True)
    assert "of the runs that had ended" in printed(part)
    assert plan_page(nothing).sections
    assert any(each.absent for each in plan_page(part).sections)


@pytest.mark.parametrize(
    ("goal", "axis"),
    [
        (Offline(24), "JCT (s)"),
        (AtRate(0.5, 100.0), "Mean request (s)"),
        (Capacity({"ttft": 4.0}, 100.0), "Capacity (agents/s)"),
    ],
)
def test_the_page_has_everything(goal, axis):
    page = plan_page(some_plan(goal))
    sections = {each.id: each for each in page.sections}
    assert list(sections) == [
        "summary", "ratio", "parts", "storage", "resources", "settings", "more", "assumed",
    ]  # fmt: skip
    assert page.legend == ("basic", "dual", "split", "oracle")
    assert sections["summary"].cards[0].title == axis
    chart = sections["ratio"].panels[0].views[0].chart
    assert isinstance(chart, LineChart) and chart.y.label == axis
    assert [line.xs for line in chart.lines] == [(1, 2)] * 4
    assert [view.label for view in sections["storage"].panels[0].views] == list(SCORES)
    parts = sections["parts"].panels[0].views[0].chart
    assert isinstance(parts, BarChart) and parts.categories == tuple(SCORES)
    loads = sections["resources"].panels[0].views[0].chart
    assert isinstance(loads, BarChart) and "PE CNIC write" in loads.categories


def notices(plan: Plan) -> list[str]:
    return [each.text for each in plan_page(plan).sections[0].notices]


def test_where_basic_is_better_that_is_said_and_by_how_much():
    plan = some_plan(scores={"basic": 9.0, "dual": 11.0, "split": 10.0, "oracle": 9.1})
    assert (plan.verdict.recommended.system, plan.verdict.recommended.split) == ("basic", SPLITS[0])
    assert plan.verdict.gain_over_basic == pytest.approx(0.9)
    assert plan.verdict.loading_limits is False
    text = " ".join(printed(plan).split())
    for words in (
        "Loading KV is not what limits here: on 1P2D a cluster that need not read is 0.99 times as good",
        "There basic is better than split, 1.11 times: JCT, s 9 against 10.",
        "The best that can be had is basic on 1P2D; the settings are for split on 1P2D.",
        "but basic on 1P2D is better",
    ):
        assert words in text, words
        assert words.startswith("but") or any(words in each for each in notices(plan))
    assert "split on it is the best" not in text
    assert "Best is basic on 1P2D." in plan_page(plan).sections[1].panels[0].text


def test_where_basic_is_better_than_oracle_the_quota_is_named():
    scores = {"basic": 9.0, "dual": 11.0, "split": 10.0, "oracle": 9.5}
    assert "without the compute quota" in " ".join(printed(some_plan(scores=scores)).split())
    close = some_plan(scores=scores | {"oracle": 9.1})
    assert "without the compute quota" not in " ".join(printed(close).split())


def test_where_basic_is_as_good_it_is_not_called_better():
    plan = some_plan(scores={"basic": 10.0, "dual": 11.0, "split": 10.0, "oracle": 8.0})
    text = " ".join(printed(plan).split())
    assert "Loading KV costs something here" in text and "1.25 times as good as basic" in text
    assert "There basic is as good as split, 1.00 times" in text
    assert "* split on it is the best that can be had" in text
    assert plan.verdict.recommended.system == "split"


def test_where_dual_or_split_gains_nothing_is_said_of_basic():
    for scores in (SCORES, {"dual": 11.0, "split": 10.0}):
        text = printed(some_plan(scores=scores))
        assert "Loading KV" not in text and "There basic" not in text


GOAL = Capacity({"ttft": 0.1, "tpot": 0.05}, 100.0)


def unmet_plan(figures, *, was_interrupted=False) -> Plan:
    verdict = verdict_of(GOAL, figures, None, was_interrupted=was_interrupted)
    nothing = {"best": None, "loads": None, "advice": None, "what_if": ()}
    values = {"figures": figures, "verdict": verdict, "was_interrupted": was_interrupted}
    return msgspec.structs.replace(some_plan(GOAL), **values, **nothing)


def none_holds(system: str, split: Split = SPLITS[0]):
    figures = some_figures(split, system, rate_aps=0.0)
    return msgspec.structs.replace(figures, nearest_aps=0.05)


def test_objectives_that_nothing_holds_get_no_advice():
    slower = none_holds("basic")
    slow = msgspec.structs.replace(slower.run.ttft, mean_s=3.0)
    slower = msgspec.structs.replace(slower, run=msgspec.structs.replace(slower.run, ttft=slow))
    plan = unmet_plan((slower, none_holds("split", SPLITS[1]), none_holds("oracle")))
    text = " ".join(printed(plan).split())
    for words in (
        "No division holds ttft <= 0.1 s, tpot <= 0.05 s.",
        "Nearest is split on 2P1D: ttft 1 s, tpot 0.02 s on average at 0.05 agents/s.",
        "A cluster that need not read would not hold that either.",
        "So no settings are advised",
    ):
        assert words in text, words
        assert any(words in each for each in notices(plan))
    for words in ("*", "1.00x", "serve MODEL", "what one more", "interrupted"):
        assert words not in text, words
    assert [each.id for each in plan_page(plan).sections] == ["summary", "ratio", "assumed"]
    body = msgspec.json.decode(plan.to_json())
    assert body["verdict"]["slo_met"] is False and body["best"] is None and body["advice"] is None
    assert body["verdict"]["nearest"]["means_s"] == {"ttft": 1.0, "tpot": 0.02}


def test_an_interrupted_search_does_not_say_that_nothing_holds():
    plan = unmet_plan((none_holds("basic"),), was_interrupted=True)
    assert plan.verdict.slo_met is None and "No division" not in printed(plan)


def test_objectives_that_only_basic_holds():
    plan = unmet_plan((some_figures(SPLITS[0], "basic", rate_aps=0.2), none_holds("split")))
    assert plan.verdict.slo_met is True and plan.verdict.recommended.system == "basic"
    assert "Neither dual nor split holds ttft <= 0.1 s" in printed(plan)


def test_without_a_request_that_counts_there_is_nothing_nearest():
    uncounted = some_figures(SPLITS[0], "split", rate_aps=0.0)
    plan = unmet_plan((uncounted,))
    assert plan.verdict.nearest is None
    assert "No division holds" in printed(plan) and "Nearest" not in printed(plan)


def test_the_file_is_whole_and_escaped(tmp_path):
    pytest.importorskip("plotly")
    path = tmp_path / "plan.html"
    write_report(path, some_plan())
    text = path.read_text()
    assert "a &lt;datasheet&gt;" in text and "<datasheet>" not in text
    assert "http-equiv" in text and list(tmp_path.iterdir()) == [path]


def test_json_of_a_plan_is_one_line_and_comes_back():
    plan = some_plan()
    assert "\n" not in plan.to_json()
    assert msgspec.json.decode(plan.to_json(), type=Plan) == plan
