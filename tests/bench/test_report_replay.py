"""The report of replays: which panels there are, and exactly what they show."""

from __future__ import annotations

from pathlib import Path

import msgspec
import plotly.graph_objects as go
import pytest
from plotly.offline import get_plotlyjs
from report_kit import BASIC, DUALPATH, PLAIN, make_record, request

from dualpath.bench.replay.comparison import (
    FIGURES,
    LoadPoint,
    Measured,
    common_loads,
    differences,
    measure,
)
from dualpath.bench.replay.records import ReplayRecord, Run, ServerSample, SessionRecord
from dualpath.bench.report import write_report
from dualpath.bench.report.replay_report import replay_page
from dualpath.bench.report.replay_tables import changed
from dualpath.bench.report.server_series import Series, balance, gauges, over_groups, rates
from dualpath.report.chart import BarChart, LineChart, figure
from dualpath.report.page import Cell, Page, Panel, Verdict

OFFLINE_PANELS = ["jct", "throughput", "tail", "hits-offline"]
ONLINE_PANELS = ["ttft", "ttst", "tpot", "e2e", "goodput", "slo", "hits-online"]
OTHER_PANELS = [
    *("breakdown", "snic-bytes", "balance", "snic-share", "read-queue"),
    *("cdf-ttft", "cdf-tpot", "cdf-e2e", "cdf-jct"),
]


def record(
    label: str, *runs: Run, setup: dict[str, object] | None = None, **figures: object
) -> ReplayRecord:
    return ReplayRecord(label=label, figures=figures, setup=setup or {}, runs=list(runs))


def online(rate_aps: float, *ttfts_s: float, **more: object) -> Run:
    requests = [request(ttft_s, at_s=float(i), session=i) for i, ttft_s in enumerate(ttfts_s)]
    sessions = [
        SessionRecord(id=f"s{i}", turns=1, scheduled_s=float(i), finished_s=each.end_s)
        for i, each in enumerate(requests)
    ]
    fields: dict[str, object] = {"requests": requests, "sessions": sessions, "duration_s": 10.0}
    return Run(mode="online", rate_aps=rate_aps, **{**fields, **more})


def offline(agents: int, duration_s: float, **more: object) -> Run:
    return Run(mode="offline", agents=agents, duration_s=duration_s, **more)


def panels(page: Page) -> dict[str, Panel]:
    return {panel.id: panel for section in page.sections for panel in section.panels}


def absent(page: Page) -> dict[str, str]:
    return {each.title: each.reason for section in page.sections for each in section.absent}


def line_chart(page: Page, panel: str, view: int = 0) -> LineChart:
    chart = panels(page)[panel].views[view].chart
    assert isinstance(chart, LineChart)
    return chart


def points(chart: LineChart) -> dict[str, list[tuple[float, float | None]]]:
    return {each.name: list(zip(each.xs, each.ys, strict=True)) for each in chart.lines}


@pytest.fixture(scope="module")
def full() -> Page:
    return replay_page([make_record(BASIC), make_record(DUALPATH), make_record(PLAIN)], "All")


def test_everything_is_there_and_plotly_takes_it(full: Page) -> None:
    assert list(panels(full)) == [*OFFLINE_PANELS, *ONLINE_PANELS, *OTHER_PANELS]
    assert absent(full) == {}
    for panel in panels(full).values():
        for view in panel.views:
            go.Figure(figure(view.chart))


def test_jct_by_agents() -> None:
    page = replay_page(
        [record("a", offline(8, 20.0), offline(4, 12.5)), record("b", offline(8, 10.0))], ""
    )
    assert points(line_chart(page, "jct")) == {"a": [(4.0, 12.5), (8.0, 20.0)], "b": [(8.0, 10.0)]}
    assert [each.slot for each in line_chart(page, "jct").lines] == [0, 1]


