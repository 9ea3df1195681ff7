"""The flags of `dualpath bench replay`, in groups, with examples. Checks nothing: see `settings`."""

from __future__ import annotations

import argparse
from pathlib import Path

from dualpath.base.slo import SLO_METRICS
from dualpath.bench.replay.load import Limits
from dualpath.bench.replay.settings import API_KEYS, STATISTICS
from dualpath.bench.replay.steady import SteadyRule
from dualpath.traces.catalog import BUILT_IN, FORMATS
from dualpath.traces.mooncake import BLOCK_TOKENS
from dualpath.traces.select import FIRST_ROUND_TOKENS

__all__ = ["add_arguments"]

_EPILOG = """\
examples, DualPath (a server to try this with: `dualpath serve tiny`):
  dualpath bench replay --base-url http://127.0.0.1:8000/v1 --trace smoke --mode offline --agents 1,2,4
  dualpath bench replay --base-url http://127.0.0.1:8000/v1 --trace smoke --mode online --aps 0.5 \\
      --duration 60 --slo ttft=4s,tpot=50ms --output dualpath.json --report dualpath.html
  dualpath bench replay --base-url http://127.0.0.1:8000/v1 --trace coding-agent --mode online \\
      --find-max-aps --aps 0.1 --slo ttft=4s,tpot=50ms
vLLM (`vllm serve MODEL --enable-prompt-tokens-details`, which makes it report hits):
  dualpath bench replay --base-url http://127.0.0.1:8000/v1 --trace generated:32k --no-delays \\
      --mode offline --agents 64 --output vllm.json
SGLang (`python -m sglang.launch_server --model-path MODEL --enable-cache-report --enable-metrics`):
  dualpath bench replay --base-url http://127.0.0.1:30000/v1 --trace mooncake-conversation --mode online \\
      --arrivals trace --speed 2 --output sglang.json
servers that take text only:
  dualpath bench replay --base-url https://HOST/v1 --api chat --model NAME --trace smoke --mode offline
then side by side:
  dualpath bench compare vllm.json sglang.json dualpath.json --report all.html
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.description = (
        "Replay sessions of agents against any server with an OpenAI API, and measure it.\n\n"
        "offline: N agents start at once; how long until all have ended (JCT), how many tokens a second.\n"
        "online: agents arrive at a rate, whatever the server does; how long until tokens come, and with\n"
        "--find-max-aps, how many agents a second it sustains."
    )
    parser.epilog = _EPILOG
    _add_server(parser.add_argument_group("the server"))
    _add_trace(parser.add_argument_group("what is replayed"))
    _add_load(parser.add_argument_group("the load"))
    _add_end(
        parser.add_argument_group(
            "when an online run ends, and what counts",
            "It ends in any case when more than half of the requests of a window have failed.",
        )
    )
    _add_objectives(parser.add_argument_group("objectives"))
    _add_results(parser.add_argument_group("results"))


def _add_server(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--base-url", metavar="URL", help="with /v1, as http://127.0.0.1:8000/v1")
    group.add_argument("--model", metavar="NAME", help="default: the first that the server lists")
    group.add_argument(
        "--api",
        choices=("completions", "chat"),
        default="completions",
        help="completions sends token ids; chat sends words, so lengths are approximate",
    )
    group.add_argument("--api-key", metavar="KEY", help=f"default: {' or '.join(API_KEYS)}")
    group.add_argument(
        "--extra-body", metavar="JSON", help='further fields of every request, as {"priority": 1}'
    )
    group.add_argument(
        "--cache-salt", metavar="SALT", help="of every request, for servers that know cache_salt"
    )
    group.add_argument(
        "--timeout-s", type=float, default=600.0, metavar="S", help="of one request (%(default)g)"
    )


def _add_trace(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--trace",
        metavar="FILE|NAME",
        help=f"a file or directory, generated:LENGTH (as generated:64k), or {', '.join(BUILT_IN)}",
    )
    group.add_argument("--trace-format", choices=FORMATS, help="default: told by the first line")
    group.add_argument(
        "--block-tokens",
        type=int,
        default=BLOCK_TOKENS,
        metavar="N",
        help="tokens of a block id in Mooncake's format (%(default)s)",
    )
    group.add_argument(
        "--sessions", type=int, metavar="N", help="only the trace's first N sessions"
    )
    group.add_argument(
        "--max-context",
        type=int,
        metavar="N",
        help="a session ends before its first turn longer than N tokens, prompt and output; default: "
        "what the server says it can take",
    )
    group.add_argument(
        "--output-tokens",
        type=int,
        metavar="N",
        help="generate N tokens each turn, not the trace's",
    )
    group.add_argument(
        "--first-round-tokens",
        type=int,
        default=FIRST_ROUND_TOKENS,
        metavar="N",
        help="more sessions than the trace has are copies behind a first round of N random tokens "
        "(%(default)s)",
    )
    group.add_argument(
        "--vocab-size",
        type=int,
        metavar="N",
        help="token ids of the model; default: what the server says, or 32000. Prompts leave out the "
        "lowest 1000 or 1/8 and the highest 1/16, where special tokens are",
    )
    group.add_argument(
        "--seed",
        type=int,
        default=0,
        metavar="N",
        help="of tokens and arrivals (%(default)s); the server may still hold the prefixes of an earlier "
        "command with the same",
    )
    group.add_argument(
        "--shuffle", action="store_true", help="sessions in random order, by the seed"
    )
    group.add_argument(
        "--describe", action="store_true", help="say what the trace holds and end; needs no server"
    )


def _add_load(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--mode", choices=("offline", "online"), default="offline")
    group.add_argument(
        "--agents",
        metavar="N[,N...]",
        help="offline: sessions at once; several make a run each; default: all of the trace",
    )
    group.add_argument(
        "--aps",
        metavar="R[,R...]",
        help="online: agents a second; several make a run each; with --find-max-aps, where it starts",
    )
    group.add_argument(
        "--arrivals",
        default="poisson",
        metavar="poisson|trace|FILE",
        help="online: at random, as the trace's sessions started, or as in a CSV with TIMESTAMP; the "
        "last two at their own rate, or with --aps scaled to it (%(default)s)",
    )
    group.add_argument(
        "--speed",
        type=float,
        default=1.0,
        metavar="X",
        help="delays and recorded arrivals X times as fast",
    )
    group.add_argument(
        "--no-delays",
        action="store_true",
        help="no time between turns, as in the paper's evaluation",
    )
    group.add_argument(
        "--max-in-flight",
        type=int,
        default=Limits().max_in_flight,
        metavar="N",
        help='requests at once (%(default)s); one more is counted as the error "client limit"',
    )


def _add_end(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--duration", type=float, metavar="S", help="cut the run off after S seconds (also offline)"
    )
    group.add_argument(
        "--max-sessions", type=int, metavar="N", help="no agent arrives after the Nth"
    )
    group.add_argument(
        "--steady-window-s",
        type=float,
        metavar="S",
        help="end when the mean TTFT and TPOT of both halves of the last S seconds agree, and measure "
        "there; 0: never. Default: 120, with Poisson arrivals and no --duration",
    )
    group.add_argument(
        "--steady-tolerance",
        type=float,
        default=SteadyRule().tolerance,
        metavar="X",
        help="what counts as agreeing (%(default)s)",
    )
    group.add_argument(
        "--ttft-limit",
        type=float,
        metavar="S",
        help="end as overloaded when the mean TTFT over that window is above; default: the --slo's",
    )
    group.add_argument(
        "--warmup-s", type=float, default=0.0, metavar="S", help="leave out what is due earlier"
    )
    group.add_argument(
        "--warmup-sessions",
        type=int,
        default=0,
        metavar="N",
        help="leave out what is due before agent N+1 arrives",
    )


def _add_objectives(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--slo",
        metavar="LIMITS",
        help=f"as ttft=4s,tpot=50ms; of {', '.join(SLO_METRICS)}, in s or ms",
    )
    group.add_argument(
        "--find-max-aps", action="store_true", help="search the highest rate that holds the --slo"
    )
    group.add_argument(
        "--precision",
        type=float,
        default=0.05,
        metavar="X",
        help="of that rate, as a share (%(default)s)",
    )
    group.add_argument(
        "--slo-percentile",
        choices=STATISTICS,
        default="mean",
        help="what a sustained rate must hold the limits by (%(default)s)",
    )
    group.add_argument(
        "--max-error-rate",
        type=float,
        default=0.0,
        metavar="X",
        help="what share of requests may fail at a sustained rate (%(default)g)",
    )


def _add_results(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--label", metavar="TEXT", help="name in comparisons; default: the model's")
    group.add_argument(
        "--output", type=Path, metavar="FILE", help="all records, for `dualpath bench compare`"
    )
    group.add_argument("--report", type=Path, metavar="FILE", help="a page with charts (.html)")
