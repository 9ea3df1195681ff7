"""`dualpath bench online`: how many agents a second each system sustains on a testbed, under objectives.

The testbed and systems of `dualpath bench pooling`, the load of `dualpath bench replay`: agents with stored
contexts arrive at random (Poisson) whatever the server does. A rate is sustained when the mean time to the
first token and the mean time of an output token stay below limits, which are multiples of what `basic` takes
for a request alone. Systems get the same agents at the same draws of arrival times, stretched to the rate.
docs/pooling.md tells what is measured and how.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

from dualpath.base.errors import ConfigError
from dualpath.base.ids import GiB
from dualpath.bench.cluster import settings as shared
from dualpath.bench.cluster.answers import AnswerLog, LoggedSender
from dualpath.bench.cluster.bounds import read_bound
from dualpath.bench.cluster.online_results import OnlineMeasured, online_figures
from dualpath.bench.cluster.passes import PassFailed, play
from dualpath.bench.cluster.store_state import StoreState
from dualpath.bench.cluster.systems import SYSTEMS, Serving, System
from dualpath.bench.cluster.workload import Shape, shared_contexts
from dualpath.bench.harness import BenchResult, Figure, Progress, base_setup
from dualpath.bench.replay import (
    Acceptance,
    Arrivals,
    Conversation,
    Endpoint,
    EndpointConfig,
    Limits,
    LoadMaker,
    OfflineLoad,
    OnlineLoad,
    RateSearch,
    ReplayRecord,
    Run,
    Slo,
    SteadyRule,
    TokenSource,
    by_run,
    find_max_rate,
    run_load,
)
from dualpath.testbed import Testbed, TestbedConfig, Topology, why_no_testbed
from dualpath.traces.model import Session, Trace

__all__ = ["HELP", "NAME", "NEEDS", "add_arguments", "run"]

NAME = "online"
HELP = "agents that arrive at random on a testbed: the highest rate that each system sustains"
NEEDS = "root and `make testbed-tools`"

_TTFT_LIMIT = 3.0
_TPOT_LIMIT = 3.0
_UNLOADED = 6
_CONTEXTS = 16
_COMMON_LOAD = 0.7
"""Of what basic's storage NICs can bring: the rate at which latencies of systems are compared."""
_START_LOAD = 0.8
_CEILING_LOAD = 1.15
"""Above what the NICs can bring at all; a run is finite, so that a little more may pass."""
_COMMON_RUN = 1000
_MARGIN_TOKENS = 64
_AT_ONCE = 24
"""Requests whose KV the engines' buffers hold together; more wait for their turn."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    shared.add_arguments(parser)
    parser.add_argument(
        "--topology", default="1P1D", metavar="nPmD", help="of the testbed (%(default)s)"
    )
    parser.add_argument(
        "--systems", default="basic,shorter,split", metavar="LIST", help="(%(default)s)"
    )
    parser.add_argument(
        "--agents",
        type=int,
        default=40,
        help="that arrive in a run of basic; more where more storage NICs read (%(default)s)",
    )
    parser.add_argument("--turns", type=int, default=2, help="of each agent (%(default)s)")
    parser.add_argument(
        "--context", type=int, default=384, metavar="TOKENS", help="stored before (%(default)s)"
    )
    parser.add_argument(
        "--append", type=int, default=8, metavar="TOKENS", help="of each turn (%(default)s)"
    )
    parser.add_argument(
        "--output", type=int, default=8, metavar="TOKENS", help="of each turn (%(default)s)"
    )
    parser.add_argument(
        "--precision", type=float, default=0.05, help="of the highest rate (%(default)s)"
    )
    parser.add_argument(
        "--quick", action="store_true", help="half as many agents, a coarser search: minutes"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Plan:
    """What is measured. `turn_bytes`: that a turn reads on average."""

    topology: Topology
    systems: tuple[System, ...]
    shape: Shape
    agents: int
    precision: float
    seed: int
    stored: tuple[Session, ...]
    sessions: tuple[Session, ...]
    source: TokenSource
    serving: Serving
    rates: shared.Rates

    def bound_aps(self, system: System) -> float:
        """Agents a second whose KV the NICs that the system reads with can bring."""
        nodes = self.topology
        nics = nodes.prefill + (nodes.decode if system.both_sides else 0)
        agent = read_bound(
            self.shape.context_tokens * self.shape.turns,
            self.serving.layout,
            nics=nics,
            rate_bytes_s=self.rates.snic_goodput_bytes_s,
        )
        return 1 / agent.seconds

    def agents_for(self, system: System) -> int:
        """In a run of the search: so many that runs of all systems at their bounds take equally long.

        With the same number a faster system's run would end before a queue that grows is as long.
        """
        return round(self.agents * self.bound_aps(system) / self.bound_aps(self.systems[0]))


def run(args: argparse.Namespace, progress: Progress) -> BenchResult:
    """Figures as in docs/pooling.md, among them `aps_gain_split`, `ttst_ratio` and `tpot_ratio`."""
    started_s = time.monotonic()
    if (reason := why_no_testbed()) is not None:
        raise ConfigError(reason)
    facts = shared.model_facts(args)
    if facts.speaks:
        raise ConfigError("--model: recorded text is for `dualpath bench pooling` only")
    plan = _plan(args, facts)
    config = TestbedConfig(
        topology=str(plan.topology),
        snic=plan.rates.snic,
        cnic=plan.rates.cnic,
        store_memory=4 * GiB,
    )
    measured: list[OnlineMeasured] = []
    with Testbed(config) as bed:
        progress(f"storing {len(plan.stored)} contexts")
        with plan.serving.filling(bed) as server:
            play(server.base_url, plan.stored, plan.source)
        state = StoreState(bed.store_address)
        slo: Slo | None = None
        for system in plan.systems:
            with plan.serving.on(bed, system) as server:
                one = asyncio.run(_measure(plan, system, server.base_url, slo, progress))
            state.restore()
            slo = one.slo
            measured.append(one)
    figures = online_figures(measured)
    figures["seconds"] = round(time.monotonic() - started_s, 1)
    setup = {**shared.setup(args, facts, plan.rates), **_setup(plan, measured)}
    result = BenchResult(NAME, figures, setup)
    _write(args, result, measured, progress)
    return result


def _plan(args: argparse.Namespace, facts: shared.BenchModelFacts) -> _Plan:
    names = tuple(each.strip() for each in args.systems.split(","))
    if unknown := [each for each in names if each not in SYSTEMS]:
        raise ConfigError(f"--systems: no {unknown[0]!r}; there are {', '.join(SYSTEMS)}")
    if names[0] != "basic":
        raise ConfigError("--systems: basic comes first, as its time alone sets the objectives")
    for flag in ("agents", "turns", "append", "output"):
        if getattr(args, flag) < 1 + (flag == "output"):
            raise ConfigError(f"--{flag}: {getattr(args, flag)} is too small")
    block = facts.layout.block_tokens
    if args.context < block:
        raise ConfigError(f"--context: expected at least a block of {block}, got {args.context}")
    agents = args.agents // 2 if args.quick else args.agents
    topology = Topology.parse(args.topology)
    most = agents * -(-(topology.prefill + topology.decode) // topology.prefill)
    shape = Shape(args.context // block * block, args.append, args.output, args.turns)
    stored, sessions = shared_contexts(
        shape, sessions=max(most, _UNLOADED), contexts=_CONTEXTS, block_tokens=block
    )
    longest = shape.longest_tokens + _MARGIN_TOKENS
    return _Plan(
        topology=topology,
        systems=tuple(SYSTEMS[name] for name in names),
        shape=shape,
        agents=agents,
        precision=max(args.precision, 0.12) if args.quick else args.precision,
        seed=args.seed,
        stored=stored,
        sessions=sessions,
        source=shared.token_source(args, facts),
        serving=shared.serving(args, facts, longest_tokens=longest, at_once=_AT_ONCE),
        rates=shared.rates(args),
    )


async def _measure(
    plan: _Plan, system: System, base_url: str, slo: Slo | None, progress: Progress
) -> OnlineMeasured:
    """Alone first, then at the common rate, then the search. The first system's time alone makes `slo`."""
    async with Endpoint(EndpointConfig(base_url=base_url)) as endpoint:
        await endpoint.probe()
        player = _Player(plan, endpoint, progress)
        alone = await player.alone()
        slo = slo or _objectives(alone)
        player.limit = slo
        common_aps = _COMMON_LOAD * plan.bound_aps(plan.systems[0])
        log = AnswerLog()
        common = await player.play(
            _maker(plan, plan.agents).online(common_aps),
            _COMMON_RUN,
            f"{common_aps:.3g} agents/s",
            log,
        )
        bound_aps = plan.bound_aps(system)
        search = RateSearch(
            _START_LOAD * bound_aps, plan.precision, ceiling=_CEILING_LOAD * bound_aps
        )
        maker = _maker(plan, plan.agents_for(system))
        found = await find_max_rate(maker, search, Acceptance(slo=slo), player.play)
    progress(f"{system.name}: {found.best_aps or 0.0:.3g} agents/s (NICs bring {bound_aps:.3g})")
    return OnlineMeasured(
        system=system.name,
        slo=slo,
        alone=alone,
        common=common,
        found=found,
        bound_aps=bound_aps,
        answers=log.answers if system.exact else {},
    )


