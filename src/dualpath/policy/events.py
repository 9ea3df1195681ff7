"""Events into and instructions out of the inter-engine scheduler (paper, section on scheduling).

The scheduler is `handle(event) -> list[Instruction]`: it does no I/O, reads no clock and draws no
random number. A driver (serve: processes; sim: virtual time) executes instructions and feeds what
happened back as events. `now_s` is the driver's clock, in seconds from any origin.

Every failure of an attempt, whatever its kind, ends the attempt on both engines (`Release`) and
puts the request back at the head of the queue as attempt + 1, with what is known to be good. Only
`AttemptFailed` starts the next attempt, because only the driver knows how many tokens were already
generated and which stored blocks proved bad:

    a read, a transfer or an engine failed:  AttemptFailed -> Release; the request is queued again
    an engine is lost:  EngineLost -> Release (the surviving engine), Interrupted; the driver
                        answers AttemptFailed -> the request is queued again

Instructions to one engine must reach it in the order they were given; then an engine that is told
to release and to reserve never holds more than it has. Events and instructions are tagged msgspec
structs: a log of them is one JSON line each, and replays to the same instructions.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec

from dualpath.base.ids import EngineId, GroupId, NodeId, RequestId, Role, Side

__all__ = [
    "Assign",
    "AttemptFailed",
    "EngineJoined",
    "EngineLost",
    "EngineReport",
    "Event",
    "GroupFetched",
    "Instruction",
    "Interrupted",
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


class EngineJoined(msgspec.Struct, frozen=True, tag=True, gc=False):
    """`node` is where its storage NIC and read queue are; None: the group is one node.

    `hbm_tokens`: device KV the engine has (decode only matters). `buffer_tokens`: its staging buffer.
    An engine that restarts is lost first, then joins; its count of assignments seen starts at 0.
    """

    engine: EngineId
    group: GroupId
    role: Role
    hbm_tokens: int
    buffer_tokens: int
    now_s: float
    node: NodeId | None = None


class EngineLost(msgspec.Struct, frozen=True, tag=True, gc=False):
    """Its requests are `Interrupted`, and wait for the driver's `AttemptFailed`. Idempotent."""

    engine: EngineId
    now_s: float


class RequestArrived(msgspec.Struct, frozen=True, tag=True, gc=False):
    """`hit_tokens` <= `prompt_tokens` - 1: found in storage; a multiple of the block size.

    `new_tokens`: the most tokens it may generate, which the decode engine reserves device memory for.
    """

    request: RequestId
    prompt_tokens: int
    hit_tokens: int
    new_tokens: int
    now_s: float


class EngineReport(msgspec.Struct, frozen=True, gc=False):
    """What an engine knew when its group fetched.

    `seen`: how many `Assign` had reached it since it joined, so that the scheduler adds those under way.
    `requests` = seq_e, `tokens` = tok_e of the paper: its unfinished requests and their prompts' tokens.
    `free_hbm_tokens`: device KV not reserved (decode). `read_queue_tokens`: read_q of the engine's
    node, for a group that spans several nodes; None: the group's `read_queue_tokens` is meant.
    """

    engine: EngineId
    seen: int
    requests: int
    tokens: int
    free_hbm_tokens: int
    read_queue_tokens: int | None = None


class GroupFetched(msgspec.Struct, frozen=True, tag=True, gc=False):
    """A group's leader fetches work. `read_queue_tokens` = read_q of the group's node.

    An engine whose report is missing keeps its last one; the order of the reports is of no meaning.
    """

    group: GroupId
    reports: tuple[EngineReport, ...]
    read_queue_tokens: int
    now_s: float


class ReadProgressed(msgspec.Struct, frozen=True, tag=True, gc=False):
    """`tokens` more were read from storage on this side, for this attempt."""

    request: RequestId
    attempt: int
    side: Side
    tokens: int
    now_s: float


class PrefillDone(msgspec.Struct, frozen=True, tag=True, gc=False):
    """The decode engine holds the whole prompt's KV, and the prefill engine nothing of it any more."""

    request: RequestId
    attempt: int
    now_s: float


class RequestFinished(msgspec.Struct, frozen=True, tag=True, gc=False):
    """The last token was generated; the decode engine gave back what it held for the request."""

    request: RequestId
    now_s: float


class RequestAborted(msgspec.Struct, frozen=True, tag=True, gc=False):
    """The client went away, or the frontend gave up; at any time, also twice."""

    request: RequestId
    now_s: float


class AttemptFailed(msgspec.Struct, frozen=True, tag=True, gc=False):
    """A read, transfer or engine-side failure ended this attempt, or the driver answers `Interrupted`.

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


class ReadPlan(msgspec.Struct, frozen=True, gc=False):
    """Which side reads what: the PE side tokens `[0, pe_tokens)`, the DE side `[pe_tokens, hit_tokens)`.

    Both are multiples of the block size. Reads bypassed altogether (`oracle`): `bypass` is true.
    """

    pe_tokens: int
    de_tokens: int
    bypass: bool = False

    @property
    def hit_tokens(self) -> int:
        return self.pe_tokens + self.de_tokens


class Assign(msgspec.Struct, frozen=True, tag=True, gc=False):
    """Both engines are known: reserve, and read by the plan. Goes to both engines."""

    request: RequestId
    attempt: int
    prefill: EngineId
    decode: EngineId
    plan: ReadPlan


class StartPrefill(msgspec.Struct, frozen=True, tag=True, gc=False):
    """All reads of the attempt are complete: the PE may compute."""

    request: RequestId
    attempt: int
    prefill: EngineId


class Release(msgspec.Struct, frozen=True, tag=True, gc=False):
    """The attempt is over before its end: these engines (those not lost) give back what it holds."""

    request: RequestId
    attempt: int
    engines: tuple[EngineId, ...]


class Interrupted(msgspec.Struct, frozen=True, tag=True, gc=False):
    """An engine of this attempt is lost. The driver answers with `AttemptFailed` of the same attempt,
    which carries what was generated and is known to be good, or with `RequestAborted`.
    """

    request: RequestId
    attempt: int


class RejectReason(StrEnum):
    NO_ENGINE = "no_engine"
    """No engine of a needed role is left and none is expected."""
    TOO_LONG = "too_long"
    """No engine could ever hold it."""
    TOO_MANY_ATTEMPTS = "too_many_attempts"
    """Each attempt failed; a request that kills its engines must not kill them for ever."""


class Reject(msgspec.Struct, frozen=True, tag=True, gc=False):
    """The request cannot be served; the driver answers the client with a clear error."""

    request: RequestId
    reason: RejectReason


Instruction = Assign | StartPrefill | Release | Interrupted | Reject
