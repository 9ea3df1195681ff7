"""Run-length coded block ids. Knows no files and no tokens."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from dualpath.traces.lines import Line
from dualpath.traces.model import BlockRun

__all__ = ["checked_runs", "common_blocks", "cut_runs", "to_runs"]

_MAX_ID = 2**63 - 1


def to_runs(ids: Iterable[int]) -> tuple[BlockRun, ...]:
    """The ids in order, each run as long as it can be."""
    runs: list[BlockRun] = []
    for each in ids:
        if runs and each == sum(runs[-1]):
            runs[-1] = (runs[-1][0], runs[-1][1] + 1)
        else:
            runs.append((each, 1))
    return tuple(runs)


def cut_runs(runs: Iterable[BlockRun], blocks: int) -> tuple[BlockRun, ...]:
    """The first `blocks` ids."""
    kept: list[BlockRun] = []
    for first, count in runs:
        if blocks <= 0:
            break
        kept.append((first, min(count, blocks)))
        blocks -= count
    return tuple(kept)


def common_blocks(a: Sequence[BlockRun], b: Sequence[BlockRun]) -> int:
    """How many ids `a` and `b` share from the start on. The runs need not be split alike."""
    shared = in_a = in_b = at_a = at_b = 0
    while in_a < len(a) and in_b < len(b):
        (first_a, count_a), (first_b, count_b) = a[in_a], b[in_b]
        if first_a + at_a != first_b + at_b:
            break
        step = min(count_a - at_a, count_b - at_b)
        shared, at_a, at_b = shared + step, at_a + step, at_b + step
        if at_a == count_a:
            in_a, at_a = in_a + 1, 0
        if at_b == count_b:
            in_b, at_b = in_b + 1, 0
    return shared


def checked_runs(line: Line, field: str, runs: Sequence[BlockRun]) -> tuple[BlockRun, ...]:
    """`runs` of a trace's line, if they can be: no negative ids, no empty runs. Raises ConfigError."""
    for i, (first, count) in enumerate(runs):
        if not 0 <= first <= _MAX_ID - count:
            raise line.wrong(f"{field}[{i}]: expected an id of 0 to {_MAX_ID}, got {first}")
        line.tokens(f"{field}[{i}] count", count)
    return tuple(runs)
