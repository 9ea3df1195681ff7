"""`dualpath bench`: finds the benchmarks in `dualpath.bench` and runs one.

A benchmark is a module there with constants NAME and HELP, `add_arguments` and `run`; one that cannot run
without arguments says what it NEEDS, and one whose result is no list of figures has a `show` of its own.
The constants are read from the source, so that listing imports no benchmark and what it needs. With
`--json` standard output is one line, the result; progress, and whatever a library prints, goes to standard
error.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import sys
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import dualpath.bench
from dualpath.base.errors import ConfigError
from dualpath.bench.harness import BenchModule, BenchResult, Figure, stderr_progress
from dualpath.cli.main import ExitCode

__all__ = ["Benchmark", "add_arguments", "find_benchmarks", "run"]


@dataclass(frozen=True, slots=True)
class Benchmark:
    """`needs`: what it must be given; "" when it runs alone."""

    name: str
    help: str
    module: str
    needs: str = ""


def find_benchmarks(directories: Sequence[str] | None = None) -> tuple[Benchmark, ...]:
    """All benchmarks of the package, by name, without importing them."""
    found = []
    for directory in dualpath.bench.__path__ if directories is None else directories:
        for path in sorted(Path(directory).glob("*.py")):
            constants = _string_constants(ast.parse(path.read_text(encoding="utf-8")))
            if "NAME" in constants and "HELP" in constants:
                module = f"{dualpath.bench.__name__}.{path.stem}"
                needs = constants.get("NEEDS", "")
                found.append(Benchmark(constants["NAME"], constants["HELP"], module, needs))
    return tuple(sorted(found, key=lambda each: each.name))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--list", action="store_true", help="List the benchmarks and end.")
    parser.add_argument(
        "--alone", action="store_true", help="With --list: only those that need nothing."
    )
    parser.add_argument(
        "name",
        nargs="?",
        metavar="NAME",
        help="The benchmark; `dualpath bench NAME --help` for its flags.",
    )
    parser.add_argument(
        "rest",
        nargs=argparse.REMAINDER,
        metavar="...",
        help="--json and the benchmark's own flags.",
    )


def run(args: argparse.Namespace) -> int:
    benchmarks = find_benchmarks()
    if args.list or args.name is None:
        for each in benchmarks:
            if not (args.alone and each.needs):
                needs = f" (needs {each.needs})" if each.needs else ""
                print(f"{each.name:<12} {each.help}{needs}")
        return 0 if args.list else 2
    chosen = next((each for each in benchmarks if each.name == args.name), None)
    if chosen is None:
        names = ", ".join(each.name for each in benchmarks) or "none"
        raise ConfigError(f"bench: unknown benchmark {args.name!r}; there are: {names}")
    module = cast(BenchModule, importlib.import_module(chosen.module))
    parser = argparse.ArgumentParser(
        prog=f"dualpath bench {chosen.name}", description=chosen.help, allow_abbrev=False
    )
    parser.add_argument(
        "--json", action="store_true", help="Print the result as one line of JSON, nothing else."
    )
    module.add_arguments(parser)
    bench_args = parser.parse_args(args.rest)
    with redirect_stdout(sys.stderr):
        result = module.run(bench_args, stderr_progress)
    if bench_args.json:
        print(result.to_json(), flush=True)
    else:
        getattr(module, "show", _print_table)(result)
    return ExitCode.INTERRUPTED if result.interrupted else 0


def _string_constants(tree: ast.Module) -> dict[str, str]:
    constants: dict[str, str] = {}
    targets: Sequence[ast.expr]
    for node in tree.body:
        if isinstance(node, ast.AnnAssign):
            targets, value = [node.target], node.value
        elif isinstance(node, ast.Assign):
            targets, value = node.targets, node.value
        else:
            continue
        if isinstance(value, ast.Constant) and isinstance(value.value, str):
            constants |= {name.id: value.value for name in targets if isinstance(name, ast.Name)}
    return constants


def _print_table(result: BenchResult) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"dualpath bench {result.bench}", title_justify="left")
    table.add_column("figure")
    table.add_column("value", justify="right")
    for name, figure in result.figures.items():
        table.add_row(name, _shown(figure))
    Console().print(table)


def _shown(figure: Figure) -> str:
    match figure:
        case str():
            return figure
        case bool():
            return "yes" if figure else "no"
        case float():
            return f"{figure:.4g}" if abs(figure) < 1e4 else f"{figure:,.0f}"
        case int():
            return f"{figure:,}"
        case Mapping():
            return "\n".join(f"{name}: {_shown(each)}" for name, each in figure.items())
        case _:
            return ", ".join(_shown(each) for each in figure)
