"""Short ways to write events, and a scheduler whose invariants are checked after every event."""

from __future__ import annotations

from typing import Any

from dualpath.base.ids import EngineId, GroupId, NodeId, RequestId, Role, Side
from dualpath.policy import (
    Assign,
    AttemptFailed,
    EngineJoined,
    EngineLost,
    EngineReport,
    Event,
    GroupFetched,
    Instruction,
    PolicyConfig,
    PrefillDone,
    ReadPlanKind,
    ReadProgressed,
    RequestAborted,
    RequestArrived,
    RequestFinished,
    Scheduler,
    SchedulerKind,
)

BLOCK = 64
BIG = 1_000_000


def config(**changes: Any) -> PolicyConfig:
    settings: dict[str, Any] = {
        "block_tokens": BLOCK,
        "alpha_tokens": 10_000,
        "beta_tokens": 1_000,
        "read_plan": ReadPlanKind.SHORTER,
        "scheduler": SchedulerKind.DUALPATH,
    }
    return PolicyConfig(**{**settings, **changes})


def joined(
    engine: str,
    group: str | None = None,
    *,
    hbm: int = BIG,
    buffer: int = BIG,
    node: str | None = None,
) -> EngineJoined:
    """Role by the first letter of the name: p..., d...; group by default: the letters before the digits."""
    role = Role.PREFILL if engine.startswith("p") else Role.DECODE
    return EngineJoined(
        EngineId(engine),
        GroupId(group if group is not None else engine[0].upper()),
        role,
        hbm,
        buffer,
        0.0,
        None if node is None else NodeId(node),
    )


def lost(engine: str) -> EngineLost:
    return EngineLost(EngineId(engine), 0.0)


def arrived(request: str, prompt: int = 200, hit: int = 128, new: int = 100) -> RequestArrived:
    return RequestArrived(RequestId(request), prompt, hit, new, 0.0)


def report(
    engine: str,
    *,
    seen: int = 0,
    requests: int = 0,
    tokens: int = 0,
    free: int = BIG,
    queue: int | None = None,
) -> EngineReport:
    return EngineReport(EngineId(engine), seen, requests, tokens, free, queue)


def fetched(group: str, *reports: EngineReport, queue: int = 0) -> GroupFetched:
    return GroupFetched(GroupId(group), reports, queue, 0.0)


def read(request: str, side: str, tokens: int, attempt: int = 0) -> ReadProgressed:
    return ReadProgressed(RequestId(request), attempt, Side(side), tokens, 0.0)


def prefilled(request: str, attempt: int = 0) -> PrefillDone:
    return PrefillDone(RequestId(request), attempt, 0.0)


def finished(request: str) -> RequestFinished:
    return RequestFinished(RequestId(request), 0.0)


def aborted(request: str) -> RequestAborted:
    return RequestAborted(RequestId(request), 0.0)


def failed(
    request: str, attempt: int = 0, *, prompt: int = 200, hit: int = 128, new: int = 100
) -> AttemptFailed:
    return AttemptFailed(RequestId(request), attempt, prompt, hit, new, 0.0)


class Checked:
    """A scheduler, and what it answered; validated after every event."""

    def __init__(self, *events: Event, **changes: Any) -> None:
        self.scheduler = Scheduler(config(**changes))
        self(*events)

    def __call__(self, *events: Event) -> list[Instruction]:
        """The instructions of all these events."""
        out: list[Instruction] = []
        for event in events:
            out += self.scheduler.handle(event)
            self.scheduler.validate()
        return out


def cluster_1p1d(**changes: Any) -> Checked:
    """Prefill engine p0 in group P, decode engine d0 in group D."""
    return Checked(joined("p0"), joined("d0"), **changes)


def placements(instructions: list[Instruction]) -> list[str]:
    """`request:prefill:decode` of each Assign."""
    return [f"{x.request}:{x.prefill}:{x.decode}" for x in instructions if isinstance(x, Assign)]
