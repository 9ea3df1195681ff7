"""One HTML file that shows facts, tables and charts, opens from disk and asks the network for nothing.

Knows no benchmark. Invariants: everything given is text and escaped; only scripts whose digests the page's
Content-Security-Policy lists run, so that text which slips through an escape is still not executed; what the
charts show is readable as tables too.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from html import escape
from importlib import resources
from importlib.util import find_spec
from typing import cast

import msgspec

from dualpath.base.errors import ConfigError
from dualpath.report.chart import Chart, description, figure, table_columns

__all__ = [
    "Absent",
    "Card",
    "CardRow",
    "Cell",
    "Notice",
    "Page",
    "Panel",
    "Section",
    "Table",
    "Verdict",
    "View",
    "check_charts",
    "render",
]


_NO_PLOTLY = "reports need the package plotly: pip install 'dualpath[bench]'"


class Verdict(Enum):
    """How a figure compares with the baseline's."""

    BETTER = "better"
    WORSE = "worse"
    SAME = "same"


@dataclass(frozen=True, slots=True)
class Cell:
    """`change`: how it compares, in few words, such as "1.82x"; `verdict` marks it, also without colour."""

    text: str
    change: str = ""
    verdict: Verdict | None = None


@dataclass(frozen=True, slots=True)
class Table:
    """The first cell of a row is its head. The first column is text, the others numbers, set right."""

    caption: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    slots: tuple[int | None, ...] = ()
    """Of the columns: the place in the palette, for a swatch."""
    folded: bool = False
    """Shown when the reader asks for it."""
    words: bool = False
    """All columns are text, set left and wrapped."""


@dataclass(frozen=True, slots=True)
class CardRow:
    """`share`: length of the bar, 0 to 1."""

    name: str
    slot: int
    value: Cell
    share: float


@dataclass(frozen=True, slots=True)
class Card:
    """One figure of everything that is compared. `hint`: what it means, and which way is good."""

    title: str
    hint: str
    rows: tuple[CardRow, ...]


@dataclass(frozen=True, slots=True)
class View:
    label: str
    chart: Chart


@dataclass(frozen=True, slots=True)
class Panel:
    """A chart, or several of which the reader picks one; `first` is shown at first. `id` is unique."""

    id: str
    title: str
    text: str
    views: tuple[View, ...]
    first: int = 0
    wide: bool = False


@dataclass(frozen=True, slots=True)
class Absent:
    """A chart that is not there, and why."""

    title: str
    reason: str


@dataclass(frozen=True, slots=True)
class Notice:
    """A sentence set apart. `good`: nothing to worry about."""

    text: str
    good: bool = False


@dataclass(frozen=True, slots=True)
class Section:
    """`short`: its name in the navigation."""

    id: str
    short: str
    title: str
    text: str = ""
    cards: tuple[Card, ...] = ()
    notices: tuple[Notice, ...] = ()
    panels: tuple[Panel, ...] = ()
    tables: tuple[Table, ...] = ()
    absent: tuple[Absent, ...] = ()


@dataclass(frozen=True, slots=True)
class Page:
    """`legend`: names of what is compared, in the order of their palette places."""

    title: str
    subtitle: str
    legend: tuple[str, ...]
    facts: tuple[Table, ...]
    sections: tuple[Section, ...]


def render(page: Page) -> str:
    """The whole file. Raises ConfigError if the package that has the charts' script is not installed."""
    theme = _asset("theme.js")
    scripts = [_plotly_script(), _asset("report.js")] if _panels(page) else []
    digests = " ".join(f"'sha256-{_digest(each)}'" for each in [theme, *scripts])
    policy = (
        f"default-src 'none'; script-src {digests}; style-src 'unsafe-inline'; img-src data: blob:; "
        "base-uri 'none'; form-action 'none'"
    )
    fills = {
        "policy": escape(policy),
        "title": escape(page.title),
        "subtitle": escape(page.subtitle),
        "theme": theme,
        "style": _asset("report.css"),
        "legend": _legend(page.legend),
        "navigation": "".join(
            f'<a href="#{escape(each.id)}">{escape(each.short)}</a>' for each in page.sections
        ),
        "facts": "".join(_table(each) for each in page.facts),
        "sections": "".join(_section(each) for each in page.sections),
        "charts": _charts(page),
        "scripts": "".join(f"<script>{each}</script>\n" for each in scripts),
    }
    return re.sub(r"\{\{(\w+)\}\}", lambda found: fills[found[1]], _asset("report.html"))


def check_charts() -> None:
    """Raises ConfigError if that package is not installed: to ask before work whose result is a page."""
    if find_spec("plotly") is None:
        raise ConfigError(_NO_PLOTLY)


def _panels(page: Page) -> list[Panel]:
    return [panel for section in page.sections for panel in section.panels]


def _charts(page: Page) -> str:
    """JSON for the script; no "<", so that no text can end the element that holds it."""
    views = {
        panel.id: [
            {
                "figure": figure(view.chart),
                "alt": description(view.chart),
                "note": view.chart.note,
                "columns": table_columns(view.chart),
                "rows_by_y": getattr(view.chart, "rows_by_y", True),
            }
            for view in panel.views
        ]
        for panel in _panels(page)
    }
    return msgspec.json.encode(views).decode().replace("<", "\\u003c")


