"""What the scheduler tells of itself for metrics: queue lengths, phases, totals."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass

import msgspec

from dualpath.base.ids import GroupId, Role
from dualpath.policy.requests import Phase

__all__ = ["SchedulerStats", "Totals", "Waiting"]


class Waiting(msgspec.Struct, frozen=True):
    """Requests in each queue; one that waits for both roles is in a prefill and in a decode queue."""

    prefill: int
    decode_global: int
    decode_private: Mapping[GroupId, int]

    @property
    def decode(self) -> int:
        """Requests without a decode engine."""
        return self.decode_global + sum(self.decode_private.values())


@dataclass(slots=True)
class Totals:
    """Counts since the scheduler was made; owned and mutated by it.

    Each arrived request ends in exactly one of finished, aborted and rejected. `assigned` counts attempts.
    """

    arrived: int = 0
    assigned: int = 0
    finished: int = 0
    aborted: int = 0
    rejected: int = 0
    failed_attempts: int = 0
    interrupted: int = 0

    def snapshot(self) -> dict[str, int]:
        return asdict(self)


class SchedulerStats(msgspec.Struct, frozen=True):
    """A snapshot. `phases`: requests that have not ended, by phase. `totals`: the fields of `Totals`."""

    phases: Mapping[Phase, int]
    engines: Mapping[Role, int]
    totals: Mapping[str, int]
