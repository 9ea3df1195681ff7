"""Choosing from a trace and changing its times. Pure: each function gives a new trace."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace

from dualpath.base.errors import ConfigError
from dualpath.traces.lengths import context_tokens
from dualpath.traces.model import Session, Trace

__all__ = [
    "FIRST_ROUND_TOKENS",
    "LimitedTrace",
    "limit_context",
    "scale_time",
    "take_sessions",
    "without_delays",
]

FIRST_ROUND_TOKENS = 64
"""Enough to make all blocks of a copy differ from those of the original."""


@dataclass(frozen=True, slots=True)
class LimitedTrace:
    """`dropped_turns` of sessions that stay, shortened or not, and of `dropped_sessions` that do not."""

    trace: Trace
    dropped_turns: int
    dropped_sessions: int


def limit_context(trace: Trace, max_tokens: int) -> LimitedTrace:
    """Each session up to its first turn whose prompt and output are more than `max_tokens` together.

    Recorded text may still be longer than that: its length is an estimate. Raises ConfigError when nothing
    is left.
    """
    sessions = [
        replace(session, turns=session.turns[:fitting])
        for session in trace.sessions
        if (fitting := _fitting_turns(session, max_tokens))
    ]
    if not sessions:
        raise ConfigError(
            f"{trace.name} has no session whose first turn fits into {max_tokens} tokens"
        )
    limited = replace(trace, sessions=tuple(sessions))
    return LimitedTrace(
        limited,
        dropped_turns=trace.turns - limited.turns,
        dropped_sessions=len(trace.sessions) - len(sessions),
    )


def take_sessions(
    trace: Trace,
    count: int,
    *,
    seed: int | None = None,
    first_round_tokens: int = FIRST_ROUND_TOKENS,
    max_context: int | None = None,
) -> Trace:
    """`count` sessions: in order, or with a `seed` in random order.

    When the trace has fewer, all are taken once, then again and again as copies with a synthetic first round
    of `first_round_tokens` (`Session.copy` 1, 2, ...). A copy starts when the trace, played in a loop, would
    come to it again. The first round makes it longer: it ends before its first turn of more than
    `max_context` tokens, and is left out if that is its first. Raises ConfigError when none is left.
    """
    if count < 1 or first_round_tokens < 1:
        raise ConfigError(
            f"sessions and tokens of a first round: expected >= 1, got {count}, {first_round_tokens}"
        )
    taken: list[Session] = []
    for session in _in_rounds(trace, seed, first_round_tokens, max_context):
        taken.append(session)
        if len(taken) == count:
            break
    return replace(trace, sessions=tuple(taken))


def scale_time(trace: Trace, speed: float) -> Trace:
    """Delays and starts divided by `speed`."""
    if not (speed > 0 and math.isfinite(speed)):
        raise ConfigError(f"speed: expected a number > 0, got {speed:g}")
    return replace(
        trace,
        sessions=tuple(
            replace(
                session,
                start_s=None if session.start_s is None else session.start_s / speed,
                turns=tuple(replace(turn, delay_s=turn.delay_s / speed) for turn in session.turns),
            )
            for session in trace.sessions
        ),
    )


def without_delays(trace: Trace) -> Trace:
    """Each turn right after the one before; the sessions' starts stay."""
    return replace(
        trace,
        sessions=tuple(
            replace(session, turns=tuple(replace(turn, delay_s=0.0) for turn in session.turns))
            for session in trace.sessions
        ),
    )


def _fitting_turns(session: Session, max_tokens: int) -> int:
    lengths = zip(context_tokens(session), session.turns, strict=True)
    for i, (prompt_tokens, turn) in enumerate(lengths):
        if prompt_tokens + turn.output_tokens > max_tokens:
            return i
    return len(session.turns)


def _in_rounds(
    trace: Trace, seed: int | None, first_round_tokens: int, max_context: int | None
) -> Iterator[Session]:
    """All sessions, then copies without end."""
    starts_s = [session.start_s for session in trace.sessions if session.start_s is not None]
    span_s = max(starts_s) - min(starts_s) if starts_s else 0.0
    period_s = span_s + span_s / max(len(starts_s) - 1, 1)
    dice = None if seed is None else random.Random(f"sessions {seed}")
    copy = 0
    while trace.sessions:
        sessions = list(trace.sessions)
        if dice is not None:
            dice.shuffle(sessions)
        if copy:
            copies = [_copy(each, copy, first_round_tokens, period_s) for each in sessions]
            sessions = [found for each in copies if (found := _shortened(each, max_context))]
        if not sessions:
            raise ConfigError(
                f"{trace.name}: no session fits into {max_context} tokens behind a first round of "
                f"{first_round_tokens}; ask for at most {len(trace.sessions)} sessions"
            )
        yield from sessions
        copy += 1


def _shortened(session: Session, max_context: int | None) -> Session | None:
    if max_context is None:
        return session
    fitting = _fitting_turns(session, max_context)
    return replace(session, turns=session.turns[:fitting]) if fitting else None


def _copy(session: Session, number: int, first_round_tokens: int, period_s: float) -> Session:
    return replace(
        session,
        id=f"{session.id} copy {number}",
        copy=number,
        first_round_tokens=first_round_tokens,
        start_s=None if session.start_s is None else session.start_s + number * period_s,
    )
