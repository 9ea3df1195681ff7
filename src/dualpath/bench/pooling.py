"""`dualpath bench pooling`: how much faster agents end when all nodes' storage NICs read for prefill.

The real system end to end on a testbed: OpenAI client, frontend, engines, transfers over a limited compute
network, a real store behind limited storage NICs. N agents with long stored contexts start together; the job
completion time (JCT) is when the last one ends. Each system gets the same agents, starts with the same blocks
in the store, and must give the same tokens; those of some agents are compared with plain `transformers` too.
docs/pooling.md tells what is measured and how.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

import msgspec

from dualpath.base.errors import ConfigError
from dualpath.base.ids import GiB
from dualpath.bench.cluster import settings as shared
from dualpath.bench.cluster.passes import Pass, play, watch
from dualpath.bench.cluster.rates import (
    MeasuredShapes,
    RatesRound,
    fit_rates,
    measure_round,
    model_spec,
)
from dualpath.bench.cluster.reference import wrong_by_transformers
from dualpath.bench.cluster.results import Measured, Measurements, utilisation_over_time
from dualpath.bench.cluster.store_state import StoreState
from dualpath.bench.cluster.systems import SYSTEMS, Serving, System
from dualpath.bench.cluster.workload import (
    LONG_APPEND,
    Workload,
    paper_shape,
    text_workload,
    workload,
)
from dualpath.bench.harness import BenchResult, Figure, Progress
from dualpath.bench.replay import TokenSource
from dualpath.bench.replay.records import RequestRecord
from dualpath.testbed import Testbed, TestbedConfig, Topology, why_no_testbed
from dualpath.traces.catalog import open_trace

__all__ = ["HELP", "NAME", "NEEDS", "add_arguments", "run"]

NAME = "pooling"
HELP = "agents on a testbed with limited storage NICs: JCT of each system, on 1P1D, 1P2D, 2P1D"
NEEDS = "root and `make testbed-tools`"

_ALONE = 3
_LONG = 25
_SHORT_PASSES = 5
"""Of a system that reads nothing, and so takes a few seconds."""
_LONG_ORDER = ("basic", "split", "split", "basic") * 3
"""So that a drift of the machine takes from both alike."""
_DETAIL_TOPOLOGY = "1P1D"
"""Where single requests and long appends are measured."""
_SIDE = "decode side"
_MARGIN_TOKENS = 64
_TEXT_OUTPUT_TOKENS = 16


def add_arguments(parser: argparse.ArgumentParser) -> None:
    shared.add_arguments(parser)
    parser.add_argument(
        "--topologies",
        default="1P1D,1P2D,2P1D",
        metavar="LIST",
        help="testbeds, one after another (%(default)s)",
    )
    parser.add_argument(
        "--systems",
        default="basic,shorter,split,oracle",
        metavar="LIST",
        help="in the order in which they are measured in each round (%(default)s)",
    )
    parser.add_argument("--agents", type=int, default=8, help="start together (%(default)s)")
    parser.add_argument("--turns", type=int, default=4, help="of each agent (%(default)s)")
    parser.add_argument(
        "--context",
        type=int,
        default=1024,
        metavar="TOKENS",
        help="stored of each agent before (%(default)s)",
    )
    parser.add_argument(
        "--rounds", type=int, default=1, help="all systems measured so often (%(default)s)"
    )
    parser.add_argument(
        "--reference",
        type=int,
        default=2,
        metavar="AGENTS",
        help="whose tokens are compared with plain transformers, too (%(default)s)",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Plan:
    """What is measured, where and with what."""

    topologies: tuple[str, ...]
    systems: tuple[System, ...]
    rounds: int
    work: Workload
    source: TokenSource
    serving: Serving
    rates: shared.Rates


def run(args: argparse.Namespace, progress: Progress) -> BenchResult:
    """Figures as in docs/pooling.md, among them `speedup_split_1p1d`, `pool_utilisation`, `wrong_tokens`."""
    started_s = time.monotonic()
    if (reason := why_no_testbed()) is not None:
        raise ConfigError(reason)
    facts = shared.model_facts(args)
    plan = _plan(args, facts)
    measured: list[Measured] = []
    rates_rounds: list[RatesRound] = []
    for topology in plan.topologies:
        measured += _measure(plan, topology, progress)
        if not facts.speaks:
            rates_rounds.append(_rates_round(args, facts, plan, progress))
    found = Measurements(measured, facts.layout, plan.rates.snic_goodput_bytes_s)
    figures = found.figures()
    reference = next(
        (each.offline.answers for each in measured if each.offline and SYSTEMS[each.system].exact),
        None,
    )
    if reference is not None:
        progress(f"comparing {args.reference} agents with plain transformers")
        wrong, compared = wrong_by_transformers(facts.files, reference, args.reference)
        figures["wrong_tokens"] = wrong + found.wrong_tokens(reference)
        figures["tokens_compared_with_transformers"] = compared
    if rates_rounds:
        rates = fit_rates(_rates_shapes(args), rates_rounds)
        figures["compute_rates"] = cast(Figure, msgspec.to_builtins(rates))
    figures["utilisation_over_time"] = _over_time(found)
    figures["seconds"] = round(time.monotonic() - started_s, 1)
    setup = {**shared.setup(args, facts, plan.rates), **_setup(args, plan)}
    result = BenchResult(NAME, figures, setup)
    _write(args.directory, result, found, progress)
    return result


def _plan(args: argparse.Namespace, facts: shared.BenchModelFacts) -> _Plan:
    names = tuple(each.strip() for each in args.systems.split(","))
    if unknown := [each for each in names if each not in SYSTEMS]:
        raise ConfigError(f"--systems: no {unknown[0]!r}; there are {', '.join(SYSTEMS)}")
    topologies = tuple(str(Topology.parse(each)) for each in args.topologies.split(","))
    for flag in ("agents", "turns", "rounds"):
        if getattr(args, flag) < 1:
            raise ConfigError(f"--{flag}: expected at least 1, got {getattr(args, flag)}")
    if args.context < facts.layout.block_tokens:
        raise ConfigError(f"--context: expected at least a block, got {args.context}")
    if not facts.speaks:
        shape = paper_shape(args.context, args.turns)
        work = workload(shape, agents=args.agents, alone=_ALONE, long=_LONG)
        longest = max(shape.longest_tokens, LONG_APPEND.longest_tokens) + _MARGIN_TOKENS
    else:
        trace = shared.with_outputs(open_trace("miniswe"), _TEXT_OUTPUT_TOKENS)
        work = text_workload(
            trace,
            max_context_tokens=args.context,
            agents=args.agents,
            alone=_ALONE,
            turns=args.turns,
        )
        longest = facts.max_model_len
    return _Plan(
        topologies=topologies,
        systems=tuple(SYSTEMS[name] for name in names),
        rounds=args.rounds,
        work=work,
        source=shared.token_source(args, facts),
        serving=shared.serving(args, facts, longest_tokens=longest, at_once=args.agents + 1),
        rates=shared.rates(args),
    )


def _measure(plan: _Plan, topology: str, progress: Progress) -> Iterator[Measured]:
    """All systems on one testbed, round after round."""
    config = TestbedConfig(
        topology=topology, snic=plan.rates.snic, cnic=plan.rates.cnic, store_memory=8 * GiB
    )
    with Testbed(config) as bed:
        progress(f"{topology}: storing {len(plan.work.stored)} contexts")
        with plan.serving.filling(bed) as server:
            play(server.base_url, plan.work.stored, plan.source)
        state = StoreState(bed.store_address)
        for number in range(plan.rounds):
            for system in plan.systems:
                with plan.serving.on(bed, system) as server:
                    passes = _system(plan, bed, system, server.base_url)
                state.restore()
                jcts = ", ".join(f"{each.offline.jct_s:.1f}" for each in passes if each.offline)
                progress(
                    f"{topology}: {system.name}: JCT {jcts} s (round {number + 1} of {plan.rounds})"
                )
                yield from passes
        compared = {"basic", "split"} <= {each.name for each in plan.systems}
        if topology == _DETAIL_TOPOLOGY and compared:
            yield from _details(plan, bed, state, progress)


def _details(
    plan: _Plan, bed: Testbed, state: StoreState, progress: Progress
) -> Iterator[Measured]:
    """Single requests that the decode side reads; long appends, each time on a new server: from those it
    learns what computing takes, and may then compute what it could read."""
    topology = str(bed.topology)
    side = SYSTEMS[_SIDE]
    with plan.serving.on(bed, side) as server:
        yield _alone(plan, topology, side, server.base_url)
    state.restore()
    for name in _LONG_ORDER if plan.work.long else ():
        with plan.serving.on(bed, SYSTEMS[name]) as server:
            play(server.base_url, plan.work.long[:1], plan.source)
            measured = watch(bed, server.base_url, plan.work.long[1:], plan.source)
        state.restore()
        progress(f"{topology}: {name}: JCT with long appends {measured.jct_s:.1f} s")
        yield Measured(topology=topology, system=name, long=measured)


def _system(plan: _Plan, bed: Testbed, system: System, base_url: str) -> list[Measured]:
    """Single requests, or the same together, which also warm the engines up; then all agents, several times
    where a run is short and leaves nothing behind."""
    topology = str(bed.topology)
    work, source = plan.work, plan.source
    if topology == _DETAIL_TOPOLOGY:
        alone = _alone(plan, topology, system, base_url)
    else:
        play(base_url, work.alone, source)
        alone = Measured(topology=topology, system=system.name)
    passes = [replace(alone, offline=watch(bed, base_url, work.agents, source))]
    if not system.exact:
        again = Measured(topology=topology, system=system.name)
        passes += [
            replace(again, offline=watch(bed, base_url, work.agents, source))
            for _ in range(_SHORT_PASSES - 1)
        ]
    return passes


def _alone(plan: _Plan, topology: str, system: System, base_url: str) -> Measured:
    play(
        base_url, plan.work.alone[:1], plan.source
    )  # Touches memory and loads code for the first time.
    requests = [play(base_url, (each,), plan.source).requests[0] for each in plan.work.alone[1:]]
    return Measured(
        topology=topology,
        system=system.name,
        alone_ttft_s=tuple(each.ttft_s for each in requests if each.ttft_s is not None),
        alone_s=tuple(each.end_s - each.scheduled_s for each in requests if each.end_s is not None),
        alone_read_over_compute=_read_over_compute(requests),
    )


def _read_over_compute(requests: list[RequestRecord]) -> float | None:
    """Nothing where nothing is read."""
    ratios = [
        each.timings["read_s"] / each.timings["prefill_s"]
        for each in requests
        if each.timings.get("prefill_s") and each.timings.get("read_s")
    ]
    return statistics.median(ratios) if ratios else None


def _rates_round(
    args: argparse.Namespace, facts: shared.BenchModelFacts, plan: _Plan, progress: Progress
) -> RatesRound:
    """For what `dualpath sim testbed` predicts this run from; nothing else runs meanwhile."""
    spec = model_spec(facts.name, threads=args.threads, block_tokens=args.block_tokens)
    engines = max(len(Topology.parse(each).nodes) for each in plan.topologies)
    return measure_round(spec, _rates_shapes(args), engines=engines, progress=progress)


def _rates_shapes(args: argparse.Namespace) -> MeasuredShapes:
    return MeasuredShapes.of(paper_shape(args.context, args.turns), args.agents)


def _over_time(found: Measurements) -> Figure:
    """Of the first round."""
    first: dict[str, dict[str, Pass]] = {
        topology: {name: found.passes(topology, name)[0] for name in found.systems(topology)}
        for topology in found.topologies
    }
    return {
        topology: {
            name: utilisation_over_time(each, found.snic_bytes_s) for name, each in systems.items()
        }
        for topology, systems in first.items()
    }


def _setup(args: argparse.Namespace, plan: _Plan) -> dict[str, Figure]:
    return {
        "topologies": list(plan.topologies),
        "systems": [each.name for each in plan.systems],
        "not_exact": [each.name for each in plan.systems if not each.exact],
        "agents": args.agents,
        "turns": args.turns,
        "rounds": args.rounds,
        "context_tokens": args.context,
    }


def _write(directory: Path, result: BenchResult, found: Measurements, progress: Progress) -> None:
    from dualpath.bench.cluster.pooling_report import write_pooling_report

    (directory / "pooling.json").write_text(result.to_json() + "\n", encoding="utf-8")
    write_pooling_report(directory / "pooling.html", result, found)
    progress(f"report: {directory / 'pooling.html'}")
