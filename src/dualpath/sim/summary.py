"""What is kept of a simulated run: some dozens of numbers, where a run's records may be millions.

Pure. Times are seconds. What counts are the requests that arrived in a stretch of the run: all of it where
agents start at once, a later part where they keep arriving. A request without a first token at the end
counts with the time that it has waited. The time to the second token is apart from the time per output
token, which is therefore of the third token and later ones.

Balance, of storage NICs and of ranks' attention alike: the busiest by the mean of all, summed over the run's
busy windows. A window is WINDOW seconds, since one of a second holds a few reads only and mostly shows their
size; those are busy in which the mean is near its highest, BUSY of its BUSY_QUANTILE. Published balances are
of a loaded system, and while agents end one after the other there is little to balance.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:  # It brings numba.
    from dualpath.sim.outcome import Outcome

__all__ = [
    "BUSY",
    "BUSY_QUANTILE",
    "FINER",
    "POINTS",
    "WINDOW",
    "Balance",
    "Spread",
    "Summary",
    "balance_of",
    "summary_of",
    "summary_of_ended",
]

Float64 = npt.NDArray[np.float64]

POINTS = 60
"""Of a series over time."""
BUSY, BUSY_QUANTILE = 0.8, 0.95
WINDOW = 10
FINER = (1, 2, 5)
"""Of the run's windows, which are a second."""

_MARKS = ("arrived_s", "assigned_s", "read_s", "prefill_s", "first_token_s")
_PARTS = ("queued", "read", "wait", "prefill")


class Spread(msgspec.Struct, frozen=True):
    """Mean and quantiles; 0 of nothing."""

    mean_s: float
    p50_s: float
    p90_s: float
    p99_s: float


class Balance(msgspec.Struct, frozen=True):
    """`max_mean`: of the busiest by the mean of all, in the busy windows, which are `share` of all windows.
    `finer`: the same with windows of FINER seconds. `series`: in POINTS equal stretches of the run, busy
    or not; 1 where nothing happened."""

    max_mean: float
    share: float
    finer: tuple[float, ...]
    series: tuple[float, ...]


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """`requests`, `*_tokens`, times and parts are of what counts; the rest is of the whole run.

    `parts_s`: means of what the time to the first token consists of. `halves_differ`: how far the means of
    TTFT and TPOT differ between the halves of what counts, the larger of both: the paper calls up to 0.05
    steady. `*_snic`: how much of their rate the storage NICs of a role read, in POINTS equal stretches.
    """

    jct_s: float
    from_s: float
    until_s: float
    events: int
    agents: int
    unfinished_agents: int
    requests: int
    prompt_tokens: int
    hit_tokens: int
    output_tokens: int
    ttft: Spread
    ttst: Spread
    tpot: Spread
    request: Spread
    parts_s: dict[str, float]
    halves_differ: float
    snic_utilization: float
    prefill_snic: tuple[float, ...]
    decode_snic: tuple[float, ...]
    snic_balance: Balance
    attention_balance: Balance
    prefill_busy_share: float
    decode_busy_share: float


def summary_of(outcome: Outcome, from_s: float = 0.0, until_s: float | None = None) -> Summary:
    """Of requests that arrived in [from_s, until_s), a run's horizon; without one, of a run to its end."""
    end_s = outcome.end_s if until_s is None else until_s
    records = outcome.records
    arrived_s = records.arrived_s
    counted = records[(arrived_s >= from_s) & (arrived_s <= end_s)]
    times = {
        name: counted[name].astype(np.float64) for name in (*_MARKS, "second_token_s", "finished_s")
    }
    started = times["first_token_s"] > 0
    finished = times["finished_s"] > 0
    second = times["second_token_s"] > 0
    third = finished & (counted.output_tokens > 2)
    ttft = np.where(started, times["first_token_s"], end_s) - times["arrived_s"]
    ttst = (times["second_token_s"] - times["first_token_s"])[second]
    tpot = (times["finished_s"] - times["second_token_s"])[third] / (
        counted.output_tokens[third] - 2
    )
    request = np.where(finished, times["finished_s"], end_s) - times["arrived_s"]
    in_first_half = times["arrived_s"] < (from_s + end_s) / 2
    prefill_nodes = outcome.prefill_nodes
    series = _stretches(outcome.snic_bytes / (outcome.snic_bytes_s * outcome.window_s))
    return Summary(
        jct_s=outcome.jct_s,
        from_s=from_s,
        until_s=end_s,
        events=outcome.events,
        agents=len(np.unique(records.agent)),
        unfinished_agents=outcome.unfinished_agents,
        requests=len(counted),
        prompt_tokens=int(counted.prompt_tokens.sum(dtype=np.int64)),
        hit_tokens=int(counted.hit_tokens.sum(dtype=np.int64)),
        output_tokens=int(counted.output_tokens.sum(dtype=np.int64)),
        ttft=_spread(ttft),
        ttst=_spread(ttst),
        tpot=_spread(tpot),
        request=_spread(request),
        parts_s={
            part: _mean((times[after] - times[before])[started])
            for part, before, after in zip(_PARTS, _MARKS, _MARKS[1:], strict=False)
        },
        halves_differ=max(
            _differ(ttft[in_first_half], ttft[~in_first_half]),
            _differ(tpot[in_first_half[third]], tpot[~in_first_half[third]]),
        ),
        snic_utilization=outcome.snic_utilization(),
        prefill_snic=_rounded(series[:prefill_nodes].mean(axis=0)),
        decode_snic=_rounded(series[prefill_nodes:].mean(axis=0)),
        snic_balance=balance_of(outcome.snic_bytes, len(outcome.snic_bytes)),
        attention_balance=balance_of(outcome.attention_s, outcome.prefill_instance_engines),
        prefill_busy_share=outcome.prefill_busy_share,
        decode_busy_share=outcome.decode_busy_share,
    )


