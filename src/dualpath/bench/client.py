"""What the replay's own client costs, how late it sends under overload, how far it agrees with other tools.

The load goes through the code that `dualpath bench replay` uses (runner, conversations, endpoint), in this
process, against a null server in another: it has no model, answers with set delays, and costs little.

- `schedule_error_ms_p99`: how late requests were sent, against when they were due. Poisson arrivals come
  faster than the server takes them, so that its queue grows until the end. `cpu_wait_share`: the share of
  the time in which this process could have run and others had the cores; it must be near zero for the figure
  to tell of the client and not of the machine.
- `client_cores`: CPU seconds of this process for each 1,000 requests, so the cores it takes at 1,000 requests
  a second, which is the rate offered; `achieved_rps` is the rate that came about. Sessions have five turns,
  each of which appends to the conversation and continues the answer's token ids. The headline has the mean
  turn of the paper's agents with a window of 64K: a prompt of 32,721 tokens and 176 tokens generated, in an
  event each. The server does not pace them, so the network brings many events at once.
- `client_cores_8k`, `client_cores_1k`: the same with shorter prompts. `client_cores_one_event`: the
  headline's prompts, the whole answer in one event.
- `client_cores_streams`: cores while thousands of answers come paced, each event in a packet of its own, as
  from a server that is not overloaded: `streams_in_flight` of them, `event_us` of CPU for each event, the
  requests' share included. Events that many cost more than the requests do; most of that is the system calls
  that wait for each and read it.
- `agreement_error`: see `dualpath.bench.peers`.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path

import msgspec
import numpy as np

from dualpath.base.errors import DualPathError
from dualpath.bench.harness import BenchResult, Figure, Progress
from dualpath.bench.replay.conversation import Conversation, TokenSource
from dualpath.bench.replay.endpoint import Endpoint, EndpointConfig
from dualpath.bench.replay.load import Limits, OnlineLoad
from dualpath.bench.replay.null_answers import NullConfig
from dualpath.bench.replay.null_server import NullServer
from dualpath.bench.replay.records import Run
from dualpath.bench.replay.runner import run_load
from dualpath.traces import AppendPrompt, Session, Turn, poisson

__all__ = ["HELP", "NAME", "add_arguments", "run"]

NAME = "client"
HELP = "what the replay's client costs, how late it sends, how far it agrees with other tools"

# Means of the paper's trajectories with a window of 64K.
_CONTEXT_TOKENS = 32_721
_OUTPUT_TOKENS = 176
_GROWTH_TOKENS = 429 + _OUTPUT_TOKENS
_TURNS = 5
_RATE_RPS = 1000.0
_TTFT_S = 0.05
_TPOT_S = 0.05
_OVERLOAD_PROMPT_TOKENS = 8192
_OVERLOAD_OUTPUT_TOKENS = 16
_OVERLOAD_TTFT_S = 0.1
_OVERLOAD_CAPACITY = 20
_OVERLOAD_RATE_RPS = 400.0
_FIRST_TOKEN, _END_TOKEN = 1_000, 30_000
_MILLE = 1000.0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Load:
    """Sessions of `turns` turns whose prompts have `context_tokens` tokens on average."""

    context_tokens: int
    output_tokens: int
    turns: int
    rate_rps: float
    duration_s: float
    seed: int

    def online(self) -> OnlineLoad:
        count = max(1, round(self.duration_s * self.rate_rps / self.turns))
        rate_aps = self.rate_rps / self.turns
        turns = self._session_turns()
        sessions = [Session(f"client {number}", turns) for number in range(count)]
        return OnlineLoad(sessions, list(islice(poisson(rate_aps, self.seed), count)), rate_aps)

    def _session_turns(self) -> tuple[Turn, ...]:
        growth = min(_GROWTH_TOKENS, max(self.context_tokens // 4, self.output_tokens + 1))
        first = self.context_tokens - growth * (self.turns - 1) // 2
        appends = [first, *[growth - self.output_tokens] * (self.turns - 1)]
        return tuple(Turn(AppendPrompt(tokens), self.output_tokens) for tokens in appends)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seed", type=int, default=0, metavar="N")
    parser.add_argument(
        "--seconds", type=float, default=8.0, metavar="S", help="of each run, in schedule"
    )
    parser.add_argument(
        "--streams", type=int, default=2000, metavar="N", help="answers at once, when paced"
    )
    parser.add_argument(
        "--no-agreement", action="store_true", help="do not compare with other tools"
    )
    parser.add_argument("--aiperf", metavar="COMMAND", help="the tool, where it is installed")
    parser.add_argument(
        "--vllm", metavar="PYTHON", help="of an environment with vLLM, to compare with that too"
    )
    parser.add_argument("--no-install", action="store_true", help="install no tool to compare with")
    parser.add_argument(
        "--peers-output", type=Path, metavar="FILE", help="every run of each tool, as JSON"
    )


def run(args: argparse.Namespace, progress: Progress) -> BenchResult:
    """The figures of the module's docstring. DualPathError when a request fails."""
    figures: dict[str, Figure] = {}
    setup: dict[str, Figure] = {
        "seed": args.seed,
        "turns": _TURNS,
        "context_tokens": _CONTEXT_TOKENS,
        "output_tokens": _OUTPUT_TOKENS,
        "tokens_per_event": 1,
        "server_ttft_s": _TTFT_S,
    }
    figures |= _overload(args, progress, setup)
    figures |= _costs(args, progress)
    figures |= _streams(args, progress, setup)
    if not args.no_agreement:
        figures |= _agreement(args, progress, setup)
    return BenchResult(NAME, figures, setup)


