"""Of experiments that an interrupted command could not finish: how many of their runs had ended. Pure."""

from __future__ import annotations

from collections.abc import Container, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

__all__ = ["Missing", "missing_of", "sentence"]

K = TypeVar("K", bound=Hashable)


@dataclass(frozen=True, slots=True)
class Missing:
    """`ended` of its `runs` had."""

    ended: int
    runs: int


def missing_of(needed: Mapping[str, Sequence[K]], results: Container[K]) -> dict[str, Missing]:
    """By name. `needed`: the runs of each experiment that could not be finished, each once."""
    return {
        name: Missing(sum(each in results for each in runs), len(runs))
        for name, runs in needed.items()
    }


def sentence(missing: Mapping[str, Missing]) -> str:
    """For people."""
    if not missing:
        return "interrupted, when all runs had ended"
    parts = (f"{name} ({each.ended} of {each.runs} runs ended)" for name, each in missing.items())
    return f"interrupted; missing: {', '.join(parts)}"
