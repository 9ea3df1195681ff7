"""`dualpath sim run`: one simulated run of a model on a cluster, by one system, and what it gave."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from dualpath.base.errors import ConfigError
from dualpath.bench.harness import BenchResult, Figure
from dualpath.cli.main import ExitCode
from dualpath.sim.arrivals import POISSON
from dualpath.sim.model_config import MODEL_TYPES, WeightFormat

if TYPE_CHECKING:
    from dualpath.sim.case import Case
    from dualpath.sim.outcome import Outcome
    from dualpath.sim.summary import Spread, Summary

__all__ = ["add_arguments", "run"]

_HORIZON_S = 4500.0
_OF_WHOLE_RUNS = ("jct_s", "halves_differ")
_OF_REQUESTS = ("ttft", "ttst", "tpot", "request", "parts_s")
"""Figures that an interrupted run does not have; those that it has once a request has ended."""

_EPILOG = """\
examples:
  dualpath sim run --model ds-27b --prefill 1 --decode 1 --system basic --trace paper:32k --agents 512
      A batch: how long until all agents have ended.
  dualpath sim run --model deepseek-v3.2 --prefill 2 --decode 4 --trace paper:64k \\
      --rate 0.4 --timeline run.json
      A service: how long a request takes, and a timeline for ui.perfetto.dev.
  dualpath sim run --model ./config.json --weights fp8 --trace coding-agent --rate 0.4 \\
      --arrivals azure-conversation
      Your own model, kept in 8 bits, and agents that come as bunched as the requests of a chat service.

Ctrl-C ends a run with what is known of the requests that have ended, and no job completion time.
`dualpath plan` compares systems and divisions of nodes. It needs pip install 'dualpath[sim]', no GPU and no
torch.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = _EPILOG
    cluster = parser.add_argument_group("Cluster")
    cluster.add_argument(
        "--model",
        required=True,
        metavar="NAME|FILE",
        help="A model of the package, such as deepseek-v3.2, or a config.json whose model_type is "
        f"{', '.join(MODEL_TYPES[:-1])} or {MODEL_TYPES[-1]}.",
    )
    cluster.add_argument(
        "--weights",
        choices=[each.value for each in WeightFormat],
        help="How weights are kept where the model is served (default: what its file says).",
    )
    cluster.add_argument(
        "--gpu",
        default="h800",
        metavar="NAME|FILE",
        help="A GPU of the package, such as h100, or a TOML file with GPU and node (default: h800).",
    )
    for role in ("prefill", "decode"):
        cluster.add_argument(
            f"--{role}", type=int, default=1, metavar="NODES", help=f"{role} nodes (default: 1)."
        )
        cluster.add_argument(
            f"--{role}-instance",
            type=int,
            metavar="NODES",
            help=f"Nodes of one {role} instance, whose GPUs step together (default: all {role} nodes).",
        )
    cluster.add_argument(
        "--tensor", type=int, default=1, metavar="GPUS", help="GPUs of one rank (default: 1)."
    )
    cluster.add_argument(
        "--system",
        default="split",
        choices=("basic", "layerwise", "dual-path-blind", "dual", "split", "steady", "oracle"),
        help="Of the paper basic, its steps, dual and oracle; split divides each read (default: split).",
    )
    load = parser.add_argument_group("Load")
    load.add_argument(
        "--trace",
        required=True,
        metavar="NAME|FILE",
        help="paper:32k, paper:48k, paper:64k, another trace of the package, or a file.",
    )
    load.add_argument("--agents", type=int, metavar="N", help="So many agents at once.")
    load.add_argument("--rate", type=float, metavar="R", help="So many agents arrive a second.")
    load.add_argument(
        "--arrivals",
        default=POISSON,
        metavar="poisson|NAME|FILE",
        help="With --rate: at random, or as the sessions of a recorded trace started, scaled to the rate: "
        "azure-conversation, another trace of the package, or a file, as a CSV with TIMESTAMP "
        "(default: poisson).",
    )
    load.add_argument(
        "--until",
        type=float,
        metavar="SECONDS",
        help=f"With --rate: how long; the last third counts (default: {_HORIZON_S:g}).",
    )
    load.add_argument(
        "--seed",
        type=int,
        default=0,
        metavar="N",
        help="Of traces and random arrivals (default: 0).",
    )
    results = parser.add_argument_group("Results")
    results.add_argument(
        "--timeline", type=Path, metavar="FILE", help="A timeline that ui.perfetto.dev opens."
    )
    results.add_argument(
        "--json", action="store_true", help="Print the result as one line of JSON, nothing else."
    )


def run(args: argparse.Namespace) -> int:
    _check(args)
    # Imported here so that `--help` needs no numba.
    from rich.console import Console

    from dualpath.sim.case import simulate, summarise
    from dualpath.sim.setting import prepare
    from dualpath.sim.summary import summary_of_ended
    from dualpath.sim.timeline import write_timeline

    case = _case(args)
    told = Console(stderr=True)
    with told.status("simulating") as status:

        def progress(now_s: float, finished: int) -> None:
            status.update(f"simulating: {now_s:,.0f} s, {finished:,} agents have ended")

        outcome = simulate(case, progress if told.is_terminal else None)
    partial = outcome.was_interrupted
    summary = summary_of_ended(outcome) if partial else summarise(case, outcome)
    if args.timeline is not None:
        cluster, _ = prepare(case.deployment, case.system, case.assumptions)
        title = f"{args.model} {args.system}{', interrupted' if partial else ''}"
        write_timeline(args.timeline, cluster, outcome, title=title)
    if args.json:
        figures = _figures(summary, online=args.rate is not None, partial=partial)
        setup = {**_setup(args), "interrupted": partial}
        print(BenchResult("sim-run", figures, setup, interrupted=partial).to_json(), flush=True)
    elif partial:
        _print_part(summary, outcome)
    else:
        _print_times(summary)
        if args.rate is None:
            _print_rows({"job completion time": f"{_seconds(summary.jct_s)} s"})
        _print_rows(_rows(summary))
    return ExitCode.INTERRUPTED if partial else 0


