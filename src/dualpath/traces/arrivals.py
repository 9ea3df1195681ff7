"""When sessions arrive: at random with a given rate, or as recorded. Seconds from the start of a run.

Knows no clock and no server. Invariants: the times of a sequence never go back; the same rate and seed give
the same times.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from dualpath.base.errors import ConfigError
from dualpath.traces.model import Session, Trace

__all__ = ["by_start", "poisson", "rebased", "recorded"]


def poisson(rate_aps: float, seed: int) -> Iterator[float]:
    """Without end: gaps are exponential, `rate_aps` agents arrive a second on average."""
    _require_positive("rate", rate_aps)
    dice = random.Random(f"arrivals {seed}")
    return itertools.accumulate(dice.expovariate(rate_aps) for _ in itertools.repeat(None))


def recorded(times_s: Sequence[float], rate_aps: float | None = None) -> Iterator[float]:
    """Without end: `times_s` from the first on, again after the last with their mean gap in between.

    `times_s` are in order, such as those of `read_arrivals`. With `rate_aps` they are stretched so that so
    many arrive a second on average; their burstiness stays. Raises ConfigError when they are no two.
    """
    span_s = times_s[-1] - times_s[0] if times_s else 0.0
    if span_s <= 0:
        raise ConfigError("arrivals: expected at least two at different times")
    gap_s = span_s / (len(times_s) - 1)
    scale = 1.0
    if rate_aps is not None:
        _require_positive("rate", rate_aps)
        scale = 1 / (rate_aps * gap_s)
    return (
        scale * (lap * (span_s + gap_s) + at_s - times_s[0])
        for lap in itertools.count()
        for at_s in times_s
    )


def by_start(trace: Trace) -> Trace:
    """Its sessions in the order in which they start. Raises ConfigError when it does not tell all starts."""
    starts_s: list[tuple[float, int]] = []
    for i, session in enumerate(trace.sessions):
        if session.start_s is None:
            raise ConfigError(
                f"{trace.name} does not tell when session {session.id} starts: give a rate instead"
            )
        starts_s.append((session.start_s, i))
    return replace(trace, sessions=tuple(trace.sessions[i] for _, i in sorted(starts_s)))


def rebased(sessions: Iterable[Session]) -> tuple[Session, ...]:
    """The same with the earliest start at 0."""
    kept = tuple(sessions)
    first_s = min((each.start_s for each in kept if each.start_s is not None), default=0.0)
    return tuple(
        each if each.start_s is None else replace(each, start_s=each.start_s - first_s)
        for each in kept
    )


def _require_positive(name: str, value: float) -> None:
    if not (value > 0 and math.isfinite(value)):
        raise ConfigError(f"{name}: expected a number > 0, got {value:g}")
