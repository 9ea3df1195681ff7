"""How many requests a second the scheduler decides for, on one core, at a given cluster size.

Every request goes through its whole life: it arrives, both roles' groups fetch with reports of all their
engines, the reads of both sides progress, prefill is done, it finishes. The loop: `arrivals_per_fetch`
requests arrive, one group fetches (all groups in turn, prefill and decode mixed), what was assigned is
read and prefilled by the time its group fetches again, and decodes for `decode_rounds` rounds of fetches.

What is counted: the time inside `Scheduler.handle`, which includes making the instructions, and garbage
collection where it falls there. What is not: making the events, and the model cluster that executes the
instructions and checks them (`wall_requests_per_s` has all of it). The clock is read around every call, so
`requests_per_s` includes that too. Fetches are cheap when much arrives between them: `requests_per_s_sparse`
repeats the run with one arrival a fetch.

Balance figures tell what the schedulers' choices are worth: tokens read by the busiest node over the mean
(prefill and decode nodes together), and prompt tokens given to the busiest prefill engine over the mean.
"""

from __future__ import annotations

import argparse
import gc
import random
import statistics
import time
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass

from dualpath.base.ids import EngineId, GroupId, RequestId, Role, Side
from dualpath.bench.harness import BenchResult, Figure, Progress
from dualpath.policy import is_compiled
from dualpath.policy.config import PolicyConfig, ReadPlanKind, SchedulerKind
from dualpath.policy.events import Assign, Event, StartPrefill
from dualpath.policy.scheduler import Scheduler
from dualpath.testing.model_cluster import ModelCluster

__all__ = ["HELP", "NAME", "add_arguments", "run"]

NAME = "scheduler"
HELP = "requests a second that the scheduler decides for, on one core"