def _overload(
    args: argparse.Namespace, progress: Progress, setup: dict[str, Figure]
) -> dict[str, Figure]:
    config = NullConfig(ttft_s=_OVERLOAD_TTFT_S, capacity=_OVERLOAD_CAPACITY)
    load = _Load(
        context_tokens=_OVERLOAD_PROMPT_TOKENS,
        output_tokens=_OVERLOAD_OUTPUT_TOKENS,
        turns=1,
        rate_rps=_OVERLOAD_RATE_RPS,
        duration_s=args.seconds,
        seed=args.seed,
    )
    setup |= {
        "overload_context_tokens": _OVERLOAD_PROMPT_TOKENS,
        "overload_output_tokens": _OVERLOAD_OUTPUT_TOKENS,
        "overload_rps": _OVERLOAD_RATE_RPS,
        "overload_capacity_rps": _OVERLOAD_CAPACITY / _OVERLOAD_TTFT_S,
    }
    waited_s = _cpu_wait_s()
    run = _run(config, load, args.seconds)
    waited_s = _cpu_wait_s() - waited_s
    late_ms = [(each.sent_s - each.scheduled_s) * _MILLE for each in run.requests]
    answered = sum(each.end_s is not None for each in run.requests)
    progress(f"overload: {len(late_ms)} requests sent, {answered} answered when time was up")
    if answered > len(late_ms) * 3 // 4:
        raise DualPathError(
            f"the server was not overloaded: it answered {answered} of {len(late_ms)} requests"
        )
    p50, p99, top = np.percentile(late_ms, [50, 99, 100]).tolist()
    return {
        "schedule_error_ms_p99": p99,
        "schedule_error_ms_p50": p50,
        "schedule_error_ms_max": top,
        "overload_unanswered": len(late_ms) - answered,
        "cpu_wait_share": waited_s / run.duration_s,
    }


def _costs(args: argparse.Namespace, progress: Progress) -> dict[str, Figure]:
    figures: dict[str, Figure] = {}
    kinds = {
        "": (_CONTEXT_TOKENS, 1),
        "_8k": (8192, 1),
        "_1k": (1024, 1),
        "_one_event": (_CONTEXT_TOKENS, _OUTPUT_TOKENS),
    }
    for suffix, (context_tokens, tokens_per_event) in kinds.items():
        config = NullConfig(ttft_s=_TTFT_S, tokens_per_event=tokens_per_event)
        load = _Load(
            context_tokens=context_tokens,
            output_tokens=_OUTPUT_TOKENS,
            turns=_TURNS,
            rate_rps=_RATE_RPS,
            duration_s=args.seconds,
            seed=args.seed,
        )
        run = _run(config, load, None)
        cores = run.client_cpu_s / len(run.requests) * _MILLE
        rps = len(run.requests) / run.duration_s
        figures[f"client_cores{suffix}"] = cores
        figures[f"achieved_rps{suffix}"] = rps
        progress(
            f"prompts of {context_tokens} tokens, {tokens_per_event} a token event: {rps:.0f} requests/s, "
            f"{cores:.2f} cores at {_RATE_RPS:.0f}"
        )
    return figures


