"""Service level objectives: what a latency may be at most.

Pure. Knows records of requests, no servers. Invariant: a request that failed meets no objective.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from dualpath.base.slo import parse_limits
from dualpath.bench.replay.records import RequestRecord

__all__ = ["Slo", "parse_slo"]


@dataclass(frozen=True, slots=True)
class Slo:
    """`limits_s`: seconds by metric, one of SLO_METRICS each; at least one."""

    limits_s: Mapping[str, float]

    def __post_init__(self) -> None:
        object.__setattr__(self, "limits_s", MappingProxyType(dict(self.limits_s)))

    def met_by(self, request: RequestRecord) -> bool:
        """Whether the request ended well and within every limit. A latency that the request does not have,
        such as the time of further tokens when one was asked for, exceeds nothing."""
        if request.error or request.end_s is None:
            return False
        for metric, limit_s in self.limits_s.items():
            seconds: float | None = getattr(request, f"{metric}_s")
            if seconds is not None and seconds > limit_s:
                return False
        return True

    def missed_by(self, request: RequestRecord, now_s: float) -> bool:
        """Whether it is certain at `now_s` that an objective is not met: the request failed, ended too late,
        or waits for its first token for longer than it may."""
        if request.error or request.end_s is not None:
            return not self.met_by(request)
        waits_s = (now_s if request.first_s is None else request.first_s) - request.scheduled_s
        return waits_s > self.limits_s.get("ttft", math.inf)

    def __str__(self) -> str:
        return ",".join(f"{metric}={limit:g}s" for metric, limit in self.limits_s.items())


def parse_slo(text: str) -> Slo:
    """Of `ttft=4s,tpot=50ms`. Raises ConfigError that says what is allowed."""
    return Slo(parse_limits(text))