def test_an_interrupted_run_has_no_jct() -> None:
    page = replay_page([record("a", offline(8, 20.0, ended="interrupted"), offline(9, 1.0))], "")
    assert points(line_chart(page, "jct")) == {"a": [(9.0, 1.0)]}
    assert (
        page.sections[0].notices[0].text
        == "a, 8 agents at once: interrupted, figures are of a part."
    )


def test_latencies_by_rate_with_objectives() -> None:
    setup = {"slo": {"ttft": 4.0, "tpot": 0.05}}
    page = replay_page([record("a", online(0.5, 1.0, 3.0), online(0.25, 1.0), setup=setup)], "")
    ttft = line_chart(page, "ttft")
    assert points(ttft) == {
        "a mean": [(0.25, 1.0), (0.5, 2.0)],
        "a p99": [(0.25, 1.0), (0.5, pytest.approx(2.98))],
    }
    assert [(each.label, each.value) for each in ttft.limits] == [("SLO 4 s", 4.0)]
    tpot = line_chart(page, "tpot")
    assert points(tpot)["a mean"] == [(0.25, pytest.approx(20.0)), (0.5, pytest.approx(20.0))]
    assert [(each.label, each.value) for each in tpot.limits] == [("SLO 50 ms", 50.0)]
    assert line_chart(page, "ttst").y.label == "TTST (ms)"
    assert points(line_chart(page, "slo")) == {"a": [(0.25, 1.0), (0.5, 1.0)]}
    assert points(line_chart(page, "goodput")) == {"a": [(0.25, 0.1), (0.5, 0.2)]}


def test_wide_spreads_are_logarithmic() -> None:
    page = replay_page([record("a", online(0.1, 0.01), online(0.2, 5.0))], "")
    assert line_chart(page, "ttft").y.log and not line_chart(page, "tpot").y.log


def test_what_a_server_does_not_tell_is_said() -> None:
    page = replay_page([record("a", online(1.0, 1.0), online(2.0, 1.0))], "")
    assert absent(page) == {
        "Goodput": "no objectives were given (--slo)",
        "SLO attainment": "no objectives were given (--slo)",
        "Prefix hit rate": "the server does not say how many prompt tokens it had",
        "Time to first token, by part": "the server reports no timings",
        "Storage reads by group": "the server's metrics do not tell",
        "Balance of storage reads": "the server's metrics do not tell",
        "SNIC utilisation": "the server's metrics do not tell",
        "Read queue": "the server's metrics do not tell",
    }


def test_one_load_makes_no_line() -> None:
    page = replay_page([record("a", online(1.0, 1.0)), record("b", online(1.0, 2.0))], "")
    assert absent(page)["Charts by load"].startswith("there is one load only")
    assert not {"ttft", "jct"} & set(panels(page))
    assert [section.id for section in page.sections if section.id in ("offline", "online")] == [
        "online"
    ]


def test_breakdown_is_the_parts_and_the_rest() -> None:
    timed = [
        request(1.0, timings={"queue_s": 0.25, "read_s": 0.5}),
        request(3.0, timings={"queue_s": 0.75, "read_s": 1.5}),
        request(9.0),
    ]
    runs = (online(1.0, requests=timed), online(1.0, 1.0))
    page = replay_page([record("a", runs[0]), record("b", runs[1])], "")
    chart = panels(page)["breakdown"].views[0].chart
    assert isinstance(chart, BarChart)
    assert chart.categories == ("1 agents/s, a",)
    assert {each.name: each.values for each in chart.bars} == {
        "queue": (0.5,),
        "read": (1.0,),
        "other": (0.5,),
    }
    assert chart.note == "No timings from: b."


