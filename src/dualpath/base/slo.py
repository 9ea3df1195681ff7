"""Limits of latencies, as service level objectives are written on a command line. Pure; knows no requests."""

from __future__ import annotations

import math
import re

from dualpath.base.errors import ConfigError

__all__ = ["SLO_METRICS", "parse_limits"]

SLO_METRICS = ("ttft", "ttst", "tpot", "e2e")
_UNITS_S = {"s": 1.0, "ms": 1e-3}
_LIMIT = re.compile(r"(?P<metric>[a-z0-9]+)=(?P<number>[0-9.]+(?:e-?[0-9]+)?)(?P<unit>[a-z]*)")


def parse_limits(text: str, *, bare_seconds: bool = False) -> dict[str, float]:
    """Seconds by metric, one or more of SLO_METRICS, of `ttft=4s,tpot=50ms`.

    `bare_seconds`: numbers without a unit are seconds. Raises ConfigError that says what is allowed.
    """
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
        if not unit and bare_seconds:
            unit = "s"
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
    return limits
