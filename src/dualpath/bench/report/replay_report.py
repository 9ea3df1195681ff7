"""The report of replays: which facts, tables and charts, and in what words."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from dualpath.bench.replay.comparison import Measured, differences, labels, measure, slo_of
from dualpath.bench.replay.records import ReplayRecord
from dualpath.bench.report import replay_charts as charts
from dualpath.bench.report import replay_tables as tables
from dualpath.bench.report.replay_charts import Curve
from dualpath.bench.report.server_series import Series, balance, gauges, over_groups, rates
from dualpath.report.chart import Axis, Limit, shown
from dualpath.report.page import Absent, Notice, Page, Panel, Section, render

__all__ = ["replay_page", "write_report"]

_AXES = {
    "ttft": Axis("TTFT", "s"),
    "ttst": Axis("TTST", "ms"),
    "tpot": Axis("TPOT", "ms"),
    "e2e": Axis("End to end", "s"),
}
_PER_SECOND = {"s": 1.0, "ms": 1e3}
_NO_SLO = "no objectives were given (--slo)"
_NO_HITS = "the server does not say how many prompt tokens it had"
_BYTE_UNITS = ((1e9, "GB/s"), (1e6, "MB/s"), (1e3, "kB/s"), (1.0, "bytes/s"))
_SNIC_BYTES = "dualpath:snic_read_bytes_total"
_SNIC_SHARE = "dualpath:snic_utilization"
_READ_QUEUE = "dualpath:read_queue_length"


def write_report(path: Path, records: Sequence[ReplayRecord], title: str = "Replay") -> None:
    """One HTML file that needs no network; the first record is the baseline. Whole or not at all.

    Raises ConfigError when plotly is missing, ValueError without records."""
    text = render(replay_page(records, title))
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)


def replay_page(records: Sequence[ReplayRecord], title: str) -> Page:
    if not records:
        raise ValueError("a report needs at least one record")
    measured = measure(records)
    limits = _limits(records)
    sections = (
        _summary(records, measured),
        _offline(measured),
        _online(measured, limits),
        _breakdown(measured),
        _storage(measured),
        _distributions(measured),
        tables.errors_section(measured),
        tables.runs_section(measured),
    )
    return Page(
        title,
        tables.subtitle(records, measured),
        labels(records),
        (tables.setup_table(records),),
        tuple(section for section in sections if section is not None),
    )


def _limits(records: Sequence[ReplayRecord]) -> dict[str, Limit]:
    """Of the first record that has objectives."""
    slo = next((found for record in records if (found := slo_of(record)) is not None), None)
    if slo is None:
        return {}
    limits = {}
    for metric, limit_s in slo.limits_s.items():
        unit = _AXES[metric].unit
        value = limit_s * _PER_SECOND[unit]
        limits[metric] = Limit(f"SLO {shown(value)} {unit}", value)
    return limits


def _mean_and_tail(figure: str, scale: float = 1.0) -> list[Curve]:
    return [
        Curve(f"{figure}_mean", "mean", scale=scale),
        Curve(f"{figure}_p99", "p99", tail=True, scale=scale),
    ]


def _summary(records: Sequence[ReplayRecord], measured: Sequence[Measured]) -> Section:
    return Section(
        "summary",
        "Summary",
        "Summary",
        cards=tables.cards(records, measured),
        notices=tuple(Notice(each) for each in [*differences(records), *tables.cautions(measured)]),
        tables=tables.figure_tables(measured),
    )


def _section(
    name: str,
    short: str,
    title: str,
    text: str,
    found: Sequence[Panel | Absent],
) -> Section:
    return Section(
        name,
        short,
        title,
        text,
        panels=tuple(each for each in found if isinstance(each, Panel)),
        absent=tuple(each for each in found if isinstance(each, Absent)),
    )


def _mode_section(
    measured: Sequence[Measured], mode: str, title: str, text: str, found: Sequence[Panel | Absent]
) -> Section | None:
    """The charts of a mode, if it was run; under one load each would be of one point."""
    count = len({each.load for each in measured if each.load.mode == mode})
    if count == 1:
        found = [Absent("Charts by load", "there is one load only, its figures are in the summary")]
    return _section(mode, mode.capitalize(), title, text, found) if count else None


def _offline(measured: Sequence[Measured]) -> Section | None:
    found = [
        charts.load_panel(
            measured,
            "offline",
            Panel(
                "jct", "Job completion time", "Until every agent has finished. Lower is better.", ()
            ),
            Axis("JCT", "s"),
            [Curve("jct_s")],
            reason="no run went to its end",
        ),
        charts.load_panel(
            measured,
            "offline",
            Panel(
                "throughput", "Output tokens", "Tokens generated a second. Higher is better.", ()
            ),
            Axis("Throughput", "tokens/s"),
            [Curve("output_tokens_per_s")],
        ),
        charts.load_panel(
            measured,
            "offline",
            Panel(
                "tail",
                "Session completion time",
                "How long one agent takes, on average and at the tail.",
                (),
            ),
            Axis("Session JCT", "s"),
            _mean_and_tail("session_jct_s"),
        ),
        charts.load_panel(
            measured,
            "offline",
            Panel(
                "hits-offline", "Prefix hit rate", "Share of prompt tokens that the server had.", ()
            ),
            Axis("Hit rate", share=True),
            [Curve("hit_rate")],
            reason=_NO_HITS,
        ),
    ]
    text = "All agents start together."
    return _mode_section(measured, "offline", "Offline: agents at once", text, found)


def _online(measured: Sequence[Measured], limits: dict[str, Limit]) -> Section | None:
    texts = {
        "ttft": ("Time to first token", "From when the request was due. Lower is better."),
        "ttst": ("Time to second token", "From the first token to the second. Lower is better."),
        "tpot": ("Time per output token", "After the first. Lower is better."),
        "e2e": ("End to end", "From when the request was due to its last token. Lower is better."),
    }
    found = [
        charts.load_panel(
            measured,
            "online",
            Panel(metric, title, text, ()),
            _AXES[metric],
            _mean_and_tail(f"{metric}_s", _PER_SECOND[_AXES[metric].unit]),
            [limits[metric]] if metric in limits else (),
        )
        for metric, (title, text) in texts.items()
    ]
    found += [
        charts.load_panel(
            measured,
            "online",
            Panel("goodput", "Goodput", "Requests a second that met every objective.", ()),
            Axis("Goodput", "requests/s"),
            [Curve("goodput_rps")],
            reason=_NO_SLO,
        ),
        charts.load_panel(
            measured,
            "online",
            Panel("slo", "SLO attainment", "Share of requests that met every objective.", ()),
            Axis("SLO attainment", share=True),
            [Curve("slo_attainment")],
            reason=_NO_SLO,
        ),
        charts.load_panel(
            measured,
            "online",
            Panel(
                "hits-online", "Prefix hit rate", "Share of prompt tokens that the server had.", ()
            ),
            Axis("Hit rate", share=True),
            [Curve("hit_rate")],
            reason=_NO_HITS,
        ),
    ]
    text = "Agents arrive at a set rate, whatever the server does."
    return _mode_section(measured, "online", "Online: agents per second", text, found)


def _breakdown(measured: Sequence[Measured]) -> Section:
    panel = Panel(
        "breakdown",
        "Time to first token, by part",
        "The server's own times; the rest is the network, the client, and what the server does not tell.",
        (),
        wide=True,
    )
    found = [charts.breakdown_panel(measured, panel)]
    return _section("parts", "First token", "Where the first token's time goes", "", found)


def _storage(measured: Sequence[Measured]) -> Section:
    def share(each: Measured) -> Series:
        return over_groups(gauges(each.run, _SNIC_SHARE), lambda values: sum(values) / len(values))

    def queue(each: Measured) -> Series:
        return over_groups(gauges(each.run, _READ_QUEUE), sum)

    byte_scale, byte_axis = _byte_axis(measured)
    found = [
        charts.group_panel(
            measured,
            Panel(
                "snic-bytes",
                "Storage reads by group",
                "Bytes a second through each storage NIC.",
                (),
            ),
            byte_axis,
            lambda each: {
                group: series.scaled(1 / byte_scale)
                for group, series in rates(each.run, _SNIC_BYTES).items()
            },
        ),
        charts.over_time_panel(
            measured,
            Panel(
                "balance",
                "Balance of storage reads",
                "The busiest NIC over the average; 1 is even.",
                (),
            ),
            Axis("max / mean", from_zero=False),
            lambda each: balance(rates(each.run, _SNIC_BYTES)),
        ),
        charts.over_time_panel(
            measured,
            Panel(
                "snic-share",
                "SNIC utilisation",
                "Share of what the NICs can do, on average over groups.",
                (),
            ),
            Axis("Utilisation", share=True),
            share,
        ),
        charts.over_time_panel(
            measured,
            Panel(
                "read-queue", "Read queue", "Tokens that wait to be read, all groups together.", ()
            ),
            Axis("Waiting", "tokens"),
            queue,
        ),
    ]
    return _section(
        "storage", "Storage", "Storage reads over time", "From the server's metrics.", found
    )


def _byte_axis(measured: Sequence[Measured]) -> tuple[float, Axis]:
    """Bytes in a unit of the axis, and the axis: a unit in which the highest rate is at least 1."""
    top = max(
        (
            rate
            for each in measured
            for series in rates(each.run, _SNIC_BYTES).values()
            for rate in series.values
            if rate is not None
        ),
        default=0.0,
    )
    scale, unit = next((each for each in _BYTE_UNITS if top >= each[0]), _BYTE_UNITS[-1])
    return scale, Axis("Read", unit)


def _distributions(measured: Sequence[Measured]) -> Section:
    texts = {"ttft": "TTFT", "tpot": "TPOT", "e2e": "End to end"}
    found = [
        charts.distribution_panel(
            measured,
            Panel(f"cdf-{metric}", title, "Of requests.", ()),
            f"{metric}_s",
            _AXES[metric],
            _PER_SECOND[_AXES[metric].unit],
        )
        for metric, title in texts.items()
    ]
    found.append(
        charts.session_panel(
            measured,
            Panel("cdf-jct", "Session JCT", "Of sessions that finished.", ()),
            Axis("Session JCT", "s"),
        )
    )
    text = "The share of requests or sessions that took at most so long. Further left is better."
    return _section("distributions", "Distributions", "Distributions", text, found)