def test_distributions_have_a_view_for_each_load_and_start_with_the_highest_common() -> None:
    a = record("a", online(0.1, 1.0), online(0.2, 1.0, 2.0), online(0.3, 1.0))
    page = replay_page([a, record("b", online(0.1, 1.0), online(0.2, 4.0, 3.0))], "")
    panel = panels(page)["cdf-ttft"]
    assert [each.label for each in panel.views] == ["0.1 agents/s", "0.2 agents/s", "0.3 agents/s"]
    assert panel.first == 1
    chart = line_chart(page, "cdf-ttft", 1)
    assert {each.name: (each.xs[0], each.xs[99], each.xs[100]) for each in chart.lines} == {
        "a": (1.0, 1.0, 2.0),
        "b": (3.0, 3.0, 4.0),
    }
    jct = line_chart(page, "cdf-jct", 1).lines[1]
    assert (jct.xs[0], jct.xs[-1]) == (pytest.approx(3.2), pytest.approx(4.2))


def test_records_without_a_common_load_meet_at_their_highest() -> None:
    page = replay_page(
        [record("a", online(0.1, 1.0), online(0.2, 2.0)), record("b", online(0.4, 3.0))], ""
    )
    panel = panels(page)["cdf-ttft"]
    assert panel.views[panel.first].label == "each at its highest load"
    chart = line_chart(page, "cdf-ttft", panel.first)
    assert {each.name: each.xs[0] for each in chart.lines} == {"a": 2.0, "b": 3.0}


def test_warm_up_failed_and_cut_off_requests_are_in_no_distribution() -> None:
    requests = [
        request(9.0, at_s=1.0),
        request(8.0, at_s=6.0, error="timeout", session=0),
        request(7.0, at_s=6.0, end_s=None),
        request(1.0, at_s=6.0),
    ]
    page = replay_page([record("a", online(1.0, 1.0, requests=requests, from_s=5.0))], "")
    assert set(line_chart(page, "cdf-ttft").lines[0].xs) == {1.0}


def samples(
    *totals: dict[str, float], name: str = "dualpath:snic_read_bytes_total"
) -> list[ServerSample]:
    return [
        ServerSample(
            at_s=2.0 * i, metrics={f'{name}{{group="{group}"}}': v for group, v in each.items()}
        )
        for i, each in enumerate(totals)
    ]


def test_rates_are_growth_a_second_and_a_restart_is_a_gap() -> None:
    run = online(
        1.0,
        samples=samples(
            {"p": 0.0, "d": 100.0},
            {"p": 60.0, "d": 120.0},
            {"p": 10.0, "d": 120.0},
            {"p": 10.0, "d": 160.0},
        ),
    )
    found = rates(run, "dualpath:snic_read_bytes_total")
    assert found == {
        "d": Series((2.0, 4.0, 6.0), (10.0, 0.0, 20.0)),
        "p": Series((2.0, 4.0, 6.0), (30.0, None, 0.0)),
    }
    assert balance(found) == Series((2.0, 6.0), (1.5, 2.0))
    assert over_groups(found, max) == Series((2.0, 6.0), (30.0, 20.0))
    assert gauges(run, "dualpath:read_queue_length") == {}


def test_reads_are_shown_in_a_readable_unit_by_group() -> None:
    run = online(1.0, samples=samples({"p": 0.0, "d": 0.0}, {"p": 3e9, "d": 1e9}))
    page = replay_page([record("a", run)], "")
    chart = line_chart(page, "snic-bytes")
    assert chart.y.label == "Read (GB/s)"
    assert points(chart) == {"d": [(2.0, 0.5)], "p": [(2.0, 1.5)]}
    assert points(line_chart(page, "balance")) == {"a": [(2.0, 1.5)]}


def test_gauges_over_groups() -> None:
    run = online(
        1.0, samples=samples({"p": 0.25, "d": 0.75}, {"p": 1.0}, name="dualpath:snic_utilization")
    )
    page = replay_page([record("a", run)], "")
    assert points(line_chart(page, "snic-share")) == {"a": [(0.0, 0.5)]}
    queue = samples({"p": 30.0, "d": 12.0}, name="dualpath:read_queue_length")
    page = replay_page([record("a", online(1.0, samples=queue))], "")
    assert points(line_chart(page, "read-queue")) == {"a": [(0.0, 42.0)]}


