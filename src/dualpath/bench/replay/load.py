"""What is offered to a server, and when a run ends.

Plain data. Invariants: an offline load has no arrival times, everyone starts at once; the times of an
online load do not depend on the server.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from dualpath.bench.replay.steady import SteadyRule
from dualpath.traces.model import Session

__all__ = ["Limits", "OfflineLoad", "OnlineLoad", "Tally"]


@dataclass(frozen=True, slots=True)
class OfflineLoad:
    """All sessions at time 0; the run ends when all have ended."""

    sessions: Sequence[Session]


@dataclass(frozen=True, slots=True)
class OnlineLoad:
    """Session i starts at `arrivals_s[i]`, in ascending order, whatever the server does. `rate_aps`: agents
    per second, as offered."""

    sessions: Sequence[Session]
    arrivals_s: Sequence[float]
    rate_aps: float

    def __post_init__(self) -> None:
        if len(self.sessions) != len(self.arrivals_s):
            raise ValueError(f"{len(self.sessions)} sessions, {len(self.arrivals_s)} arrival times")


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """`duration_s`: the run ends then, and what runs is cut off. `steady`: the rule that ends an online
    run. `warmup_s`, `warmup_sessions`: what is due earlier, or before that session starts, is left out of
    figures. `max_in_flight`: requests at once; one that would be more is recorded as the error "client
    limit". `sample_s`: between looks at the server's metrics."""

    duration_s: float | None = None
    steady: SteadyRule | None = None
    warmup_s: float = 0.0
    warmup_sessions: int = 0
    max_in_flight: int = 10_000
    sample_s: float = 1.0


@dataclass(slots=True)
class Tally:
    """How far a run is; the run counts, a display reads. `sessions` and `turns`: of the whole load.
    `sessions_started` includes those that ended. `turns_skipped`: of sessions that failed."""

    sessions: int = 0
    turns: int = 0
    turns_skipped: int = 0
    sessions_started: int = 0
    sessions_ended: int = 0
    requests: int = 0
    in_flight: int = 0
    output_tokens: int = 0
    answered: int = 0
    ttft_sum_s: float = 0.0
    errors: dict[str, int] = field(default_factory=dict)

    @property
    def mean_ttft_s(self) -> float | None:
        return self.ttft_sum_s / self.answered if self.answered else None