def _streams(
    args: argparse.Namespace, progress: Progress, setup: dict[str, Figure]
) -> dict[str, Figure]:
    """Sent within half of the time that an answer takes; all are under way at once then."""
    answer_s = _OUTPUT_TOKENS * _TPOT_S
    load = _Load(
        context_tokens=1024,
        output_tokens=_OUTPUT_TOKENS,
        turns=1,
        rate_rps=2 * args.streams / answer_s,
        duration_s=answer_s / 2,
        seed=args.seed,
    )
    run = _run(NullConfig(ttft_s=_TTFT_S, tpot_s=_TPOT_S), load, None)
    setup |= {"streams_context_tokens": 1024, "streams_tpot_s": _TPOT_S}
    events = len(run.requests) * _OUTPUT_TOKENS
    cores = run.client_cpu_s / run.duration_s
    figures: dict[str, Figure] = {
        "client_cores_streams": cores,
        "streams_in_flight": _most_in_flight(run),
        "events_per_s": events / run.duration_s,
        "event_us": run.client_cpu_s / events * 1e6,
    }
    progress(
        f"{figures['streams_in_flight']} streams at once: {events / run.duration_s:.0f} events/s on "
        f"{cores:.2f} cores"
    )
    return figures


def _agreement(
    args: argparse.Namespace, progress: Progress, setup: dict[str, Figure]
) -> dict[str, Figure]:
    """Its own packages (a server's, and the tools) are needed for this figure only."""
    from dualpath.bench.peers import AgreementOptions, measure_agreement

    options = AgreementOptions(aiperf=args.aiperf, vllm=args.vllm, install=not args.no_install)
    agreement = measure_agreement(progress, options)
    if agreement.error is None:
        progress("no other tool is installed: agreement_error is left out")
        return {}
    if args.peers_output is not None:
        args.peers_output.write_bytes(msgspec.json.format(msgspec.json.encode(agreement), indent=1))
    figures: dict[str, Figure] = {"agreement_error": agreement.error}
    for tool, differences in agreement.differences.items():
        figures[f"agreement_{tool}"] = dict(differences)
    for tool, differences in agreement.differences_at_server.items():
        figures[f"agreement_at_server_{tool}"] = dict(differences)
    setup |= {f"version_{tool}": version for tool, version in agreement.versions.items()}
    setup |= {f"command_{tool}": command for tool, command in agreement.commands.items()}
    return figures


def _run(config: NullConfig, load: _Load, duration_s: float | None) -> Run:
    """Raises DualPathError when a request failed, as no figure would mean what it says then."""
    with NullServer(config) as server:
        run = asyncio.run(_replay(server.base_url, load, duration_s))
    failed = [each for each in run.requests if each.error]
    if failed:
        raise DualPathError(
            f"{len(failed)} of {len(run.requests)} requests to the null server failed, the first: "
            f"{failed[0].error}: {failed[0].detail}"
        )
    return run


async def _replay(base_url: str, load: _Load, duration_s: float | None) -> Run:
    source = TokenSource(load.seed, _FIRST_TOKEN, _END_TOKEN)
    async with Endpoint(EndpointConfig(base_url=base_url)) as endpoint:
        await endpoint.probe()
        limits = Limits(duration_s=duration_s)
        return await run_load(load.online(), endpoint, partial(Conversation, source=source), limits)


def _cpu_wait_s() -> float:
    """How long this process has waited for a core so far; 0 where the kernel does not count it."""
    try:
        return int(Path("/proc/self/schedstat").read_text(encoding="ascii").split()[1]) * 1e-9
    except (OSError, IndexError, ValueError):
        return 0.0


def _most_in_flight(run: Run) -> int:
    """Requests under way at once."""
    changes: list[tuple[float, int]] = []
    for each in run.requests:
        if each.end_s is not None:
            changes += [(each.sent_s, 1), (each.end_s, -1)]
    return _peak([step for _, step in sorted(changes)])


def _peak(steps: Sequence[int]) -> int:
    return int(np.cumsum(steps).max()) if steps else 0
