"""`dualpath demo`: flags, progress bar, table and JSON line; `dualpath.bench.demo` does the rest.

The last line of standard output is the result as JSON. Exit code 1 when tokens differ.
"""

from __future__ import annotations

import argparse
import signal
import sys
from pathlib import Path
from types import FrameType, TracebackType

from dualpath.base.errors import ConfigError

__all__ = ["add_arguments", "run"]

_PIPED_WIDTH = 100
"""Columns of the table where the width of the terminal is unknown."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model",
        nargs="?",
        default="smollm2",
        metavar="MODEL",
        help="any MODEL of `dualpath serve`; tiny needs no download (default: smollm2)",
    )
    parser.add_argument(
        "--store",
        type=Path,
        metavar="DIR",
        help="where KV is stored, kept for the next run (default: in the cache directory)",
    )
    parser.add_argument(
        "--fresh", action="store_true", help="clear the store first: nothing is found at the start"
    )
    parser.add_argument(
        "--read-path",
        default="split",
        choices=("split", "shorter", "pe", "de"),
        help="which side reads stored KV (default: split)",
    )
    parser.add_argument(
        "--sessions",
        type=Path,
        metavar="DIR",
        help="other recorded sessions: .jsonl files, a line a turn, its field `input` the prompt",
    )
    parser.add_argument(
        "--gen", type=int, default=8, metavar="TOKENS", help="generated a turn (default: 8)"
    )
    parser.add_argument(
        "--turns",
        type=int,
        metavar="N",
        help="only the first N turns of each session (default: all; 16 with the models that have one "
        "token a byte)",
    )
    parser.add_argument(
        "--compare",
        type=int,
        default=1,
        metavar="N",
        help="turns of each session that are also run without stored KV (default: 1)",
    )


def run(args: argparse.Namespace) -> int:
    for flag, value in (("--gen", args.gen), ("--turns", args.turns), ("--compare", args.compare)):
        if value is not None and value < 1:
            raise ConfigError(f"{flag}: expected a whole number >= 1, got {value}")
    # Imported here so that `dualpath demo --help` needs no server library.
    from rich.console import Console

    from dualpath.bench.demo import (
        QUESTION,
        DemoOptions,
        clear_store,
        default_store,
        default_turns,
        run_demo,
        stored_blocks,
    )
    from dualpath.bench.harness import BenchResult
    from dualpath.traces import open_trace

    signal.signal(signal.SIGTERM, _interrupt)
    store = (args.store or default_store(args.model)).expanduser().absolute()
    options = DemoOptions(
        model=args.model,
        store=store,
        log=store.with_name(f"{store.name}.log"),
        read_path=args.read_path,
        gen_tokens=args.gen,
        turns=args.turns or default_turns(args.model),
        compared=args.compare,
    )
    if args.fresh:
        clear_store(store)
    found = stored_blocks(store)
    if args.sessions is not None and not args.sessions.is_dir():
        raise ConfigError(f"--sessions: {args.sessions} is no directory")
    if args.sessions is None:
        trace = open_trace("miniswe")
    else:
        trace = open_trace(args.sessions, trace_format="full-text")
    sessions = trace.sessions
    with _Bar(options.total_runs(sessions)) as bar:
        report = run_demo(
            options,
            sessions,
            answered=lambda answer: bar.print_above(f"Q: {QUESTION}\nA: {answer.strip()}"),
            progress=bar.update,
        )
    Console(width=None if sys.stdout.isatty() else _PIPED_WIDTH).print(report.table())
    result = BenchResult("demo", report.figures(), {**options.setup(), "stored_blocks": found})
    print(result.to_json(), flush=True)
    if not report.tokens_equal:
        print("dualpath: tokens with and without stored KV differ", file=sys.stderr)
        return 1
    return 0


class _Bar:
    """The progress bar, on standard error."""

    def __init__(self, total: int) -> None:
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeElapsedColumn,
        )

        self._progress = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=Console(stderr=True),
            redirect_stdout=False,
        )
        self._task = self._progress.add_task("", total=total)

    def update(self, what: str, completed: int) -> None:
        self._progress.update(self._task, description=what, advance=completed)

    def print_above(self, text: str) -> None:
        """To standard output, which may be the same terminal."""
        self._progress.stop()
        print(text, flush=True)
        self._progress.start()

    def __enter__(self) -> _Bar:
        self._progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._progress.stop()


def _interrupt(number: int, frame: FrameType | None) -> None:
    """As Ctrl-C: the server is stopped on the way out."""
    raise KeyboardInterrupt
