"""The page of `dualpath bench pooling`: JCT beside its bound, and each storage NIC over time."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from dualpath.bench.cluster.results import Measurements
from dualpath.bench.harness import BenchResult
from dualpath.report.chart import Axis, BarChart, Bars, Limit, Line, LineChart, shown
from dualpath.report.page import (
    Card,
    CardRow,
    Cell,
    Page,
    Panel,
    Section,
    Table,
    Verdict,
    View,
    render,
)

__all__ = ["pooling_page", "write_pooling_report"]

_CHART_WINDOW_S = 0.5
_CLEARLY = 1.02


def write_pooling_report(path: Path, result: BenchResult, found: Measurements) -> None:
    """One HTML file that needs no network. Whole or not at all. Raises ConfigError without plotly."""
    text = render(pooling_page(result, found))
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)


def pooling_page(result: BenchResult, found: Measurements) -> Page:
    systems = list(
        dict.fromkeys(name for topology in found.topologies for name in found.systems(topology))
    )
    topologies = [each for each in found.topologies if found.systems(each)]
    return Page(
        "Pooling storage NICs",
        f"{', '.join(topologies)}; {result.setup['agents']} agents, "
        f"{result.setup['turns']} turns each, {result.setup['snic']} a storage NIC",
        tuple(systems),
        (_setup_table(result),),
        (
            _summary(result, found, topologies, systems),
            *(_topology(found, topology, systems) for topology in topologies),
        ),
    )


def _setup_table(result: BenchResult) -> Table:
    return Table(
        "Setup",
        ("", "value"),
        tuple((Cell(name), Cell(_plain(value))) for name, value in result.setup.items()),
        folded=True,
    )


def _plain(value: object) -> str:
    if isinstance(value, float):
        return shown(value)
    if isinstance(value, list | tuple):
        return ", ".join(map(str, value))
    return str(value)


def _summary(
    result: BenchResult, found: Measurements, topologies: Sequence[str], systems: Sequence[str]
) -> Section:
    single = [
        (name, value)
        for name, value in result.figures.items()
        if isinstance(value, int | float) and not isinstance(value, bool)
    ]
    return Section(
        "summary",
        "Summary",
        "Summary",
        "Job completion time is from the start of all agents until the last one ends. The bound is the "
        "time in which the storage NICs that a system reads with can bring what it read. oracle reads and "
        "transfers nothing: what computing alone takes, with tokens that mean nothing.",
        cards=tuple(_card(found, topology, systems) for topology in topologies),
        tables=(
            Table("Figures", ("", "value"), tuple((Cell(a), Cell(shown(b))) for a, b in single)),
            _passes_table(found, topologies),
        ),
    )


def _card(found: Measurements, topology: str, systems: Sequence[str]) -> Card:
    times = {name: found.jct_s(topology, name) for name in systems}
    longest = max((each for each in times.values() if each is not None), default=0.0)
    rows = []
    for slot, name in enumerate(systems):
        jct_s = times[name]
        if jct_s is not None:
            speedup = found.speedup(topology, name)
            change = "" if speedup is None or name == "basic" else f"{speedup:.2f}x"
            cell = Cell(f"{shown(jct_s)} s", change, _verdict(speedup) if change else None)
            rows.append(CardRow(name, slot, cell, jct_s / longest if longest else 0.0))
    return Card(f"JCT, {topology}", "Lower is better; speed-up over basic.", tuple(rows))


def _verdict(speedup: float | None) -> Verdict | None:
    if speedup is None:
        return None
    if 1 / _CLEARLY <= speedup <= _CLEARLY:
        return Verdict.SAME
    return Verdict.BETTER if speedup > 1 else Verdict.WORSE


def _passes_table(found: Measurements, topologies: Sequence[str]) -> Table:
    rows: list[tuple[Cell, ...]] = []
    for topology in topologies:
        for system in found.systems(topology):
            for each in found.passes(topology, system):
                bound = found.bound(topology, system, each)
                used = found.utilisation(topology, system)
                balanced = found.balance(topology, system)
                reads = system != "oracle"
                rows.append(
                    (
                        Cell(f"{topology} {system}"),
                        Cell(shown(each.jct_s)),
                        Cell(shown(bound.seconds) if reads else ""),
                        Cell(shown(bound.seconds / each.jct_s, share=True) if reads else ""),
                        Cell(", ".join(f"{node} {used[node]:.1%}" for node in used)),
                        Cell(shown(balanced)),
                        Cell(shown(each.ttft_s_mean)),
                        Cell(shown(each.read_tokens / each.prompt_tokens, share=True)),
                    )
                )
    return Table(
        "Passes",
        (
            *("", "JCT (s)", "bound (s)", "of bound", "NICs while reading", "max/avg"),
            *("mean TTFT (s)", "hit rate"),
        ),
        tuple(rows),
    )


def _topology(found: Measurements, topology: str, systems: Sequence[str]) -> Section:
    present = found.systems(topology)
    views = [View(name, _over_time(found, topology, name)) for name in present if name != "oracle"]
    panels = [
        Panel(
            f"jct-{topology}",
            "JCT and bound",
            "The part of the JCT that reading takes at least, and the rest.",
            (View("all", _jct_chart(found, topology, present)),),
        )
    ]
    if views:
        panels.append(
            Panel(
                f"nics-{topology}",
                "Storage NICs over time",
                "Share of what TCP gets of a NIC, by node. From the start of the agents.",
                tuple(views),
                first=len(views) - 1,
                wide=True,
            )
        )
    return Section(
        topology.lower(),
        topology,
        topology,
        f"Storage NICs of {found.snic_bytes_s / 1e6:.1f} MB/s each.",
        panels=tuple(panels),
    )


def _jct_chart(found: Measurements, topology: str, systems: Sequence[str]) -> BarChart:
    first = {name: found.passes(topology, name)[0] for name in systems}
    bounds = {
        name: 0.0 if name == "oracle" else found.bound(topology, name, each).seconds
        for name, each in first.items()
    }
    return BarChart(
        f"JCT, {topology}",
        tuple(systems),
        Axis("time", "s"),
        (
            Bars("reading at least", tuple(bounds[name] for name in systems), 0),
            Bars("rest", tuple(first[name].jct_s - bounds[name] for name in systems), 1),
        ),
        note="First round.",
    )


def _over_time(found: Measurements, topology: str, system: str) -> LineChart:
    measured = found.passes(topology, system)[0]
    windows = measured.nics.windows(_CHART_WINDOW_S)
    middles = tuple((each.from_s + each.to_s) / 2 for each in windows)
    return LineChart(
        f"Storage NICs, {topology}, {system}",
        Axis("time", "s"),
        Axis("utilisation", share=True),
        tuple(
            Line(node, middles, tuple(each.rates[i] / found.snic_bytes_s for each in windows), i, i)
            for i, node in enumerate(measured.nics.nodes)
        ),
        limits=(Limit("TCP's share of the rate", 1.0),),
    )
