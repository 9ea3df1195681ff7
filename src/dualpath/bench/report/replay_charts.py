"""The charts of replays: by load, over time, by part, and distributions. Pure.

A function gives a panel, or says why there is none. Lines of a record have its colour and marker everywhere.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from dualpath.bench.replay.comparison import LoadPoint, Measured, common_loads, loads
from dualpath.bench.replay.figures import OTHER_PART, ttft_parts
from dualpath.bench.replay.records import RequestRecord, SessionRecord
from dualpath.bench.report.server_series import Series, over_groups
from dualpath.report.chart import (
    LINE_POINTS,
    Axis,
    BarChart,
    Bars,
    Limit,
    Line,
    LineChart,
    cdf_line,
    thinned,
)
from dualpath.report.page import Absent, Panel, View

__all__ = [
    "Curve",
    "breakdown_panel",
    "distribution_panel",
    "group_panel",
    "load_panel",
    "over_time_panel",
    "session_panel",
]

_LOAD_AXES = {
    "offline": Axis("Agents at once", "sessions"),
    "online": Axis("Agents offered", "agents/s"),
}
_TIME = Axis("Time since the start of the run", "s")
_DOTTED = 2
_MANY_GROUPS = 7
_LOG_RANGE = 100.0
"""Values that spread wider than this are easier to read on a logarithmic axis."""


@dataclass(frozen=True, slots=True)
class Curve:
    """A figure by its key, and what its line's name has beside the record's. `tail`: dotted, hollow markers.
    `scale` turns the figure into the axis's unit."""

    figure: str
    suffix: str = ""
    tail: bool = False
    scale: float = 1.0


def load_panel(
    measured: Sequence[Measured],
    mode: str,
    panel: Panel,
    axis: Axis,
    curves: Sequence[Curve],
    limits: Sequence[Limit] = (),
    reason: str = "no run has this figure",
) -> Panel | Absent:
    """`panel` gets one view: lines over agents (offline) or rate (online), one a record and curve."""
    lines = []
    for slot, label in _records(measured):
        runs = sorted(
            (each for each in measured if each.slot == slot and each.load.mode == mode),
            key=lambda each: each.load,
        )
        for curve in curves:
            points = [
                (each.load.value, value * curve.scale)
                for each in runs
                if (value := each.number(curve.figure)) is not None
            ]
            if points:
                xs, ys = zip(*points, strict=True)
                name = f"{label} {curve.suffix}".strip()
                dash = _DOTTED if curve.tail else 0
                lines.append(Line(name, xs, ys, slot, dash, open=curve.tail))
    if not lines:
        return Absent(panel.title, reason)
    values = [y for line in lines for y in line.ys if y is not None]
    chart = LineChart(
        panel.title,
        _LOAD_AXES[mode],
        axis if axis.share else _log_if_wide(axis, values),
        tuple(lines),
        tuple(limits),
    )
    return Panel(panel.id, panel.title, panel.text, (View("", chart),), wide=panel.wide)


def distribution_panel(
    measured: Sequence[Measured],
    panel: Panel,
    latency: str,
    axis: Axis,
    scale: float = 1.0,
) -> Panel | Absent:
    """The shares of requests at or below a latency, times `scale`; a view for each load."""

    def values(each: Measured) -> list[float]:
        times = (_latency_s(request, latency) for request in each.counted)
        return [seconds * scale for seconds in times if seconds is not None]

    return _cdf_panel(measured, panel, axis, values, "no request has this time")


def session_panel(measured: Sequence[Measured], panel: Panel, axis: Axis) -> Panel | Absent:
    """The shares of sessions that were done in a time from their scheduled start."""
    return _cdf_panel(
        measured,
        panel,
        axis,
        lambda each: [
            taken
            for session in each.run.sessions
            if session.scheduled_s >= each.run.from_s and (taken := _taken_s(session)) is not None
        ],
        "no session ended",
    )


def breakdown_panel(measured: Sequence[Measured], panel: Panel) -> Panel | Absent:
    """The mean parts of the time to the first token that servers report, and what is left of it, by run."""
    by_load = sorted(measured, key=lambda each: (each.load, each.slot))
    parts = [(each, found) for each in by_load if (found := ttft_parts(each.run))]
    if not parts:
        return Absent(panel.title, "the server reports no timings")
    names = list(dict.fromkeys(part for _, found in parts for part in found if part != OTHER_PART))
    told = {each.label for each, _ in parts}
    silent = list(dict.fromkeys(each.label for each in measured if each.label not in told))
    chart = BarChart(
        panel.title,
        tuple(f"{each.load.label}, {each.label}" for each, _ in parts),
        Axis("Mean TTFT", "s"),
        # The rest is at least 0: clocks of two machines may make the parts longer than the whole.
        tuple(
            Bars(
                part.replace("_", " "),
                tuple(max(0.0, found.get(part, 0.0)) for _, found in parts),
                slot,
            )
            for slot, part in enumerate([*names, OTHER_PART])
        ),
        f"No timings from: {', '.join(silent)}." if silent else "",
    )
    return Panel(panel.id, panel.title, panel.text, (View("", chart),), wide=panel.wide)


