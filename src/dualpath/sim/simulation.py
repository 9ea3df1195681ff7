"""The driver in virtual time: the same policy as in the product, over the kernel's cluster.

The driver makes the policy's events from what the kernel tells, in order, and hands its `Assign` back; it
holds no rule of its own. Between two fetches nothing is decided, so the kernel runs from fetch to fetch by
itself, and starts a prefill when all reads are complete, as the policy is known to answer; that it does is
checked.

Deterministic: the same cluster, policy and workload give the same events, instructions and records. Leaders
fetch every `Cluster.fetch_s`, those of a role spread evenly over that time in a fixed order; or, when it
is 0, at once and in the order in which the product's driver answers its standing fetches.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from dualpath.base.errors import ConfigError, InvariantViolation
from dualpath.base.ids import EngineId, GroupId, RequestId, Role, Side
from dualpath.policy.config import PolicyConfig
from dualpath.policy.events import (
    Assign,
    EngineJoined,
    EngineReport,
    Event,
    GroupFetched,
    Instruction,
    PrefillDone,
    ReadProgressed,
    RequestArrived,
    RequestFinished,
    StartPrefill,
)
from dualpath.policy.scheduler import Scheduler
from dualpath.sim.cluster import Cluster
from dualpath.sim.kernel import (
    advance,
    assign_all,
    handle_of,
    make_state,
    read_queue_tokens,
    reports_of,
)
from dualpath.sim.kernel.log import ARRIVED, FINISHED, PREFILL_DONE, READ_ON_DE, READ_ON_PE
from dualpath.sim.outcome import Outcome
from dualpath.sim.workload import Workload

__all__ = ["EventLog", "Simulation"]

_PE, _DE = Side.PE, Side.DE
_CHECK_FETCHES = 4096
"""After so many fetches progress is told, and looked for."""


class EventLog(Protocol):
    """Takes each event with its instructions, as they happen."""

    def __call__(self, event: Event, instructions: list[Instruction]) -> None: ...


@dataclass(frozen=True, slots=True)
class _Group:
    """A node. `figures[f, e]`: what its engines report, in the order of `EngineReport`'s fields."""

    node: int
    id: GroupId
    engines: tuple[EngineId, ...]
    figures: npt.NDArray[np.int64]


