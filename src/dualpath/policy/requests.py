"""The life of a request in the scheduler: its phases, what moves it, and queues in order of arrival.

`TRANSITIONS` is the only place that says which event moves a request where; an event that it does not
know for the request's phase is late, and ignored. `docs/policy.md` shows it as a diagram.

One `RequestState` is one attempt: the next attempt is a new object with the same arrival number, so
that what an engine has not yet seen of the old one keeps its own figures.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping
from enum import StrEnum
from typing import TYPE_CHECKING, Final

from dualpath.base.ids import RequestId

if TYPE_CHECKING:
    from dualpath.policy.cluster import EngineState, GroupState

__all__ = ["TRANSITIONS", "ArrivalQueue", "Phase", "RequestState", "Trigger", "state_diagram"]


class Phase(StrEnum):
    """Where a request is. `ENDED` requests are forgotten at once."""

    WAITING = "waiting"
    """One or both of its engines are not chosen yet; no engine knows of it."""
    READING = "reading"
    PREFILLING = "prefilling"
    DECODING = "decoding"
    INTERRUPTED = "interrupted"
    """An engine was lost; the driver is asked for what the next attempt starts with."""
    ENDED = "ended"


class Trigger(StrEnum):
    """What moves a request."""

    ASSIGNED = "assigned"
    ASSIGNED_WITHOUT_READS = "assigned, nothing to read"
    READS_COMPLETE = "reads complete"
    PREFILL_DONE = "prefill done"
    ENGINE_LOST = "engine lost"
    ATTEMPT_FAILED = "attempt failed"
    FINISHED = "finished"
    ABORTED = "aborted"
    REJECTED = "rejected"


def _transitions() -> dict[tuple[Phase, Trigger], Phase]:
    table = {
        (Phase.WAITING, Trigger.ASSIGNED): Phase.READING,
        (Phase.WAITING, Trigger.ASSIGNED_WITHOUT_READS): Phase.PREFILLING,
        (Phase.READING, Trigger.READS_COMPLETE): Phase.PREFILLING,
        (Phase.PREFILLING, Trigger.PREFILL_DONE): Phase.DECODING,
        (Phase.WAITING, Trigger.REJECTED): Phase.ENDED,
    }
    for phase in (Phase.READING, Phase.PREFILLING, Phase.DECODING):
        table[phase, Trigger.ENGINE_LOST] = Phase.INTERRUPTED
        table[phase, Trigger.ATTEMPT_FAILED] = Phase.WAITING
    table[Phase.INTERRUPTED, Trigger.ATTEMPT_FAILED] = Phase.WAITING
    for phase in Phase:
        if phase is not Phase.ENDED:
            table[phase, Trigger.ABORTED] = Phase.ENDED
            table[phase, Trigger.FINISHED] = Phase.ENDED
    return table


TRANSITIONS: Mapping[tuple[Phase, Trigger], Phase] = _transitions()
_WAITING: Final = Phase.WAITING
# By phase first: looked up at every event.
_MOVES: Final[dict[Phase, dict[Trigger, Phase]]] = {phase: {} for phase in Phase}
for (_before, _trigger), _after in TRANSITIONS.items():
    _MOVES[_before][_trigger] = _after


def state_diagram() -> str:
    """`TRANSITIONS` as a Mermaid state diagram; the triggers of one arrow are joined."""
    arrows: dict[tuple[Phase, Phase], list[str]] = {}
    for (before, trigger), after in TRANSITIONS.items():
        arrows.setdefault((before, after), []).append(trigger.value)
    lines = ["stateDiagram-v2", f"    [*] --> {Phase.WAITING.value}: arrived"]
    for (before, after), triggers in arrows.items():
        target = "[*]" if after is Phase.ENDED else after.value
        lines.append(f"    {before.value} --> {target}: {' / '.join(triggers)}")
    return "\n".join(lines)


class RequestState:
    """One attempt of a request. Owned by the scheduler; mutable, equal only to itself.

    `tokens`: the prompt's. `hbm_tokens`: what the decode engine must reserve. `buffer_tokens`: the
    prompt rounded up to blocks, what each staging buffer must hold. `prefill`, `decode`: its engines,
    from the choice to the end; `..._counted`: in the engine's figures on top of its report, which cannot
    know it. `pe_read_tokens`, `de_read_tokens`: what the engines' nodes are to read for it;
    `..._unread_tokens`: still. `group`: the decode group whose private queue it is in.
    `returned`: it was put back into a queue, so that younger requests may have overtaken it.
    """

    __slots__ = (
        "arrival",
        "attempt",
        "buffer_tokens",
        "de_read_tokens",
        "de_unread_tokens",
        "decode",
        "decode_counted",
        "group",
        "hbm_tokens",
        "hit_tokens",
        "id",
        "pe_read_tokens",
        "pe_unread_tokens",
        "phase",
        "prefill",
        "prefill_counted",
        "returned",
        "tokens",
    )

    def __init__(
        self,
        request: RequestId,
        arrival: int,
        attempt: int,
        tokens: int,
        hit_tokens: int,
        hbm_tokens: int,
        buffer_tokens: int,
    ) -> None:
        self.id = request
        self.arrival = arrival
        self.attempt = attempt
        self.tokens = tokens
        self.hit_tokens = hit_tokens
        self.hbm_tokens = hbm_tokens
        self.buffer_tokens = buffer_tokens
        self.returned = attempt > 0
        self.phase = _WAITING
        self.prefill: EngineState | None = None
        self.decode: EngineState | None = None
        self.prefill_counted = False
        self.decode_counted = False
        self.group: GroupState | None = None
        self.pe_read_tokens = 0
        self.de_read_tokens = 0
        self.pe_unread_tokens = 0
        self.de_unread_tokens = 0

    def move(self, trigger: Trigger) -> bool:
        """Follow `TRANSITIONS`; False, and no change, when the trigger means nothing in this phase."""
        after = _MOVES[self.phase].get(trigger)
        if after is None:
            return False
        self.phase = after
        return True


class ArrivalQueue:
    """Requests, oldest arrival first. O(1) at both ends; O(log n) and a move of memory in between."""

    __slots__ = ("_first", "_places")

    def __init__(self) -> None:
        # Sorted by arrival. The places before `_first` are empty: their requests have left at the front.
        self._places: list[RequestState | None] = []
        self._first = 0

    def __len__(self) -> int:
        return len(self._places) - self._first

    def __iter__(self) -> Iterator[RequestState]:
        for place in range(self._first, len(self._places)):
            request = self._places[place]
            assert request is not None
            yield request

    def __contains__(self, request: RequestState) -> bool:
        place = self._find(request)
        return place < len(self._places) and self._places[place] is request

    def head(self) -> RequestState | None:
        return self._places[self._first] if self._first < len(self._places) else None

    def push(self, request: RequestState) -> None:
        places = self._places
        newest = places[-1] if places else None
        if newest is None or newest.arrival < request.arrival:
            places.append(request)
        else:
            places.insert(self._find(request), request)

    def remove(self, request: RequestState) -> None:
        """KeyError when it is not in the queue."""
        places, first = self._places, self._first
        if first < len(places) and places[first] is request:
            places[first] = None
            first += 1
            if 2 * first >= len(places):
                del places[:first]
                first = 0
            self._first = first
            return
        place = self._find(request)
        if place == len(places) or places[place] is not request:
            raise KeyError(request.arrival)
        del places[place]

    def _find(self, request: RequestState) -> int:
        """The place of the first that is not older."""
        return bisect_left(self._places, request.arrival, self._first, key=_arrival)


def _arrival(request: RequestState | None) -> int:
    assert request is not None
    return request.arrival