def _check(args: argparse.Namespace) -> None:
    for flag in ("prefill", "decode", "prefill_instance", "decode_instance", "tensor", "agents"):
        value = getattr(args, flag)
        if value is not None and value < 1:
            name = flag.replace("_", "-")
            raise ConfigError(f"--{name}: expected a whole number >= 1, got {value}")
    if (args.agents is None) == (args.rate is None):
        got = "neither" if args.agents is None else "both"
        raise ConfigError(f"--agents N, --rate R: expected one of them, got {got}")
    if args.arrivals != POISSON and args.rate is None:
        raise ConfigError("--arrivals: expected with --rate; --agents start at once")
    if args.until is not None and args.rate is None:
        raise ConfigError("--until: expected with --rate; agents at once are simulated to the end")
    for flag in ("rate", "until"):
        value = getattr(args, flag)
        if value is not None and not 0 < value < float("inf"):
            raise ConfigError(f"--{flag}: expected a number > 0, got {value:g}")
    if args.timeline is not None and not args.timeline.parent.is_dir():
        raise ConfigError(
            f"--timeline: expected a file in a directory that exists, got {str(args.timeline)!r}"
        )


def _case(args: argparse.Namespace) -> Case:
    from dualpath.sim.case import Case
    from dualpath.sim.hardware import load_hardware
    from dualpath.sim.model_config import load_model
    from dualpath.sim.plan.load import AtRate, Offline
    from dualpath.sim.setting import Assumptions, Deployment, System

    deployment = Deployment(
        model=load_model(args.model, weights=args.weights and WeightFormat(args.weights)),
        hardware=load_hardware(args.gpu),
        prefill_nodes=args.prefill,
        decode_nodes=args.decode,
        prefill_instance_nodes=args.prefill_instance or args.prefill,
        decode_instance_nodes=args.decode_instance or args.decode,
        tensor=args.tensor,
    )
    return Case(
        deployment=deployment,
        system=System(args.system),
        assumptions=Assumptions(),
        trace=args.trace,
        load=Offline(args.agents) if args.agents else AtRate(args.rate, args.until or _HORIZON_S),
        arrivals=args.arrivals,
        seed=args.seed,
    )


def _setup(args: argparse.Namespace) -> dict[str, Figure]:
    kept = ("model", "gpu", "prefill", "decode", "tensor", "system", "trace", "seed")
    load: dict[str, Figure] = {"agents": args.agents}
    if args.rate is not None:
        load = {"rate_aps": args.rate, "arrivals": args.arrivals}
    if args.weights is not None:
        load["weights"] = args.weights
    return {**{name: getattr(args, name) for name in kept}, **load}


def _figures(summary: Summary, *, online: bool, partial: bool) -> dict[str, Figure]:
    """Without those that mean nothing: a service has no end, and a run that was interrupted neither."""
    figures: dict[str, Figure] = msgspec.to_builtins(summary)
    left_out = {"jct_s"} if online else set()
    if partial:
        left_out |= {*_OF_WHOLE_RUNS, *(() if summary.requests else _OF_REQUESTS)}
    return {name: value for name, value in figures.items() if name not in left_out}


def _print_part(summary: Summary, outcome: Outcome) -> None:
    """Of a run that was interrupted."""
    if summary.requests:
        _print_times(summary, "Seconds, of the requests that had ended")
    rows = _rows(summary)
    _print_rows({"requests that had ended": rows.pop("requests"), **rows})
    ended = outcome.agents - outcome.unfinished_agents
    print(
        f"interrupted at {_seconds(outcome.end_s)} s; {ended:,} of {outcome.agents:,} agents had ended"
    )


def _print_times(summary: Summary, title: str = "Seconds") -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    for name in ("", "mean", "p50", "p90", "p99"):
        table.add_column(name, justify="right" if name else "left")
    spreads: dict[str, Spread] = {
        "TTFT": summary.ttft,
        "TTST": summary.ttst,
        "TPOT": summary.tpot,
        "request": summary.request,
    }
    for name, each in spreads.items():
        values = (each.mean_s, each.p50_s, each.p90_s, each.p99_s)
        table.add_row(name, *(f"{value:.4g}" for value in values))
    for name, seconds in summary.parts_s.items():
        table.add_row(f"  of TTFT: {name}", f"{seconds:.4g}", "", "", "")
    Console().print(table)


def _rows(summary: Summary) -> dict[str, str]:
    from dualpath.report.chart import shown

    return {
        "requests": shown(summary.requests),
        "agents that have not ended": shown(summary.unfinished_agents),
        "storage NICs in use": shown(summary.snic_utilization, share=True),
        "busiest storage NIC by the mean": shown(summary.snic_balance.max_mean),
        "busiest rank's attention by the mean": shown(summary.attention_balance.max_mean),
        "prefill busy": shown(summary.prefill_busy_share, share=True),
        "decode busy": shown(summary.decode_busy_share, share=True),
    }


def _print_rows(rows: Mapping[str, str]) -> None:
    for name, text in rows.items():
        print(f"{name}: {text}")


def _seconds(value: float) -> str:
    from dualpath.report.chart import shown

    return shown(round(value, 1))