class Simulation:
    """One run. `window_s`: of the series over time, which end after `windows`.

    `log` is given everything that passes between the driver and the policy. `scheduler`: a new one that
    decides, instead of the one that `policy` says; to try another. Raises ConfigError when a
    request is longer than a decode engine's device memory.
    """

    def __init__(
        self,
        cluster: Cluster,
        policy: PolicyConfig,
        work: Workload,
        *,
        window_s: float = 1.0,
        windows: int = 20_000,
        log: EventLog | None = None,
        scheduler: Scheduler | None = None,
    ) -> None:
        if not window_s > 0:
            raise ConfigError(f"window_s: expected more than 0, got {window_s}")
        _check_longest(cluster, work)
        self._cluster = cluster
        self._scheduler = Scheduler(policy) if scheduler is None else scheduler
        self._state = make_state(cluster, policy, work, window_s=window_s, windows=windows)
        self._kernel = handle_of(self._state)
        # Without the record view, whose access is slow from Python.
        self._clock = self._state.clock.view(np.ndarray)
        self._done = self._state.log.view(np.ndarray)
        # All of a log entry but its time, which comes first, are whole numbers.
        self._done_ints = self._done.view(np.int64).reshape(len(self._done), -1)[:, 1:]
        self._done_s = self._done["time_s"]
        self._log_full = int(self._clock["log_full"][0])
        self._work = work
        self._decide = self._scheduler.handle if log is None else _logged(self._scheduler, log)
        self._ids: list[RequestId] = [RequestId("")] * work.agents
        self._engine_index: dict[EngineId, int] = {}
        self._events = 0
        self._next_fetch = 0
        self._assigned: list[Assign] = []
        self._by_node = self._join()
        self._rounds = _rounds(
            self._by_node[: cluster.prefill_nodes], self._by_node[cluster.prefill_nodes :]
        )

    def run(
        self, until_s: float = math.inf, progress: Callable[[float, int], None] | None = None
    ) -> Outcome:
        """Until all agents have ended, or `until_s`. `progress(now_s, finished_agents)` now and then.

        It may be called again, with a later `until_s`, and goes on as if it had not stopped in between.
        What happened so far is the outcome, also of a run that KeyboardInterrupt ends: it then
        `was_interrupted`.
        """
        interrupted = False
        try:
            with _collector_off():
                if self._cluster.fetch_s:
                    self._run_fetching(until_s, progress)
                else:
                    self._run_standing(until_s)
        except KeyboardInterrupt:
            interrupted = True
        return Outcome.of(self._cluster, self._state, interrupted=interrupted)

    def set_quota_s(self, quota_s: float) -> None:
        """Of all prefill batches from now on."""
        self._state.parameters[0].quota_s = quota_s

    def _join(self) -> list[_Group]:
        """All engines; their groups, by node."""
        cluster, groups = self._cluster, []
        reported = reports_of(self._state)
        for node in range(cluster.nodes):
            prefill = node < cluster.prefill_nodes
            first = node * cluster.gpus
            name = f"p{node}" if prefill else f"d{node - cluster.prefill_nodes}"
            engines = tuple(EngineId(f"{name}.{i}") for i in range(cluster.gpus))
            figures = reported[:, first : first + cluster.gpus]
            group = _Group(node, GroupId(name), engines, figures)
            groups.append(group)
            for index, engine in enumerate(engines, first):
                self._engine_index[engine] = index
                joined = EngineJoined(
                    engine=engine,
                    group=group.id,
                    role=Role.PREFILL if prefill else Role.DECODE,
                    hbm_tokens=0 if prefill else cluster.decode_hbm_tokens,
                    # A request larger than a buffer is admitted alone.
                    buffer_tokens=1 << 40,
                    now_s=0.0,
                )
                self._carry_out(self._decide(joined))
        return groups

    def _run_fetching(self, until_s: float, progress: Callable[[float, int], None] | None) -> None:
        rounds, clock = self._rounds, self._clock
        live, unfinished = clock["live"], clock["unfinished_agents"]
        fetch_s = self._cluster.fetch_s
        while unfinished[0]:
            if not live[0]:
                # Nothing to fetch before somebody arrives.
                soonest = self._state.heap[0].time_s // fetch_s
                self._next_fetch = max(self._next_fetch, int(soonest) * len(rounds))
            fetch = self._next_fetch
            number, place = divmod(fetch, len(rounds))
            share, group = rounds[place]
            at_s = (number + share) * fetch_s
            if at_s > until_s:
                self._advance(until_s)
                return
            self._advance(at_s)
            self._fetch(group)
            if self._assigned:
                self._assign()
            self._next_fetch = fetch + 1
            if self._next_fetch % _CHECK_FETCHES == 0:
                self._check_alive()
                if progress is not None:
                    progress(at_s, self._work.agents - int(unfinished[0]))

    def _run_standing(self, until_s: float) -> None:
        """As the product does: an engine reports on every change, and its report is its group's fetch; an
        arrival is a fetch of all groups, the least loaded first. All of them are answered before any engine
        hears of its assignments and reports those.

        The product's other reports, of every block that was read and as heartbeats, are left out: nothing
        that a request can wait for has changed since the report before.
        """
        unfinished = self._clock["unfinished_agents"]
        while unfinished[0] and self._now_s() < until_s:
            taken = advance(self._kernel, until_s, True)
            if taken == 0:
                return
            self._drain(taken)
            groups = self._fetching(taken)
            while groups:
                for group in groups:
                    self._fetch(group)
                groups = self._groups_of(self._assign())

    def _fetching(self, taken: int) -> list[_Group]:
        """The groups that fetch after what just happened, in order."""
        done = self._done[:taken]
        if (done["kind"] == ARRIVED).any():
            return sorted(self._by_node, key=_load)
        slots = self._state.slots.view(np.ndarray)[done["slot"]]
        on_decode = (done["kind"] == FINISHED) | (done["kind"] == READ_ON_DE)
        return self._groups_of(np.where(on_decode, slots["decode"], slots["prefill"]).tolist())

    def _groups_of(self, engines: list[int]) -> list[_Group]:
        """Of engines by index, in their order, each once."""
        nodes = dict.fromkeys(engine // self._cluster.gpus for engine in engines)
        return [self._by_node[node] for node in nodes]

    def _advance(self, until_s: float) -> None:
        taken = self._log_full
        while taken >= self._log_full:
            taken = advance(self._kernel, until_s, False)
            self._drain(taken)

    def _drain(self, taken: int) -> None:
        """Tell the policy what happened."""
        if not taken:
            return
        ids, decide = self._ids, self._decide
        event: Event
        # Columns of numbers are faster than a record at a time.
        columns = self._done_s[:taken].tolist(), *self._done_ints[:taken].T.tolist()
        for now_s, kind, slot, tokens, turn, hit_tokens, new_tokens in zip(*columns, strict=True):
            if kind == READ_ON_PE:
                event = ReadProgressed(ids[slot], 0, _PE, tokens, now_s)
            elif kind == READ_ON_DE:
                event = ReadProgressed(ids[slot], 0, _DE, tokens, now_s)
            elif kind == PREFILL_DONE:
                event = PrefillDone(ids[slot], 0, now_s)
            elif kind == FINISHED:
                event = RequestFinished(ids[slot], now_s)
            else:
                ids[slot] = request = RequestId(f"{slot}.{turn}")
                event = RequestArrived(request, tokens, hit_tokens, new_tokens, now_s)
            if instructions := decide(event):
                self._carry_out(instructions)

    def _fetch(self, group: _Group) -> None:
        reports = tuple(map(EngineReport, group.engines, *group.figures.tolist()))
        queue_tokens = read_queue_tokens(self._kernel, group.node)
        event = GroupFetched(group.id, reports, queue_tokens, self._now_s())
        if instructions := self._decide(event):
            self._carry_out(instructions)

    def _now_s(self) -> float:
        return float(self._clock["now_s"][0])

    def _check_alive(self) -> None:
        """Raises InvariantViolation when nothing will ever happen again and requests wait."""
        clock = self._state.clock[0]
        idle = clock.heap_size == 0 and not self._state.links.active.any()
        if idle and clock.live and clock.events == self._events:
            raise InvariantViolation(
                f"the simulated cluster stands still at {clock.now_s} s with {clock.live} requests"
            )
        self._events = int(clock.events)

    def _carry_out(self, instructions: list[Instruction]) -> None:
        for each in instructions:
            if type(each) is Assign:
                self._assigned.append(each)
            elif type(each) is not StartPrefill:
                raise InvariantViolation(f"the simulated cluster cannot do {each}")

    def _assign(self) -> list[int]:
        """Tell engines what they were assigned. Those engines, in the order in which they were told."""
        assigned, index = self._assigned, self._engine_index
        if not assigned:
            return []
        rows: list[int] = []
        engines: list[int] = []
        for each in assigned:
            slot = int(each.request.partition(".")[0])
            prefill, decode, plan = index[each.prefill], index[each.decode], each.plan
            rows += slot, prefill, decode, plan.pe_tokens, plan.bypass
            engines += decode, prefill
        assigned.clear()
        # A flat list is several times faster to convert than one of rows.
        assign_all(self._kernel, np.array(rows, np.int64).reshape(-1, 5))
        return engines


@contextmanager
def _collector_off() -> Iterator[None]:
    """A run makes no reference cycles, but much that the collector would look at over and over again."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _logged(scheduler: Scheduler, log: EventLog) -> Callable[[Event], list[Instruction]]:
    def decide(event: Event) -> list[Instruction]:
        instructions = scheduler.handle(event)
        log(event, instructions)
        return instructions

    return decide


def _check_longest(cluster: Cluster, work: Workload) -> None:
    whole = work.prompt_tokens.astype(np.int64) + work.output_tokens
    of_trajectory = np.maximum.reduceat(whole, work.first_turn[:-1])
    longest = int((of_trajectory[work.trajectory] + work.first_round_tokens).max(initial=0))
    if longest > cluster.decode_hbm_tokens:
        raise ConfigError(
            f"expected requests of at most {cluster.decode_hbm_tokens} tokens, what the memory of a decode "
            f"engine holds, got one of {longest}: use shorter ones, or more GPUs for an engine"
        )


def _load(group: _Group) -> tuple[float, GroupId]:
    """Unfinished tokens an engine; equal ones in order of the groups' ids."""
    _, _, tokens, _ = group.figures
    return float(tokens.mean()), group.id


def _rounds(prefill: list[_Group], decode: list[_Group]) -> list[tuple[float, _Group]]:
    """When each group fetches in a round, as a share of it, in order. Uneven gaps between the groups of a
    role would give one of them more of the requests."""
    groups = [(i / len(prefill), each) for i, each in enumerate(prefill)]
    groups += [((i + 0.5) / len(decode), each) for i, each in enumerate(decode)]
    return sorted(groups, key=lambda each: each[0])
