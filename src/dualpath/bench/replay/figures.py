"""The figures of a run: pure functions of its records.

What is measured: latencies of the requests that were due from `run.from_s` on and ended well, from when
they were due; rates of what ended between `run.from_s` and the end of the run. Failed requests are in no
average; their number stands beside it, by kind. A figure that nothing was measured for is absent, never 0.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise

import numpy as np

from dualpath.bench.harness import Figure
from dualpath.bench.replay.records import RequestRecord, Run, ServerSample
from dualpath.bench.replay.server_metrics import counted_hit_rate, counted_parts, label_value
from dualpath.bench.replay.slo import Slo

__all__ = [
    "OTHER_PART",
    "by_run",
    "distribution",
    "ended_well",
    "errors_by_kind",
    "hit_rate",
    "measured",
    "run_figures",
    "run_key",
    "snic_balance",
    "tokens_by_path",
    "ttft_at_least",
    "ttft_parts",
]

OTHER_PART = "other"
"""What of the time to the first token the parts that the server reports do not cover."""

_PERCENTILES = (50, 90, 95, 99)
_BALANCE_WINDOW_S = 10.0
_SNIC_BYTES = "dualpath:snic_read_bytes_total"


def run_figures(run: Run, slo: Slo | None = None) -> dict[str, Figure]:
    """All figures by name, `METRIC_UNIT_STATISTIC`."""
    return {
        **_counts(run),
        **_rates(run, slo),
        **_latencies(run),
        **_session_times(run),
        **_cache(run),
        **_client(run),
    }


def by_run(runs: Sequence[Run], slo: Slo | None = None) -> dict[str, Figure]:
    """Of one run as they are; of several each figure by the run's key."""
    if len(runs) == 1:
        return run_figures(runs[0], slo)
    figures: dict[str, dict[str, Figure]] = {}
    for run in runs:
        for name, figure in run_figures(run, slo).items():
            figures.setdefault(name, {})[run_key(run)] = figure
    return dict(figures)


def run_key(run: Run) -> str:
    """What tells runs of one command apart: the agents offline, the rate online, to four digits."""
    return f"{run.agents}" if run.rate_aps is None else f"{run.rate_aps:.4g}"


# Which requests.


def measured(run: Run) -> list[RequestRecord]:
    """Due after the warm-up, however they went."""
    return [each for each in run.requests if each.scheduled_s >= run.from_s]


def ended_well(requests: Iterable[RequestRecord]) -> list[RequestRecord]:
    return [each for each in requests if not each.error and each.end_s is not None]


def errors_by_kind(requests: Iterable[RequestRecord]) -> dict[str, int]:
    """Most frequent first."""
    return dict(Counter(each.error for each in requests if each.error).most_common())


# Statistics.


def distribution(name: str, values: Iterable[float | None]) -> dict[str, Figure]:
    """`NAME_mean`, `NAME_p50`, ... of those that are not None; {} if none is. Percentiles are
    interpolated."""
    known = np.array([each for each in values if each is not None], np.float64)
    if not known.size:
        return {}
    cuts = np.percentile(known, _PERCENTILES)
    return {
        f"{name}_mean": float(known.mean()),
        **{f"{name}_p{cut}": float(each) for cut, each in zip(_PERCENTILES, cuts, strict=True)},
    }


def ttft_parts(run: Run) -> dict[str, float]:
    """Mean seconds of the parts of the time to the first token, over the requests whose server reports
    them, in the server's order, and OTHER_PART. Where none does, the means that the server counts over the
    run; {} if it does not either."""
    requests = ended_well(measured(run))
    reported = [each for each in requests if each.timings and each.ttft_s is not None]
    if not reported:
        return _counted_parts(run, requests)
    sums: dict[str, float] = {}
    total_s = 0.0
    for each in reported:
        total_s += each.ttft_s or 0.0
        for part, seconds in each.timings.items():
            name = part.removesuffix("_s")
            sums[name] = sums.get(name, 0.0) + seconds
    sums[OTHER_PART] = total_s - sum(sums.values())
    return {part: seconds / len(reported) for part, seconds in sums.items()}


def _counted_parts(run: Run, requests: Iterable[RequestRecord]) -> dict[str, float]:
    parts = counted_parts([each for each in run.samples if each.at_s >= run.from_s])
    ttft_s = [each.ttft_s for each in requests if each.ttft_s is not None]
    if parts and ttft_s:
        parts[OTHER_PART] = sum(ttft_s) / len(ttft_s) - sum(parts.values())
    return parts


def ttft_at_least(run: Run) -> dict[str, Figure]:
    """As `distribution("ttft_s", ...)`, with the requests that were cut off before their first token, which
    would have taken at least as long as they waited: what overload does to those whose answers never came."""
    waited = [
        run.duration_s - each.scheduled_s
        for each in measured(run)
        if not each.error and each.first_s is None
    ]
    known = [each.ttft_s for each in measured(run) if not each.error]
    return distribution("ttft_s", [*known, *waited])


def hit_rate(run: Run) -> float | None:
    """Cached tokens by prompt tokens, as the answers say; where they do not, as the server counts over the
    run; None if it does not either."""
    told = [each for each in ended_well(measured(run)) if each.cached_tokens >= 0]
    prompt_tokens = sum(each.prompt_tokens for each in told)
    if not prompt_tokens:
        return counted_hit_rate([each for each in run.samples if each.at_s >= run.from_s])
    return sum(each.cached_tokens for each in told) / prompt_tokens


def tokens_by_path(requests: Iterable[RequestRecord]) -> dict[str, int]:
    """Cached tokens by the side that read them."""
    tokens: Counter[str] = Counter()
    for each in requests:
        tokens.update(each.cached_by_path)
    return dict(sorted(tokens.items()))