def test_many_groups_become_highest_average_and_lowest() -> None:
    groups = {f"g{i:02}": float(i) for i in range(12)}
    totals = (dict.fromkeys(groups, 0.0), {g: 2e9 * v for g, v in groups.items()})
    page = replay_page([record("a", online(1.0, samples=samples(*totals)))], "")
    assert points(line_chart(page, "snic-bytes")) == {
        "highest of 12 groups": [(2.0, 11.0)],
        "average": [(2.0, 5.5)],
        "lowest": [(2.0, 0.0)],
    }


def test_long_runs_stay_small(tmp_path: Path) -> None:
    requests = [request(float(i % 997), at_s=i / 10) for i in range(20_000)]
    totals = [{"p": float(i), "d": 2.0 * i} for i in range(10_000)]
    run = online(1.0, requests=requests, samples=samples(*totals), duration_s=20_000.0)
    page = replay_page([record("a", run)], "")
    lines = [
        line
        for panel in panels(page).values()
        for view in panel.views
        for line in getattr(view.chart, "lines", ())
    ]
    assert max(len(line.xs) for line in lines) == 400
    assert line_chart(page, "balance").note == "Each point is the average of about 25.0 samples."
    write_report(tmp_path / "r.html", [record("a", run)])
    assert (tmp_path / "r.html").stat().st_size - len(get_plotlyjs().encode()) < 150_000


def test_errors_are_always_told(full: Page) -> None:
    errors = next(section for section in full.sections if section.id == "errors")
    assert errors.tables[0].columns == ("run", "requests", "failed", "http 503", "timeout")
    assert all(row[0].text.startswith("vLLM 0.32, ") for row in errors.tables[0].rows)
    good = replay_page([record("a", online(1.0, 1.0, 2.0))], "").sections[-2]
    assert (good.notices[0].text, good.notices[0].good) == ("No errors in 2 requests.", True)
    assert good.tables == ()
    failed = online(1.0, requests=[request(), request(error="timeout"), request(end_s=None)])
    failed = msgspec.structs.replace(
        failed, sessions=[SessionRecord(id="s", turns=3, scheduled_s=0.0)]
    )
    bad = replay_page([record("a", failed)], "").sections[-2]
    assert bad.notices[0].text == "1 of 2 requests failed. Cut off when their run ended: 1."
    assert [cell.text for cell in bad.tables[0].rows[0]] == ["a, 1 agents/s", "2", "50.0 %", "1"]


def test_cards_compare_with_the_first_record_under_the_highest_common_load() -> None:
    a = record("a", offline(4, 10.0), offline(8, 20.0), offline(16, 99.0), max_aps=0.4)
    b = record("b", offline(8, 10.0), offline(4, 9.0), max_aps=0.9)
    cards = replay_page([a, b], "").sections[0].cards
    rate, jct = cards[0], cards[1]
    assert (rate.title, [row.value.text for row in rate.rows]) == (
        "Highest sustained rate",
        ["0.4 agents/s", "0.9 agents/s"],
    )
    assert jct.hint == "at 8 agents at once, lower is better"
    assert [(row.name, row.value, row.share) for row in jct.rows] == [
        ("a", Cell("20 s"), 1.0),
        ("b", Cell("10 s", "0.50×", Verdict.BETTER), 0.5),
    ]


def test_tables_have_a_ratio_only_where_the_first_record_has_a_run() -> None:
    page = replay_page(
        [record("a", offline(8, 20.0)), record("b", offline(8, 30.0), offline(9, 1.0))], ""
    )
    eight, nine = page.sections[0].tables
    assert (eight.caption, eight.folded, nine.folded) == ("8 agents at once", False, True)
    jct = next(row for row in eight.rows if row[0].text == "JCT (s)")
    assert jct[1:] == (Cell("20"), Cell("30", "1.50×", Verdict.WORSE))
    assert nine.columns == ("figure", "b")
    assert nine.rows[0] == (Cell("JCT (s)"), Cell("1"))


