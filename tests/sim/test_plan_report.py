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


def some_plan(goal=None) -> Plan:
    goal = goal or Offline(24)
    field = "rate_aps" if isinstance(goal, Capacity) else "jct_s"
    figures = tuple(
        some_figures(split, system, **{field: score * (1 + place / 10)})
        for place, split in enumerate(SPLITS)
        for system, score in SCORES.items()
    )
    best = figures[2]
    more = some_figures(Split(1, 3, 1, 1), "split", **{field: 8.0})
    return Plan(
        goal=goal,
        figures=figures,
        best=best,
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
