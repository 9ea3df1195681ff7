"""`dualpath sim reproduce`: the published evaluation, simulated, and how far each number is off."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from dualpath.base.errors import ConfigError
from dualpath.bench.harness import BenchResult, Figure
from dualpath.cli.main import ExitCode
from dualpath.cli.sweep_flags import add_sweep_flags, check_sweep_flags

if TYPE_CHECKING:
    from rich.console import Console

    from dualpath.sim.missing import Missing
    from dualpath.sim.reproduction import Reproduction

__all__ = ["add_arguments", "run"]

_PIPED_WIDTH = 120
"""Columns of the table where the width of the terminal is unknown."""

_EPILOG = """\
examples:
  dualpath sim reproduce table1
      The cache-compute ratios, which are arithmetic.
  dualpath sim reproduce fig12 fig13 fig14
      The ablation and both balances, from the same four runs.
  dualpath sim reproduce all --sensitivity --output docs/results
      Everything, as a page with charts beside the data.
  dualpath sim reproduce fig12 --output docs/results
      One experiment's files once more; the page of all stays as it is.

Ctrl-C ends it with the experiments whose runs have all ended, and says which are missing.
It needs pip install 'dualpath[sim]', no GPU and no torch. What is modelled and what is not:
docs/simulator.md.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = _EPILOG
    parser.add_argument(
        "names",
        nargs="*",
        metavar="NAME",
        help="table1, fig7 to fig14, table3, workingset, or all (default: all).",
    )
    add_sweep_flags(parser)
    parser.add_argument(
        "--sensitivity",
        action="store_true",
        help="Also vary each fitted value by a fifth, up and down, in five runs each.",
    )
    parser.add_argument(
        "--output",
        type=Path,
        metavar="DIR",
        help="Directory: reproduction/ gets JSON, CSV and charts of each experiment whose runs all ended; "
        "reproduction.md and reproduction.json are written only when those are all experiments, "
        "and stay as they are otherwise.",
    )
    parser.add_argument(
        "--json", action="store_true", help="Print the result as one line of JSON, nothing else."
    )


def run(args: argparse.Namespace) -> int:
    check_sweep_flags(args)
    if args.output is not None and args.output.exists() and not args.output.is_dir():
        raise ConfigError(f"--output: expected a directory, got the file {str(args.output)!r}")
    # Imported here so that `--help` needs no numba.
    from rich.console import Console

    from dualpath.sim.experiments.experiment import Settings
    from dualpath.sim.missing import missing_of, sentence
    from dualpath.sim.progress import shown_watch
    from dualpath.sim.reproduction import all_cases, chosen, reproduction_of
    from dualpath.sim.reproduction_files import write_reproduction
    from dualpath.sim.sensitivity import moved, sensitivity_cases
    from dualpath.sim.setting import Assumptions
    from dualpath.sim.sweep import sweep

    told = Console(stderr=True)
    experiments = chosen(args.names)
    settings = Settings(Assumptions(), args.seed)
    needed = {each.name: each.cases(settings) for each in experiments}
    cases = all_cases(experiments, settings)
    if args.sensitivity:
        needed["sensitivity"] = sensitivity_cases(settings)
        cases += needed["sensitivity"]
    with shown_watch(told) as watch:
        played = sweep(cases, workers=args.workers, watch=watch)
    found = reproduction_of(
        experiments, settings, played.results, was_interrupted=played.was_interrupted
    )
    changes = moved(settings, played.results) if args.sensitivity else []
    unfinished = {name: runs for name, runs in needed.items() if not played.has(runs)}
    missing = missing_of(unfinished, played.results)
    line = _result(found, missing, args).to_json()
    if args.output is not None:
        written = write_reproduction(
            args.output, found, settings, changes, line=line, command=_command()
        )
        _tell_written(told, args.output, found, len(written))
    if args.json:
        print(line, flush=True)
    else:
        _print_tables(found)
        if played.was_interrupted:
            print(sentence(missing))
    return ExitCode.INTERRUPTED if played.was_interrupted else 0


def _command() -> str:
    return " ".join(["dualpath", *sys.argv[1:]])


def _tell_written(told: Console, output: Path, found: Reproduction, files: int) -> None:
    from dualpath.sim.reproduction_files import PAGE_FILES

    page = " and ".join(PAGE_FILES)
    if found.is_whole:
        text = f"{files} files in {output}, with {page}"
    else:
        names = ", ".join(found.evaluations) or "no experiment"
        text = f"{files} files in {output}: of {names}. "
        text += f"Not written: {page}, which need all runs of all experiments"
        if any((output / each).exists() for each in PAGE_FILES):
            text += "; those that are there are of an earlier run"
    told.print(text, highlight=False, markup=False, soft_wrap=True)


def _result(
    found: Reproduction, missing: Mapping[str, Missing], args: argparse.Namespace
) -> BenchResult:
    from dualpath.sim.reproduction import role_of

    values = {
        each.id: {
            "ours": round(each.ours, 6),
            "error": round(each.error, 4),
            "role": role_of(each).value,
        }
        for each in found.figures.values()
    }
    figures: dict[str, Figure] = {
        **{name: value for name, value in found.headline().items() if value is not None},
        "values": values,
        "statements": {each.id: each.holds for each in found.checks.values()},
    }
    setup: dict[str, Figure] = {
        "experiments": list(found.evaluations),
        "runs": found.runs,
        "seed": args.seed,
        "workers": args.workers,
        "interrupted": found.was_interrupted,
        "missing": {name: asdict(each) for name, each in missing.items()},
    }
    return BenchResult("sim-reproduce", figures, setup, interrupted=found.was_interrupted)


def _print_tables(found: Reproduction) -> None:
    from rich.console import Console
    from rich.table import Table

    from dualpath.report.chart import shown
    from dualpath.sim.published import CLAIMS, PUBLISHED
    from dualpath.sim.reproduction import role_of

    console = Console(width=None if sys.stdout.isatty() else _PIPED_WIDTH)
    table = Table(title="Published and ours", title_justify="left")
    for name in ("figure", "what"):
        table.add_column(name)
    for name in ("published", "ours", "error"):
        table.add_column(name, justify="right")
    table.add_column("")
    for each in found.figures.values():
        known = PUBLISHED[each.id]
        values = (f"{shown(value)} {known.unit}".strip() for value in (known.value, each.ours))
        table.add_row(
            each.id, known.what, *values, f"{100 * each.error:+.1f} %", role_of(each).value
        )
    if found.figures:
        console.print(table)
    for check in found.checks.values():
        mark = "holds" if check.holds else "does not hold"
        text = f"{check.id}: {mark}. {CLAIMS[check.id].what} ({check.detail})."
        console.print(text, highlight=False, markup=False, soft_wrap=True)
    for name, value in found.headline().items():
        if value is not None:
            said = f"{value:.3f}" if isinstance(value, float) else str(value).lower()
            console.print(f"{name} {said}", highlight=False)