def _plotly_script() -> str:
    try:
        from plotly.offline import get_plotlyjs
    except ImportError as error:
        raise ConfigError(_NO_PLOTLY) from error
    script = cast(str, get_plotlyjs())
    return script.replace("</script", "<\\/script").replace("<!--", "<\\!--")


def _asset(name: str) -> str:
    return resources.files(__package__).joinpath("assets", name).read_text(encoding="utf-8")


def _digest(script: str) -> str:
    return base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()


def _legend(names: Sequence[str]) -> str:
    baseline = ' <span class="quiet">baseline</span>' if len(names) > 1 else ""
    items = (
        f"<li>{_swatch(slot)}{escape(name)}{baseline if slot == 0 else ''}</li>"
        for slot, name in enumerate(names)
    )
    return f'<ul class="legend">{"".join(items)}</ul>'


def _swatch(slot: int) -> str:
    return f'<span class="swatch slot-{slot % 7}" aria-hidden="true"></span>'


def _section(section: Section) -> str:
    parts = [f'<section id="{escape(section.id)}"><h2>{escape(section.title)}</h2>']
    if section.text:
        parts.append(f'<p class="lead">{escape(section.text)}</p>')
    parts += [
        f'<p class="notice{" good" if each.good else ""}">{escape(each.text)}</p>'
        for each in section.notices
    ]
    if section.cards:
        parts.append(f'<div class="cards">{"".join(_card(each) for each in section.cards)}</div>')
    if section.panels:
        parts.append(
            f'<div class="panels">{"".join(_panel(each) for each in section.panels)}</div>'
        )
    parts += [_table(each) for each in section.tables]
    if section.absent:
        items = "".join(
            f"<li><b>{escape(each.title)}</b>: {escape(each.reason)}</li>"
            for each in section.absent
        )
        parts.append(f'<ul class="absent">{items}</ul>')
    return "".join([*parts, "</section>"])


def _card(card: Card) -> str:
    rows = "".join(
        f'<li><span class="name">{_swatch(row.slot)}{escape(row.name)}</span>'
        f'<span class="value">{escape(row.value.text)}</span>'
        f"{_bar(row) if len(card.rows) > 1 else ''}</li>"
        for row in card.rows
    )
    return (
        f'<div class="card"><h3>{escape(card.title)}</h3>'
        f'<p class="hint">{escape(card.hint)}</p><ul>{rows}</ul></div>'
    )


def _bar(row: CardRow) -> str:
    width = min(1.0, max(0.0, row.share)) * 100
    return (
        f'<span class="bar" aria-hidden="true"><i class="slot-{row.slot % 7}" '
        f'style="width:{width:.1f}%"></i></span><span class="verdict">{_change(row.value)}</span>'
    )


_MARKS = {Verdict.BETTER: "▲ better", Verdict.WORSE: "▼ worse", Verdict.SAME: "= same"}


def _change(cell: Cell) -> str:
    if not cell.change:
        return ""
    if cell.verdict is None:
        return f'<span class="change">{escape(cell.change)}</span>'
    return (
        f'<span class="change {cell.verdict.value}">{escape(cell.change)} '
        f"<small>{_MARKS[cell.verdict]}</small></span>"
    )


def _panel(panel: Panel) -> str:
    name = escape(panel.id)
    picker = ""
    if len(panel.views) > 1:
        options = "".join(
            f'<option value="{index}"{" selected" if index == panel.first else ""}>'
            f"{escape(view.label)}</option>"
            for index, view in enumerate(panel.views)
        )
        picker = (
            f'<label class="picker"><span>of</span><select id="{name}-view" '
            f'aria-label="{escape(panel.title)}: of what">{options}</select></label>'
        )
    first = panel.views[panel.first].chart
    return (
        f'<figure class="panel{" wide" if panel.wide else ""}" id="{name}" data-first="{panel.first}">'
        f'<div class="head"><h3 id="{name}-title">{escape(panel.title)}</h3>{picker}</div>'
        f'<p class="text">{escape(panel.text)}</p>'
        f'<div class="chart" role="img" aria-label="{escape(description(first))}"></div>'
        f'<figcaption class="note">{escape(first.note)}</figcaption>'
        f"<details><summary>Numbers</summary>"
        f'<div class="scroll" tabindex="0" role="region" aria-labelledby="{name}-title"></div>'
        f"</details></figure>"
    )


def _table(table: Table) -> str:
    slots = table.slots or (None,) * len(table.columns)
    head = "".join(
        f'<th scope="col">{"" if slot is None else _swatch(slot)}{escape(each)}</th>'
        for each, slot in zip(table.columns, slots, strict=True)
    )
    rows = "".join(
        f'<tr><th scope="row">{escape(row[0].text)}</th>'
        + "".join(f"<td>{escape(cell.text)}{_change(cell)}</td>" for cell in row[1:])
        + "</tr>"
        for row in table.rows
    )
    caption = "" if table.folded else f"<caption>{escape(table.caption)}</caption>"
    kind = " words" if table.words else " few" if len(table.columns) < 3 else ""
    text = (
        f'<div class="scroll{kind}" tabindex="0" role="region" aria-label="{escape(table.caption)}">'
        f"<table>{caption}<thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>"
    )
    if not table.folded:
        return text
    return f'<details class="folded"><summary>{escape(table.caption)}</summary>{text}</details>'
