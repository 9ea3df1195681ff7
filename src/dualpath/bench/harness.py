"""What every benchmark shares: a name, its arguments, and one JSON line as the result.

`dualpath bench NAME --json` prints progress to stderr and, as the last line of stdout, one object
`{"bench": NAME, "figures": {...}, "setup": {...}}`.
"""

from __future__ import annotations

import argparse
import os
import platform
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

import dualpath

__all__ = ["BenchModule", "BenchResult", "Figure", "Progress", "base_setup", "stderr_progress"]

Figure = float | int | bool | str | list[float] | dict[str, float]
Progress = Callable[[str], None]
"""Called with one line of what is going on; goes to stderr."""


@dataclass(frozen=True, slots=True)
class BenchResult:
    """`figures` as the documentation names them; `setup` is what is needed to repeat the run."""

    bench: str
    figures: dict[str, Figure]
    setup: dict[str, Figure] = field(default_factory=dict)

    def to_json(self) -> str:
        body = {
            "bench": self.bench,
            "figures": self.figures,
            "setup": {**base_setup(), **self.setup},
        }
        return msgspec.json.encode(body).decode()


class BenchModule(Protocol):
    """What `dualpath.bench.<name>` modules provide."""

    NAME: str
    HELP: str

    def add_arguments(self, parser: argparse.ArgumentParser) -> None: ...

    def run(self, args: argparse.Namespace, progress: Progress) -> BenchResult: ...


def base_setup() -> dict[str, Figure]:
    """Version and machine, in words that carry no host name."""
    return {
        "dualpath": dualpath.__version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "cores": os.cpu_count() or 0,
        "command": " ".join(["dualpath", *sys.argv[1:]]),
    }


def stderr_progress(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
