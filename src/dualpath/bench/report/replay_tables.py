"""The tables, cards and sentences of the replays' report. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dualpath.bench.replay.comparison import (
    FIGURES,
    MAX_APS,
    Better,
    FigureSpec,
    LoadPoint,
    Measured,
    common_loads,
    failures,
    labels,
    loads,
    max_aps,
    ratio,
)
from dualpath.bench.replay.figures import errors_by_kind
from dualpath.bench.replay.figures import measured as due
from dualpath.bench.replay.records import ReplayRecord
from dualpath.report.chart import shown
from dualpath.report.page import Card, CardRow, Cell, Notice, Section, Table, Verdict

__all__ = [
    "cards",
    "cautions",
    "changed",
    "errors_section",
    "figure_tables",
    "runs_section",
    "setup_table",
    "subtitle",
]

_SAME = 0.02
"""Ratios within this of 1 are no difference worth a word."""
_LATE_MS = 5.0
_HEADLINES = {
    "offline": ("jct_s", "output_tokens_per_s", "hit_rate"),
    "online": ("ttft_s_mean", "ttft_s_p99", "tpot_s_mean", "goodput_rps"),
}


@dataclass(frozen=True, slots=True)
class _Entry:
    slot: int
    label: str
    value: float | None


def subtitle(records: Sequence[ReplayRecord], measured: Sequence[Measured]) -> str:
    """What ran, in one line."""
    parts = []
    for key in ("trace", "model"):
        values = list(dict.fromkeys(str(each.setup[key]) for each in records if key in each.setup))
        if values:
            parts.append(f"{key} {', '.join(values)}")
    modes = sorted({each.load.mode for each in measured})
    requests = sum(len(each.run.requests) for each in measured)
    runs = f"{len(measured)} run{'' if len(measured) == 1 else 's'}"
    parts.append(f"{' and '.join(modes) or 'nothing'}: {runs}, {requests:,} requests")
    return " · ".join(parts)


def setup_table(records: Sequence[ReplayRecord]) -> Table:
    """Everything that each record says of how it was made; "unknown" where it does not."""
    keys = list(dict.fromkeys(key for record in records for key in record.setup))
    first = [key for key in ("command", "model", "trace", "mode") if key not in keys]
    rows = tuple(
        (Cell(key), *(Cell(_said(record.setup.get(key))) for record in records))
        for key in [*first, *keys]
    )
    return Table("Setup", ("", *labels(records)), rows, (None, *range(len(records))))


def cautions(measured: Sequence[Measured]) -> list[str]:
    """What makes figures doubtful."""
    found = failures(measured)
    for each in measured:
        late_ms = each.number("schedule_error_ms_p99")
        if late_ms is not None and late_ms > _LATE_MS:
            found.append(
                f"{each.label}, {each.load.label}: the client sent late, by {shown(late_ms)} ms at p99. "
                "Latencies count from when requests were due and include that."
            )
        if each.run.ended == "interrupted":
            found.append(f"{each.label}, {each.load.label}: interrupted, figures are of a part.")
    return found


def changed(spec: FigureSpec, value: float | None, baseline: float | None) -> Cell:
    """The value with its ratio to the baseline's and whether that is good."""
    if value is None:
        return Cell("–")
    text = shown(value * spec.scale, share=spec.share)
    if baseline == 0 and value and spec.better is not Better.NEITHER:
        return Cell(text, "from 0", _verdict(spec, lower=value < 0))
    change = ratio(value, baseline)
    if change is None:
        return Cell(text)
    verdict = None
    if spec.better is not Better.NEITHER:
        same = abs(change - 1) <= _SAME
        verdict = Verdict.SAME if same else _verdict(spec, lower=change < 1)
    return Cell(text, _times(change), verdict)


def cards(records: Sequence[ReplayRecord], measured: Sequence[Measured]) -> tuple[Card, ...]:
    """The headline figures, under the highest load that all records share."""
    found = []
    rates = [
        _Entry(slot, label, max_aps(record))
        for slot, (record, label) in enumerate(zip(records, labels(records), strict=True))
    ]
    if any(each.value is not None for each in rates):
        found.append(_card(MAX_APS, "within the objectives", rates))
    specs = {spec.key: spec for spec in FIGURES}
    for mode, keys in _HEADLINES.items():
        load = _headline_load(measured, mode)
        runs = [each for each in measured if each.load == load]
        for key in keys:
            entries = [_Entry(each.slot, each.label, each.number(key)) for each in runs]
            if load is not None and any(each.value is not None for each in entries):
                found.append(_card(specs[key], f"at {load.label}", entries))
    return tuple(found)


