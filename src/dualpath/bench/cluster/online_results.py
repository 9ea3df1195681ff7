"""The figures of `dualpath bench online`, from what was measured. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from dualpath.bench.cluster.answers import Answers, wrong_tokens
from dualpath.bench.harness import Figure
from dualpath.bench.replay.campaign import Found
from dualpath.bench.replay.figures import ended_well, hit_rate, run_key, ttft_parts
from dualpath.bench.replay.records import RequestRecord, Run
from dualpath.bench.replay.slo import Slo

__all__ = ["OnlineMeasured", "online_figures"]

_DUAL = "split"


@dataclass(frozen=True, slots=True, kw_only=True)
class OnlineMeasured:
    """One system. `common`: at the rate at which all systems are compared; `answers`: of that run, empty
    where they mean nothing. `bound_aps`: agents a second that its storage NICs can bring KV for."""

    system: str
    slo: Slo
    alone: Run
    common: Run
    found: Found
    bound_aps: float
    answers: Answers


def online_figures(measured: Sequence[OnlineMeasured]) -> dict[str, Figure]:
    """Basic comes first, and is what gains and ratios are to."""
    basic = measured[0]
    by_name = {each.system: each for each in measured}
    figures: dict[str, Figure] = {}
    for name in (_DUAL, "shorter"):
        gain = _gain(by_name.get(name), basic)
        if gain is not None:
            figures[f"aps_gain_{name}"] = gain
    dual = by_name.get(_DUAL)
    if dual is not None:
        for metric in ("ttst", "tpot"):
            ratio = _ratio(_mean(dual.common, metric), _mean(basic.common, metric))
            if ratio is not None:
                figures[f"{metric}_ratio"] = ratio
            middle = _ratio(_median(dual.common, metric), _median(basic.common, metric))
            if middle is not None:
                figures[f"{metric}_ratio_p50"] = middle
    figures["wrong_tokens"] = sum(
        wrong_tokens(basic.answers, each.answers) for each in measured if each.answers
    )
    figures["max_aps"] = {each.system: each.found.best_aps or 0.0 for each in measured}
    figures["bound_aps"] = {each.system: each.bound_aps for each in measured}
    figures["tried_aps"] = {
        each.system: {
            f"{rate:.4g}": problem or "sustained" for rate, problem in each.found.problems.items()
        }
        for each in measured
    }
    for metric in ("ttft", "ttst", "tpot"):
        figures[f"{metric}_s_alone"] = _means(measured, metric, alone=True)
        figures[f"{metric}_s_common"] = _means(measured, metric, alone=False)
        figures[f"{metric}_s_mean"] = {
            each.system: {
                run_key(run): mean
                for run in _by_rate(each)
                if (mean := _mean(run, metric)) is not None
            }
            for each in measured
        }
    figures["ttft_parts_s"] = {
        each.system: {run_key(run): dict(ttft_parts(run)) for run in _by_rate(each)}
        for each in measured
    }
    rates = {each.system: hit_rate(each.common) for each in measured}
    figures["hit_rate"] = {name: rate for name, rate in rates.items() if rate is not None}
    return figures


def _by_rate(each: OnlineMeasured) -> list[Run]:
    return sorted([each.common, *each.found.runs], key=lambda run: run.rate_aps or 0.0)


def _means(measured: Sequence[OnlineMeasured], metric: str, *, alone: bool) -> dict[str, Figure]:
    found = {each.system: _mean(each.alone if alone else each.common, metric) for each in measured}
    return {name: mean for name, mean in found.items() if mean is not None}


def _mean(run: Run, metric: str) -> float | None:
    values = _values(run, metric)
    return statistics.fmean(values) if values else None


def _median(run: Run, metric: str) -> float | None:
    values = _values(run, metric)
    return statistics.median(values) if values else None


def _values(run: Run, metric: str) -> list[float]:
    return [
        seconds
        for each in ended_well(run.requests)
        if (seconds := _latency_s(each, metric)) is not None
    ]


def _latency_s(request: RequestRecord, metric: str) -> float | None:
    match metric:
        case "ttft":
            return request.ttft_s
        case "ttst":
            return request.ttst_s
        case _:
            return request.tpot_s


def _gain(system: OnlineMeasured | None, basic: OnlineMeasured) -> float | None:
    """None where basic sustained nothing."""
    return None if system is None else _ratio(system.found.best_aps or 0.0, basic.found.best_aps)


def _ratio(above: float | None, below: float | None) -> float | None:
    return above / below if above is not None and below else None
