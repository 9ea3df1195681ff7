"""How far our replay's figures are from those of other load generators, for the same server and load.

One `dualpath serve` without a store, so that nothing is found of what was sent before, and one Mooncake
trace, which every tool replays by its timestamps, with other prompts each time. Requests do not overlap and
take long, so that the tools differ by what they count, not by who gets the processor. They take turns, so
that a machine that gets slower does so for all. What each says is also put in relation to what the server
itself measured of the same requests, which leaves out whatever made one run slower than the next. Knows what
is compared; the tools are in `tools`.
"""

from __future__ import annotations

import asyncio
import json
import tempfile
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from dualpath.bench.harness import Progress
from dualpath.bench.peers.figures import (
    COMPARED,
    LoadFigures,
    differences,
    figures_of_run,
    median_figures,
)
from dualpath.bench.peers.server_side import ServerSide, observed
from dualpath.bench.peers.tools import (
    Aiperf,
    PeerFailed,
    PeerTask,
    PeerTool,
    VllmBench,
    shown_command,
)
from dualpath.bench.replay.conversation import Conversation, TokenSource
from dualpath.bench.replay.endpoint import Endpoint, EndpointConfig
from dualpath.bench.replay.load import OnlineLoad
from dualpath.bench.replay.records import Run
from dualpath.bench.replay.runner import run_load
from dualpath.bench.server import ServeProcess
from dualpath.engine.model_source import ModelSpec, cache_directory, resolve_model
from dualpath.traces import open_trace

__all__ = [
    "Agreement",
    "AgreementOptions",
    "Measured",
    "check_same_work",
    "measure_agreement",
    "trace_lines",
]

