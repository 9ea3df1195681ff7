"""`bench router`: what the router adds to a request's latency, at a given rate.

Two servers that compute nothing answer at once, each in a process of its own, and the router runs in a
third. This process sends requests on a fixed schedule, in turn to the router and straight to a server, so
that both are measured in the same run and under the same load. The difference holds all that the router
does: with pairs also the whole exchange with the prefill server, which without a router nobody would have.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import tempfile
from collections.abc import Sequence
from contextlib import AsyncExitStack, ExitStack
from pathlib import Path

from dualpath.base.errors import DualPathError
from dualpath.bench.harness import BenchResult, Figure, Progress
from dualpath.bench.replay.answer import Answer
from dualpath.bench.replay.conversation import PromptBody
from dualpath.bench.replay.endpoint import Endpoint, EndpointConfig
from dualpath.bench.replay.null_answers import MODEL
from dualpath.bench.replay.null_server import NullServer
from dualpath.bench.server import ServeProcess

__all__ = ["HELP", "NAME", "add_arguments", "run"]

NAME = "router"
HELP = "latency that the router adds to a request"

_WARM_UP_REQUESTS = 100
_WORD = "lorem "
_TOKENS_OF_A_WORD = 1.5
"""At the four bytes a token that text has on average."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--rate",
        type=float,
        default=200.0,
        metavar="N",
        help="requests a second through the router",
    )
    parser.add_argument(
        "--seconds", type=float, default=20.0, metavar="S", help="time of each measurement"
    )
    parser.add_argument(
        "--prompt-tokens", type=int, default=1000, metavar="N", help="length of the text prompts"
    )
    parser.add_argument(
        "--output-tokens", type=int, default=8, metavar="N", help="tokens that are streamed back"
    )


def run(args: argparse.Namespace, progress: Progress) -> BenchResult:
    figures: dict[str, Figure] = {}
    with ExitStack() as stack:
        servers = [stack.enter_context(NullServer()) for _ in range(2)]
        prefill, decode = (each.base_url for each in servers)
        logs = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        ways: dict[str, Sequence[str]] = {
            "": ("--prefill", prefill, "--decode", decode),
            "plain_": ("--server", prefill, decode),
        }
        for prefix, arguments in ways.items():
            progress(f"{' '.join(arguments)}, {args.seconds:g} s at {args.rate:g} requests/s")
            command = [sys.executable, "-m", "dualpath", "router"]
            router = ServeProcess(arguments, logs / f"{prefix}router.log", command=command)
            with router:
                samples = asyncio.run(_measure(router.base_url, decode, args))
            figures |= {f"{prefix}{name}": value for name, value in samples.items()}
    setup: dict[str, Figure] = {
        "rate": args.rate,
        "seconds": args.seconds,
        "prompt_tokens": args.prompt_tokens,
        "output_tokens": args.output_tokens,
    }
    return BenchResult(NAME, figures, setup)


async def _measure(routed_url: str, direct_url: str, args: argparse.Namespace) -> dict[str, Figure]:
    words = round(args.prompt_tokens / _TOKENS_OF_A_WORD)
    async with AsyncExitStack() as stack:
        routed, direct = [
            await stack.enter_async_context(Endpoint(EndpointConfig(base_url=url, model=MODEL)))
            for url in (routed_url, direct_url)
        ]
        await _on_schedule((routed, direct), _WARM_UP_REQUESTS, words, args)
        requests = 2 * round(args.rate * args.seconds)
        answers = await _on_schedule((routed, direct), requests, words, args)
    through, straight = answers[::2], answers[1::2]
    return {
        "overhead_ms_p50": _difference_ms(through, straight, 50),
        "overhead_ms_p90": _difference_ms(through, straight, 90),
        "overhead_ms_p99": _difference_ms(through, straight, 99),
        "routed_ms_p50": round(_percentile_ms(through, 50), 3),
        "direct_ms_p50": round(_percentile_ms(straight, 50), 3),
        "requests": len(through),
    }


async def _on_schedule(
    endpoints: Sequence[Endpoint], requests: int, words: int, args: argparse.Namespace
) -> list[Answer]:
    """The answers in the order of their requests, which go to the endpoints in turn, each at the rate."""
    loop = asyncio.get_running_loop()
    gap_s = 1 / (args.rate * len(endpoints))
    begin_s = loop.time()
    tasks = []
    for number in range(requests):
        await asyncio.sleep(max(0.0, begin_s + number * gap_s - loop.time()))
        # No two prompts are alike from their start, as no session is like another.
        text = f'"{number} {_WORD * words}"'.encode()
        send = endpoints[number % len(endpoints)].send(
            PromptBody(text, args.prompt_tokens), args.output_tokens
        )
        tasks.append(asyncio.create_task(send))
    answers = await asyncio.gather(*tasks)
    failed = [each for each in answers if each.error]
    if failed:
        first = failed[0]
        raise DualPathError(
            f"{len(failed)} of {requests} requests failed, the first: {first.error}: {first.detail}"
        )
    return answers


def _difference_ms(through: Sequence[Answer], straight: Sequence[Answer], percent: int) -> float:
    return round(_percentile_ms(through, percent) - _percentile_ms(straight, percent), 3)


def _percentile_ms(answers: Sequence[Answer], percent: int) -> float:
    latencies = [each.end_s - each.sent_s for each in answers if each.end_s is not None]
    return 1e3 * statistics.quantiles(latencies, n=100, method="inclusive")[percent - 1]
