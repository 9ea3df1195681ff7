"""Shows how far a run is: a bar on a terminal, a line every few seconds elsewhere.

Reads a `Tally` that the run keeps. Knows no server. `status_line` and `remaining_s` are pure.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from dualpath.bench.harness import Progress
from dualpath.bench.replay.load import Tally

__all__ = ["remaining_s", "show_progress", "status_line"]

_LINE_EVERY_S = 5.0
_BAR_EVERY_S = 0.5


@asynccontextmanager
async def show_progress(
    title: str, tally: Tally, duration_s: float | None, progress: Progress
) -> AsyncIterator[None]:
    """While the block runs. `progress` takes the lines where standard error is no terminal."""
    display = _Display(title, tally, duration_s, progress)
    task = asyncio.create_task(display.show_bar() if sys.stderr.isatty() else display.show_lines())
    try:
        yield
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
        progress(f"{title}: {status_line(tally, display.elapsed_s())}")


def status_line(tally: Tally, elapsed_s: float) -> str:
    """What has happened."""
    failed = sum(tally.errors.values())
    parts = [
        f"{tally.sessions_ended:,}/{tally.sessions:,} agents",
        f"{tally.requests:,} requests",
        f"{tally.in_flight:,} in flight",
        f"{failed:,} errors" if failed else "no errors",
    ]
    if elapsed_s > 0:
        parts.append(f"{tally.output_tokens / elapsed_s:,.0f} tokens/s")
    if tally.mean_ttft_s is not None:
        parts.append(f"TTFT {tally.mean_ttft_s:.3g} s")
    return ", ".join(parts)


def remaining_s(tally: Tally, elapsed_s: float, duration_s: float | None) -> float | None:
    """By the time where a duration is set, otherwise by the turns that have ended; None: too early to tell.
    A run that ends for being steady ends earlier."""
    if duration_s is not None:
        return max(duration_s - elapsed_s, 0.0)
    share = (tally.requests + tally.turns_skipped) / tally.turns if tally.turns else 0.0
    return elapsed_s * (1 - share) / share if share else None


class _Display:
    def __init__(
        self, title: str, tally: Tally, duration_s: float | None, progress: Progress
    ) -> None:
        self._title = title
        self._tally = tally
        self._duration_s = duration_s
        self._progress = progress
        self._started_s = time.monotonic()

    def elapsed_s(self) -> float:
        return time.monotonic() - self._started_s

    async def show_lines(self) -> None:
        while True:
            await asyncio.sleep(_LINE_EVERY_S)
            self._progress(f"{self._title}: {self._status()}")

    async def show_bar(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn

        columns = (
            TextColumn("{task.description}"),
            BarColumn(20),
            TextColumn("{task.fields[status]}"),
        )
        # Drawn from here: a thread of its own would take the interpreter from sends that are due.
        with Progress(
            *columns, console=Console(stderr=True), auto_refresh=False, transient=True
        ) as bar:
            task = bar.add_task(self._title, total=1.0, status="")
            while True:
                bar.update(task, completed=self._share(), status=self._status())
                bar.refresh()
                await asyncio.sleep(_BAR_EVERY_S)

    def _share(self) -> float:
        elapsed_s = self.elapsed_s()
        left_s = remaining_s(self._tally, elapsed_s, self._duration_s)
        return 0.0 if left_s is None else elapsed_s / max(elapsed_s + left_s, 1e-9)

    def _status(self) -> str:
        elapsed_s = self.elapsed_s()
        left_s = remaining_s(self._tally, elapsed_s, self._duration_s)
        left = "" if left_s is None else f", {_clock(left_s)} left"
        return f"{status_line(self._tally, elapsed_s)}{left}"


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
