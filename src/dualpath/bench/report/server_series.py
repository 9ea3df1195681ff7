"""What a server's metrics tell over a run's time: rates, gauges, and the balance between groups. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from dualpath.bench.replay.records import Run
from dualpath.bench.replay.server_metrics import label_value

__all__ = ["Series", "balance", "gauges", "over_groups", "rates"]


@dataclass(frozen=True, slots=True)
class Series:
    """Seconds from the start of the run, and values there; None: not known then."""

    at_s: tuple[float, ...]
    values: tuple[float | None, ...]

    def scaled(self, by: float) -> Series:
        values = tuple(None if value is None else value * by for value in self.values)
        return Series(self.at_s, values)


def gauges(run: Run, name: str) -> dict[str, Series]:
    """By the label `group`, in the order of names; empty where the server has no such metric."""
    groups = sorted({group for sample in run.samples for group in _by_group(sample.metrics, name)})
    at_s = tuple(sample.at_s for sample in run.samples)
    by_time = [_by_group(sample.metrics, name) for sample in run.samples]
    return {group: Series(at_s, tuple(values.get(group) for values in by_time)) for group in groups}


def rates(run: Run, name: str) -> dict[str, Series]:
    """A counter's growth a second between samples, at the later one; None where it fell (a restart)."""
    found = {}
    for group, series in gauges(run, name).items():
        points = [
            (at_s, value)
            for at_s, value in zip(series.at_s, series.values, strict=True)
            if value is not None
        ]
        growth = [
            (later, (now - before) / (later - earlier) if now >= before else None)
            for (earlier, before), (later, now) in pairwise(points)
            if later > earlier
        ]
        if growth:
            found[group] = Series(
                tuple(at_s for at_s, _ in growth), tuple(rate for _, rate in growth)
            )
    return found


def balance(groups: Mapping[str, Series]) -> Series:
    """The highest group over the average of all, at times when something was read."""

    def ratio(values: Sequence[float]) -> float | None:
        return max(values) * len(values) / sum(values) if sum(values) > 0 else None

    return over_groups(groups, ratio)


def over_groups(
    groups: Mapping[str, Series], pick: Callable[[Sequence[float]], float | None]
) -> Series:
    """One value of those of all groups, at times when all are known."""
    by_time: dict[float, list[float]] = {}
    for series in groups.values():
        for at_s, value in zip(series.at_s, series.values, strict=True):
            if value is not None:
                by_time.setdefault(at_s, []).append(value)
    points = [
        (at_s, picked)
        for at_s, values in sorted(by_time.items())
        if len(values) == len(groups) and (picked := pick(values)) is not None
    ]
    return Series(tuple(at_s for at_s, _ in points), tuple(picked for _, picked in points))


def _by_group(metrics: Mapping[str, float], name: str) -> dict[str, float]:
    return {
        group: value
        for exported, value in metrics.items()
        if (group := label_value(exported, name, "group")) is not None
    }
