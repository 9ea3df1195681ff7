"""`dualpath bench replay`: replays sessions of agents against any OpenAI endpoint, and measures it.

The composition root: trace, endpoint, loads, runs, then figures, result file and report. Invariant: Ctrl-C
gives what was measured so far; a second one ends at once.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

from dualpath.base.errors import ConfigError
from dualpath.bench.harness import BenchResult, Figure, Progress, base_setup
from dualpath.bench.replay.arguments import add_arguments
from dualpath.bench.replay.campaign import (
    INTERRUPTED,
    Acceptance,
    Arrivals,
    Found,
    LoadMaker,
    find_max_rate,
    play_all,
)
from dualpath.bench.replay.conversation import Conversation, TokenSource
from dualpath.bench.replay.endpoint import Endpoint, EndpointFacts
from dualpath.bench.replay.figures import by_run, run_key
from dualpath.bench.replay.load import OfflineLoad, OnlineLoad, Tally
from dualpath.bench.replay.progress import show_progress
from dualpath.bench.replay.records import ReplayRecord, Run
from dualpath.bench.replay.runner import run_load
from dualpath.bench.replay.search import RateSearch
from dualpath.bench.replay.settings import Settings, settings_of
from dualpath.bench.replay.summary import print_summary
from dualpath.traces.azure import read_arrivals
from dualpath.traces.catalog import open_trace
from dualpath.traces.generated import SESSIONS
from dualpath.traces.model import Trace
from dualpath.traces.select import limit_context, scale_time, without_delays
from dualpath.traces.summary import statistics

__all__ = ["HELP", "NAME", "NEEDS", "TokenRange", "add_arguments", "run", "show"]

NAME = "replay"
HELP = "replays agent sessions against any OpenAI endpoint: latencies, JCT, the highest rate"
NEEDS = "a server and a trace"

_DEFAULT_VOCABULARY = 32_000


def run(args: argparse.Namespace, progress: Progress) -> BenchResult:
    settings = settings_of(args)
    trace = _open(settings)
    if args.describe:
        figures: dict[str, Figure] = dict(
            asdict(statistics(_limited(trace, settings.max_context)[0]))
        )
        return BenchResult(NAME, figures, {"trace": trace.name, "trace_format": trace.format})
    arrivals = _arrivals(settings)
    if settings.endpoint is None:
        raise ConfigError("--base-url: where is the server? as http://127.0.0.1:8000/v1")
    return asyncio.run(_replay(settings, trace, arrivals, progress))


def show(result: BenchResult) -> None:
    """Prints the result for people."""
    print_summary(result)


@dataclass(frozen=True, slots=True)
class TokenRange:
    """The token ids of prompts, [first, end): without those at both ends of a vocabulary, where tokenizers
    have special tokens and vendors padding. A vocabulary of bytes is used whole."""

    first: int
    end: int

    @classmethod
    def of_vocabulary(cls, size: int | None) -> TokenRange:
        size = size or _DEFAULT_VOCABULARY
        if size < 1000:
            return cls(0, min(size, 256))
        return cls(min(1000, size // 8), size - size // 16)


@dataclass(slots=True)
class _Player:
    """Plays loads against one endpoint."""

    settings: Settings
    endpoint: Endpoint
    tokens: TokenRange
    progress: Progress
    stop: asyncio.Event

    async def play(self, load: OfflineLoad | OnlineLoad, number: int, title: str) -> Run:
        limits = self.settings.limits
        tally = Tally(sessions=len(load.sessions))
        source = self._source(self.settings.seed + number)
        async with show_progress(title, tally, limits.duration_s, self.progress):
            return await run_load(
                load,
                self.endpoint,
                partial(Conversation, source=source),
                limits,
                tally=tally,
                stop=self.stop,
            )

    def _source(self, seed: int) -> TokenSource:
        config = self.settings.endpoint
        if config is not None and config.api == "chat":
            return TokenSource.words(seed)
        return TokenSource(seed, self.tokens.first, self.tokens.end)


async def _replay(
    settings: Settings, trace: Trace, arrivals: Arrivals, progress: Progress
) -> BenchResult:
    assert settings.endpoint is not None
    stop = asyncio.Event()
    async with Endpoint(settings.endpoint) as endpoint:
        facts = await endpoint.probe()
        longest = _longest(settings, facts.max_model_len)
        limited, dropped = _limited(trace, longest)
        several = settings.find_max or max(len(settings.agents), len(settings.rates)) > 1
        if trace.format == "full-text" and several:
            progress("recorded text is the same in each run: earlier runs may make prefix hits")
        for line in dropped:
            progress(line)
        tokens = TokenRange.of_vocabulary(settings.vocab_size or facts.vocab_size)
        player = _Player(settings, endpoint, tokens, progress, stop)
        maker = LoadMaker(
            trace=limited,
            first_round_tokens=settings.first_round_tokens,
            max_context=longest,
            seed=settings.seed if settings.shuffle else None,
            arrivals=arrivals,
        )
        found = None
        with _first_ctrl_c(stop, progress):
            if settings.find_max:
                found = await _search(settings, maker, player)
                runs: Sequence[Run] = found.runs
            else:
                runs = await play_all(_loads(settings, maker), player.play)
    setup = _setup(settings, limited, facts, tokens, dropped)
    return _result(settings, facts, runs, found, setup, progress)


async def _search(settings: Settings, maker: LoadMaker, player: _Player) -> Found:
    assert settings.slo is not None
    acceptance = Acceptance(
        slo=settings.slo,
        statistic=settings.slo_statistic,
        max_error_rate=settings.max_error_rate,
    )
    search = RateSearch(settings.rates[0] if settings.rates else 1.0, settings.precision)
    return await find_max_rate(maker, search, acceptance, player.play)


def _loads(settings: Settings, maker: LoadMaker) -> dict[str, OfflineLoad | OnlineLoad]:
    if settings.mode == "offline":
        counts = settings.agents or (len(maker.trace.sessions),)
        return {
            "1 agent" if count == 1 else f"{count:,} agents": maker.offline(count)
            for count in counts
        }
    if not settings.rates:
        return {"as recorded": maker.online(None)}
    return {f"{rate:.4g} agents/s": maker.online(rate) for rate in settings.rates}


def _arrivals(settings: Settings) -> Arrivals:
    kind = settings.arrivals
    times_s: tuple[float, ...] = ()
    if kind not in ("poisson", "trace"):
        kind, times_s = "recorded", _recorded(Path(settings.arrivals), settings.speed)
    return Arrivals(
        kind=kind,
        times_s=times_s,
        seed=settings.seed,
        max_sessions=settings.max_sessions,
        duration_s=settings.limits.duration_s,
    )


def _recorded(path: Path, speed: float) -> tuple[float, ...]:
    if not path.is_file():
        raise ConfigError(f"--arrivals: expected poisson, trace or a CSV file, got {str(path)!r}")
    return tuple(each / speed for each in read_arrivals(path))


# The trace.


def _open(settings: Settings) -> Trace:
    """With its times and outputs as they shall be played."""
    trace = open_trace(
        settings.trace,
        trace_format=settings.trace_format,
        block_tokens=settings.block_tokens,
        generated_sessions=settings.sessions or SESSIONS,
        seed=settings.seed,
    )
    if settings.sessions is not None:
        trace = replace(trace, sessions=trace.sessions[: settings.sessions])
    trace = scale_time(trace, settings.speed)
    if not settings.delays:
        trace = without_delays(trace)
    if settings.output_tokens is not None:
        trace = _with_outputs(trace, settings.output_tokens)
    return trace


def _with_outputs(trace: Trace, tokens: int) -> Trace:
    return replace(
        trace,
        sessions=tuple(
            replace(
                session,
                turns=tuple(replace(turn, output_tokens=tokens) for turn in session.turns),
            )
            for session in trace.sessions
        ),
    )


def _longest(settings: Settings, max_model_len: int | None) -> int | None:
    """The most tokens of a turn's prompt and output, as far as asked for and as the server can take."""
    return min(filter(None, (settings.max_context, max_model_len)), default=None)


