"""The runs of one command: one, a sweep over agents or rates, or the search for the highest rate.

Makes the loads from a trace and plays them one after the other. Knows no HTTP and no command line: who
plays a load is given. Invariant: each run has tokens of its own (another seed), so that what an earlier run
left in the server's cache is no hit; the arrival times of runs at different rates come from the same draws.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice

from dualpath.base.errors import ConfigError
from dualpath.bench.harness import Figure
from dualpath.bench.replay.figures import run_figures, ttft_at_least
from dualpath.bench.replay.load import OfflineLoad, OnlineLoad
from dualpath.bench.replay.records import Run
from dualpath.bench.replay.search import RateSearch
from dualpath.bench.replay.slo import Slo
from dualpath.bench.replay.steady import Verdict
from dualpath.traces.arrivals import by_start, poisson, recorded
from dualpath.traces.model import Trace
from dualpath.traces.select import FIRST_ROUND_TOKENS, take_sessions

__all__ = [
    "INTERRUPTED",
    "Acceptance",
    "Arrivals",
    "Found",
    "LoadMaker",
    "Play",
    "find_max_rate",
    "play_all",
]

INTERRUPTED = "interrupted"

Play = Callable[[OfflineLoad | OnlineLoad, int, str], Awaitable[Run]]
"""Plays a load, the n-th of the command, with a title for people."""

MAX_SESSIONS = 10_000
"""Of an online run without a duration, unless said otherwise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrivals:
    """When agents arrive. `kind`: "poisson"; "trace", as the sessions' starts say; or "recorded", as
    `times_s` say, again and again. `seed`: of the Poisson process. `max_sessions`, `duration_s`: none
    arrive after."""

    kind: str = "poisson"
    times_s: Sequence[float] = ()
    seed: int = 0
    max_sessions: int | None = None
    duration_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadMaker:
    """Loads of sessions of `trace`, whose times are as they shall be played; copies with a synthetic first
    round of `first_round_tokens` where it has too few, as far as these fit into `max_context` tokens.
    `seed`: takes them in random order; None: in order."""

    trace: Trace
    first_round_tokens: int = FIRST_ROUND_TOKENS
    max_context: int | None = None
    seed: int | None = None
    arrivals: Arrivals = field(default_factory=Arrivals)

    def offline(self, agents: int) -> OfflineLoad:
        return OfflineLoad(self._take(agents).sessions)

    def online(self, rate_aps: float | None) -> OnlineLoad:
        """At a rate, or at that of the recording."""
        plan = self.arrivals
        if plan.kind == "trace":
            count = plan.max_sessions or len(self.trace.sessions)
            trace = by_start(self._take(count))
            times_s = [each.start_s or 0.0 for each in trace.sessions]
            if rate_aps is not None:
                times_s = list(islice(recorded(times_s, rate_aps), count))
            times_s = self._through_duration(times_s)
            return OnlineLoad(trace.sessions[: len(times_s)], times_s, rate_aps or _rate(times_s))
        if plan.kind == "recorded":
            endless = recorded(plan.times_s, rate_aps)
        elif rate_aps is None:
            raise ConfigError("--aps: Poisson arrivals need a rate")
        else:
            endless = poisson(rate_aps, plan.seed)
        if plan.duration_s is None:
            count = plan.max_sessions or len(plan.times_s) or MAX_SESSIONS
            times_s = list(islice(endless, count))
        else:
            times_s = self._through_duration(islice(endless, plan.max_sessions))
        sessions = self._take(len(times_s)).sessions if times_s else ()
        return OnlineLoad(sessions, times_s, rate_aps or _rate(times_s))

    def _take(self, count: int) -> Trace:
        return take_sessions(
            self.trace,
            count,
            seed=self.seed,
            first_round_tokens=self.first_round_tokens,
            max_context=self.max_context,
        )

    def _through_duration(self, times_s: Iterable[float]) -> list[float]:
        """With the first that is too late: by it the runner knows that arrivals had not ended."""
        limit_s = self.arrivals.duration_s
        if limit_s is None:
            return list(times_s)
        found = []
        for at_s in times_s:
            found.append(at_s)
            if at_s >= limit_s:
                break
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Acceptance:
    """When a rate counts as sustained. The objectives hold by `statistic`: "mean", as in the published
    evaluation, or "p50", "p90", "p95", "p99"."""

    slo: Slo
    statistic: str = "mean"
    max_error_rate: float = 0.0

    def problem(self, run: Run) -> str:
        """Why the run's rate is not sustained; "" when it is."""
        if run.ended in (Verdict.TTFT_LIMIT, Verdict.ERRORS):
            return f"ended: {run.ended}"
        figures = run_figures(run, self.slo)
        error_rate = _number(figures, "error_rate")
        if error_rate is None:
            return "no request ended"
        if error_rate > self.max_error_rate:
            return f"{error_rate:.2%} errors"
        for metric, limit_s in self.slo.limits_s.items():
            seconds = _number(figures, f"{metric}_s_{self.statistic}")
            if seconds is not None and seconds > limit_s:
                return f"{metric} {self.statistic} {seconds:.3g} s exceeds {limit_s:g} s"
        waited_s = _number(ttft_at_least(run), f"ttft_s_{self.statistic}")
        if waited_s is not None and waited_s > self.slo.limits_s.get("ttft", math.inf):
            return f"ttft {self.statistic} is at least {waited_s:.3g} s with those cut off"
        return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What a search found. `best_aps` None: no rate was sustained. `bounded`: a rate was found that is not;
    if not, the server may do more. `problems`: by rate tried, in order, "" where it was sustained."""

    best_aps: float | None
    bounded: bool
    problems: Mapping[float, str]
    runs: Sequence[Run]


async def play_all(loads: Mapping[str, OfflineLoad | OnlineLoad], play: Play) -> list[Run]:
    """One after the other, until all are played or one is interrupted."""
    runs: list[Run] = []
    for title, load in loads.items():
        runs.append(await play(load, len(runs), title))
        if runs[-1].ended == INTERRUPTED:
            break
    return runs


async def find_max_rate(
    maker: LoadMaker, search: RateSearch, acceptance: Acceptance, play: Play
) -> Found:
    """Tries rates until the search has ended or a run is interrupted."""
    runs: list[Run] = []
    problems: dict[float, str] = {}
    while (rate := search.next_rate()) is not None:
        run = await play(maker.online(rate), len(runs), f"{rate:.4g} agents/s")
        runs.append(run)
        if run.ended == INTERRUPTED:
            break
        problems[rate] = acceptance.problem(run)
        search.observe(rate, not problems[rate])
    return Found(best_aps=search.best, bounded=search.bounded, problems=problems, runs=runs)


def _rate(times_s: Sequence[float]) -> float:
    """Of recorded arrivals; 0 where too few to tell."""
    span_s = times_s[-1] - times_s[0] if times_s else 0.0
    return (len(times_s) - 1) / span_s if span_s > 0 else 0.0


def _number(figures: Mapping[str, Figure], name: str) -> float | None:
    value = figures.get(name)
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None
