"""`dualpath sim policies`: policies and variants of them on the same cases, and which does better."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import TYPE_CHECKING

from dualpath.bench.harness import BenchResult, Figure
from dualpath.cli.main import ExitCode
from dualpath.cli.sweep_flags import add_sweep_flags, check_sweep_flags

if TYPE_CHECKING:
    from dualpath.sim.experiments.trial import Measured, Trial

__all__ = ["add_arguments", "run"]

_EPILOG = """\
examples:
  dualpath sim policies split
      Rules that divide reads between both sides, against the shorter queue.
  dualpath sim policies all --json
      Everything, as in docs/results/policies_*.json.

It needs pip install 'dualpath[sim]', no GPU and no torch. What the results say: docs/results/policies.md.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = _EPILOG
    parser.add_argument(
        "names",
        nargs="*",
        metavar="NAME",
        help="split, order, thresholds, hierarchy, roles, or all (default: all).",
    )
    add_sweep_flags(parser)
    parser.add_argument(
        "--json", action="store_true", help="Print the result as one line of JSON, nothing else."
    )


def run(args: argparse.Namespace) -> int:
    check_sweep_flags(args)
    # Imported here so that `--help` needs no numba.
    from rich.console import Console

    from dualpath.sim.experiments.experiment import Settings
    from dualpath.sim.experiments.policies import chosen_policies, play_trial
    from dualpath.sim.experiments.trial import name_of
    from dualpath.sim.progress import shown_watch
    from dualpath.sim.setting import Assumptions
    from dualpath.sim.workers import each_in_workers

    settings = Settings(Assumptions(), args.seed)
    experiments = {each: each.trials(settings) for each in chosen_policies(args.names)}
    # Long ones first, so that workers end together.
    trials = sorted(
        (trial for each in experiments.values() for trial in each),
        key=lambda trial: -trial.case.agents,
    )
    results: dict[Trial, Measured] = {}
    interrupted = False
    with shown_watch(Console(stderr=True)) as watch:
        watch.expect(len(trials))
        try:
            for trial, measured in each_in_workers(play_trial, trials, args.workers):
                results[trial] = measured
                watch.ended(f"{trial.experiment}: {trial.variant}, {name_of(trial.case)}")
        except KeyboardInterrupt:
            interrupted = True
    found = {
        each.name: each.evaluate(settings, results)
        for each, needed in experiments.items()
        if all(trial in results for trial in needed)
    }
    setup: dict[str, Figure] = {
        "policies": list(found),
        "runs": len(results),
        "seed": args.seed,
        "workers": args.workers,
        "interrupted": interrupted,
    }
    if args.json:
        result = BenchResult("sim-policies", dict(found), setup, interrupted=interrupted)
        print(result.to_json(), flush=True)
    else:
        for name, figures in found.items():
            _print(name, figures, 0)
    return ExitCode.INTERRUPTED if interrupted else 0


def _print(name: str, value: Figure, depth: int) -> None:
    """As an outline; what has no parts of its own in one line."""
    indent = "  " * depth
    if not isinstance(value, Mapping):
        print(f"{indent}{name}: {value}")
    elif any(isinstance(each, Mapping) for each in value.values()):
        print(f"{indent}{name}")
        for key, each in value.items():
            _print(key, each, depth + 1)
    else:
        print(f"{indent}{name}: {', '.join(f'{key} {each}' for key, each in value.items())}")
