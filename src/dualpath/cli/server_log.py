"""How commands that serve log: to standard error, each line with its time and level."""

from __future__ import annotations

import logging
import sys

__all__ = ["log_to_stderr"]


def log_to_stderr(level: str) -> None:
    """`level`: a name of `logging`'s, in any case."""
    logging.basicConfig(
        stream=sys.stderr,
        level=level.upper(),
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
    )
