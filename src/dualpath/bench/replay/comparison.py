"""Results side by side: runs matched by their load, each figure with its ratio to the first record's. Pure.

Knows what each figure is called, its unit and which way is good; not how it is shown. Loads match when agents
are equal, or rates to six digits.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TypeGuard

from dualpath.base.slo import SLO_METRICS
from dualpath.bench.harness import Figure
from dualpath.bench.replay.figures import ended_well, errors_by_kind, run_figures
from dualpath.bench.replay.figures import measured as due
from dualpath.bench.replay.records import ReplayRecord, RequestRecord, Run
from dualpath.bench.replay.slo import Slo

__all__ = [
    "FIGURES",
    "MAX_APS",
    "Better",
    "FigureSpec",
    "LoadPoint",
    "Measured",
    "common_loads",
    "differences",
    "failures",
    "labels",
    "loads",
    "max_aps",
    "measure",
    "ratio",
    "slo_of",
]

_SETUP = (
    "trace",
    "trace_sessions",
    "trace_turns",
    "model",
    "seed",
    "slo",
    "speed",
    "delays",
    "max_context",
    "output_tokens",
    "first_round_tokens",
)
"""What two results must share to be compared."""


class Better(Enum):
    LOWER = "lower"
    HIGHER = "higher"
    NEITHER = "neither"


@dataclass(frozen=True, slots=True)
class FigureSpec:
    """`key` as in a run's figures. `unit` is that of the figure times `scale`. `share`: a fraction of one."""

    key: str
    name: str
    unit: str
    better: Better
    share: bool = False
    scale: float = 1.0


_TIMES = (
    ("ttft_s", "TTFT", "s", 1.0),
    ("ttst_s", "TTST", "ms", 1e3),
    ("tpot_s", "TPOT", "ms", 1e3),
    ("e2e_s", "End to end", "s", 1.0),
)

FIGURES = (
    FigureSpec("jct_s", "JCT", "s", Better.LOWER),
    FigureSpec("session_jct_s_mean", "Session JCT, mean", "s", Better.LOWER),
    FigureSpec("session_jct_s_p99", "Session JCT, p99", "s", Better.LOWER),
    *(
        FigureSpec(f"{key}_{cut}", f"{name}, {cut}", unit, Better.LOWER, scale=scale)
        for key, name, unit, scale in _TIMES
        for cut in ("mean", "p50", "p99")
    ),
    FigureSpec("itl_s_p99", "ITL, p99", "ms", Better.LOWER, scale=1e3),
    FigureSpec("output_tokens_per_s", "Output tokens", "tokens/s", Better.HIGHER),
    FigureSpec("prompt_tokens_per_s", "Prompt tokens", "tokens/s", Better.HIGHER),
    FigureSpec("requests_per_s", "Requests", "requests/s", Better.HIGHER),
    FigureSpec("goodput_rps", "Goodput", "requests/s", Better.HIGHER),
    FigureSpec("slo_attainment", "SLO attainment", "", Better.HIGHER, share=True),
    FigureSpec("hit_rate", "Prefix hit rate", "", Better.HIGHER, share=True),
    FigureSpec("snic_max_over_mean", "SNIC balance, max/mean", "", Better.LOWER),
    FigureSpec("error_rate", "Errors", "", Better.LOWER, share=True),
    FigureSpec("requests", "Requests ended", "", Better.NEITHER),
)
"""What comparisons show of a run, in this order."""

MAX_APS = FigureSpec("max_aps", "Highest sustained rate", "agents/s", Better.HIGHER)
"""Of a whole record."""


@dataclass(frozen=True, slots=True, order=True)
class LoadPoint:
    """What was offered: `value` agents at once (offline) or agents a second (online)."""

    mode: str
    value: float

    @property
    def label(self) -> str:
        if self.mode == "online":
            return f"{self.value:.4g} agents/s"
        return f"{self.value:g} agent{'' if self.value == 1 else 's'} at once"


@dataclass(frozen=True, slots=True)
class Measured:
    """One run of a record. `slot`: the record's place among those compared; `label`: its unique name."""

    slot: int
    label: str
    load: LoadPoint
    run: Run
    figures: Mapping[str, Figure]

    def number(self, key: str) -> float | None:
        """A figure of one value; None if the run does not have it."""
        value = self.figures.get(key)
        return float(value) if isinstance(value, int | float) else None

    @property
    def counted(self) -> list[RequestRecord]:
        """Requests whose latencies count."""
        return ended_well(due(self.run))


def measure(records: Sequence[ReplayRecord]) -> list[Measured]:
    """All runs, by record and load; of several runs of a record under one load the last."""
    found = []
    for slot, (record, label) in enumerate(zip(records, labels(records), strict=True)):
        by_load = {_load(run): run for run in record.runs}
        slo = slo_of(record)
        for load, run in sorted(by_load.items(), key=lambda each: each[0]):
            found.append(Measured(slot, label, load, run, run_figures(run, slo)))
    return found


def slo_of(record: ReplayRecord) -> Slo | None:
    """What `--slo` said; None if nothing."""
    said = record.setup.get("slo")
    if not isinstance(said, Mapping):
        return None
    limits_s = {metric: said[metric] for metric in SLO_METRICS if _is_number(said.get(metric))}
    return Slo(limits_s) if limits_s else None


def max_aps(record: ReplayRecord) -> float | None:
    """What `--find-max-aps` found; None if it was not looked for."""
    found = record.figures.get(MAX_APS.key)
    return float(found) if _is_number(found) else None


def loads(measured: Iterable[Measured]) -> list[LoadPoint]:
    """Every load of any record, in order."""
    return sorted({each.load for each in measured})


def common_loads(measured: Sequence[Measured]) -> list[LoadPoint]:
    """Those that every record has."""
    slots = {each.slot for each in measured}
    return [
        load
        for load in loads(measured)
        if {each.slot for each in measured if each.load == load} == slots
    ]


def ratio(value: float | None, baseline: float | None) -> float | None:
    """None where one is missing or the baseline is 0."""
    if value is None or baseline is None or baseline == 0:
        return None
    return value / baseline


def differences(records: Sequence[ReplayRecord]) -> list[str]:
    """Sentences about what the results do not share though they should."""
    found = []
    for key in _SETUP:
        values = {
            label: record.setup.get(key)
            for record, label in zip(records, labels(records), strict=True)
        }
        if len({str(value) for value in values.values()}) > 1:
            said = ", ".join(
                f"{label}: {'not said' if value is None else value}"
                for label, value in values.items()
            )
            name = key.replace("_", " ")
            found.append(f"Not the same {name}: {said}.")
    return found


def failures(measured: Iterable[Measured]) -> list[str]:
    """Sentences about the runs in which requests failed: what failed agents left undone is in no figure."""
    found = []
    for each in measured:
        errors = sum(errors_by_kind(due(each.run)).values())
        if errors:
            found.append(
                f"{each.label}, {each.load.label}: {errors:,} of {each.figures['requests']:,} requests "
                "failed. Their agents did no more, so JCT and latencies are of less work."
            )
    return found


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float)


def _load(run: Run) -> LoadPoint:
    value = float(run.agents or 0) if run.mode == "offline" else float(f"{run.rate_aps or 0.0:.6g}")
    return LoadPoint(run.mode, value)


def labels(records: Sequence[ReplayRecord]) -> tuple[str, ...]:
    """Of the records, made unique by a number."""
    seen: dict[str, int] = {}
    found = []
    for record in records:
        count = seen[record.label] = seen.get(record.label, 0) + 1
        found.append(record.label if count == 1 else f"{record.label} ({count})")
    return tuple(found)
