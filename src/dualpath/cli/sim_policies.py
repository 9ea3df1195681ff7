"""`dualpath sim policies`: policies and variants of them on the same cases, and which does better."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from dualpath.bench.harness import BenchResult, Figure
from dualpath.cli.main import ExitCode
from dualpath.cli.sweep_flags import add_sweep_flags, check_sweep_flags

if TYPE_CHECKING:
    from dualpath.sim.case import Case
    from dualpath.sim.experiments.trial import Measured, Trial
    from dualpath.sim.progress import Watch

__all__ = ["add_arguments", "ended_runs", "run"]

_EPILOG = """\
examples:
  dualpath sim policies split
      Rules that divide reads between both sides, against the shorter queue.
  dualpath sim policies all --json
      Everything, as in docs/results/policies_*.json.

Ctrl-C ends it with the figures of what is complete, those of each run that has ended of the rest, and what is
missing.
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
    from dualpath.sim.experiments.policies import chosen_policies
    from dualpath.sim.missing import missing_of, sentence
    from dualpath.sim.progress import shown_watch
    from dualpath.sim.setting import Assumptions

    settings = Settings(Assumptions(), args.seed)
    needed = {each: each.trials(settings) for each in chosen_policies(args.names)}
    results: dict[Trial, Measured] = {}
    found: dict[str, Figure] = {}
    interrupted = False
    with shown_watch(Console(stderr=True)) as watch:
        try:
            _play([trial for each in needed.values() for trial in each], results, args, watch)
        except KeyboardInterrupt:
            interrupted = True
    try:
        for each, trials in needed.items():
            if all(trial in results for trial in trials):
                found[each.name] = each.evaluate(settings, results)
    except KeyboardInterrupt:
        interrupted = True
    left = {each.name: trials for each, trials in needed.items() if each.name not in found}
    missing = missing_of(left, results)
    ended = ended_runs(left, results)
    setup: dict[str, Figure] = {
        "policies": list(found),
        "runs": len(results),
        "seed": args.seed,
        "workers": args.workers,
        "interrupted": interrupted,
        "missing": {name: asdict(each) for name, each in missing.items()},
    }
    if args.json:
        figures = {**found, "ended_runs": ended} if interrupted else found
        result = BenchResult("sim-policies", figures, setup, interrupted=interrupted)
        print(result.to_json(), flush=True)
    else:
        for name, value in found.items():
            _print(name, value, 0)
        for name, value in ended.items():
            _print(f"{name}, runs that ended", value, 0)
        if interrupted:
            print(sentence(missing))
    return ExitCode.INTERRUPTED if interrupted else 0


def _play(
    trials: Sequence[Trial], results: dict[Trial, Measured], args: argparse.Namespace, watch: Watch
) -> None:
    """Into `results`, as they end. Raises KeyboardInterrupt."""
    from dualpath.sim.experiments.policies import play_trial
    from dualpath.sim.experiments.trial import name_of
    from dualpath.sim.workers import each_in_workers

    watch.expect(len(trials))
    # Long ones first, so that workers end together.
    ordered = sorted(trials, key=lambda trial: -trial.case.agents)
    for trial, measured in each_in_workers(play_trial, ordered, args.workers):
        results[trial] = measured
        watch.ended(f"{trial.experiment}: {trial.variant}, {name_of(trial.case)}")


def ended_runs(
    left: Mapping[str, Sequence[Trial]], results: Mapping[Trial, Measured]
) -> dict[str, Figure]:
    """Of experiments that are not complete: figures of each run by experiment, case and variant."""
    found: dict[str, Figure] = {}
    for name, trials in left.items():
        by_case: dict[str, dict[str, Figure]] = {}
        for trial in trials:
            if trial in results:
                by_variant = by_case.setdefault(_full_name(trial.case), {})
                by_variant[trial.variant] = _figures(trial, results[trial])
        if by_case:
            found[name] = by_case
    return found


def _full_name(case: Case) -> str:
    """With all that distinguishes the cases of an experiment."""
    from dualpath.sim.experiments.trial import name_of

    parts = [name_of(case)]
    if case.until_s < float("inf"):
        parts.append(f"{case.until_s:g} s")
    if (case.append, case.output) != (1.0, 1.0):
        parts.append(f"append x{case.append:g} output x{case.output:g}")
    return ", ".join([*parts, f"seed {case.seed}"])


def _figures(trial: Trial, measured: Measured) -> dict[str, Figure]:
    from dualpath.sim.experiments.trial import ratio
    from dualpath.sim.plan.load import Offline

    summary = measured.summary
    is_batch = isinstance(trial.case.load, Offline)
    return {
        **({"jct_s": round(summary.jct_s, 1)} if is_batch else {}),
        "request_s": ratio(summary.request.mean_s),
        "ttft_mean_s": ratio(summary.ttft.mean_s),
        "ttft_p50_s": ratio(summary.ttft.p50_s),
        "ttft_p99_s": ratio(summary.ttft.p99_s),
        "balance": ratio(measured.balance),
    }


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
