"""Events into and instructions out of the inter-engine scheduler (paper, section on scheduling).

The scheduler is `handle(event) -> list[Instruction]`: it does no I/O, reads no clock and draws no
random number. A driver (serve: processes; sim: virtual time) executes instructions and feeds what
happened back as events. `now_s` is the driver's clock, in seconds from any origin.

Every failure of an attempt, whatever its kind, ends the attempt on both engines (`Release`) and
puts the request back at the head of the queue as attempt + 1, with what is known to be good.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from dualpath.base.ids import EngineId, GroupId, RequestId, Role, Side

__all__ = [
    "Assign",
    "AttemptFailed",
    "EngineJoined",
    "EngineLost",
    "EngineReport",
    "Event",
    "GroupFetched",
    "Instruction",
    "PrefillDone",
    "ReadPlan",
    "ReadProgressed",
    "Reject",
    "RejectReason",
    "Release",
    "RequestAborted",
    "RequestArrived",
    "RequestFinished",
    "StartPrefill",
]


@dataclass(frozen=True, slots=True)
class EngineJoined:
    """`group` is the engine's node: all engines of a group share a storage NIC and a read queue.

    `hbm_tokens`: device KV the engine has (decode only matters). `buffer_tokens`: its staging buffer.
    """

    engine: EngineId
    group: GroupId
    role: Role
    hbm_tokens: int
    buffer_tokens: int
    now_s: float


@dataclass(frozen=True, slots=True)
class EngineLost:
    """Its requests are attempted again on the rest, or rejected when no engine of the role is left."""

    engine: EngineId
    now_s: float


@dataclass(frozen=True, slots=True)
class RequestArrived:
    """`hit_tokens` <= `prompt_tokens` - 1: found in storage; a multiple of the block size.

    `new_tokens`: the most tokens it may generate, which the decode engine reserves device memory for.
    """

    request: RequestId
    prompt_tokens: int
    hit_tokens: int
    new_tokens: int
    now_s: float


@dataclass(frozen=True, slots=True)
class EngineReport:
    """What an engine knew when its group fetched.

    `seen`: how many assignments had reached it, so that the scheduler adds those under way.
    `requests` = seq_e, `tokens` = tok_e of the paper: its unfinished requests and their tokens.
    `free_hbm_tokens`: device KV not reserved (decode).
    """

    engine: EngineId
    seen: int
    requests: int
    tokens: int
    free_hbm_tokens: int


@dataclass(frozen=True, slots=True)
class GroupFetched:
    """A group's leader fetches work. `read_queue_tokens` = read_q of the node."""

    group: GroupId
    reports: tuple[EngineReport, ...]
    read_queue_tokens: int
    now_s: float


@dataclass(frozen=True, slots=True)
class ReadProgressed:
    """`tokens` more were read from storage on this side, for this attempt."""

    request: RequestId
    attempt: int
    side: Side
    tokens: int
    now_s: float


@dataclass(frozen=True, slots=True)
class PrefillDone:
    request: RequestId
    attempt: int
    now_s: float


@dataclass(frozen=True, slots=True)
class RequestFinished:
    request: RequestId
    now_s: float


@dataclass(frozen=True, slots=True)
class RequestAborted:
    """The client went away, or the frontend gave up; at any time, also twice."""

    request: RequestId
    now_s: float


@dataclass(frozen=True, slots=True)
class AttemptFailed:
    """A read, transfer or engine-side failure ended this attempt.

    The next one starts with `prompt_tokens` (it grew if tokens were already generated), the good
    prefix `hit_tokens`, and `new_tokens` still to generate. An event of an older attempt is ignored.
    """

    request: RequestId
    attempt: int
    prompt_tokens: int
    hit_tokens: int
    new_tokens: int
    now_s: float


Event = (
    EngineJoined
    | EngineLost
    | RequestArrived
    | GroupFetched
    | ReadProgressed
    | PrefillDone
    | RequestFinished
    | RequestAborted
    | AttemptFailed
)


@dataclass(frozen=True, slots=True)
class ReadPlan:
    """Which side reads what: the PE side tokens `[0, pe_tokens)`, the DE side `[pe_tokens, hit_tokens)`.

    Both are multiples of the block size. Reads bypassed altogether (`oracle`): `bypass` is true.
    """

    pe_tokens: int
    de_tokens: int
    bypass: bool = False

    @property
    def hit_tokens(self) -> int:
        return self.pe_tokens + self.de_tokens


@dataclass(frozen=True, slots=True)
class Assign:
    """Both engines are known: reserve, and read by the plan."""

    request: RequestId
    attempt: int
    prefill: EngineId
    decode: EngineId
    plan: ReadPlan


@dataclass(frozen=True, slots=True)
class StartPrefill:
    """All reads of the attempt are complete: the PE may compute."""

    request: RequestId
    attempt: int
    prefill: EngineId


@dataclass(frozen=True, slots=True)
class Release:
    """The attempt is over before its end: these engines (those not lost) give back what it holds."""

    request: RequestId
    attempt: int
    engines: tuple[EngineId, ...]


class RejectReason(StrEnum):
    NO_ENGINE = "no_engine"
    """No engine of a needed role is left and none is expected."""
    TOO_LONG = "too_long"
    """No engine could ever hold it."""


@dataclass(frozen=True, slots=True)
class Reject:
    """The request cannot be served; the driver answers the client with a clear error."""

    request: RequestId
    reason: RejectReason


Instruction = Assign | StartPrefill | Release | Reject
