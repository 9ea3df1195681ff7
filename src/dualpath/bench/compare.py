"""`dualpath bench compare`: results of replays side by side, with ratios to the first, and their report.

Runs are matched by their load; what a result lacks is left out. Says where results should not be compared.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
from rich.text import Text

from dualpath.base.errors import ConfigError
from dualpath.bench.harness import BenchResult, Figure, Progress
from dualpath.bench.replay.comparison import (
    FIGURES,
    MAX_APS,
    FigureSpec,
    Measured,
    differences,
    failures,
    labels,
    loads,
    max_aps,
    measure,
    ratio,
)
from dualpath.bench.replay.figures import run_key
from dualpath.bench.replay.records import ReplayRecord, read_record
from dualpath.bench.report.replay_tables import changed
from dualpath.report.page import Verdict

__all__ = ["HELP", "NAME", "NEEDS", "add_arguments", "compare", "run", "show"]

NAME = "compare"
HELP = "results of `replay --output` side by side, with ratios to the first, and as an HTML report"
NEEDS = "two or more result files"

_STYLES = {Verdict.BETTER: "green", Verdict.WORSE: "red", Verdict.SAME: "dim"}
_MARKS = {Verdict.BETTER: "better", Verdict.WORSE: "worse", Verdict.SAME: "same"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "files",
        nargs="+",
        type=Path,
        metavar="FILE",
        help="Result files; the first is the baseline.",
    )
    parser.add_argument(
        "--labels", metavar="A,B,...", help="Names of the results instead of those in the files."
    )
    parser.add_argument(
        "--title", default="Comparison", help="Of the report (default: %(default)s)."
    )
    parser.add_argument(
        "--report", type=Path, metavar="FILE", help="Write the HTML report; it needs no network."
    )


def run(args: argparse.Namespace, progress: Progress) -> BenchResult:
    paths: list[Path] = args.files
    if len(paths) < 2:
        raise ConfigError("compare: two or more result files are needed")
    records = _labelled([read_record(path) for path in paths], args.labels)
    if args.report is not None:
        _write_report(args.report, records, args.title)
        progress(f"report: {args.report}")
    names = labels(records)
    setup: dict[str, Figure] = {
        "labels": names,
        "files": {name: path.name for name, path in zip(names, paths, strict=True)},
    }
    return BenchResult(NAME, compare(records), setup)


def compare(records: Sequence[ReplayRecord]) -> dict[str, Figure]:
    """`by_load`: each figure by load, key and record. Ratios to the first record: `jct_speedup` (above 1 is
    faster) by record and agents; `ttft_ratio`, `tpot_ratio` (below 1 is faster) of means by record and rate;
    `max_aps_ratio` by record. `warnings`: what makes the comparison doubtful."""
    measured = measure(records)
    names = labels(records)
    rates = {
        name: rate
        for name, record in zip(names, records, strict=True)
        if (rate := max_aps(record)) is not None
    }
    figures: dict[str, Figure] = {
        "by_load": _by_load(measured),
        "warnings": [*differences(records), *failures(measured)],
    }
    figures |= {
        "jct_speedup": _ratios(measured, "jct_s", inverse=True),
        "ttft_ratio": _ratios(measured, "ttft_s_mean", mode="online"),
        "tpot_ratio": _ratios(measured, "tpot_s_mean", mode="online"),
    }
    if rates:
        figures["max_aps"] = rates
        figures["max_aps_ratio"] = {
            name: found
            for name, rate in rates.items()
            if name != names[0] and (found := ratio(rate, rates.get(names[0]))) is not None
        }
    return {name: figure for name, figure in figures.items() if figure != {}}


def show(result: BenchResult) -> None:
    """Prints a row for each load and figure, a column for each record."""
    from rich.console import Console
    from rich.table import Table

    names = result.setup["labels"]
    by_load = result.figures["by_load"]
    assert isinstance(names, Sequence) and isinstance(by_load, Mapping)
    table = Table(title="dualpath bench compare", title_justify="left")
    table.add_column("figure")
    for name in names:
        table.add_column(Text(str(name)), justify="right", overflow="fold")
    rates = result.figures.get(MAX_APS.key)
    if isinstance(rates, Mapping):
        table.add_row(_name(MAX_APS), *_cells(MAX_APS, rates, names))
        table.add_section()
    for load, figures in by_load.items():
        assert isinstance(figures, Mapping)
        table.add_row(Text(load, style="bold"))
        for spec in FIGURES:
            values = figures.get(spec.key)
            if isinstance(values, Mapping):
                table.add_row(_name(spec), *_cells(spec, values, names))
        table.add_section()
    console = Console()
    warnings = result.figures["warnings"]
    assert isinstance(warnings, Sequence)
    for warning in warnings:
        console.print(Text(f"warning: {warning}", style="yellow"))
    console.print(table)


def _labelled(records: Sequence[ReplayRecord], given: str | None) -> list[ReplayRecord]:
    if given is None:
        return list(records)
    names = [each.strip() for each in given.split(",")]
    if len(names) != len(records) or not all(names):
        raise ConfigError(f"--labels: expected {len(records)} names, got {given!r}")
    return [
        msgspec.structs.replace(record, label=name)
        for record, name in zip(records, names, strict=True)
    ]


def _write_report(path: Path, records: Sequence[ReplayRecord], title: str) -> None:
    from dualpath.bench.report import write_report

    try:
        write_report(path, records, title)
    except OSError as error:
        raise ConfigError(f"--report: {path} cannot be written: {error.strerror}") from error


def _by_load(measured: Sequence[Measured]) -> dict[str, Figure]:
    found: dict[str, Figure] = {}
    for load in loads(measured):
        runs = [each for each in measured if each.load == load]
        by_key = {
            spec.key: {
                each.label: value for each in runs if (value := each.number(spec.key)) is not None
            }
            for spec in FIGURES
        }
        found[load.label] = {key: values for key, values in by_key.items() if values}
    return found


def _ratios(
    measured: Sequence[Measured], key: str, *, mode: str = "offline", inverse: bool = False
) -> dict[str, Figure]:
    """By record, but the first, and load."""
    found: dict[str, dict[str, Figure]] = {}
    baselines = {each.load: each.number(key) for each in measured if each.slot == 0}
    for each in measured:
        if each.slot == 0 or each.load.mode != mode:
            continue
        value, baseline = each.number(key), baselines.get(each.load)
        against = ratio(baseline, value) if inverse else ratio(value, baseline)
        if against is not None:
            found.setdefault(each.label, {})[run_key(each.run)] = against
    return dict(found)


def _name(spec: FigureSpec) -> str:
    return f"{spec.name}, {spec.unit}" if spec.unit else spec.name


def _cells(spec: FigureSpec, values: Mapping[str, Figure], names: Sequence[Figure]) -> list[Text]:
    cells: list[Text] = []
    baseline = _number(values.get(str(names[0])))
    for index, name in enumerate(names):
        cell = changed(spec, _number(values.get(str(name))), baseline if index else None)
        text = Text(cell.text)
        if cell.verdict is not None:
            text.append(f"  {cell.change} {_MARKS[cell.verdict]}", style=_STYLES[cell.verdict])
        elif cell.change:
            text.append(f"  {cell.change}")
        cells.append(text)
    return cells


def _number(value: Figure | None) -> float | None:
    return float(value) if isinstance(value, int | float) else None
