"""`dualpath plan`: how to divide nodes into prefill and decode nodes, what to set, and what that gives."""

from __future__ import annotations

import argparse
from pathlib import Path

from msgspec.structs import replace

from dualpath.base.config_cli import add_config_arguments, config_from_args
from dualpath.base.errors import ConfigError
from dualpath.cli.main import ExitCode
from dualpath.report.page import check_charts
from dualpath.sim.plan.settings import PlanSettings

__all__ = ["add_arguments", "run"]


_EPILOG = """\
examples:
  dualpath plan --model deepseek-v3.2 --gpu h200 --nodes 6 --trace paper:64k --agents 1024 --output plan/
      Six nodes for a batch of 1,024 agents: every division into prefill and decode nodes, by every system,
      and a page with charts in plan/plan.html.
  dualpath plan --model ./Qwen3-8B/config.json --hardware my-node.toml --nodes 4 --trace coding-agent \\
      --slo ttft=4,tpot=50ms --snic 100gbit --timeline best.json
      How many agents a second your own four nodes sustain, and a timeline of it for ui.perfetto.dev.

Nothing is measured: runs are simulated, with the policy that `dualpath serve` has. It needs
pip install 'dualpath[sim]', no GPU and no torch. How to read what it says: docs/planner.md.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "dualpath plan --model M --gpu H --nodes N --trace T [flags]"
    parser.description = (
        "Divides your nodes into prefill and decode nodes, says what to set on them, and what that gives:\n"
        "how long a batch of agents takes, how long a request takes, or how many agents a second are served."
    )
    parser.epilog = _EPILOG
    add_config_arguments(parser, PlanSettings)
    parser.add_argument(
        "--json", action="store_true", help="Print the plan as one line of JSON, nothing else."
    )


def run(args: argparse.Namespace) -> int:
    settings = config_from_args(PlanSettings, args)
    output = None if settings.output is None else _directory(Path(settings.output))
    timeline = None if settings.timeline is None else _new_file(Path(settings.timeline))
    # Imported here so that `--help` needs no numba.
    from rich.console import Console

    from dualpath.bench.harness import base_setup
    from dualpath.sim.plan.question import question_of
    from dualpath.sim.plan.report import write_report
    from dualpath.sim.plan.search import make_plan, write_best_timeline
    from dualpath.sim.plan.table import print_plan
    from dualpath.sim.progress import shown_watch

    told = Console(stderr=True)
    question = question_of(settings)
    with shown_watch(told) as watch:
        plan = make_plan(question, workers=settings.workers, watch=watch)
    plan = replace(plan, setup={**base_setup(), **plan.setup})
    if output is not None:
        (output / "plan.json").write_text(plan.to_json() + "\n", encoding="utf-8")
        write_report(output / "plan.html", plan)
        told.print(f"report: {output / 'plan.html'}", highlight=False, soft_wrap=True)
    if timeline is not None:
        said = f"{timeline}"
        if plan.best is None:
            said += " was not written: there is no best run that it could show"
        else:
            write_best_timeline(timeline, question, plan.best)
        told.print(f"timeline: {said}", highlight=False, soft_wrap=True)
    if args.json:
        print(plan.to_json(), flush=True)
    else:
        print_plan(plan, Console())
    return ExitCode.INTERRUPTED if plan.was_interrupted else 0


def _directory(path: Path) -> Path:
    if path.exists() and not path.is_dir():
        raise ConfigError(f"--output: expected a directory, got the file {str(path)!r}")
    check_charts()
    path.mkdir(parents=True, exist_ok=True)
    return path


def _new_file(path: Path) -> Path:
    if not path.parent.is_dir():
        raise ConfigError(
            f"--timeline: expected a file in a directory that exists, got {str(path)!r}"
        )
    return path
