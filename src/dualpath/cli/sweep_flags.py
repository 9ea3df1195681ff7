"""Flags of commands that simulate many runs, and what is accepted."""

from __future__ import annotations

import argparse
import os

from dualpath.base.errors import ConfigError

__all__ = ["add_sweep_flags", "check_sweep_flags"]


def add_sweep_flags(parser: argparse.ArgumentParser) -> None:
    """`--workers` and `--seed`."""
    parser.add_argument(
        "--workers",
        type=int,
        default=os.cpu_count() or 1,
        metavar="N",
        help="Processes that simulate at once (default: one a core).",
    )
    parser.add_argument(
        "--seed", type=int, default=0, metavar="N", help="Of traces and arrivals (default: 0)."
    )


def check_sweep_flags(args: argparse.Namespace) -> None:
    """Raises ConfigError."""
    for flag, value, least in (("--workers", args.workers, 1), ("--seed", args.seed, 0)):
        if value < least:
            raise ConfigError(f"{flag}: expected a whole number >= {least}, got {value}")
