"""A plan as one HTML page that needs no network: which cards, charts and tables, and in what words."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from pathlib import Path

from dualpath.report.chart import Axis, BarChart, Bars, Line, LineChart, shown
from dualpath.report.page import (
    Absent,
    Card,
    CardRow,
    Cell,
    Notice,
    Page,
    Panel,
    Section,
    Table,
    Verdict,
    View,
    render,
)
from dualpath.sim.plan.load import AtRate, Capacity, Goal, Offline
from dualpath.sim.plan.result import Figures, Plan, gain
from dualpath.sim.plan.table import load_sentences, setting_rows, times, what_if_names
from dualpath.sim.plan.verdict import SAME, limits_text, verdict_sentences
from dualpath.sim.summary import POINTS

__all__ = ["plan_page", "write_report"]


def write_report(path: Path, plan: Plan) -> None:
    """Whole or not at all. Raises ConfigError when plotly is missing."""
    text = render(plan_page(plan))
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)


def plan_page(plan: Plan) -> Page:
    setup = plan.setup
    sections = [_summary(plan), _ratios(plan)]
    if plan.best is not None:
        sections += [_first_token(plan, plan.best), _storage(plan, plan.best), _resources(plan)]
        sections += [_settings(plan), _what_if(plan)]
    sections.append(_assumed(plan))
    facts = Table(
        "Question",
        ("", ""),
        tuple((Cell(name.replace("_", " ")), Cell(_said(value))) for name, value in setup.items()),
    )
    return Page(
        "Plan",
        f"{setup.get('model')} on {setup.get('nodes')} nodes of {setup.get('gpu')} · {_load(plan.goal)}",
        tuple(_slots(plan)),
        (facts,),
        tuple(sections),
    )


def _said(value: str | int | float | None) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return value if isinstance(value, str) else "none" if value is None else shown(value)


def _load(goal: Goal) -> str:
    match goal:
        case Offline(agents=agents):
            return f"{agents:,} agents at once"
        case AtRate(rate_aps=rate_aps, horizon_s=horizon_s):
            return f"{rate_aps:g} agents a second for {horizon_s:,.0f} s"
        case Capacity(limits_s=limits_s, horizon_s=horizon_s):
            return (
                f"the highest rate with {limits_text(limits_s)}, each tried for {horizon_s:,.0f} s"
            )


def _axis(goal: Goal) -> Axis:
    match goal:
        case Offline():
            return Axis("JCT", "s")
        case AtRate():
            return Axis("Mean request", "s")
        case Capacity():
            return Axis("Capacity", "agents/s")


def _slots(plan: Plan) -> dict[str, int]:
    """Systems and their places in the palette."""
    return {
        name: slot for slot, name in enumerate(dict.fromkeys(each.system for each in plan.figures))
    }


def _summary(plan: Plan) -> Section:
    notices = [Notice(each) for each in verdict_sentences(plan)]
    notices += [Notice(each, good=True) for each in load_sentences(plan)]
    if plan.was_interrupted:
        notices.append(Notice("Interrupted: this is of the runs that had ended."))
    if plan.best is None:
        return Section("summary", "Summary", "Summary", notices=tuple(notices))
    by_system = plan.of_split(plan.best.split)
    axis = _axis(plan.goal)
    more_is_better = isinstance(plan.goal, Capacity)
    cards = (
        _card(plan, by_system, axis.label, lambda each: each.score(plan.goal), more_is_better),
        _card(plan, by_system, "Mean TTFT (s)", lambda each: each.run.ttft.mean_s, False),
        _card(plan, by_system, "Mean TPOT (ms)", lambda each: 1e3 * each.run.tpot.mean_s, False),
        _card(
            plan,
            by_system,
            "Storage NICs used (%)",
            lambda each: 1e2 * each.run.snic_utilization,
            None,
        ),
    )
    text = (
        f"What the systems do on {plan.best.split.name}, the best split of dual and split; basic is "
        "prefill nodes alone reading, dual the published design, split both sides reading each request, "
        "oracle a cluster that need not read at all."
    )
    return Section("summary", "Summary", "Summary", text, cards=cards, notices=tuple(notices))


def _card(
    plan: Plan,
    by_system: dict[str, Figures],
    title: str,
    value: Callable[[Figures], float],
    more_is_better: bool | None,
) -> Card:
    """`more_is_better` None: neither way is good."""
    slots = _slots(plan)
    values = {system: value(each) for system, each in by_system.items()}
    top = max(values.values(), default=0.0) or 1.0
    hints = {
        True: "Higher is better.",
        False: "Lower is better.",
        None: "Of their rate, over the run.",
    }
    rows = []
    for system, each in values.items():
        cell = Cell(shown(each))
        base = values.get("basic")
        if system != "basic" and base and each and more_is_better is not None:
            ratio = each / base
            better = (ratio > 1) == more_is_better
            verdict = Verdict.BETTER if better else Verdict.WORSE
            verdict = Verdict.SAME if abs(ratio - 1) <= SAME else verdict
            cell = Cell(shown(each), times(ratio), verdict)
        rows.append(CardRow(system, slots[system], cell, each / top))
    return Card(title, hints[more_is_better], tuple(rows))


def _ratios(plan: Plan) -> Section:
    axis = _axis(plan.goal)
    lines = []
    for system, slot in _slots(plan).items():
        found = plan.of_system(system)
        lines.append(
            Line(
                system,
                tuple(each.split.prefill_nodes for each in found),
                tuple(each.score(plan.goal) for each in found),
                slot,
                slot,
            )
        )
    nodes = plan.setup.get("nodes")
    chart = LineChart(
        f"{axis.title} by division of {nodes} nodes",
        Axis(f"Prefill nodes of {nodes}", from_zero=False),
        axis,
        tuple(lines),
    )
    choice = plan.verdict.recommended
    best = "" if choice is None else f" Best is {choice.system} on {choice.split.name}."
    panel = Panel("ratio", chart.title, f"The others decode.{best}", (View("", chart),), wide=True)
    return Section(
        "ratio",
        "P/D ratio",
        "Prefill and decode nodes",
        panels=(panel,),
        tables=(_split_table(plan),),
    )


def _split_table(plan: Plan) -> Table:
    slots = _slots(plan)
    rows = []
    for split in sorted({each.split for each in plan.figures}, key=lambda each: each.prefill_nodes):
        by_system = plan.of_split(split)
        basic = by_system.get("basic")
        cells = [Cell(split.name)]
        for system in slots:
            each = by_system.get(system)
            if each is None:
                cells.append(Cell("–"))
            elif basic is None or system == "basic":
                cells.append(Cell(shown(each.score(plan.goal))))
            else:
                ratio = gain(plan.goal, basic, each)
                as_good = "" if ratio is None else f"{times(ratio)} as good"
                cells.append(Cell(shown(each.score(plan.goal)), as_good))
        rows.append(tuple(cells))
    return Table(_axis(plan.goal).label, ("split", *slots), tuple(rows), (None, *slots.values()))


def _first_token(plan: Plan, best: Figures) -> Section:
    by_system = plan.of_split(best.split)
    names = {
        "queued": "waits for engines",
        "read": "is read",
        "wait": "waits for a batch",
        "prefill": "prefill",
    }
    bars = tuple(
        Bars(title, tuple(each.run.parts_s[part] for each in by_system.values()), slot)
        for slot, (part, title) in enumerate(names.items())
    )
    chart = BarChart("Time to first token, by part", tuple(by_system), Axis("Mean time", "s"), bars)
    panel = Panel(
        "parts",
        chart.title,
        f"Means over requests, on {best.split.name}.",
        (View("", chart),),
        wide=True,
    )
    return Section("parts", "First token", "Where the first token's time goes", panels=(panel,))


def _storage(plan: Plan, best: Figures) -> Section:
    views = []
    by_system = plan.of_split(best.split)
    for system, each in by_system.items():
        xs = tuple(
            (place + 0.5) * each.run.until_s / POINTS for place in range(len(each.run.prefill_snic))
        )
        lines = (
            Line("prefill nodes", xs, each.run.prefill_snic, 0, 0),
            Line("decode nodes", xs, each.run.decode_snic, 1, 1),
        )
        chart = LineChart(
            f"Use of storage NICs, {system}",
            Axis("Time", "s"),
            Axis("Utilisation", share=True),
            lines,
            note=f"Busiest NIC by the mean of all: {shown(each.run.snic_balance.max_mean)}.",
        )
        views.append(View(system, chart))
    panel = Panel(
        "snic",
        "Use of storage NICs over time",
        f"Mean over the nodes of a role, of what a NIC brings, on {best.split.name}.",
        tuple(views),
        first=list(by_system).index(best.system),
        wide=True,
    )
    return Section("storage", "Storage", "Storage reads over time", panels=(panel,))


def _resources(plan: Plan) -> Section:
    assert plan.best is not None and plan.loads is not None
    loads = plan.loads
    chart = BarChart(
        "Load of each resource while all storage NICs read",
        tuple(loads.shares),
        Axis("Load", "%"),
        (Bars("load", tuple(1e2 * each for each in loads.shares.values()), 0),),
        note="At 100 % and above it is a bottleneck before storage is.",
    )
    panel = Panel("loads", chart.title, load_sentences(plan)[-1], (View("", chart),), wide=True)
    return Section(
        "resources",
        "Bottlenecks",
        "Bottlenecks besides storage",
        "The paper's analysis, with the rates of the specification; it neglects what is appended.",
        panels=(panel,),
    )


def _settings(plan: Plan) -> Section:
    assert plan.advice is not None
    rows = [
        (Cell(name), Cell(value), Cell(reason)) for name, value, reason in setting_rows(plan.advice)
    ]
    serve = shlex.join(["dualpath", "serve", "MODEL", *plan.advice.serve])
    rows.append((Cell("all as flags"), Cell(""), Cell(serve)))
    return Section(
        "settings",
        "Settings",
        "Settings for this cluster",
        tables=(Table("Settings", ("", "value", "because"), tuple(rows), words=True),),
    )


def _what_if(plan: Plan) -> Section:
    if not plan.what_if:
        absent = Absent("One more of something", "the plan was interrupted before it was tried")
        return Section("more", "One more", "What one more would give", absent=(absent,))
    rows = tuple(
        (
            Cell(name),
            Cell(shown(each.figures.score(plan.goal))),
            Cell(times(each.gain)),
            Cell(shown(each.figures.run.ttft.mean_s)),
            Cell(shown(1e3 * each.figures.run.tpot.mean_s)),
        )
        for name, each in zip(what_if_names(plan), plan.what_if, strict=True)
    )
    columns = ("", _axis(plan.goal).label, "times as good", "mean TTFT (s)", "mean TPOT (ms)")
    return Section(
        "more",
        "One more",
        "What one more would give",
        "The best once more, with one part added.",
        tables=(Table("One more", columns, rows),),
    )


def _assumed(plan: Plan) -> Section:
    rows = tuple((Cell(each.name), Cell(each.value), Cell(each.source)) for each in plan.premises)
    return Section(
        "assumed",
        "Assumptions",
        "What was taken for granted",
        "The plan is as good as these. Give your own with --hardware and the flags of the node.",
        tables=(Table("Assumptions", ("", "value", "source"), rows, words=True),),
    )
