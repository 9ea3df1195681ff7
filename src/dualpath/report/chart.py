"""Charts as data, and the Plotly figure of each. Pure; knows nothing of what is charted, nor of the page.

Invariants: figures hold plain JSON values, numbers rounded to six digits, None where there is no value.
Colours are those of the light theme; `meta.slot` names the place in the palette, so that the page can
exchange them. Names stay plain text; what draws them escapes what Plotly would take for markup.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

__all__ = [
    "LINE_POINTS",
    "PALETTE",
    "Axis",
    "BarChart",
    "Bars",
    "Chart",
    "Limit",
    "Line",
    "LineChart",
    "cdf_line",
    "description",
    "figure",
    "shown",
    "table_columns",
    "thinned",
]

PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
"""Okabe and Ito's colours without yellow, which a white page swallows. Dash, marker and the bars' pattern
repeat what the colour says."""

_DASHES = ("solid", "dash", "dot", "dashdot", "longdash", "longdashdot")
_MARKERS = ("circle", "square", "diamond", "triangle-up", "cross", "star", "hexagon")
_PATTERNS = ("", "/", ".", "x", "-", "\\", "+")
LINE_POINTS = 400
_CDF_QUANTILES = 200
_MARKED_POINTS = 40
"""Lines with more points are drawn without markers."""
_LIMIT_REACH = 3.0
"""A limit is drawn when it is at most this many times the highest value; it would flatten the lines else."""


@dataclass(frozen=True, slots=True)
class Axis:
    """`share`: values are fractions of one, shown as percent. `from_zero`: the axis has 0 on it."""

    title: str
    unit: str = ""
    log: bool = False
    share: bool = False
    from_zero: bool = True

    @property
    def label(self) -> str:
        unit = "%" if self.share else self.unit
        return f"{self.title} ({unit})" if unit else self.title


@dataclass(frozen=True, slots=True)
class Line:
    """`xs` and `ys` pair up; a None in `ys` is a gap. `slot`: colour and marker; `dash`: kind of line;
    `open`: hollow markers."""

    name: str
    xs: tuple[float, ...]
    ys: tuple[float | None, ...]
    slot: int
    dash: int = 0
    open: bool = False


@dataclass(frozen=True, slots=True)
class Limit:
    """A horizontal line that values should stay below, or above."""

    label: str
    value: float


@dataclass(frozen=True, slots=True)
class LineChart:
    """`rows_by_y`: lines share their y values, so the table of numbers has a row for each y."""

    title: str
    x: Axis
    y: Axis
    lines: tuple[Line, ...]
    limits: tuple[Limit, ...] = ()
    note: str = ""
    rows_by_y: bool = False


@dataclass(frozen=True, slots=True)
class Bars:
    """One value a category, stacked on those of the bars before."""

    name: str
    values: tuple[float | None, ...]
    slot: int


@dataclass(frozen=True, slots=True)
class BarChart:
    """Stacked horizontal bars: one a category, named at its left."""

    title: str
    categories: tuple[str, ...]
    x: Axis
    bars: tuple[Bars, ...]
    note: str = ""


Chart = LineChart | BarChart


def shown(value: float | None, *, share: bool = False) -> str:
    """Four significant digits, thousands set apart, no zeros at the end; "" where there is no value."""
    if value is None or math.isnan(value):
        return ""
    if share:
        return f"{value * 100:.1f} %"
    if value == 0:
        return "0"
    if abs(value) >= 1000 or value == int(value):
        return f"{value:,.0f}"
    digits = 3 - math.floor(math.log10(abs(value)))
    return f"{value:.{digits}f}".rstrip("0").rstrip(".") if abs(value) >= 1e-4 else f"{value:.3g}"


def cdf_line(name: str, values: Iterable[float], slot: int) -> Line:
    """The share of values at or below x, at the nearest-rank quantiles 0.5 %, 1 %, ..., 100 %."""
    ordered = sorted(values)
    shares = tuple(each / _CDF_QUANTILES for each in range(1, _CDF_QUANTILES + 1))
    if not ordered:
        return Line(name, (), (), slot, slot)
    ranks = (math.ceil(step * len(ordered) / _CDF_QUANTILES) for step in range(1, len(shares) + 1))
    return Line(name, tuple(ordered[rank - 1] for rank in ranks), shares, slot, slot)


def thinned(line: Line, points: int = LINE_POINTS) -> Line:
    """At most `points` points: means over equal stretches of x, which must rise. Gaps count as nothing."""
    if len(line.xs) <= points:
        return line
    start, width = line.xs[0], (line.xs[-1] - line.xs[0]) / points
    stretches: dict[int, list[int]] = {}
    for index, x in enumerate(line.xs):
        stretches.setdefault(min(points - 1, int((x - start) / width)), []).append(index)
    xs, ys = [], []
    for indices in stretches.values():
        values = [y for index in indices if (y := line.ys[index]) is not None]
        xs.append(math.fsum(line.xs[index] for index in indices) / len(indices))
        ys.append(math.fsum(values) / len(values) if values else None)
    return replace(line, xs=tuple(xs), ys=tuple(ys))


def table_columns(chart: Chart) -> tuple[str, ...]:
    """Heads of the table of numbers: what a row is, then the values' names."""
    match chart:
        case BarChart():
            return ("", *(f"{each.name} ({chart.x.unit})" for each in chart.bars))
        case LineChart():
            rows, values = (chart.y, chart.x) if chart.rows_by_y else (chart.x, chart.y)
            return (rows.label, *(f"{each.name}: {values.label}" for each in chart.lines))