def _limited(trace: Trace, longest: int | None) -> tuple[Trace, list[str]]:
    """As far as it fits; and what was left out, in a sentence."""
    if longest is None:
        return trace, []
    limited = limit_context(trace, longest)
    if not limited.dropped_turns:
        return limited.trace, []
    return limited.trace, [
        f"{limited.dropped_turns:,} of {trace.turns:,} turns and {limited.dropped_sessions:,} of "
        f"{len(trace.sessions):,} sessions are left out: longer than {longest:,} tokens"
    ]


# Results.


def _setup(
    settings: Settings,
    trace: Trace,
    facts: EndpointFacts,
    tokens: TokenRange,
    dropped: Sequence[str],
) -> dict[str, Figure]:
    assert settings.endpoint is not None
    limits, steady = settings.limits, settings.limits.steady
    setup: dict[str, Figure | None] = {
        "mode": settings.mode,
        "base_url": settings.endpoint.base_url,
        "api": settings.endpoint.api,
        "model": facts.model,
        "max_model_len": facts.max_model_len,
        "returns_token_ids": facts.returns_token_ids,
        "takes_extensions": facts.takes_extensions,
        "trace": trace.name,
        "trace_format": trace.format,
        "trace_sessions": len(trace.sessions),
        "trace_turns": trace.turns,
        "left_out": dropped[0] if dropped else None,
        "max_context": settings.max_context,
        "output_tokens": settings.output_tokens,
        "speed": settings.speed,
        "delays": settings.delays,
        "first_round_tokens": settings.first_round_tokens,
        "seed": settings.seed,
        "shuffle": settings.shuffle,
        "token_ids": [tokens.first, tokens.end],
        "arrivals": settings.arrivals if settings.mode == "online" else None,
        "duration_s": limits.duration_s,
        "warmup_s": limits.warmup_s,
        "warmup_sessions": limits.warmup_sessions,
        "steady_window_s": steady.window_s if steady is not None and steady.steady_ends else None,
        "steady_tolerance": steady.tolerance if steady is not None else None,
        "ttft_limit_s": steady.ttft_limit_s if steady is not None else None,
        "max_in_flight": limits.max_in_flight,
        "timeout_s": settings.endpoint.timeout_s,
        "slo": dict(settings.slo.limits_s) if settings.slo is not None else None,
        "slo_statistic": settings.slo_statistic if settings.find_max else None,
        "precision": settings.precision if settings.find_max else None,
    }
    return {name: value for name, value in setup.items() if value is not None}


