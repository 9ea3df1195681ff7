"""Reports as a reader sees them, in headless Chromium: drawn, right, legible, on a phone, without network.

Skipped where no browser is found, unless DUALPATH_REQUIRE_BROWSER=1.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright
from report_kit import BASIC, DUALPATH, PLAIN, make_record

from dualpath.bench.report import write_report
from dualpath.bench.report.replay_report import replay_page
from dualpath.report.chart import BarChart, LineChart
from dualpath.report.page import Panel

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
ARGUMENTS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
DEADLINE_MS = 60_000
HOSTILE = "<b>old</b></script><script>window.hit = 1</script><img src=x onerror='window.hit = 2'>"

RECORDS = [
    make_record(system, rates=(0.1, 0.3, 0.5), agents=(4, 16), sessions=16)
    for system in (BASIC, DUALPATH, PLAIN)
]


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    found = next((path for name in BROWSERS if (path := shutil.which(name))), None)
    if found is None:
        reason = f"no browser: none of {', '.join(BROWSERS)} is on PATH (make browser)"
        if os.environ.get("DUALPATH_REQUIRE_BROWSER") == "1":
            pytest.fail(reason)
        pytest.skip(reason)
    home = str(tmp_path_factory.mktemp("browser"))
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=found,
            args=ARGUMENTS,
            headless=True,
            timeout=DEADLINE_MS,
            env={**os.environ, "HOME": home},
        )
        yield browser
        browser.close()


@dataclass
class Opened:
    """A page, and everything that it complained of or asked for."""

    page: Page
    complaints: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)

    def drawn(self) -> None:
        expect(self.page.locator("html[data-drawn=yes]")).to_have_count(1, timeout=DEADLINE_MS)


Open = Callable[..., Opened]


@pytest.fixture(scope="module")
def open_report(browser: Browser) -> Iterator[Open]:
    contexts = []

    def opened(path: Path, scheme: str = "light", width: int = 1280, height: int = 900) -> Opened:
        context = browser.new_context(
            color_scheme=scheme,
            viewport={"width": width, "height": height},
            reduced_motion="reduce",
        )
        contexts.append(context)
        found = Opened(context.new_page())
        found.page.on("console", lambda message: found.complaints.append(message.text))
        found.page.on("pageerror", lambda error: found.complaints.append(str(error)))
        found.page.on("request", lambda request: found.requests.append(request.url))
        found.page.goto(path.as_uri(), timeout=DEADLINE_MS)
        found.drawn()
        return found

    yield opened
    for context in contexts:
        context.close()


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("report") / "report.html"
    write_report(path, RECORDS, "Coding agents")
    return path


@pytest.fixture(scope="module")
def small_report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("report") / "small.html"
    write_report(path, [make_record(PLAIN, rates=(), agents=(4, 8))])
    return path


@pytest.fixture(scope="module")
def light(open_report: Open, report: Path) -> Opened:
    return open_report(report)


@pytest.fixture(scope="module")
def panels() -> dict[str, Panel]:
    page = replay_page(RECORDS, "")
    return {panel.id: panel for section in page.sections for panel in section.panels}


def test_nothing_is_asked_of_the_network_and_nothing_complains(light: Opened, report: Path) -> None:
    assert light.requests == [report.as_uri()]
    assert light.complaints == []


def test_every_chart_is_drawn(light: Opened, panels: dict[str, Panel]) -> None:
    assert light.page.locator(".panel .chart .main-svg").count() >= len(panels)
    for name, panel in panels.items():
        chart = panel.views[panel.first].chart
        legend = light.page.locator(f"#{name} .legendtext").all_text_contents()
        if isinstance(chart, BarChart):
            assert legend == [each.name for each in chart.bars]
            bars = light.page.locator(f"#{name} .barlayer .trace")
            assert bars.count() == len(chart.bars)
            assert bars.nth(0).locator(".point").count() == len(chart.categories)
            continue
        assert legend == [each.name for each in chart.lines]
        traces = light.page.locator(f"#{name} .scatterlayer .trace")
        assert traces.count() == len(chart.lines)
        assert light.page.locator(f"#{name} .scatterlayer path.js-line").count() == len(chart.lines)
        if len(chart.lines[0].xs) <= 40:
            for index, line in enumerate(chart.lines):
                assert traces.nth(index).locator("path.point").count() == len(line.xs)


def test_lines_stand_where_their_values_are(light: Opened, panels: dict[str, Panel]) -> None:
    chart = panels["jct"].views[0].chart
    assert isinstance(chart, LineChart)
    tops = light.page.evaluate(
        """() => [...document.querySelectorAll("#jct .scatterlayer path.point")]
          .map((point) => -point.getBoundingClientRect().top)"""
    )
    values = [y for line in chart.lines for y in line.ys]
    assert sorted(range(len(values)), key=values.__getitem__) == sorted(
        range(len(tops)), key=tops.__getitem__
    )


def _table(opened: Opened, panel: str) -> list[list[str]]:
    details = opened.page.locator(f"#{panel} details")
    details.locator("summary").click()
    expect(details.locator("tbody tr").first).to_be_visible()
    rows = details.locator("tr").all()
    return [row.locator("th, td").all_text_contents() for row in rows]


def test_tables_have_the_charts_numbers(light: Opened, panels: dict[str, Panel]) -> None:
    chart = panels["jct"].views[0].chart
    assert isinstance(chart, LineChart)
    head, *rows = _table(light, "jct")
    assert head == [
        "Agents at once (sessions)",
        *(f"{record.label}: JCT (s)" for record in RECORDS),
    ]
    assert [row[0] for row in rows] == ["4", "16"]
    for index, row in enumerate(rows):
        shown = [float(cell.replace(",", "")) for cell in row[1:]]
        assert shown == pytest.approx([line.ys[index] for line in chart.lines], rel=1e-4)

    parts = panels["breakdown"].views[0].chart
    assert isinstance(parts, BarChart)
    head, *rows = _table(light, "breakdown")
    assert head == ["", *(f"{bars.name} (s)" for bars in parts.bars)]
    assert [row[0] for row in rows] == list(parts.categories)
    assert float(rows[3][1]) == pytest.approx(parts.bars[0].values[3], rel=1e-4)

    hits = panels["hits-online"].views[0].chart
    assert isinstance(hits, LineChart)
    rows = _table(light, "hits-online")
    assert rows[1][1] == f"{(hits.lines[0].ys[0] or 0) * 100:.1f} %"

    rows = _table(light, "cdf-ttft")
    assert (len(rows), rows[1][0], rows[-1][0]) == (201, "0.5 %", "100.0 %")


def test_another_view_can_be_picked(light: Opened, panels: dict[str, Panel]) -> None:
    panel = panels["snic-bytes"]
    labels = light.page.locator("#snic-bytes option").all_text_contents()
    assert labels == [view.label for view in panel.views]
    box = light.page.locator("#snic-bytes .chart")
    before = box.get_attribute("aria-label")
    assert before is not None and before.startswith(
        "Line chart, Storage reads by group: Read (GB/s)"
    )
    light.page.locator("#snic-bytes select").select_option(label="Basic, 4 agents at once")
    assert box.get_attribute("aria-label") != before
    assert light.page.locator("#snic-bytes .scatterlayer .trace").count() == 3


_TEXTS = """() => {
  const shade = (element) => {
    for (let at = element; at; at = at.parentElement) {
      const color = getComputedStyle(at).backgroundColor;
      if (!/, 0\\)$|transparent/.test(color)) return color;
    }
    return "none";
  };
  const found = [];
  for (const element of document.body.querySelectorAll("*")) {
    const own = [...element.childNodes].some((node) => node.nodeType === 3 && node.textContent.trim());
    const box = element.getBoundingClientRect();
    const hidden = element.closest("script, noscript, option, .modebar, .skip");
    if (!own || !box.width || !box.height || hidden) continue;
    const style = getComputedStyle(element);
    const color = element instanceof SVGElement ? style.fill : style.color;
    found.push([element.textContent.trim().slice(0, 30), color, shade(element)]);
  }
  return found;
}"""


def _contrast(one: str, other: str) -> float:
    """Ratio of WCAG 2 of two `rgb(r, g, b)`."""

    def luminance(color: str) -> float:
        channels = [float(each) / 255 for each in color[color.index("(") + 1 : -1].split(",")[:3]]
        linear = [c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_all_text_is_legible(open_report: Open, report: Path, scheme: str) -> None:
    opened = open_report(report, scheme)
    texts = opened.page.evaluate(_TEXTS)
    assert len(texts) > 500
    page_color = opened.page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (_contrast(page_color, "rgb(255, 255, 255)") < 1.3) == (scheme == "light")
    pale = [each for each in texts if _contrast(each[1], each[2]) < 4.5]
    assert pale == []
    assert opened.complaints == []


def _theme(opened: Opened) -> tuple[str, str, str]:
    """What the button says, the theme in force, and the colour of the first chart's first line."""
    page = opened.page
    color = page.locator("#jct .scatterlayer path.js-line").first.evaluate(
        "(line) => getComputedStyle(line).stroke"
    )
    theme = page.locator("html").get_attribute("data-theme") or ""
    return page.locator("#theme").inner_text(), theme, color