def description(chart: Chart) -> str:
    """The chart in words, for those who do not see it."""
    match chart:
        case BarChart():
            parts = "; ".join(each.name for each in chart.bars)
            return (
                f"Stacked bars, {chart.title}, {chart.x.label}. "
                f"{len(chart.categories)} bars: {', '.join(chart.categories)}. Parts: {parts}."
            )
        case LineChart():
            lines = "; ".join(f"{each.name}: {_extent(each, chart)}" for each in chart.lines)
            limits = "".join(f" Limit {each.label}." for each in chart.limits)
            return (
                f"Line chart, {chart.title}: {chart.y.label} by {chart.x.label}. {lines}.{limits}"
            )


def figure(chart: Chart) -> dict[str, object]:
    """Plotly's `data` and `layout`."""
    match chart:
        case BarChart():
            return _bar_figure(chart)
        case LineChart():
            return _line_figure(chart)


def _extent(line: Line, chart: LineChart) -> str:
    values = [y for y in line.ys if y is not None]
    if not values:
        return "no values"
    if chart.rows_by_y:
        median = line.xs[(len(line.xs) - 1) // 2]
        return f"median {shown(median)}, highest {shown(line.xs[-1])} {chart.x.unit}"
    share = chart.y.share
    low, high = shown(min(values), share=share), shown(max(values), share=share)
    points = f"{len(values)} points" if len(values) > 1 else "1 point"
    return f"{points} from {low} to {high}" if low != high else f"{points} at {low}"


def _line_figure(chart: LineChart) -> dict[str, Any]:
    data = []
    for line in chart.lines:
        color = PALETTE[line.slot % len(PALETTE)]
        marked = len(line.xs) <= _MARKED_POINTS
        data.append(
            {
                "type": "scatter",
                "mode": "lines+markers" if marked else "lines",
                "name": line.name,
                "x": _rounded(line.xs),
                "y": _rounded(line.ys),
                "meta": {"slot": line.slot % len(PALETTE)},
                "line": {"color": color, "width": 2.25, "dash": _DASHES[line.dash % len(_DASHES)]},
                "marker": {
                    "color": color,
                    "size": 9,
                    "symbol": _MARKERS[line.slot % len(_MARKERS)] + ("-open" if line.open else ""),
                },
                "hovertemplate": f"%{{y:{_hover(chart.y)}}}" if not chart.rows_by_y else _CDF_HOVER,
            }
        )
    layout: dict[str, Any] = {
        "xaxis": _axis(chart.x),
        "yaxis": _axis(chart.y),
        "hovermode": "closest" if chart.rows_by_y else "x unified",
        "showlegend": True,
    }
    if chart.rows_by_y:
        layout["yaxis"] |= {"range": [0, 1.02]}
    elif chart.y.from_zero and not chart.y.log:
        layout["yaxis"]["rangemode"] = "tozero"
    _add_limits(layout, chart)
    return {"data": data, "layout": layout}


def _bar_figure(chart: BarChart) -> dict[str, Any]:
    data = [
        {
            "type": "bar",
            "orientation": "h",
            "name": bars.name,
            "y": list(chart.categories),
            "x": _rounded(bars.values),
            "meta": {"slot": bars.slot % len(PALETTE)},
            "marker": {
                "color": PALETTE[bars.slot % len(PALETTE)],
                "pattern": {
                    "shape": _PATTERNS[bars.slot % len(_PATTERNS)],
                    "fillmode": "overlay",
                    "solidity": 0.25,
                    "size": 7,
                },
            },
            "hovertemplate": f"%{{x:{_hover(chart.x)}}}",
        }
        for bars in chart.bars
    ]
    layout = {
        "barmode": "stack",
        "bargap": 0.35,
        "xaxis": _axis(chart.x),
        "yaxis": {
            "type": "category",
            "tickvals": list(chart.categories),
            "autorange": "reversed",
            "automargin": True,
        },
        "hovermode": "y unified",
        "showlegend": True,
        "legend": {"traceorder": "normal"},
    }
    return {"data": data, "layout": layout}


_CDF_HOVER = "%{y:.1%} at or below %{x:.4~g}"


def _hover(axis: Axis) -> str:
    return ".1%" if axis.share else ",.4~g"


def _axis(axis: Axis) -> dict[str, Any]:
    body: dict[str, Any] = {"title": {"text": axis.label}, "automargin": True}
    if axis.log:
        body |= {"type": "log", "dtick": 1, "minor": {"ticks": "outside"}}
    if axis.share:
        body |= {"tickformat": ".0%"}
        body["title"] = {"text": axis.title}
    return body


def _add_limits(layout: dict[str, Any], chart: LineChart) -> None:
    values = [y for line in chart.lines for y in line.ys if y is not None]
    top = max(values, default=0.0)
    drawn = [each for each in chart.limits if each.value <= _LIMIT_REACH * top]
    if not drawn:
        return
    high = max(top, *(each.value for each in drawn)) * 1.12
    if chart.y.log:
        low = min([each for each in values if each > 0] + [each.value for each in drawn]) / 1.5
        layout["yaxis"]["range"] = [_six(math.log10(low)), _six(math.log10(high))]
    else:
        layout["yaxis"]["range"] = [0, _six(high)]
    layout["shapes"] = [
        {
            "type": "line",
            "xref": "paper",
            "x0": 0,
            "x1": 1,
            "y0": _six(each.value),
            "y1": _six(each.value),
            "line": {"width": 1.5, "dash": "dash"},
            "label": {"text": each.label, "textposition": "start", "yanchor": "bottom"},
        }
        for each in drawn
    ]


def _rounded(values: Sequence[float | None]) -> list[float | None]:
    return [None if each is None else _six(each) for each in values]


def _six(value: float) -> float:
    return float(f"{value:.6g}")