def group_panel(
    measured: Sequence[Measured],
    panel: Panel,
    axis: Axis,
    series: Callable[[Measured], Mapping[str, Series]],
) -> Panel | Absent:
    """A line for each group of engines over time; a view for each record and load."""
    views, order = [], []
    for each in measured:
        by_group = series(each)
        if not by_group:
            continue
        lines = (
            _extremes(by_group)
            if len(by_group) > _MANY_GROUPS
            else [
                Line(group, line.at_s, line.values, slot, slot)
                for slot, (group, line) in enumerate(by_group.items())
            ]
        )
        chart = LineChart(panel.title, _TIME, axis, _thin(lines), note=_thin_note(lines))
        views.append(View(f"{each.label}, {each.load.label}", chart))
        order.append(each)
    if not views:
        return Absent(panel.title, "the server's metrics do not tell")
    first = order.index(max(order, key=lambda each: (each.load, -each.slot)))
    return Panel(panel.id, panel.title, panel.text, tuple(views), first, panel.wide)


def over_time_panel(
    measured: Sequence[Measured],
    panel: Panel,
    axis: Axis,
    series: Callable[[Measured], Series],
    limits: Sequence[Limit] = (),
) -> Panel | Absent:
    """A line for each record over time; a view for each load."""

    def line(each: Measured) -> Line | None:
        found = series(each)
        if not found.at_s:
            return None
        return Line(each.label, found.at_s, found.values, each.slot, each.slot)

    def chart(lines: Sequence[Line]) -> LineChart:
        return LineChart(
            panel.title, _TIME, axis, _thin(lines), tuple(limits), note=_thin_note(lines)
        )

    return _panel_by_load(measured, panel, line, chart, "the server's metrics do not tell")


def _cdf_panel(
    measured: Sequence[Measured],
    panel: Panel,
    axis: Axis,
    values: Callable[[Measured], list[float]],
    reason: str,
) -> Panel | Absent:
    def line(each: Measured) -> Line | None:
        found = values(each)
        return cdf_line(each.label, found, each.slot) if found else None

    def chart(lines: Sequence[Line]) -> LineChart:
        spread = [x for each in lines for x in each.xs]
        share = Axis("Share at or below", share=True)
        return LineChart(
            panel.title, _log_if_wide(axis, spread), share, tuple(lines), rows_by_y=True
        )

    return _panel_by_load(measured, panel, line, chart, reason)


def _panel_by_load(
    measured: Sequence[Measured],
    panel: Panel,
    line: Callable[[Measured], Line | None],
    chart: Callable[[Sequence[Line]], LineChart],
    reason: str,
) -> Panel | Absent:
    """A view for each load that has lines; the highest that all records have comes first, else the highest.

    Where records share no load, one more view has the highest of each."""
    views: list[View] = []
    shown: list[LoadPoint | None] = []
    for load in loads(measured):
        lines = [found for each in measured if each.load == load and (found := line(each))]
        if lines:
            views.append(View(load.label, chart(lines)))
            shown.append(load)
    if not views:
        return Absent(panel.title, reason)
    common = [load for load in common_loads(measured) if load in shown]
    if not common and len(_records(measured)) > 1:
        highest = [
            max((each for each in measured if each.slot == slot), key=lambda each: each.load)
            for slot, _ in _records(measured)
        ]
        lines = [found for each in highest if (found := line(each))]
        views.append(View("each at its highest load", chart(lines)))
        shown.append(None)
    first = shown.index(common[-1]) if common else len(views) - 1
    return Panel(panel.id, panel.title, panel.text, tuple(views), first, panel.wide)


def _records(measured: Sequence[Measured]) -> list[tuple[int, str]]:
    return sorted({(each.slot, each.label) for each in measured})


def _latency_s(request: RequestRecord, latency: str) -> float | None:
    seconds: float | None = getattr(request, latency)
    return seconds


def _taken_s(session: SessionRecord) -> float | None:
    return None if session.finished_s is None else session.finished_s - session.scheduled_s


def _extremes(by_group: Mapping[str, Series]) -> list[Line]:
    """Of many groups the highest, the average and the lowest, which can still be told apart."""
    picks: tuple[tuple[str, Callable[[Sequence[float]], float]], ...] = (
        (f"highest of {len(by_group)} groups", max),
        ("average", statistics.fmean),
        ("lowest", min),
    )
    return [
        Line(name, found.at_s, found.values, slot, slot)
        for slot, (name, pick) in enumerate(picks)
        if (found := over_groups(by_group, pick)).at_s
    ]


def _thin(lines: Iterable[Line]) -> tuple[Line, ...]:
    return tuple(thinned(line) for line in lines)


def _thin_note(lines: Iterable[Line]) -> str:
    longest = max((len(line.xs) for line in lines), default=0)
    if longest <= LINE_POINTS:
        return ""
    return f"Each point is the average of about {longest / LINE_POINTS:.1f} samples."


def _log_if_wide(axis: Axis, values: Sequence[float]) -> Axis:
    low, high = min(values), max(values)
    return replace(axis, log=low > 0 and high / low > _LOG_RANGE)