def test_the_theme_follows_the_system_or_the_reader(open_report: Open, small_report: Path) -> None:
    opened = open_report(small_report, "light")
    blue, sky = "rgb(0, 114, 178)", "rgb(86, 180, 233)"
    assert _theme(opened) == ("Theme: auto", "light", blue)
    opened.page.emulate_media(color_scheme="dark")
    opened.page.wait_for_selector("html[data-theme=dark]", timeout=DEADLINE_MS)
    _until(lambda: _theme(opened) == ("Theme: auto", "dark", sky), opened)
    button = opened.page.locator("#theme")
    button.click()
    _until(lambda: _theme(opened) == ("Theme: light", "light", blue), opened)
    button.click()
    _until(lambda: _theme(opened) == ("Theme: dark", "dark", sky), opened)
    opened.page.emulate_media(color_scheme="light")
    opened.page.reload(timeout=DEADLINE_MS)
    opened.drawn()
    assert _theme(opened) == ("Theme: dark", "dark", sky), "remembered"
    assert opened.complaints == []


def _until(holds: Callable[[], bool], opened: Opened) -> None:
    for _ in range(100):
        if holds():
            return
        opened.page.wait_for_timeout(50)
    pytest.fail(f"still {_theme(opened)}")


def test_the_toggle_works_with_the_keyboard(open_report: Open, small_report: Path) -> None:
    page = open_report(small_report).page
    for _ in range(15):
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.id") == "theme":
            break
    assert page.evaluate("document.activeElement.id") == "theme"
    assert page.locator("#theme").evaluate("(it) => getComputedStyle(it).outlineStyle") == "solid"
    page.keyboard.press("Enter")
    assert page.locator("#theme").inner_text() == "Theme: light"