_HBM_TOKENS = 860_000
_BUFFER_TOKENS = 200_000
_BLOCK_TOKENS = 64


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--prefill-groups", type=int, default=48, metavar="N")
    parser.add_argument("--decode-groups", type=int, default=96, metavar="N")
    parser.add_argument("--group-engines", type=int, default=8, metavar="N")
    parser.add_argument("--requests", type=int, default=20_000, metavar="N", help="in each run")
    parser.add_argument("--arrivals-per-fetch", type=int, default=8, metavar="N")
    parser.add_argument(
        "--decode-rounds",
        type=int,
        default=4,
        metavar="N",
        help="rounds of fetches a request decodes",
    )
    parser.add_argument(
        "--repeats", type=int, default=3, metavar="N", help="the median is reported"
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N")
    parser.add_argument(
        "--read-plan", type=ReadPlanKind, choices=list(ReadPlanKind), default=ReadPlanKind.SPLIT
    )


def run(args: argparse.Namespace, progress: Progress) -> BenchResult:
    shape = _Shape(args.prefill_groups, args.decode_groups, args.group_engines)
    runs = []
    for repeat in range(args.repeats):
        runs.append(_measure(args, shape, SchedulerKind.DUALPATH, args.arrivals_per_fetch))
        progress(f"dualpath {repeat + 1}/{args.repeats}: {runs[-1].requests_per_s:,.0f} requests/s")
    middle = sorted(runs, key=lambda each: each.requests_per_s)[len(runs) // 2]
    by_kind = {SchedulerKind.DUALPATH: middle}
    for kind in SchedulerKind:
        if kind is not SchedulerKind.DUALPATH:
            by_kind[kind] = _measure(args, shape, kind, args.arrivals_per_fetch)
            progress(f"{kind}: {by_kind[kind].requests_per_s:,.0f} requests/s")
    sparse = _measure(args, shape, SchedulerKind.DUALPATH, 1)
    progress(f"dualpath, one arrival a fetch: {sparse.requests_per_s:,.0f} requests/s")
    figures: dict[str, Figure] = {
        "requests_per_s": round(middle.requests_per_s),
        "requests_per_s_runs": [round(each.requests_per_s) for each in runs],
        "requests_per_s_sparse": round(sparse.requests_per_s),
        "wall_requests_per_s": round(middle.wall_requests_per_s),
        "p50_handle_us": middle.percentile_us(50),
        "p99_handle_us": middle.percentile_us(99),
        "max_handle_us": middle.percentile_us(100),
        "mean_us_by_event": middle.mean_us_by_event(),
        "requests_per_s_by_scheduler": {
            kind.value: round(each.requests_per_s) for kind, each in by_kind.items()
        },
        "node_reads_max_over_mean": {
            kind.value: each.read_balance
            for kind, each in by_kind.items()
            if kind is not SchedulerKind.ORACLE
        },
        "prefill_tokens_max_over_mean": {
            kind.value: each.prefill_balance for kind, each in by_kind.items()
        },
    }
    setup: dict[str, Figure] = {
        "engines": (shape.prefill_groups + shape.decode_groups) * shape.group_engines,
        "groups": shape.prefill_groups + shape.decode_groups,
        "prefill_groups": shape.prefill_groups,
        "decode_groups": shape.decode_groups,
        "requests": args.requests,
        "arrivals_per_fetch": args.arrivals_per_fetch,
        "decode_rounds": args.decode_rounds,
        "repeats": args.repeats,
        "seed": args.seed,
        "read_plan": args.read_plan.value,
        "policy_compiled": is_compiled(),
    }
    return BenchResult(NAME, figures, setup)


@dataclass(frozen=True, slots=True)
class _Shape:
    prefill_groups: int
    decode_groups: int
    group_engines: int

    def join_all(self, cluster: ModelCluster, scheduler: Scheduler) -> list[GroupId]:
        """The groups in the order in which they fetch: roles mixed in their proportion."""
        groups: list[tuple[float, GroupId]] = []
        for role, count in ((Role.PREFILL, self.prefill_groups), (Role.DECODE, self.decode_groups)):
            for index in range(count):
                group = GroupId(f"{role}-{index:03}")
                groups.append(((index + 0.5) / count, group))
                for rank in range(self.group_engines):
                    engine = EngineId(f"{group}-{rank}")
                    scheduler.handle(cluster.join(engine, group, role, _HBM_TOKENS, _BUFFER_TOKENS))
        return [group for _, group in sorted(groups)]


@dataclass(frozen=True, slots=True)
class _Run:
    requests: int
    handle_ns: dict[str, list[int]]
    wall_s: float
    read_balance: float
    prefill_balance: float

    @property
    def requests_per_s(self) -> float:
        return self.requests / (sum(sum(each) for each in self.handle_ns.values()) / 1e9)

    @property
    def wall_requests_per_s(self) -> float:
        return self.requests / self.wall_s

    def percentile_us(self, percent: int) -> float:
        every = sorted(ns for each in self.handle_ns.values() for ns in each)
        return round(every[min(len(every) - 1, len(every) * percent // 100)] / 1e3, 2)

    def mean_us_by_event(self) -> dict[str, float]:
        return {
            name: round(statistics.fmean(each) / 1e3, 2) for name, each in self.handle_ns.items()
        }


class _Replay:
    """One run: a scheduler, the model cluster that executes it, and where each request stands."""

    def __init__(self, args: argparse.Namespace, shape: _Shape, kind: SchedulerKind) -> None:
        config = PolicyConfig(
            scheduler=kind,
            read_plan=args.read_plan,
            block_tokens=_BLOCK_TOKENS,
            alpha_tokens=3_500_000,
            beta_tokens=700_000,
        )
        self.scheduler = Scheduler(config)
        self.cluster = ModelCluster(_BLOCK_TOKENS)
        self.order = shape.join_all(self.cluster, self.scheduler)
        self.handle_ns: dict[str, list[int]] = defaultdict(list)
        self.prefill_tokens: dict[EngineId, int] = dict.fromkeys(
            (each.id for each in self.cluster.engines.values() if each.role is Role.PREFILL), 0
        )
        self.finished = 0
        self._random = random.Random(args.seed)
        self._arrived = 0
        # Per prefill group: assigned, waiting for the group's next fetch, by which they are computed.
        self._to_compute: dict[GroupId, list[Assign]] = defaultdict(list)
        self._decoding: deque[tuple[int, RequestId]] = deque()
        self._decode_fetches = args.decode_rounds * len(self.order)

    def step(self, events: Sequence[Event]) -> None:
        """Handle events, timed one by one, and execute what follows, untimed."""
        handle, clock = self.scheduler.handle, time.perf_counter_ns
        for event in events:
            start = clock()
            instructions = handle(event)
            spent = clock() - start
            self.handle_ns[type(event).__name__].append(spent)
            self.cluster.execute(instructions, event)
            for each in instructions:
                if isinstance(each, Assign):
                    group = self.cluster.engines[each.prefill].group
                    self._to_compute[group].append(each)
                    tokens = self.cluster.requests[each.request].prompt_tokens
                    self.prefill_tokens[each.prefill] += tokens
                else:
                    assert isinstance(each, StartPrefill), each

    def arrive(self, count: int) -> None:
        """Agent turns: long prompts, nearly all of them stored."""
        events: list[Event] = []
        for _ in range(count):
            prompt = self._random.randrange(1_000, 64_000)
            append = self._random.randrange(1, 900)
            hit = max(0, prompt - append) // _BLOCK_TOKENS * _BLOCK_TOKENS
            request = RequestId(f"r{self._arrived}")
            self._arrived += 1
            events.append(self.cluster.arrive(request, prompt, hit, 200))
        self.step(events)

    def fetch(self, turn: int) -> None:
        """The next group computes what it was given before, finishes what is old, and fetches."""
        group = self.order[turn % len(self.order)]
        computed = self._to_compute.pop(group, [])
        reads: list[Event] = [
            self.cluster.read(each.request, side, tokens)
            for each in computed
            if not each.plan.bypass
            for side, tokens in ((Side.PE, each.plan.pe_tokens), (Side.DE, each.plan.de_tokens))
            if tokens
        ]
        self.step(reads)
        self.step([self.cluster.finish_prefill(each.request) for each in computed])
        self._decoding.extend((turn + self._decode_fetches, each.request) for each in computed)
        done: list[Event] = []
        while self._decoding and self._decoding[0][0] <= turn:
            done.append(self.cluster.finish(self._decoding.popleft()[1]))
        self.finished += len(done)
        self.step(done)
        for engine in self.cluster.groups[group]:
            self.cluster.deliver(engine.id)
        self.step([self.cluster.fetch(group)])


def _measure(
    args: argparse.Namespace, shape: _Shape, kind: SchedulerKind, arrivals_per_fetch: int
) -> _Run:
    replay = _Replay(args, shape, kind)
    gc.collect()
    start = time.perf_counter()
    arrived = turn = 0
    while replay.finished < args.requests:
        count = min(arrivals_per_fetch, args.requests - arrived)
        replay.arrive(count)
        arrived += count
        replay.fetch(turn)
        turn += 1
    wall_s = time.perf_counter() - start
    replay.cluster.check_idle()
    replay.scheduler.validate()
    return _Run(
        requests=args.requests,
        handle_ns=dict(replay.handle_ns),
        wall_s=wall_s,
        read_balance=_max_over_mean(list(replay.cluster.read_tokens.values())),
        prefill_balance=_max_over_mean(list(replay.prefill_tokens.values())),
    )


def _max_over_mean(values: Sequence[int]) -> float:
    mean = statistics.fmean(values)
    return round(max(values) / mean, 3) if mean else 0.0