def figure_tables(measured: Sequence[Measured]) -> tuple[Table, ...]:
    """A table for each load: figures down, records across, ratios to the first. Headline loads first."""
    found = []
    headlines = [_headline_load(measured, mode) for mode in _HEADLINES]
    for load in loads(measured):
        runs = [each for each in measured if each.load == load]
        rows = []
        for spec in FIGURES:
            if all(each.number(spec.key) is None for each in runs):
                continue
            unit = f" ({spec.unit})" if spec.unit else ""
            baseline = _baseline(runs, spec.key)
            cells = (
                changed(spec, each.number(spec.key), baseline if each.slot else None)
                for each in runs
            )
            rows.append((Cell(spec.name + unit), *cells))
        columns = ("figure", *(each.label for each in runs))
        found.append(
            Table(
                load.label.capitalize(),
                columns,
                tuple(rows),
                (None, *(each.slot for each in runs)),
                folded=load not in headlines,
            )
        )
    return tuple(sorted(found, key=lambda each: each.folded))


def errors_section(measured: Sequence[Measured]) -> Section:
    """Always there: that nothing failed is a result too."""
    by_run = [(each, errors_by_kind(due(each.run))) for each in measured]
    kinds = sorted({kind for _, errors in by_run for kind in errors})
    requests = sum(int(each.number("requests") or 0) for each in measured)
    cut = sum(int(each.number("requests_cut_off") or 0) for each in measured)
    notes = f" Cut off when their run ended: {cut:,}." if cut else ""
    if not kinds:
        return Section(
            "errors",
            "Errors",
            "Errors",
            notices=(Notice(f"No errors in {requests:,} requests.{notes}", good=True),),
        )
    failed = sum(sum(errors.values()) for _, errors in by_run)
    rows = tuple(
        (
            Cell(f"{each.label}, {each.load.label}"),
            Cell(shown(each.number("requests"))),
            Cell(shown(each.number("error_rate"), share=True)),
            *(Cell(shown(float(errors.get(kind, 0)))) for kind in kinds),
        )
        for each, errors in by_run
        if errors
    )
    return Section(
        "errors",
        "Errors",
        "Errors",
        "Failed requests are in no average. Runs without errors are not listed.",
        notices=(Notice(f"{failed:,} of {requests:,} requests failed.{notes}"),),
        tables=(Table("Errors by kind", ("run", "requests", "failed", *kinds), rows),),
    )


def runs_section(measured: Sequence[Measured]) -> Section:
    columns = (
        ("measured_s", "measured (s)", False),
        ("sessions", "sessions", False),
        ("requests", "requests", False),
        ("ttft_s_mean", "TTFT mean (s)", False),
        ("ttft_s_p99", "TTFT p99 (s)", False),
        ("output_tokens_per_s", "output (tokens/s)", False),
        ("hit_rate", "hit rate", True),
        ("schedule_error_ms_p99", "sent late p99 (ms)", False),
        ("client_cores", "client (cores)", False),
    )
    rows = tuple(
        (
            Cell(f"{each.label}, {each.load.label}"),
            Cell(each.run.ended),
            *(Cell(shown(each.number(key), share=share) or "–") for key, _, share in columns),
        )
        for each in measured
    )
    heads = ("run", "ended by", *(head for _, head, _ in columns))
    return Section("runs", "Runs", "All runs", tables=(Table("One line a run", heads, rows),))


def _verdict(spec: FigureSpec, *, lower: bool) -> Verdict:
    return Verdict.BETTER if lower is (spec.better is Better.LOWER) else Verdict.WORSE


def _times(change: float) -> str:
    """Two decimals, fewer where large and more where they would say nothing."""
    return (
        f"{change:,.1f}×"
        if change >= 10
        else f"{change:.2f}×"
        if change >= 0.1
        else f"{change:.2g}×"
    )


def _headline_load(measured: Sequence[Measured], mode: str) -> LoadPoint | None:
    common = [load for load in common_loads(measured) if load.mode == mode]
    every = [load for load in loads(measured) if load.mode == mode]
    return next(reversed(common or every), None)


def _baseline(runs: Sequence[Measured], key: str) -> float | None:
    """The first record's; None if it has no run among these."""
    return next((each.number(key) for each in runs if each.slot == 0), None)


def _card(spec: FigureSpec, where: str, entries: Sequence[_Entry]) -> Card:
    top = max(each.value for each in entries if each.value is not None)
    baseline = next((each.value for each in entries if each.slot == 0), None)
    rows = []
    for each in entries:
        cell = changed(spec, each.value, baseline if each.slot else None)
        unit = f" {spec.unit}" if spec.unit and each.value is not None else ""
        length = (each.value or 0.0) / top if top else 0.0
        rows.append(
            CardRow(
                each.label, each.slot, Cell(cell.text + unit, cell.change, cell.verdict), length
            )
        )
    good = "lower is better" if spec.better is Better.LOWER else "higher is better"
    return Card(spec.name, f"{where}, {good}", tuple(rows))


def _said(value: object) -> str:
    if value is None:
        return "unknown"
    if isinstance(value, dict):
        return ", ".join(f"{key}: {_said(each)}" for key, each in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(_said(each) for each in value)
    return str(value)
