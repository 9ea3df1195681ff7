"""A driver for tests: a scheduler, and the model cluster that executes what it says, step by step."""

from __future__ import annotations

from collections.abc import Iterator

from dualpath.base.ids import EngineId, GroupId, RequestId, Role, Side
from dualpath.policy import (
    Assign,
    Event,
    GroupFetched,
    Instruction,
    PolicyConfig,
    Scheduler,
    SchedulerKind,
)
from dualpath.testing.model_cluster import ModelCluster, ModelRequest

BLOCK = 64


class Driver:
    """`log` keeps every event with its instructions, for replays."""

    def __init__(self, config: PolicyConfig) -> None:
        self.config = config
        self.scheduler = Scheduler(config)
        self.cluster = ModelCluster(config.block_tokens)
        self.log: list[tuple[Event, list[Instruction]]] = []

    def play(self, event: Event) -> list[Instruction]:
        out = self.scheduler.handle(event)
        self.log.append((event, out))
        self.cluster.execute(out, event)
        return out

    def join_all(
        self, prefill: int, decode: int, group_engines: int, *, hbm: int, buffer: int
    ) -> None:
        """Groups P0.. and D0.. of engines p0.0.. and d0.0.."""
        for role, groups in ((Role.PREFILL, prefill), (Role.DECODE, decode)):
            for group in range(groups):
                for rank in range(group_engines):
                    self.join(role, group, rank, hbm=hbm, buffer=buffer)

    def join(self, role: Role, group: int, rank: int, *, hbm: int, buffer: int) -> None:
        letter = "p" if role is Role.PREFILL else "d"
        engine, name = EngineId(f"{letter}{group}.{rank}"), GroupId(f"{letter.upper()}{group}")
        self.play(self.cluster.join(engine, name, role, hbm, buffer))

    def fetch(self, group: GroupId) -> list[Instruction]:
        event = self.cluster.fetch(group)
        out = self.play(event)
        if self.config.scheduler not in (SchedulerKind.ROUND_ROBIN, SchedulerKind.RANDOM):
            self.check_not_overloaded(event, out)
        return out

    def check_not_overloaded(self, event: GroupFetched, out: list[Instruction]) -> None:
        """Of the prefill engines of the group: what was reported and is on the way stays within beta

        before each assignment that this fetch chose. (Assignments under a decode group's fetch were
        chosen earlier.)
        """
        tokens = {each.engine: each.tokens for each in event.reports}
        for engine in tokens:
            model = self.cluster.engines[engine]
            if model.role is Role.DECODE:
                return
            given = [x.request for x in out if isinstance(x, Assign) and x.prefill == engine]
            load = (
                tokens[engine]
                + model.tokens_under_way
                - sum(self.cluster.requests[each].prompt_tokens for each in given)
            )
            for request in given:
                assert load <= self.config.beta_tokens, f"{request} was given to {engine} at {load}"
                load += self.cluster.requests[request].prompt_tokens

    def of_phase(self, phase: str) -> list[ModelRequest]:
        return [each for each in self.cluster.requests.values() if phase_of(each) == phase]

    def finish_reads(self, request: ModelRequest) -> None:
        for side in Side:
            if request.unread_tokens[side]:
                self.play(self.cluster.read(request.id, side, request.unread_tokens[side]))

    def advance(self) -> None:
        """Every request goes as far as it can: one fetch of every group, and what follows."""
        for request in self.of_phase("interrupted"):
            self.play(self.cluster.fail(request.id, request.hit_tokens, 0))
        for engine in self.cluster.engines:
            self.cluster.deliver(engine)
        for group in list(self.cluster.groups):
            self.fetch(group)
        for request in self.of_phase("reading"):
            self.finish_reads(request)
        for request in self.of_phase("prefilling"):
            self.play(self.cluster.finish_prefill(request.id))
        for request in self.of_phase("decoding"):
            self.play(self.cluster.finish(request.id))

    def settle(self) -> int:
        """Advance until no request is left, then check that none left a trace; the rounds it took."""
        before = len(self.cluster.requests)
        rounds = 0
        while self.cluster.requests:
            # In each round the oldest request at least gets on, so this bounds starvation.
            assert rounds <= 3 * before + 5, f"stuck: {list(self.cluster.requests.values())[:3]}"
            self.advance()
            self.scheduler.validate()
            rounds += 1
        self.cluster.check_idle()
        for group in list(self.cluster.groups):
            self.fetch(group)
        self.scheduler.validate()
        for name, size in traces(self.scheduler):
            assert size == 0, f"{name}: {size} left"
        stats = self.scheduler.stats()
        totals = stats.totals
        assert totals["arrived"] == totals["finished"] + totals["aborted"] + totals["rejected"]
        return rounds


def phase_of(request: ModelRequest) -> str:
    """As a driver knows it."""
    if request.interrupted:
        return "interrupted"
    if request.assign is None:
        return "waiting"
    if request.prefilled:
        return "decoding"
    return "prefilling" if request.started else "reading"


def traces(scheduler: Scheduler) -> Iterator[tuple[str, int]]:
    """All in a scheduler that grows with requests: 0 when none is left and every assignment was seen."""
    members, queues = scheduler._members, scheduler._queues
    yield "requests", len(scheduler._requests)
    yield "prefill queue", len(queues.prefill)
    yield "decode queue", len(queues.decode)
    for groups in members.groups.values():
        for group in groups.values():
            yield f"queue of {group.id}", len(group.queue)
            yield f"tokens of {group.id}", group.tokens
    for engine in members.engines.values():
        yield f"unseen of {engine.id}", len(engine.unseen)
        yield f"pending of {engine.id}", len(engine.pending)
        yield f"tokens of {engine.id}", engine.tokens
        yield f"memory of {engine.id}", engine.unseen_hbm_tokens
    for node in members.nodes.values():
        yield f"reads of {node.id}", node.read_queue_tokens


def request_name(number: int) -> RequestId:
    return RequestId(f"r{number}")
