"""Charts as data, their Plotly figures, and the page: exact values, escapes, nothing from the network."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from dataclasses import replace

import plotly.graph_objects as go
import pytest
from hypothesis import given
from hypothesis import strategies as st
from plotly.offline import get_plotlyjs

from dualpath.base.errors import ConfigError
from dualpath.report import page as page_module
from dualpath.report.chart import (
    LINE_POINTS,
    PALETTE,
    Axis,
    BarChart,
    Bars,
    Limit,
    Line,
    LineChart,
    cdf_line,
    description,
    figure,
    shown,
    table_columns,
    thinned,
)
from dualpath.report.page import (
    Absent,
    Card,
    CardRow,
    Cell,
    Notice,
    Page,
    Panel,
    Section,
    Table,
    Verdict,
    View,
    render,
)

HOSTILE = "</script><script>alert(1)</script>\"'<img src=x onerror=alert(2)>&amp;"

LINES = LineChart(
    "TTFT",
    Axis("Rate", "agents/s"),
    Axis("TTFT", "s"),
    (
        Line("a", (0.1, 0.2), (1.0, 2.123456789), 0),
        Line("b p99", (0.1, 0.2, 0.3), (1.5, None, 3.0), 1, 2, open=True),
    ),
    (Limit("SLO 4 s", 4.0),),
)
BARS = BarChart(
    "Parts",
    ("x", "y"),
    Axis("TTFT", "s"),
    (Bars("read", (1.0, 2.0), 0), Bars("other", (0.5, None), 1)),
)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, ""),
        (float("nan"), ""),
        (0.0, "0"),
        (12.0, "12"),
        (1.23456, "1.235"),
        (0.05, "0.05"),
        (0.024361, "0.02436"),
        (999.96, "1000"),
        (1234567.8, "1,234,568"),
        (0.0000123456, "1.23e-05"),
        (-2.5, "-2.5"),
    ],
)
def test_numbers_have_four_digits(value: float | None, text: str) -> None:
    assert shown(value) == text


def test_shares_are_shown_as_percent() -> None:
    assert shown(0.8764, share=True) == "87.6 %"


def test_a_line_figure_has_the_points_and_says_each_line_in_three_ways() -> None:
    body = figure(LINES)
    a, b = body["data"]
    assert (a["x"], a["y"]) == ([0.1, 0.2], [1.0, 2.12346])
    assert (b["x"], b["y"]) == ([0.1, 0.2, 0.3], [1.5, None, 3.0])
    assert (a["line"]["color"], b["line"]["color"]) == (PALETTE[0], PALETTE[1])
    assert (a["line"]["dash"], b["line"]["dash"]) == ("solid", "dot")
    assert (a["marker"]["symbol"], b["marker"]["symbol"]) == ("circle", "square-open")
    layout = body["layout"]
    assert layout["xaxis"]["title"]["text"] == "Rate (agents/s)"
    assert layout["yaxis"]["title"]["text"] == "TTFT (s)"
    go.Figure(body)


def test_a_limit_is_drawn_where_it_can_be_seen() -> None:
    layout = figure(LINES)["layout"]
    assert [(each["y0"], each["label"]["text"]) for each in layout["shapes"]] == [(4.0, "SLO 4 s")]
    assert layout["yaxis"]["range"] == [0, 4.48]
    far = figure(replace(LINES, limits=(Limit("SLO 40 s", 40.0),)))
    assert "shapes" not in far["layout"]
    log = figure(replace(LINES, y=Axis("TTFT", "s", log=True)))
    assert log["layout"]["yaxis"]["range"] == pytest.approx([-0.176091, 0.651278])
    go.Figure(log)


def test_a_bar_figure_stacks_parts_with_patterns() -> None:
    body = figure(BARS)
    assert [each["x"] for each in body["data"]] == [[1.0, 2.0], [0.5, None]]
    assert [each["y"] for each in body["data"]] == [["x", "y"]] * 2
    assert [each["marker"]["pattern"]["shape"] for each in body["data"]] == ["", "/"]
    assert body["layout"]["barmode"] == "stack"
    go.Figure(body)


def test_charts_are_told_in_words() -> None:
    assert description(LINES) == (
        "Line chart, TTFT: TTFT (s) by Rate (agents/s). "
        "a: 2 points from 1 to 2.123; b p99: 2 points from 1.5 to 3. Limit SLO 4 s."
    )
    assert description(BARS) == ("Stacked bars, Parts, TTFT (s). 2 bars: x, y. Parts: read; other.")
    assert table_columns(LINES) == ("Rate (agents/s)", "a: TTFT (s)", "b p99: TTFT (s)")
    assert table_columns(BARS) == ("", "read (s)", "other (s)")


def test_a_cdf_of_few_values_steps_at_each() -> None:
    line = cdf_line("a", [3.0, 1.0, 2.0, 4.0], 2)
    assert len(line.xs) == 200 and line.ys[0] == 0.005 and line.ys[-1] == 1.0
    assert [line.xs[index] for index in (0, 49, 50, 99, 100, 149, 150, 199)] == [
        *(1.0, 1.0, 2.0, 2.0),
        *(3.0, 3.0, 4.0, 4.0),
    ]


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=700))
def test_a_cdf_says_the_share_at_or_below(values: list[float]) -> None:
    line = cdf_line("a", values, 0)
    for x, share in zip(line.xs, line.ys, strict=True):
        assert sum(value <= x for value in values) >= share * len(values) - 1e-9
        assert sum(value < x for value in values) < share * len(values) + 1e-9


def test_few_points_stay_as_they_are_and_many_become_averages() -> None:
    few = Line("a", tuple(map(float, range(LINE_POINTS))), (1.0,) * LINE_POINTS, 0)
    assert thinned(few) is few
    xs = tuple(float(each) for each in range(1000))
    many = thinned(Line("a", xs, tuple(x if x != 1.0 else None for x in xs), 3, 1))
    assert len(many.xs) == LINE_POINTS and (many.slot, many.dash) == (3, 1)
    assert (many.xs[0], many.ys[0]) == (1.0, 1.0)  # 0, 1 and 2, of which 1 has no value.
    assert (many.xs[-1], many.ys[-1]) == (998.0, 998.0)


def _page(text: str) -> Page:
    cell = Cell(text, "2x", Verdict.BETTER)
    panel = Panel(
        "p",
        text,
        text,
        (
            View(
                text,
                replace(LINES, title=text, note=text, lines=(replace(LINES.lines[0], name=text),)),
            ),
            View("bars", replace(BARS, categories=(text, "y"))),
        ),
    )
    section = Section(
        "s",
        text,
        text,
        text,
        (Card(text, text, (CardRow(text, 0, cell, 0.5),)),),
        (Notice(text),),
        (panel,),
        (Table(text, (text, "b"), ((Cell(text), cell),), (0, None)),),
        (Absent(text, text),),
    )
    facts = (Table("t", ("", "a"), ((Cell(text), Cell(text)),)),)
    return Page(text, text, (text, "b"), facts, (section,))


def test_no_text_becomes_markup_or_script() -> None:
    html = render(_page(HOSTILE))
    assert "<script>alert" not in html and "<img" not in html.replace(get_plotlyjs(), "")
    assert len(re.findall(r"<script[ >]", html.replace(get_plotlyjs(), ""))) == 4
    held = re.search(r'<script type="application/json" id="charts">(.*?)</script>', html, re.S)
    assert held is not None
    views = json.loads(held[1])["p"]
    assert views[0]["figure"]["data"][0]["name"] == HOSTILE
    assert views[1]["figure"]["data"][0]["y"] == [HOSTILE, "y"]
    assert views[0]["note"] == HOSTILE


def test_the_page_loads_nothing() -> None:
    html = render(_page("plain"))
    own = html.replace(get_plotlyjs(), "")
    assert len(own) < len(html) - 4_000_000, "the charts' script is in the file, once"
    assert not re.search(r"""\bsrc\s*=|<link|@import|url\(|https?://""", own)
    assert re.findall(r'href="([^"]*)"', own) == ["#main", "#s"]
    assert "\n" not in re.findall(r'content="(default-src [^"]*)"', own)[0]


def test_only_the_pages_own_scripts_may_run() -> None:
    html = render(_page("plain"))
    policy = re.search(r'http-equiv="Content-Security-Policy" content="([^"]*)"', html)
    assert policy is not None
    scripts = re.findall(r"<script>(.*?)</script>", html, re.S)
    digests = [
        base64.b64encode(hashlib.sha256(each.encode()).digest()).decode() for each in scripts
    ]
    assert len(scripts) == 3
    allowed = " ".join(f"&#x27;sha256-{each}&#x27;" for each in digests)
    assert f"script-src {allowed};" in policy[1]
    assert policy[1].startswith("default-src &#x27;none&#x27;;")


def test_a_page_without_charts_needs_no_plotly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "plotly.offline", None)
    page = _page("plain")
    bare = replace(page, sections=(replace(page.sections[0], panels=()),))
    assert len(render(bare)) < 60_000
    with pytest.raises(ConfigError, match=r"pip install 'dualpath\[bench\]'"):
        render(page)


def test_verdicts_are_words_too() -> None:
    html = render(_page("plain"))
    assert '<span class="change better">2x <small>▲ better</small></span>' in html
    assert set(page_module._MARKS) == set(Verdict)
