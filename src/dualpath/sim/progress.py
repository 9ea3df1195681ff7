"""Shows on standard error how far many runs are: a bar on a terminal, a line for each run elsewhere."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
)

__all__ = ["Watch", "shown_watch"]


class Watch:
    """Is told how far the runs are; this one does nothing with it."""

    def expect(self, runs: int) -> None:
        """So many more."""

    def ended(self, sentence: str) -> None:
        """One of them, and what it gave."""


@contextmanager
def shown_watch(console: Console) -> Iterator[Watch]:
    """`console` is one of standard error."""
    if not console.is_terminal:
        yield _Lines(console)
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(30),
        MofNCompleteColumn(),
        TextColumn("runs"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, transient=True) as bar:
        yield _Bar(bar)


class _Lines(Watch):
    def __init__(self, console: Console) -> None:
        self._console = console
        self._expected = self._done = 0

    def expect(self, runs: int) -> None:
        self._expected += runs

    def ended(self, sentence: str) -> None:
        self._done += 1
        line = f"[{self._done}/{self._expected}] {sentence}"
        self._console.print(line, highlight=False, markup=False, soft_wrap=True)


class _Bar(Watch):
    def __init__(self, bar: Progress) -> None:
        self._bar = bar
        self._expected = 0
        self._task = bar.add_task("simulating", total=None)

    def expect(self, runs: int) -> None:
        self._expected += runs
        self._bar.update(self._task, total=self._expected)

    def ended(self, sentence: str) -> None:
        self._bar.update(self._task, advance=1, description=sentence)