@dataclass(slots=True)
class _Player:
    """Plays loads against one server. `limit`: what ends a run early."""

    plan: _Plan
    endpoint: Endpoint
    progress: Progress
    limit: Slo | None = None

    async def play(
        self,
        load: OfflineLoad | OnlineLoad,
        number: int,
        title: str,
        log: AnswerLog | None = None,
    ) -> Run:
        """Each number has tokens of its own behind the shared contexts."""
        steady = None
        if isinstance(load, OnlineLoad) and self.limit is not None:
            # Half a run, so that runs at different rates end early for the same reason.
            window_s = len(load.sessions) / load.rate_aps / 2
            steady = SteadyRule(
                window_s=window_s,
                steady_ends=False,
                ttft_limit_s=self.limit.limits_s["ttft"],
            )
        run = await run_load(
            load,
            LoggedSender(self.endpoint, AnswerLog() if log is None else log),
            partial(self._talk, number),
            Limits(steady=steady),
        )
        failed = next((each for each in run.requests if each.error), None)
        if failed is not None:
            raise PassFailed(f"{failed.error}: {failed.detail}")
        if isinstance(load, OnlineLoad):
            ttfts = [each.ttft_s for each in run.requests if each.ttft_s is not None]
            mean_s = statistics.fmean(ttfts) if ttfts else 0.0
            self.progress(f"  {title}: {run.ended}, mean TTFT {mean_s:.2f} s")
        return run

    async def alone(self) -> Run:
        """One agent after another; the first only warms up. Their requests are one run's."""
        runs = [
            await self.play(OfflineLoad((session,)), _COMMON_RUN + 1, "alone")
            for session in self.plan.sessions[:_UNLOADED]
        ]
        requests = [request for run in runs[1:] for request in run.requests]
        return Run(mode="offline", agents=1, requests=requests)

    def _talk(self, number: int, session: Session) -> Conversation:
        return Conversation(replace(session, id=f"{number} {session.id}"), self.plan.source)


