"""Whether large clusters are better scheduled in cells, each by a scheduler of its own, under one chooser.

The chooser gives each request that arrives to a cell, which keeps it to its end: to that with the fewest
tokens of requests that have not ended, by its own count; to the better of two drawn at random, by what
their engines last reported; or in turn. A cell is a twelfth, or a quarter, of the nodes of each role.
Cells are striped, node i in cell i modulo their number, so that the leaders of a cell fetch evenly spread
over time; or whole: consecutive nodes and so whole instances, whose leaders fetch one soon after the
other.

DS 660B on 24P48D, 64K contexts: online at 12 times the rate of figure 11, while the load still rises, and
offline. What the policy costs is measured, not simulated: CPU time of this process while it handles the
events of the first minutes of the offline run once more.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from dualpath.base.ids import EngineId, GroupId, RequestId, Role
from dualpath.policy.config import PolicyConfig
from dualpath.policy.events import (
    EngineJoined,
    Event,
    GroupFetched,
    Instruction,
    PrefillDone,
    ReadProgressed,
    RequestArrived,
    RequestFinished,
)
from dualpath.policy.scheduler import Scheduler
from dualpath.policy.splitmix import SplitMix64
from dualpath.sim.case import Case, workload_of
from dualpath.sim.experiments.experiment import Settings
from dualpath.sim.experiments.fig11 import RATE_APS
from dualpath.sim.experiments.grid import ds_660b, offline_case
from dualpath.sim.experiments.trial import (
    Measured,
    PolicyExperiment,
    Results,
    Trial,
    Value,
    name_of,
    play_with,
    ratio,
)
from dualpath.sim.plan.load import AtRate, Offline
from dualpath.sim.setting import System, prepare
from dualpath.sim.simulation import Simulation

__all__ = ["EXPERIMENT", "CellScheduler", "better_of_two", "in_turn", "least", "striped", "whole"]

_NAME = "hierarchy"
_TIMES = 12
"""As many nodes as 2P4D."""
_PREFILL_NODES, _DECODE_NODES = 2 * _TIMES, 4 * _TIMES
_HORIZON_S = 600.0
_AGENTS = 512 * _TIMES
_COSTED_S = 150.0
_REPEATS = 3

Choose = Callable[["CellScheduler"], int]
"""The cell for a request that arrives."""


class CellScheduler(Scheduler):
    """A scheduler a cell. Of engines, it only knows that they join; of requests, only that they end well.

    `unfinished_tokens`: prompts of a cell's requests. `reported_tokens`: by its groups' last fetches.
    """

    def __init__(
        self, config: PolicyConfig, cells: int, choose: Choose, cell_of: Callable[[Role, int], int]
    ) -> None:
        super().__init__(config)
        self.cells = [Scheduler(config) for _ in range(cells)]
        self.unfinished_tokens = [0] * cells
        self.reported_tokens = [0] * cells
        self.numbers = SplitMix64(config.seed)
        self.arrived = 0
        self._choose = choose
        self._cell_of = cell_of
        self._of_group: dict[GroupId, int] = {}
        self._joined_groups = dict.fromkeys(Role, 0)
        self._of_request: dict[RequestId, tuple[int, int]] = {}
        self._by_engine: dict[EngineId, int] = {}

    def handle(self, event: Event) -> list[Instruction]:
        if isinstance(event, RequestArrived):
            cell = self._choose(self)
            self.arrived += 1
            self._of_request[event.request] = cell, event.prompt_tokens
            self.unfinished_tokens[cell] += event.prompt_tokens
        elif isinstance(event, GroupFetched):
            cell = self._of_group[event.group]
            for each in event.reports:
                self.reported_tokens[cell] += each.tokens - self._by_engine.get(each.engine, 0)
                self._by_engine[each.engine] = each.tokens
        elif isinstance(event, RequestFinished):
            cell, tokens = self._of_request.pop(event.request)
            self.unfinished_tokens[cell] -= tokens
        elif isinstance(event, EngineJoined):
            if event.group not in self._of_group:
                number = self._joined_groups[event.role]
                self._joined_groups[event.role] = number + 1
                self._of_group[event.group] = self._cell_of(event.role, number)
            cell = self._of_group[event.group]
        else:
            assert isinstance(event, ReadProgressed | PrefillDone), event
            cell = self._of_request[event.request][0]
        return self.cells[cell].handle(event)

    def validate(self) -> None:
        for each in self.cells:
            each.validate()


def least(scheduler: CellScheduler) -> int:
    tokens = scheduler.unfinished_tokens
    return tokens.index(min(tokens))


def better_of_two(scheduler: CellScheduler) -> int:
    cells, tokens = len(scheduler.cells), scheduler.reported_tokens
    one = scheduler.numbers.below(cells)
    # Any but the first.
    other = (one + 1 + scheduler.numbers.below(cells - 1)) % cells
    return min(one, other, key=lambda cell: (tokens[cell], cell))


def in_turn(scheduler: CellScheduler) -> int:
    return scheduler.arrived % len(scheduler.cells)


def striped(cells: int, role: Role, number: int) -> int:
    return number % cells


def whole(cells: int, role: Role, number: int) -> int:
    return number * cells // (_PREFILL_NODES if role is Role.PREFILL else _DECODE_NODES)


@dataclass(frozen=True, slots=True)
class _Variant:
    cells: int
    choose: Choose
    cell_of: Callable[[int, Role, int], int] = striped

    def scheduler(self, config: PolicyConfig) -> CellScheduler:
        cell_of = partial(self.cell_of, self.cells)
        return CellScheduler(config, self.cells, self.choose, cell_of)


_GLOBAL = "global"
_VARIANTS = {
    "12 cells, least tokens": _Variant(12, least),
    "12 cells, better of two": _Variant(12, better_of_two),
    "12 cells, in turn": _Variant(12, in_turn),
    "4 cells, least tokens": _Variant(4, least),
    "12 whole cells, least tokens": _Variant(12, least, whole),
    "4 whole cells, least tokens": _Variant(4, least, whole),
}
_OFFLINE = (_GLOBAL, "12 cells, least tokens", "12 whole cells, least tokens")


def _schedule(variant: str, config: PolicyConfig) -> Scheduler:
    return Scheduler(config) if variant == _GLOBAL else _VARIANTS[variant].scheduler(config)


def _offline(settings: Settings) -> Case:
    deployment = ds_660b(_PREFILL_NODES, _DECODE_NODES)
    return offline_case(settings, deployment, System.SPLIT, "64k", _AGENTS)


def _online(settings: Settings) -> Case:
    return Case(
        deployment=ds_660b(_PREFILL_NODES, _DECODE_NODES),
        system=System.SPLIT,
        assumptions=settings.assumptions,
        trace="paper:64k",
        load=AtRate(RATE_APS * _TIMES, _HORIZON_S),
        seed=settings.seed,
    )


def _trials(settings: Settings) -> list[Trial]:
    online, offline = _online(settings), _offline(settings)
    return [
        *(Trial(_NAME, each, online) for each in (_GLOBAL, *_VARIANTS)),
        *(Trial(_NAME, each, offline) for each in _OFFLINE),
    ]


def _play(trial: Trial) -> Measured:
    return play_with(trial.case, schedule=partial(_schedule, trial.variant))


def _evaluate(settings: Settings, results: Results) -> Mapping[str, Value]:
    found: dict[str, dict[str, Value]] = {}
    for trial in _trials(settings):
        summary = results[trial].summary
        jct_s = {"jct_s": round(summary.jct_s, 1)} if isinstance(trial.case.load, Offline) else {}
        found.setdefault(name_of(trial.case), {})[trial.variant] = {
            **jct_s,
            "request_s": ratio(summary.request.mean_s),
            "ttft_mean_s": ratio(summary.ttft.mean_s),
            "ttft_p50_s": ratio(summary.ttft.p50_s),
            "ttft_p99_s": ratio(summary.ttft.p99_s),
        }
    costs = {each: round(_cpu_us_a_request(settings, each), 1) for each in (_GLOBAL, *_VARIANTS)}
    return {"latency": found, "cpu_us_a_request": costs}


def _cpu_us_a_request(settings: Settings, variant: str) -> float:
    """Of all the events of a run's beginning, those of engines that join left out; the least of some runs."""
    case = _offline(settings)
    cluster, policy = prepare(case.deployment, case.system, case.assumptions)
    events: list[Event] = []
    outcome = Simulation(
        cluster,
        policy,
        workload_of(case),
        scheduler=_schedule(variant, policy),
        log=lambda event, instructions: events.append(event),
    ).run(_COSTED_S)
    if outcome.was_interrupted:
        raise KeyboardInterrupt
    joined = [each for each in events if isinstance(each, EngineJoined)]
    others = [each for each in events if not isinstance(each, EngineJoined)]
    requests = sum(isinstance(each, RequestArrived) for each in others)
    costs_s = [_cpu_s(_schedule(variant, policy), joined, others) for _ in range(_REPEATS)]
    return 1e6 * min(costs_s) / requests


def _cpu_s(scheduler: Scheduler, joined: Sequence[Event], others: Sequence[Event]) -> float:
    for each in joined:
        scheduler.handle(each)
    start_s = time.process_time()
    for each in others:
        scheduler.handle(each)
    return time.process_time() - start_s


EXPERIMENT = PolicyExperiment(_NAME, "Cells under a chooser", _trials, _play, _evaluate)
