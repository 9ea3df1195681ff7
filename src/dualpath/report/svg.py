"""A chart as an SVG file of its own, for pages that run no script. Pure.

Colours and dashes are those of `chart`; text is escaped; nothing is loaded from elsewhere. It shows what
Plotly would, but for hints under the mouse. Invariant: the same chart gives the same text.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from html import escape

from dualpath.report.chart import (
    PALETTE,
    Axis,
    BarChart,
    Chart,
    Line,
    LineChart,
    description,
    shown,
)

__all__ = ["svg"]

_WIDTH, _HEIGHT = 640, 360
_LEFT, _RIGHT, _TOP, _BOTTOM = 78, 16, 40, 78
_BAR_LEFT, _BAR_HEIGHT, _BAR_GAP = 110, 22, 12
_LEGEND_COLUMNS, _LEGEND_ROW = 4, 18
_TICKS = 6
_DASHES = ("", "7 4", "2 3", "7 3 2 3", "12 4", "12 4 2 4")
_GREY, _INK, _FAINT = "#777", "#222", "#e3e3e3"
_MARKED_POINTS = 40

Scale = Callable[[float], float]


def svg(chart: Chart) -> str:
    """The text of a file."""
    if isinstance(chart, BarChart):
        height, body = _bars(chart)
    else:
        height, body = _HEIGHT + _more_rows(len(chart.lines)), _lines(chart)
    words = escape(description(chart))
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" '
        f'font-family="sans-serif" font-size="12" fill="{_INK}" role="img" aria-label="{words}">'
    )
    background = f'<rect width="{_WIDTH}" height="{height}" fill="#fff"/>'
    title = _text(_LEFT if isinstance(chart, LineChart) else _BAR_LEFT, 22, chart.title, size=14)
    return "\n".join([head, background, title, *body, "</svg>", ""])


def _lines(chart: LineChart) -> list[str]:
    xs = [x for line in chart.lines for x in line.xs]
    ys = [y for line in chart.lines for y in line.ys if y is not None]
    ys += [limit.value for limit in chart.limits]
    if not xs or not ys:
        return [_text(_LEFT, _HEIGHT / 2, "no values", fill=_GREY)]
    x_ticks = _ticks(min(xs), max(xs), chart.x)
    y_ticks = _ticks(min(ys), max(ys), chart.y)
    to_x = _scale(x_ticks, chart.x, _LEFT, _WIDTH - _RIGHT)
    to_y = _scale(y_ticks, chart.y, _HEIGHT - _BOTTOM, _TOP)
    body = []
    for tick in y_ticks:
        y = to_y(tick)
        body.append(_rule(_LEFT, y, _WIDTH - _RIGHT, y, _FAINT))
        body.append(_text(_LEFT - 8, y + 4, _tick(tick, chart.y), anchor="end", fill=_GREY))
    for tick in x_ticks:
        x = to_x(tick)
        body.append(_rule(x, _HEIGHT - _BOTTOM, x, _HEIGHT - _BOTTOM + 4, _GREY))
        label = _tick(tick, chart.x)
        body.append(_text(x, _HEIGHT - _BOTTOM + 18, label, anchor="middle", fill=_GREY))
    middle = (_LEFT + _WIDTH - _RIGHT) / 2
    body.append(_text(middle, _HEIGHT - _BOTTOM + 36, chart.x.label, anchor="middle"))
    body.append(_upright(18, (_TOP + _HEIGHT - _BOTTOM) / 2, chart.y.label))
    for limit in chart.limits:
        y = to_y(limit.value)
        body.append(_rule(_LEFT, y, _WIDTH - _RIGHT, y, _INK, dash="4 4"))
        body.append(_text(_LEFT + 4, y - 4, limit.label, fill=_GREY))
    for line in chart.lines:
        body += _line(line, to_x, to_y)
    entries = [(each.name, each.slot, each.dash) for each in chart.lines]
    return [*body, *_legend(entries, _HEIGHT - 16)]


def _line(line: Line, to_x: Scale, to_y: Scale) -> Iterator[str]:
    color = PALETTE[line.slot % len(PALETTE)]
    stretches: list[list[str]] = [[]]
    for x, y in zip(line.xs, line.ys, strict=True):
        if y is None:
            stretches.append([])
        else:
            stretches[-1].append(f"{to_x(x):.1f},{to_y(y):.1f}")
    dash = _dash(line.dash)
    for points in stretches:
        if points:
            yield (
                f'<polyline points="{" ".join(points)}" fill="none" stroke="{color}" '
                f'stroke-width="2"{dash}/>'
            )
        if len(line.xs) <= _MARKED_POINTS:
            for point in points:
                cx, _, cy = point.partition(",")
                yield f'<circle cx="{cx}" cy="{cy}" r="3.2" fill="{color}"/>'


def _bars(chart: BarChart) -> tuple[int, list[str]]:
    """Height and content."""
    count = len(chart.categories)
    bottom = _TOP + count * (_BAR_HEIGHT + _BAR_GAP)
    totals = [math.fsum(bars.values[i] or 0.0 for bars in chart.bars) for i in range(count)]
    ticks = _ticks(0.0, max(totals, default=0.0) or 1.0, chart.x)
    to_x = _scale(ticks, chart.x, _BAR_LEFT, _WIDTH - _RIGHT - 50)
    body = []
    for tick in ticks:
        x = to_x(tick)
        body.append(_rule(x, _TOP, x, bottom, _FAINT))
        body.append(_text(x, bottom + 16, _tick(tick, chart.x), anchor="middle", fill=_GREY))
    for i, (category, total) in enumerate(zip(chart.categories, totals, strict=True)):
        y = _TOP + i * (_BAR_HEIGHT + _BAR_GAP)
        body.append(_text(_BAR_LEFT - 8, y + _BAR_HEIGHT / 2 + 4, category, anchor="end"))
        start = 0.0
        for bars in chart.bars:
            value = bars.values[i] or 0.0
            x, width = to_x(start), to_x(start + value) - to_x(start)
            color = PALETTE[bars.slot % len(PALETTE)]
            body.append(
                f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{_BAR_HEIGHT}" fill="{color}"/>'
            )
            start += value
        label = _tick(total, chart.x)
        body.append(_text(to_x(total) + 6, y + _BAR_HEIGHT / 2 + 4, label, fill=_GREY))
    middle = (_BAR_LEFT + _WIDTH - _RIGHT) / 2
    body.append(_text(middle, bottom + 34, chart.x.label, anchor="middle"))
    if len(chart.bars) == 1:
        return bottom + 46, body
    entries = [(each.name, each.slot, 0) for each in chart.bars]
    return bottom + 68 + _more_rows(len(entries)), [*body, *_legend(entries, bottom + 54)]


def _legend(entries: Sequence[tuple[str, int, int]], y: float) -> Iterator[str]:
    """Names with a stroke of their colour and dash, in rows of `_columns`, the first at `y`."""
    columns = _columns(len(entries))
    width = (_WIDTH - _LEFT - _RIGHT) / columns
    for i, (name, slot, dash) in enumerate(entries):
        x, at_y = _LEFT + i % columns * width, y + i // columns * _LEGEND_ROW
        yield _rule(
            x, at_y - 4, x + 22, at_y - 4, PALETTE[slot % len(PALETTE)], width=2, dash_of=dash
        )
        yield _text(x + 27, at_y, name)


def _columns(entries: int) -> int:
    return max(1, entries if entries <= _LEGEND_COLUMNS else _LEGEND_COLUMNS - 1)


def _more_rows(entries: int) -> int:
    """Pixels that a legend needs for rows after its first."""
    return (max(0, entries - 1) // _columns(entries)) * _LEGEND_ROW


def _ticks(low: float, high: float, axis: Axis) -> list[float]:
    """Round values that enclose all; on a logarithmic axis 1, 2 and 5 times powers of ten."""
    if axis.log and low > 0:
        return _log_ticks(low, high)
    low = min(low, 0.0) if axis.from_zero else low
    high = high if high > low else low + 1.0
    raw = (high - low) / (_TICKS - 1)
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor >= raw * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [i * step for i in range(first, last + 1)]


def _log_ticks(low: float, high: float) -> list[float]:
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    steps = (1, 2, 5) if last - first <= 3 else (1,)
    every = [factor * 10.0**power for power in range(first, last + 1) for factor in steps]
    below = max((tick for tick in every if tick <= low), default=every[0])
    above = min((tick for tick in every if tick >= high), default=every[-1])
    return [tick for tick in every if below <= tick <= above]


def _scale(ticks: Sequence[float], axis: Axis, start: float, end: float) -> Scale:
    """From values to pixels; the first and last tick are at the ends."""
    log = axis.log and ticks[0] > 0
    low, high = (math.log(each) if log else each for each in (ticks[0], ticks[-1]))
    span = high - low or 1.0

    def scale(value: float) -> float:
        at = math.log(max(value, 1e-300)) if log else value
        return start + (at - low) / span * (end - start)

    return scale


def _tick(value: float, axis: Axis) -> str:
    return shown(value, share=True) if axis.share else shown(value)


def _text(
    x: float, y: float, text: str, *, anchor: str = "start", fill: str = _INK, size: int = 12
) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{fill}" font-size="{size}">'
        f"{escape(text)}</text>"
    )


def _upright(x: float, y: float, text: str) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="middle" transform="rotate(-90 {x:.1f} {y:.1f})">'
        f"{escape(text)}</text>"
    )


def _rule(
    x1: float,
    y1: float,
    x2: float,
    y2: float,
    color: str,
    *,
    width: int = 1,
    dash: str = "",
    dash_of: int = 0,
) -> str:
    dashes = f' stroke-dasharray="{dash}"' if dash else _dash(dash_of)
    return (
        f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{color}" '
        f'stroke-width="{width}"{dashes}/>'
    )


def _dash(number: int) -> str:
    pattern = _DASHES[number % len(_DASHES)]
    return f' stroke-dasharray="{pattern}"' if pattern else ""
