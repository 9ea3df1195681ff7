"""Service level objectives: what a latency may be at most.

Pure. Knows records of requests, no servers. Invariant: a request that failed meets no objective.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from dualpath.base.errors import ConfigError
from dualpath.bench.replay.records import RequestRecord

__all__ = ["SLO_METRICS", "Slo", "parse_slo"]

SLO_METRICS = ("ttft", "ttst", "tpot", "e2e")
_UNITS_S = {"s": 1.0, "ms": 1e-3}
_LIMIT = re.compile(r"(?P<metric>[a-z0-9]+)=(?P<number>[0-9.]+(?:e-?[0-9]+)?)(?P<unit>[a-z]*)")


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
    limits: dict[str, float] = {}
    for part in text.replace(" ", "").split(","):
        match = _LIMIT.fullmatch(part)
        if match is None:
            raise ConfigError(
                f"--slo: expected METRIC=TIME such as ttft=4s,tpot=50ms, got {part!r}"
            )
        metric, unit = match["metric"], match["unit"]
        if metric not in SLO_METRICS:
            raise ConfigError(
                f"--slo: unknown metric {metric!r}, allowed: {', '.join(SLO_METRICS)}"
            )
        if unit not in _UNITS_S:
            raise ConfigError(f"--slo: {part!r} needs a unit, one of: {', '.join(_UNITS_S)}")
        if metric in limits:
            raise ConfigError(f"--slo: {metric} is given twice")
        try:
            limits[metric] = float(match["number"]) * _UNITS_S[unit]
        except ValueError:
            raise ConfigError(f"--slo: {match['number']!r} in {part!r} is no number") from None
        if not 0 < limits[metric] < math.inf:
            raise ConfigError(f"--slo: {part!r}: a limit is above 0")
    return Slo(limits)