def test_a_phone_shows_all_without_scrolling_sideways(open_report: Open, report: Path) -> None:
    opened = open_report(report, "light", 390, 844)
    page = opened.page
    page.locator("details").evaluate_all("(all) => all.forEach((each) => { each.open = true; })")
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    boxes = page.locator(".card, .panel, .scroll, .chart, .chart .main-svg, h1, h2, select")
    wide = boxes.evaluate_all(
        """(all) => all.map((each) => [each.outerHTML.slice(0, 60), each.getBoundingClientRect()])
          .filter(([, box]) => box.width && (box.right > innerWidth + 0.5 || box.left < -0.5))
          .map(([name, box]) => [name, box.left, box.right])"""
    )
    assert wide == []
    sizes = page.locator(".chart .nsewdrag").evaluate_all(
        """(all) => all.map((each) => each.getBoundingClientRect()).map((box) => [box.width, box.height])"""
    )
    assert len(sizes) == page.locator(".panel").count()
    assert min(width for width, _ in sizes) > 150 and min(height for _, height in sizes) > 100
    assert opened.complaints == []


def test_hostile_names_are_shown_as_they_are(open_report: Open, tmp_path: Path) -> None:
    path = tmp_path / "hostile.html"
    record = make_record(DUALPATH, rates=(0.1,), agents=(4, 8), sessions=4)
    hostile = type(record)(
        label=HOSTILE, figures={HOSTILE: 1}, setup={HOSTILE: HOSTILE}, runs=record.runs
    )
    write_report(path, [hostile, record], HOSTILE)
    opened = open_report(path)
    assert opened.page.evaluate("window.hit") is None
    assert opened.page.locator("#jct .legendtext").first.text_content() == HOSTILE
    assert opened.page.locator("h1").text_content() == HOSTILE
    assert _table(opened, "jct")[0][1] == f"{HOSTILE}: JCT (s)"
    assert (opened.requests, opened.complaints) == ([path.as_uri()], [])