def snic_balance(
    samples: Sequence[ServerSample], *, from_s: float = 0.0, window_s: float = _BALANCE_WINDOW_S
) -> float | None:
    """Bytes read by the busiest storage NIC over the mean of all, the average over windows in which
    anything was read (paper, section 7: 1.18 against 1.53 round robin). None with fewer than two NICs or no
    samples."""
    reads = [
        (sample.at_s, groups)
        for sample in samples
        if sample.at_s >= from_s and (groups := _bytes_by_group(sample.metrics))
    ]
    if not reads:
        return None
    edges = reads[:1]
    for at_s, groups in reads[1:]:
        if at_s >= edges[-1][0] + window_s:
            edges.append((at_s, groups))
    if edges[-1][0] < reads[-1][0] and len(edges) == 1:
        edges.append(reads[-1])
    ratios = []
    for (_, before), (_, after) in pairwise(edges):
        moved = [after[group] - before.get(group, 0.0) for group in after]
        if len(moved) > 1 and sum(moved) > 0:
            ratios.append(max(moved) * len(moved) / sum(moved))
    return sum(ratios) / len(ratios) if ratios else None


# Groups of figures.


def _counts(run: Run) -> dict[str, Figure]:
    requests = measured(run)
    errors = errors_by_kind(requests)
    ended = len(ended_well(requests)) + sum(errors.values())
    failed = {each.session for each in run.requests if each.error}
    asked = Counter(each.session for each in run.requests)
    figures: dict[str, Figure] = {
        "ended": run.ended,
        "duration_s": run.duration_s,
        "measured_s": run.duration_s - run.from_s,
        "sessions": len(run.sessions),
        "sessions_finished": sum(each.finished_s is not None for each in run.sessions),
        "sessions_failed": len(failed),
        "requests": ended,
        "requests_cut_off": len(requests) - ended,
        # Later turns of sessions that failed.
        "turns_not_run": sum(run.sessions[each].turns - asked[each] for each in failed),
        "errors": dict(errors),
    }
    if ended:
        figures["error_rate"] = sum(errors.values()) / ended
    return figures


def _rates(run: Run, slo: Slo | None) -> dict[str, Figure]:
    seconds = run.duration_s - run.from_s
    if seconds <= 0:
        return {}
    ended = [each for each in ended_well(run.requests) if (each.end_s or 0.0) >= run.from_s]
    figures: dict[str, Figure] = {
        "requests_per_s": len(ended) / seconds,
        "prompt_tokens_per_s": sum(each.prompt_tokens for each in ended) / seconds,
        "output_tokens_per_s": sum(each.output_tokens for each in ended) / seconds,
    }
    if slo is None:
        return figures
    figures["goodput_rps"] = sum(slo.met_by(each) for each in ended) / seconds
    due = measured(run)
    met = sum(slo.met_by(each) for each in due)
    missed = sum(slo.missed_by(each, run.duration_s) for each in due)
    if met + missed:
        figures["slo_attainment"] = met / (met + missed)
    return figures


_LATENCIES: Mapping[str, Callable[[RequestRecord], float | None]] = {
    "ttft_s": lambda each: each.ttft_s,
    "ttst_s": lambda each: each.ttst_s,
    "tpot_s": lambda each: each.tpot_s,
    "e2e_s": lambda each: each.e2e_s,
}


def _latencies(run: Run) -> dict[str, Figure]:
    requests = ended_well(measured(run))
    figures: dict[str, Figure] = {}
    for name, latency in _LATENCIES.items():
        figures |= distribution(name, map(latency, requests))
    if run.itl_s:
        figures |= {f"itl_s_p{cut}": run.itl_s[cut] for cut in _PERCENTILES}
    parts = ttft_parts(run)
    if parts:
        figures["ttft_parts_s"] = dict(parts)
    return figures


def _session_times(run: Run) -> dict[str, Figure]:
    """JCT: offline, the time until all agents have ended; and of each session."""
    figures: dict[str, Figure] = {}
    if run.mode == "offline" and run.ended == "complete":
        figures["jct_s"] = run.duration_s
    times = [
        each.finished_s - each.scheduled_s
        for each in run.sessions
        if each.finished_s is not None and each.scheduled_s >= run.from_s
    ]
    figures |= distribution("session_jct_s", times)
    if times:
        figures["session_jct_s_max"] = max(times)
    return figures


def _cache(run: Run) -> dict[str, Figure]:
    requests = ended_well(measured(run))
    figures: dict[str, Figure] = {}
    rate = hit_rate(run)
    if rate is not None:
        figures["hit_rate"] = rate
    tokens = tokens_by_path(requests)
    if sum(tokens.values()):
        total = sum(tokens.values())
        figures["share_by_path"] = {path: count / total for path, count in tokens.items()}
    balance = snic_balance(run.samples, from_s=run.from_s)
    if balance is not None:
        figures["snic_max_over_mean"] = balance
    return figures


def _client(run: Run) -> dict[str, Figure]:
    """How well this process kept to the schedule, and what it cost."""
    late_ms = [(each.sent_s - each.scheduled_s) * 1e3 for each in measured(run)]
    figures: dict[str, Figure] = {}
    if late_ms:
        p50, p99 = np.percentile(late_ms, (50, 99))
        figures |= {"schedule_error_ms_p50": float(p50), "schedule_error_ms_p99": float(p99)}
    if run.duration_s > 0:
        figures["client_cores"] = run.client_cpu_s / run.duration_s
    return figures


def _bytes_by_group(metrics: Mapping[str, float]) -> dict[str, float]:
    found = {}
    for exported, value in metrics.items():
        group = label_value(exported, _SNIC_BYTES, "group")
        if group is not None:
            found[group] = value
    return found
