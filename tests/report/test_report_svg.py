"""Charts as SVG: well-formed, with every value in its place, and safe with any text."""

from __future__ import annotations

import xml.etree.ElementTree as ET

from hypothesis import given
from hypothesis import strategies as st

from dualpath.report.chart import Axis, BarChart, Bars, Limit, Line, LineChart
from dualpath.report.svg import svg

NS = "{http://www.w3.org/2000/svg}"


def root(chart):
    return ET.fromstring(svg(chart))


def texts(chart):
    return [each.text for each in root(chart).iter(f"{NS}text")]


def lines(*ys, log=False, limits=(), xs=None):
    return LineChart(
        "Title",
        Axis("Agents"),
        Axis("Time", "s", log=log),
        tuple(Line(f"l{i}", tuple(xs or range(len(y))), tuple(y), i, i) for i, y in enumerate(ys)),
        limits,
    )


def points(chart):
    return [
        [tuple(map(float, pair.split(","))) for pair in each.get("points").split()]
        for each in root(chart).iter(f"{NS}polyline")
    ]


def test_a_line_chart_has_title_axes_and_names():
    found = texts(lines((1.0, 2.0), (3.0, 4.0)))
    for text in ("Title", "Agents", "Time (s)", "l0", "l1"):
        assert text in found


def test_higher_values_are_higher_up_and_later_ones_further_right():
    ((a, b),) = points(lines((1.0, 2.0)))
    assert a[0] < b[0]
    assert a[1] > b[1]


def test_a_straight_line_is_straight():
    ((a, b, c),) = points(lines((0.0, 5.0, 10.0)))
    assert abs((a[1] + c[1]) / 2 - b[1]) < 0.2
    assert abs((a[0] + c[0]) / 2 - b[0]) < 0.2


def test_powers_are_straight_on_a_logarithmic_axis():
    ((a, b, c),) = points(lines((1.0, 10.0, 100.0), log=True))
    assert abs((a[1] + c[1]) / 2 - b[1]) < 0.2


def test_a_gap_splits_the_line():
    assert [len(each) for each in points(lines((1.0, None, 2.0, 3.0)))] == [1, 2]


def test_a_limit_is_drawn_at_its_value():
    chart = lines((0.5, 2.0), limits=(Limit("SLO", 2.0),))
    assert "SLO" in texts(chart)
    dashed = [
        each for each in root(chart).iter(f"{NS}line") if each.get("stroke-dasharray") == "4 4"
    ]
    ((_, top),) = points(chart)
    assert abs(float(dashed[0].get("y1")) - top[1]) < 0.2


def test_no_values():
    assert "no values" in texts(lines((None, None)))


def test_stacked_bars_lie_end_to_end():
    chart = BarChart(
        "Parts",
        ("a", "b"),
        Axis("Time", "s"),
        (Bars("x", (1.0, 2.0), 0), Bars("y", (3.0, None), 1)),
    )
    bars = [each for each in root(chart).iter(f"{NS}rect") if each.get("x")]
    (x0, w0), (x1, w1) = ((float(bars[i].get("x")), float(bars[i].get("width"))) for i in (0, 1))
    assert abs(x0 + w0 - x1) < 0.2
    assert abs(w1 / w0 - 3) < 0.05
    assert {"Parts", "a", "b", "x", "y", "4", "2"} <= set(texts(chart))


def test_names_of_many_lines_have_rows():
    def height(count):
        return float(root(lines(*[(1.0, 2.0)] * count)).get("viewBox").split()[3])

    assert height(1) == height(4) < height(5) == height(6) < height(7)


def test_text_is_escaped():
    chart = BarChart("<script>&", ('"a"',), Axis("x"), (Bars("b", (1.0,), 0),))
    assert "<script>" not in svg(chart)
    assert "<script>&" in texts(chart)


@given(
    st.lists(st.floats(1e-6, 1e9), min_size=1, max_size=8),
    st.booleans(),
)
def test_any_values_stay_in_the_picture(ys, log):
    for each in points(lines(ys, log=log)):
        for x, y in each:
            assert 0 <= x <= 640
            assert 0 <= y <= 360
