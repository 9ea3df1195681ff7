"""What the flags of `dualpath bench replay` say, checked, as one frozen whole.

Knows the parsed arguments and the environment; reads no trace and asks no server. Raises ConfigError that
names the flag.
"""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

from dualpath.base.errors import ConfigError
from dualpath.bench.replay.endpoint import EndpointConfig
from dualpath.bench.replay.load import Limits
from dualpath.bench.replay.slo import Slo, parse_slo
from dualpath.bench.replay.steady import SteadyRule

__all__ = ["API_KEYS", "STATISTICS", "Settings", "settings_of"]

API_KEYS = ("DUALPATH_API_KEY", "OPENAI_API_KEY")
_FINEST = 1e-3
STATISTICS = ("mean", "p50", "p90", "p95", "p99")


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What was asked for. `agents`: offline, of each run; empty: as many as the trace has sessions.
    `rates`: online, of each run; empty: as recorded. `arrivals`: "poisson", "trace" or a file."""

    endpoint: EndpointConfig | None
    trace: str
    trace_format: str | None
    block_tokens: int
    sessions: int | None
    max_sessions: int | None
    max_context: int | None
    output_tokens: int | None
    speed: float
    delays: bool
    mode: str
    agents: tuple[int, ...]
    rates: tuple[float, ...]
    arrivals: str
    seed: int
    shuffle: bool
    first_round_tokens: int
    vocab_size: int | None
    limits: Limits
    slo: Slo | None
    find_max: bool
    precision: float
    slo_statistic: str
    max_error_rate: float
    label: str
    output: Path | None
    report: Path | None


def settings_of(args: argparse.Namespace, environ: Mapping[str, str] = os.environ) -> Settings:
    """Raises ConfigError."""
    if args.trace is None:
        raise ConfigError("--trace: say what to replay, for example --trace smoke")
    for flag in ("sessions", "max_sessions", "max_context", "output_tokens", "vocab_size"):
        _at_least(flag, getattr(args, flag), 1)
    for flag in ("block_tokens", "first_round_tokens", "max_in_flight"):
        _at_least(flag, getattr(args, flag), 1)
    for flag in ("speed", "timeout_s", "precision", "duration", "ttft_limit", "steady_tolerance"):
        _above_zero(flag, getattr(args, flag))
    for flag in ("warmup_s", "warmup_sessions", "max_error_rate", "steady_window_s"):
        _at_least(flag, getattr(args, flag), 0)
    if args.precision < _FINEST:
        raise ConfigError(f"--precision: expected at least {_FINEST:g}, got {args.precision:g}")
    agents = tuple(map(int, _numbers("--agents", args.agents, whole=True)))
    rates = _numbers("--aps", args.aps, whole=False)
    slo = None if args.slo is None else parse_slo(args.slo)
    online = args.mode == "online"
    if online and agents:
        raise ConfigError("--agents is for --mode offline; online the load is --aps")
    if not online and (rates or args.find_max_aps):
        raise ConfigError("--aps and --find-max-aps need --mode online")
    if args.find_max_aps and (slo is None or len(rates) > 1 or args.arrivals == "trace"):
        raise ConfigError(
            "--find-max-aps needs a --slo, at most one --aps, and not --arrivals trace"
        )
    if online and not rates and not args.find_max_aps and args.arrivals == "poisson":
        raise ConfigError("--aps: how many agents a second? for example --aps 0.5")
    return Settings(
        endpoint=None if args.base_url is None else _endpoint(args, environ),
        trace=args.trace,
        trace_format=args.trace_format,
        block_tokens=args.block_tokens,
        sessions=args.sessions,
        max_sessions=args.max_sessions,
        max_context=args.max_context,
        output_tokens=args.output_tokens,
        speed=args.speed,
        delays=not args.no_delays,
        mode=args.mode,
        agents=agents,
        rates=rates,
        arrivals=args.arrivals,
        seed=args.seed,
        shuffle=args.shuffle,
        first_round_tokens=args.first_round_tokens,
        vocab_size=args.vocab_size,
        limits=_limits(args, slo),
        slo=slo,
        find_max=args.find_max_aps,
        precision=args.precision,
        slo_statistic=args.slo_percentile,
        max_error_rate=args.max_error_rate,
        label=args.label or "",
        output=_writable("--output", args.output),
        report=_writable("--report", args.report),
    )


def _endpoint(args: argparse.Namespace, environ: Mapping[str, str]) -> EndpointConfig:
    extra: dict[str, object] = {}
    if args.extra_body is not None:
        try:
            extra = msgspec.json.decode(args.extra_body, type=dict[str, object])
        except msgspec.MsgspecError as error:
            raise ConfigError(f"--extra-body: expected a JSON object: {error}") from error
    if args.cache_salt is not None:
        extra["cache_salt"] = args.cache_salt
    if not args.base_url.startswith(("http://", "https://")):
        raise ConfigError(
            f"--base-url: expected http://HOST:PORT/v1 or https://..., got {args.base_url!r}"
        )
    keys = [args.api_key, *(environ.get(name) for name in API_KEYS)]
    return EndpointConfig(
        base_url=args.base_url.rstrip("/"),
        model=args.model,
        api=args.api,
        api_key=next((each for each in keys if each), None),
        timeout_s=args.timeout_s,
        extra_body=extra,
    )


def _limits(args: argparse.Namespace, slo: Slo | None) -> Limits:
    steady = None
    if args.mode == "online":
        ttft_limit_s = args.ttft_limit
        if ttft_limit_s is None and slo is not None:
            ttft_limit_s = slo.limits_s.get("ttft")
        ends = args.duration is None and args.arrivals == "poisson"
        if args.steady_window_s is not None:
            ends = args.steady_window_s > 0
        steady = SteadyRule(
            window_s=args.steady_window_s or SteadyRule().window_s,
            steady_ends=ends,
            tolerance=args.steady_tolerance,
            ttft_limit_s=ttft_limit_s,
        )
    return Limits(
        duration_s=args.duration,
        steady=steady,
        warmup_s=args.warmup_s,
        warmup_sessions=args.warmup_sessions,
        max_in_flight=args.max_in_flight,
    )


def _numbers(flag: str, text: str | None, *, whole: bool) -> tuple[float, ...]:
    """Comma-separated, each once."""
    if text is None:
        return ()
    try:
        numbers = tuple(int(part) if whole else float(part) for part in text.split(","))
    except ValueError:
        raise ConfigError(f"{flag}: expected numbers such as 1,2,4, got {text!r}") from None
    if not all(0 < each < math.inf for each in numbers):
        raise ConfigError(f"{flag}: expected numbers above 0, got {text!r}")
    if len({f"{each:.4g}" for each in numbers}) < len(numbers):
        raise ConfigError(f"{flag}: two numbers in {text!r} are the same to four digits")
    return numbers


def _at_least(flag: str, value: float | None, least: int) -> None:
    if value is not None and not least <= value < math.inf:
        raise ConfigError(f"{_spelled(flag)}: expected a number >= {least}, got {value:g}")


def _above_zero(flag: str, value: float | None) -> None:
    if value is not None and not 0 < value < math.inf:
        raise ConfigError(f"{_spelled(flag)}: expected a number above 0, got {value:g}")


def _spelled(flag: str) -> str:
    return f"--{flag.replace('_', '-')}"


def _writable(flag: str, path: Path | None) -> Path | None:
    """Found out before the run, not after it."""
    if path is not None and not path.resolve().parent.is_dir():
        raise ConfigError(f"{flag}: there is no directory {path.resolve().parent}")
    return path