def _maker(plan: _Plan, agents: int) -> LoadMaker:
    """Loads of the plan's first sessions, the same draws of arrival times for every rate."""
    return LoadMaker(
        trace=Trace("stored contexts", "generated", plan.sessions),
        arrivals=Arrivals(kind="poisson", seed=plan.seed, max_sessions=agents),
    )


def _objectives(alone: Run) -> Slo:
    """Multiples of the medians of requests alone."""
    ttft_s = statistics.median(each.ttft_s or 0.0 for each in alone.requests)
    tpot_s = statistics.median(each.tpot_s or 0.0 for each in alone.requests)
    return Slo({"ttft": _TTFT_LIMIT * ttft_s, "tpot": _TPOT_LIMIT * tpot_s})


def _setup(plan: _Plan, measured: Sequence[OnlineMeasured]) -> dict[str, Figure]:
    return {
        "topology": str(plan.topology),
        "systems": [each.name for each in plan.systems],
        "agents": {each.name: plan.agents_for(each) for each in plan.systems},
        "turns": plan.shape.turns,
        "context_tokens": plan.shape.context_tokens,
        "append_tokens": plan.shape.append_tokens,
        "output_tokens": plan.shape.output_tokens,
        "contexts": _CONTEXTS,
        "slo": dict(measured[0].slo.limits_s),
        "slo_ttft_times_alone": _TTFT_LIMIT,
        "slo_tpot_times_alone": _TPOT_LIMIT,
        "common_aps": _COMMON_LOAD * plan.bound_aps(plan.systems[0]),
        "precision": plan.precision,
    }


def _write(
    args: argparse.Namespace,
    result: BenchResult,
    measured: Sequence[OnlineMeasured],
    progress: Progress,
) -> None:
    """One record of each system, as `dualpath bench replay --output` makes them, and one report."""
    from dualpath.bench.report import write_report

    records = []
    for each in measured:
        runs = sorted([each.common, *each.found.runs], key=lambda run: run.rate_aps or 0.0)
        figures = {**by_run(runs, each.slo), "max_aps": each.found.best_aps or 0.0}
        setup = {**base_setup(), **result.setup, "mode": "online", "system": each.system}
        record = ReplayRecord(label=each.system, figures=figures, setup=setup, runs=runs)
        record.write(args.directory / f"online-{each.system.replace(' ', '-')}.json")
        records.append(record)
    (args.directory / "online.json").write_text(result.to_json() + "\n", encoding="utf-8")
    report = args.directory / "online.html"
    write_report(report, records, title="Agents that arrive at random, on a testbed")
    progress(f"report: {report}")