def _result(
    settings: Settings,
    facts: EndpointFacts,
    runs: Sequence[Run],
    found: Found | None,
    setup: dict[str, Figure],
    progress: Progress,
) -> BenchResult:
    figures = by_run(runs, settings.slo)
    setup["runs"] = [run_key(each) for each in runs]
    if found is not None:
        # 0: not even the lowest rate tried was sustained.
        figures["max_aps"] = found.best_aps or 0.0
        figures["max_aps_bounded"] = found.bounded
        figures["tried_aps"] = {
            f"{rate:.4g}": problem or "sustained" for rate, problem in found.problems.items()
        }
    record = ReplayRecord(
        label=settings.label or facts.model,
        figures=figures,
        setup={**base_setup(), **setup},
        runs=list(runs),
    )
    if settings.output is not None:
        record.write(settings.output)
        progress(f"records: {settings.output}")
    if settings.report is not None:
        from dualpath.bench.report import write_report

        write_report(settings.report, [record])
        progress(f"report: {settings.report}")
    interrupted = any(each.ended == INTERRUPTED for each in runs)
    return BenchResult(NAME, figures, setup, interrupted)


@contextmanager
def _first_ctrl_c(stop: asyncio.Event, progress: Progress) -> Iterator[None]:
    """The first sets `stop`; from then on Ctrl-C is as everywhere else."""
    loop = asyncio.get_running_loop()

    def interrupt() -> None:
        progress("interrupted: ending the run (Ctrl-C again ends at once)")
        loop.remove_signal_handler(signal.SIGINT)
        stop.set()

    loop.add_signal_handler(signal.SIGINT, interrupt)
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGINT)