OURS = "dualpath"
_MODEL = "smollm2"
_SERVE = (_MODEL, "--no-store", "--threads", "1")
_PROMPT_TOKENS = 256
_FIRST_TOKEN, _END_TOKEN = 1_000, 40_000
"""Ordinary tokens of the model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AgreementOptions:
    """`aiperf`: its command; None: the one in the cache directory, installed there if `install`. `vllm`: the
    Python of an environment that has vLLM; None: left out. Request i of a run is due at i * `interval_s`."""

    aiperf: str | None = None
    vllm: str | None = None
    install: bool = True
    repetitions: int = 3
    requests: int = 6
    output_tokens: int = 16
    interval_s: float = 2.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """`error`: the largest of `differences`, without sign; None: there was no tool.

    `differences`: by tool and compared figure, (ours - theirs) / theirs. `differences_at_server`: the same
    where each is in relation to what the server measured of that run. `figures` by tool, ours included:
    medians over the runs. `runs`: every run of each, with `server_side`. `commands`: what to type; `trace`:
    the lines of its trace.jsonl.
    """

    error: float | None
    differences: dict[str, dict[str, float]] = field(default_factory=dict)
    differences_at_server: dict[str, dict[str, float]] = field(default_factory=dict)
    figures: dict[str, LoadFigures] = field(default_factory=dict)
    runs: dict[str, list[LoadFigures]] = field(default_factory=dict)
    server_side: dict[str, list[ServerSide]] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    commands: dict[str, str] = field(default_factory=dict)
    trace: list[str] = field(default_factory=list)


def measure_agreement(progress: Progress, options: AgreementOptions) -> Agreement:
    """Raises ConfigError, PeerFailed or ServerFailed when something that was asked for does not work."""
    tools = _tools(progress, options)
    if not tools:
        return Agreement(error=None)
    versions = {tool.name: tool.version() for tool in tools}
    lines = trace_lines(options)
    parent = cache_directory()
    parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="bench-peers-", dir=parent) as name:
        directory = Path(name)
        trace = directory / "trace.jsonl"
        trace.write_text("".join(f"{line}\n" for line in lines))
        progress(f"starting dualpath serve {' '.join(_SERVE)}")
        with ServeProcess(_SERVE, directory / "server.log") as server:
            tasks = _Tasks(options, server.base_url, trace, directory)
            measured = _take_turns(progress, tools, tasks)
        commands = {tool.name: shown_command(tool, tasks.next(tool.name)) for tool in tools}
    last_due_s = (options.requests - 1) * options.interval_s
    related = {name: [each.related(last_due_s) for each in runs] for name, runs in measured.items()}
    plain = {name: [each.plain for each in runs] for name, runs in measured.items()}
    by_tool = {tool.name: differences(plain[OURS], plain[tool.name]) for tool in tools}
    return Agreement(
        error=max(abs(each) for by_figure in by_tool.values() for each in by_figure.values()),
        differences=by_tool,
        differences_at_server={
            tool.name: differences(related[OURS], related[tool.name]) for tool in tools
        },
        figures={
            name: median_figures([each.figures for each in runs]) for name, runs in measured.items()
        },
        runs={name: [each.figures for each in runs] for name, runs in measured.items()},
        server_side={name: [each.server for each in runs] for name, runs in measured.items()},
        versions=versions,
        commands={"server": f"dualpath serve {' '.join(_SERVE)}", **commands},
        trace=lines,
    )


def trace_lines(options: AgreementOptions) -> list[str]:
    """Mooncake JSONL: requests that share nothing, one after the other."""
    return [
        json.dumps(
            {
                "timestamp": round(number * options.interval_s * 1e3),
                "input_length": _PROMPT_TOKENS,
                "output_length": options.output_tokens,
                "hash_ids": [number + 1],
            }
        )
        for number in range(options.requests)
    ]


@dataclass(frozen=True, slots=True)
class Measured:
    """One run, as the tool and as the server saw it."""

    figures: LoadFigures
    server: ServerSide

    @property
    def plain(self) -> dict[str, float]:
        return {name: getattr(self.figures, name) for name in COMPARED}

    def related(self, last_due_s: float) -> dict[str, float]:
        """To what the server measured."""
        expected = self.server.expected(last_due_s)
        return {name: value / expected[name] for name, value in self.plain.items()}


class _Tasks:
    """Numbers the runs, so that each has prompts of its own."""

    def __init__(
        self, options: AgreementOptions, base_url: str, trace: Path, directory: Path
    ) -> None:
        self.options = options
        self._base_url = base_url
        self._trace = trace
        self._directory = directory
        self._tokenizer = resolve_model(ModelSpec(model=_MODEL)).directory.absolute()
        self._number = 0

    def next(self, name: str) -> PeerTask:
        self._number += 1
        directory = self._directory / f"{self._number}-{name}"
        directory.mkdir()
        return PeerTask(
            base_url=self._base_url,
            model=_MODEL,
            tokenizer=self._tokenizer,
            trace=self._trace,
            requests=self.options.requests,
            output_tokens=self.options.output_tokens,
            seed=self._number,
            directory=directory,
        )


def _take_turns(
    progress: Progress, tools: list[PeerTool], tasks: _Tasks
) -> dict[str, list[Measured]]:
    runs: dict[str, list[Measured]] = {name: [] for name in (OURS, *(t.name for t in tools))}
    progress("warming the server up")
    _replay(tasks.next(OURS))
    order = [(OURS, _replay), *((tool.name, tool.run) for tool in tools)]
    for repetition in range(tasks.options.repetitions):
        said = []
        # To and fro, so that none is always first.
        for name, run in order if repetition % 2 == 0 else reversed(order):
            task = tasks.next(name)
            figures, server = observed(task.base_url, partial(run, task))
            check_same_work(name, figures, task)
            if server.requests != task.requests:
                raise PeerFailed(
                    f"{name}: the server got {server.requests} requests, expected {task.requests}"
                )
            runs[name].append(Measured(figures, server))
            over_ms = (figures.ttft_mean_s - server.ttft_mean_s) * 1e3
            said.append(f"{name} {figures.ttft_mean_s:.3f} s ({over_ms:+.0f} ms)")
        progress(f"turn {repetition + 1}: mean TTFT (over the server's own): {', '.join(said)}")
    return runs


def _replay(task: PeerTask) -> LoadFigures:
    return figures_of_run(asyncio.run(_run_ours(task)))


async def _run_ours(task: PeerTask) -> Run:
    sessions = open_trace(str(task.trace)).sessions
    arrivals = [session.start_s or 0.0 for session in sessions]
    rate_aps = len(sessions) / (arrivals[-1] or 1.0)
    source = TokenSource(task.seed, _FIRST_TOKEN, _END_TOKEN)
    config = EndpointConfig(base_url=task.base_url, model=task.model)
    async with Endpoint(config) as endpoint:
        load = OnlineLoad(sessions, arrivals, rate_aps)
        return await run_load(load, endpoint, partial(Conversation, source=source))


def check_same_work(name: str, figures: LoadFigures, task: PeerTask) -> None:
    """All did the same work, or nothing can be compared."""
    wanted = (task.requests, 0, task.requests * task.output_tokens)
    got = (figures.requests, figures.failed, figures.output_tokens)
    if got != wanted:
        raise PeerFailed(
            f"{name}: requests, failed requests and output tokens are {got}, expected {wanted}"
        )
    prompt_tokens = task.requests * _PROMPT_TOKENS
    # Text of so many tokens may have a few more or fewer when the server reads it.
    if abs(figures.prompt_tokens - prompt_tokens) > prompt_tokens // 50:
        raise PeerFailed(f"{name}: {figures.prompt_tokens} prompt tokens, expected {prompt_tokens}")


def _tools(progress: Progress, options: AgreementOptions) -> list[PeerTool]:
    tools: list[PeerTool] = []
    if options.aiperf is not None:
        tools.append(Aiperf((options.aiperf,)))
    elif options.install or Aiperf.home().is_dir():
        tools.append(Aiperf.installed(progress))
    if options.vllm is not None:
        tools.append(VllmBench(options.vllm))
    return tools
