"""What every benchmark shares: a name, its arguments, and one JSON line as the result.

`dualpath bench NAME --json` prints progress to stderr and, as the last line of stdout, one object
`{"bench": NAME, "figures": {...}, "setup": {...}}`.
"""

from __future__ import annotations

import argparse
import os
import platform
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

import msgspec

import dualpath

__all__ = ["BenchModule", "BenchResult", "Figure", "Progress", "base_setup", "stderr_progress"]

_SECRET_FLAGS = ("--api-key", "--cache-salt")

Figure: TypeAlias = float | int | bool | str | Sequence["Figure"] | Mapping[str, "Figure"]
"""What JSON holds; a mapping is a figure by what it depends on, such as the number of agents."""
Progress = Callable[[str], None]
"""Called with one line of what is going on; goes to stderr."""


@dataclass(frozen=True, slots=True)
class BenchResult:
    """`figures` as the documentation names them; `setup` is what is needed to repeat the run.
    `interrupted`: it is a partial result, as Ctrl-C was pressed; the process says so by its exit code."""

    bench: str
    figures: dict[str, Figure]
    setup: dict[str, Figure] = field(default_factory=dict)
    interrupted: bool = False

    def to_json(self) -> str:
        setup: dict[str, Figure] = {**base_setup(), **self.setup}
        body = {"bench": self.bench, "figures": self.figures, "setup": setup}
        return msgspec.json.encode(body).decode()


class BenchModule(Protocol):
    """What `dualpath.bench.<name>` modules provide; also, where it applies, a constant NEEDS and a function
    `show(result)` that prints the result for people instead of the table of figures."""

    NAME: str
    HELP: str

    def add_arguments(self, parser: argparse.ArgumentParser) -> None: ...

    def run(self, args: argparse.Namespace, progress: Progress) -> BenchResult: ...


def base_setup() -> dict[str, str | int]:
    """Version and machine, in words that carry no host name and no key."""
    return {
        "dualpath": dualpath.__version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "cores": os.cpu_count() or 0,
        "command": " ".join(["dualpath", *_without_secrets(sys.argv[1:])]),
    }


def _without_secrets(arguments: Sequence[str]) -> Iterator[str]:
    """Results are kept and shown to others."""
    previous = ""
    for argument in arguments:
        flag, equals, _ = argument.partition("=")
        if previous in _SECRET_FLAGS:
            yield "..."
        elif equals and flag in _SECRET_FLAGS:
            yield f"{flag}=..."
        else:
            yield argument
        previous = argument


def stderr_progress(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