def summary_of_ended(outcome: Outcome) -> Summary:
    """Of a run that was interrupted: only requests that ended count, of all of the run so far. `jct_s` is
    then when it was interrupted, and completes nothing; halves have nothing steady to compare."""
    ended = outcome.records[outcome.records.finished_s > 0]
    found = summary_of(replace(outcome, records=ended))
    return msgspec.structs.replace(found, agents=outcome.agents)


def balance_of(series: Float64, size: int) -> Balance:
    """Of `series` [units, windows], whose units are groups of `size` that are balanced each by itself."""
    max_mean, share = _busy_balance(_merged(series, WINDOW), size)
    stretches = _stretches(series).reshape(-1, size, POINTS)
    top, middle = stretches.max(axis=1).sum(axis=0), stretches.mean(axis=1).sum(axis=0)
    return Balance(
        max_mean=max_mean,
        share=share,
        finer=tuple(_busy_balance(_merged(series, count), size)[0] for count in FINER),
        series=_rounded(np.divide(top, middle, out=np.ones(POINTS), where=middle > 0)),
    )


def _busy_balance(series: Float64, size: int) -> tuple[float, float]:
    """In the busy windows, and what share of all they are; 1 when nothing happened."""
    grouped = series.reshape(-1, size, series.shape[1])
    most, mean = grouped.max(axis=1), grouped.mean(axis=1)
    busy = mean >= BUSY * np.quantile(mean, BUSY_QUANTILE, axis=1, keepdims=True)
    busy &= mean > 0
    total = float(mean[busy].sum())
    return float(most[busy].sum()) / total if total else 1.0, float(busy.mean())


def _merged(series: Float64, count: int) -> Float64:
    """Windows that are `count` times as long; what is left over at the end is one more."""
    starts = np.arange(0, series.shape[1], count)
    merged: Float64 = np.add.reduceat(series, starts, axis=1)
    return merged


def _stretches(series: Float64) -> Float64:
    """[units, POINTS]: means over equal stretches of all windows."""
    windows = series.shape[1]
    edges = np.linspace(0, windows, POINTS + 1)
    start = np.zeros((len(series), 1))
    total = np.concatenate((start, np.cumsum(series, axis=1)), axis=1)
    at_edges = np.stack([np.interp(edges, np.arange(windows + 1), each) for each in total])
    means: Float64 = np.diff(at_edges, axis=1) * POINTS / windows
    return means


def _spread(values: Float64) -> Spread:
    if not len(values):
        return Spread(0.0, 0.0, 0.0, 0.0)
    return Spread(
        _mean(values), *np.quantile(values, (0.5, 0.9, 0.99), method="inverted_cdf").tolist()
    )


def _mean(values: Float64) -> float:
    return float(values.mean()) if len(values) else 0.0


def _differ(first: Float64, second: Float64) -> float:
    """Of the means, by the larger."""
    means = _mean(first), _mean(second)
    return abs(means[0] - means[1]) / max(means) if max(means) > 0 else 0.0


def _rounded(values: Float64) -> tuple[float, ...]:
    return tuple(float(f"{each:.4g}") for each in values)
