"""A replay's result as a table for people: a row a figure, a column a run; of many runs the other way round.

Knows the figures by name, and how they are best read. What was not measured has no row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from dualpath.bench.harness import BenchResult, Figure

__all__ = ["print_summary", "rows_of_runs", "table_rows"]

_STATISTICS = ("mean", "p50", "p90", "p99")
_LATENCIES = {
    "ttft_s": ("TTFT, s", 1.0),
    "ttst_s": ("TTST, ms", 1e3),
    "tpot_s": ("TPOT, ms", 1e3),
    "itl_s": ("ITL, ms", 1e3),
    "e2e_s": ("E2E, s", 1.0),
}
"""Name and how many of the unit a second has."""
_FIRST_ROWS = {
    "ended": "ended",
    "measured_s": "measured, s",
    "sessions": "agents",
    "sessions_finished": "agents finished",
    "requests": "requests",
    "errors": "errors",
    "turns_not_run": "turns not run",
    "requests_cut_off": "requests cut off",
    "jct_s": "JCT, s",
}
_LAST_ROWS = {
    "slo_attainment": "SLO attainment",
    "goodput_rps": "goodput, requests/s",
    "requests_per_s": "requests/s",
    "prompt_tokens_per_s": "prompt tokens/s",
    "output_tokens_per_s": "output tokens/s",
    "hit_rate": "prefix hits",
    "share_by_path": "read by side",
    "snic_max_over_mean": "SNIC max/mean",
    "schedule_error_ms_p99": "late sends p99, ms",
    "client_cores": "client, cores",
}
_RUN_COLUMNS = {
    "requests": "requests",
    "errors": "errors",
    "jct_s": "JCT, s",
    "ttft_s_mean": "TTFT, s",
    "ttft_s_p99": "its p99",
    "tpot_s_mean": "TPOT, s",
    "output_tokens_per_s": "tokens/s",
    "ended": "ended",
    "tried_aps": "",
}
_MOST_COLUMNS = 3
_SHARES = ("hit_rate", "slo_attainment", "share_by_path")


def print_summary(result: BenchResult) -> None:
    """To standard output."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table(title=f"dualpath bench {result.bench}", title_justify="left")
    unit = "agents" if result.setup.get("mode") == "offline" else "agents/s"
    runs = result.setup.get("runs")
    keys = [str(run) for run in runs] if isinstance(runs, Sequence) else []
    if len(keys) > _MOST_COLUMNS:
        header, *rows = rows_of_runs(result.figures, keys, unit)
        for name in header:
            table.add_column(name, justify="right")
    elif keys:
        table.add_column("")
        for key in keys:
            table.add_column(
                "1 agent" if f"{key} {unit}" == "1 agents" else f"{key} {unit}", justify="right"
            )
        rows = [[name, *cells] for name, cells in table_rows(result.figures, keys)]
    else:  # What --describe found.
        table.add_column("")
        table.add_column(escape(str(result.setup.get("trace", ""))), justify="right")
        rows = [[name, _cell(name, value)] for name, value in result.figures.items()]
    for cells in rows:
        table.add_row(*map(escape, cells))
    console = Console()
    console.print(table)
    if "max_aps" in result.figures:
        console.print(_highest_rate(result.figures))


def rows_of_runs(figures: Mapping[str, Figure], runs: Sequence[str], unit: str) -> list[list[str]]:
    """For many runs: one a row, of the figures that matter most. The first row is the header."""
    columns = {run: _of_run(figures, run) for run in runs}
    known = {
        key: name
        for key, name in _RUN_COLUMNS.items()
        if any(key in each for each in columns.values())
        # A verdict on a run says how it ended.
        and not (key == "ended" and "tried_aps" in figures)
    }
    rows = [[unit, *known.values()]]
    for run, column in columns.items():
        rows.append([run, *(_cell(key, column.get(key)) for key in known)])
    return rows


def table_rows(figures: Mapping[str, Figure], runs: Sequence[str]) -> list[tuple[str, list[str]]]:
    """The name and one cell a run of everything worth a row."""
    columns = [figures if len(runs) < 2 else _of_run(figures, run) for run in runs]
    rows = [
        (name, [_cell(key, each.get(key)) for each in columns]) for key, name in _FIRST_ROWS.items()
    ]
    for key, (name, per_s) in _LATENCIES.items():
        statistics = [
            each for each in _STATISTICS if any(f"{key}_{each}" in column for column in columns)
        ]
        cells = [_statistics(key, statistics, per_s, each) for each in columns]
        rows.append((f"{name}: {' / '.join(statistics)}", cells))
    rows.append(("TTFT by part, ms", [_parts(each.get("ttft_parts_s")) for each in columns]))
    rows += [
        (name, [_cell(key, each.get(key)) for each in columns]) for key, name in _LAST_ROWS.items()
    ]
    return [(name, cells) for name, cells in rows if any(cells)]


def _of_run(figures: Mapping[str, Figure], run: str) -> dict[str, Figure]:
    return {
        name: figure[run]
        for name, figure in figures.items()
        if isinstance(figure, Mapping) and run in figure
    }


def _statistics(
    key: str, statistics: Sequence[str], per_s: float, figures: Mapping[str, Figure]
) -> str:
    values = [figures.get(f"{key}_{each}") for each in statistics]
    return " / ".join(
        _three_digits(each * per_s) for each in values if isinstance(each, int | float)
    )


def _parts(figure: Figure | None) -> str:
    """A line a part that took any time."""
    if not isinstance(figure, Mapping):
        return ""
    shown = [
        f"{part} {_three_digits(seconds * 1e3)}"
        for part, seconds in figure.items()
        if isinstance(seconds, int | float) and seconds
    ]
    return "\n".join(shown)


def _three_digits(value: float) -> str:
    return f"{value:.3g}" if value < 1000 else f"{value:,.0f}"


def _cell(key: str, value: Figure | None) -> str:
    match value:
        case None:
            return ""
        case str():
            return value
        case Mapping():
            if not value:
                return "none" if key == "errors" else ""
            return "\n".join(f"{name} {_cell(key, each)}" for name, each in value.items())
        case int():
            return f"{value:,}"
        case float() if key in _SHARES:
            return f"{value:.1%}"
        case float():
            return _three_digits(value)
        case _:
            return ", ".join(_cell(key, each) for each in value)


def _highest_rate(figures: Mapping[str, Figure]) -> str:
    best, bounded = figures["max_aps"], figures["max_aps_bounded"]
    if not best:
        return "no rate that was tried is sustained"
    more = "" if bounded else ", and it may do more: no rate was found that it does not sustain"
    return f"highest sustained rate: {best:.4g} agents/s{more}"