SPECS = {spec.key: spec for spec in FIGURES}


@pytest.mark.parametrize(
    ("key", "value", "baseline", "cell"),
    [
        ("jct_s", 5.0, 10.0, Cell("5", "0.50×", Verdict.BETTER)),
        ("jct_s", 10.1, 10.0, Cell("10.1", "1.01×", Verdict.SAME)),
        ("goodput_rps", 5.0, 10.0, Cell("5", "0.50×", Verdict.WORSE)),
        ("goodput_rps", 150.0, 10.0, Cell("150", "15.0×", Verdict.BETTER)),
        ("tpot_s_mean", 0.02, 0.5, Cell("20", "0.04×", Verdict.BETTER)),
        ("hit_rate", 0.5, 0.25, Cell("50.0 %", "2.00×", Verdict.BETTER)),
        ("error_rate", 0.1, 0.0, Cell("10.0 %", "from 0", Verdict.WORSE)),
        ("error_rate", 0.0, 0.0, Cell("0.0 %")),
        ("requests", 5.0, 10.0, Cell("5", "0.50×")),
        ("jct_s", None, 10.0, Cell("–")),
        ("jct_s", 5.0, None, Cell("5")),
    ],
)
def test_changes_and_verdicts(
    key: str, value: float | None, baseline: float | None, cell: Cell
) -> None:
    assert changed(SPECS[key], value, baseline) == cell


def test_runs_are_matched_by_load() -> None:
    a, b = record("x", online(0.1), offline(4, 1.0)), record("x", online(0.10000001), online(0.3))
    measured: list[Measured] = measure([a, b])
    assert [(each.label, each.load) for each in measured] == [
        ("x", LoadPoint("offline", 4.0)),
        ("x", LoadPoint("online", 0.1)),
        ("x (2)", LoadPoint("online", 0.1)),
        ("x (2)", LoadPoint("online", 0.3)),
    ]
    assert common_loads(measured) == [LoadPoint("online", 0.1)]


def test_what_differs_is_said() -> None:
    a = record("a", setup={"trace": "t", "model": "m", "seed": 1})
    b = record("b", setup={"trace": "t", "model": "n"})
    assert differences([a, b]) == [
        "Not the same model: a: m, b: n.",
        "Not the same seed: a: 1, b: not said.",
    ]
    assert [each.text for each in replay_page([a, b], "").sections[0].notices] == differences(
        [a, b]
    )


def test_late_sends_are_said() -> None:
    page = replay_page([record("a", online(1.0, requests=[request(sent_s=0.02)]))], "")
    assert (
        page.sections[0].notices[0].text.startswith("a, 1 agents/s: the client sent late, by 20 ms")
    )


def test_setup_says_unknown_where_a_record_is_silent() -> None:
    page = replay_page([record("a", setup={"model": "m", "slo": {"ttft": 4.0}}), record("b")], "T")
    rows = {row[0].text: [cell.text for cell in row[1:]] for row in page.facts[0].rows}
    assert rows == {
        "command": ["unknown", "unknown"],
        "trace": ["unknown", "unknown"],
        "mode": ["unknown", "unknown"],
        "model": ["m", "unknown"],
        "slo": ["ttft: 4.0", "unknown"],
    }
    assert page.subtitle == "model m · nothing: 0 runs, 0 requests"


def test_hostile_labels_stay_text(tmp_path: Path) -> None:
    label = "</script><script>alert(1)</script>"
    write_report(
        tmp_path / "r.html", [record(label, online(1.0, 1.0), setup={label: label})], label
    )
    html = (tmp_path / "r.html").read_text(encoding="utf-8")
    assert "<script>alert" not in html
    assert "&lt;/script&gt;&lt;script&gt;alert(1)" in html
    assert list(tmp_path.iterdir()) == [tmp_path / "r.html"]


def test_a_report_of_nothing_is_a_mistake(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="at least one record"):
        write_report(tmp_path / "r.html", [])
