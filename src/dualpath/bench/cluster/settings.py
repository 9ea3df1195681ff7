"""What `dualpath bench pooling` and `dualpath bench online` can both be told, and what follows from it."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, replace
from pathlib import Path

from dualpath.base.errors import ConfigError
from dualpath.base.ids import GiB
from dualpath.bench.cluster.model import RANDOM, arithmetic, random_model, weight_count
from dualpath.bench.cluster.systems import Serving
from dualpath.bench.cluster.workload import paper_shape
from dualpath.bench.harness import Figure
from dualpath.bench.replay import TokenSource
from dualpath.bench.replay_command import TokenRange
from dualpath.engine.model_source import ModelFiles, load_config
from dualpath.kv.layout import KVLayout
from dualpath.serve.cluster import describe_model
from dualpath.serve.config import Device, Dtype, ServeConfig
from dualpath.testbed import TestbedConfig
from dualpath.testbed.bed import TCP_SHARE
from dualpath.traces.model import Trace

__all__ = [
    "BenchModelFacts",
    "Rates",
    "add_arguments",
    "model_facts",
    "rates",
    "serving",
    "setup",
    "token_source",
    "with_outputs",
]

_TEXT_MODEL = "smollm2"
_TRIAL_MODEL = "tiny"
_ANY_BYTES = 1024 * GiB


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model",
        default=RANDOM,
        choices=(RANDOM, _TRIAL_MODEL, _TEXT_MODEL),
        help=f"{RANDOM}: random weights with much KV for their FLOPs; {_TEXT_MODEL}: a real small model with "
        f"recorded text of a software-engineering agent; {_TRIAL_MODEL}: to try the benchmark itself, it has "
        "too little KV (%(default)s)",
    )
    defaults = TestbedConfig()
    parser.add_argument(
        "--snic", default=defaults.snic, metavar="RATE", help="of each storage NIC (%(default)s)"
    )
    parser.add_argument(
        "--cnic", default=defaults.cnic, metavar="RATE", help="of each compute NIC (%(default)s)"
    )
    parser.add_argument(
        "--threads", type=int, default=1, help="CPU threads of each engine (%(default)s)"
    )
    parser.add_argument(
        "--block-tokens", type=int, default=16, metavar="TOKENS", help="of a block (%(default)s)"
    )
    parser.add_argument("--seed", type=int, default=0, help="of tokens and arrivals (%(default)s)")
    parser.add_argument(
        "--directory",
        type=_directory,
        default="dualpath-testbed-results",
        metavar="DIR",
        help="where the report, records and logs go; made if absent (%(default)s)",
    )


@dataclass(frozen=True, slots=True)
class Rates:
    """Of the testbed's NICs, as given; `snic_goodput_bytes_s`: what TCP gets of a storage NIC."""

    snic: str
    cnic: str
    snic_goodput_bytes_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchModelFacts:
    """The model that is served. `name`: what `dualpath serve` is given. `speaks`: its weights are real, so it
    gets real text; prompts of the others are random tokens."""

    name: str
    files: ModelFiles
    layout: KVLayout
    max_model_len: int
    vocabulary: int
    speaks: bool


def rates(args: argparse.Namespace) -> Rates:
    """Raises ConfigError."""
    config = TestbedConfig(snic=args.snic, cnic=args.cnic)
    return Rates(config.snic, config.cnic, config.snic_bits_s / 8 * TCP_SHARE)


def model_facts(args: argparse.Namespace) -> BenchModelFacts:
    """Makes the model if need be. Raises ConfigError."""
    name = str(random_model()) if args.model == RANDOM else args.model
    facts = describe_model(
        ServeConfig(
            model=name,
            dtype=Dtype.FLOAT32,
            device=Device.CPU,
            block_tokens=args.block_tokens,
            # Only described, not served: no buffer shall bound what the model can do.
            pe_buffer=_ANY_BYTES,
            de_buffer=_ANY_BYTES,
            kv_device_memory=_ANY_BYTES,
        )
    )
    return BenchModelFacts(
        name=name,
        files=facts.files,
        layout=facts.layout,
        max_model_len=facts.max_model_len,
        vocabulary=facts.vocabulary,
        speaks=args.model == _TEXT_MODEL,
    )


def token_source(args: argparse.Namespace, facts: BenchModelFacts) -> TokenSource:
    tokens = TokenRange.of_vocabulary(facts.vocabulary)
    return TokenSource(args.seed, tokens.first, tokens.end)


def serving(
    args: argparse.Namespace, facts: BenchModelFacts, *, longest_tokens: int, at_once: int
) -> Serving:
    """`at_once`: most requests under way together, each of `longest_tokens` at most."""
    return Serving(
        model=facts.name,
        layout=facts.layout,
        longest_tokens=longest_tokens,
        tokens_at_once=at_once * longest_tokens,
        threads=args.threads,
        logs=args.directory / "logs",
    )


def setup(args: argparse.Namespace, facts: BenchModelFacts, rates: Rates) -> dict[str, Figure]:
    """The model's numbers are of a turn in the paper's shape with the context that was asked for."""
    config = load_config(facts.files)
    shape = paper_shape(args.context, 1)
    head_size = (
        getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    )
    numbers = arithmetic(
        facts.layout,
        weights=weight_count(facts.files),
        query_width=config.num_attention_heads * head_size,
        cached_tokens=shape.context_tokens,
        append_tokens=shape.append_tokens,
    )
    return {
        "model": args.model,
        "weights": "real" if facts.speaks else "random",
        "prompts": "recorded text (miniswe)" if facts.speaks else "random tokens",
        "dtype": "float32",
        "kv_bytes_token": numbers.kv_bytes_token,
        "flop_token": numbers.flop_token,
        "gb_pflop": numbers.gb_pflop,
        "snic": rates.snic,
        "cnic": rates.cnic,
        "snic_goodput_bytes_s": rates.snic_goodput_bytes_s,
        "store": "redis",
        "threads": args.threads,
        "block_tokens": args.block_tokens,
        "seed": args.seed,
    }


def with_outputs(trace: Trace, tokens: int) -> Trace:
    """Every turn generates so many."""
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


def _directory(text: str) -> Path:
    path = Path(text)
    try:
        (path / "logs").mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--directory: {path} cannot be made: {error.strerror}") from error
    return path
