"""The paper's traces: its table of them, and generated sessions whose means are the table's.

The generator's own means are up to 10 % off. So a larger pool is drawn, and of it sessions are chosen whose
means agree. Knows no cluster. Invariant: the same length, count and seed give the same sessions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import astuple, dataclass, replace
from types import MappingProxyType

import numpy as np
import numpy.typing as npt

from dualpath.base.errors import ConfigError
from dualpath.sim.workload import offline
from dualpath.traces import Trace
from dualpath.traces.generated import PREFIX, SESSIONS, generate, parse_length

__all__ = ["PAPER_TRACES", "WITHIN", "TraceMeans", "matched", "means_of", "paper_trace"]

Array = npt.NDArray[np.float64]

WITHIN = 0.01
"""How far, relative to what it shall be, a mean of `matched` sessions may be off."""
_CLOSE = 0.002
"""No session is exchanged any more when all means are as near as this."""
_POOL = 4
"""Sessions drawn for each that is chosen."""
_EXCHANGES, _TRIED = 5_000, 256
"""At most so many, each the best of so many."""


@dataclass(frozen=True, slots=True)
class TraceMeans:
    """Means over a trace's sessions: of the number of turns, of each one's mean append, output and prompt
    (`context_tokens`), and of each one's longest prompt with its output (`total_tokens`)."""

    turns: float
    append_tokens: float
    output_tokens: float
    total_tokens: float
    context_tokens: float


PAPER_TRACES: Mapping[str, TraceMeans] = MappingProxyType(
    {
        "32k": TraceMeans(60, 608, 148, 28_639, 17_183),
        "48k": TraceMeans(106, 474, 172, 42_607, 25_120),
        "64k": TraceMeans(157, 429, 176, 55_958, 32_721),
    }
)
"""By maximum length (paper, table of traces; 500 trajectories each)."""


def paper_trace(length: str, count: int = SESSIONS, seed: int = 0) -> Trace:
    """`count` generated sessions whose means are those of `PAPER_TRACES[length]`, each WITHIN.

    Takes a second or two for 500. Raises ConfigError for another length, and when so few sessions cannot have
    those means.
    """
    if length not in PAPER_TRACES:
        raise ConfigError(f"length: expected one of {', '.join(PAPER_TRACES)}, got {length!r}")
    pool = generate(parse_length(length), _POOL * count, seed)
    return matched(
        Trace(f"{PREFIX}{length}, matched", "generated", pool), PAPER_TRACES[length], count, seed
    )


def matched(trace: Trace, means: TraceMeans, count: int, seed: int = 0) -> Trace:
    """`count` of the trace's sessions whose means are `means`, each WITHIN; they stay in order.

    They are drawn at random, and then single ones exchanged for others until the means are close. Raises
    ConfigError when that does not succeed: the trace has too few sessions, or none like these.
    """
    if not 1 <= count <= len(trace.sessions):
        raise ConfigError(
            f"sessions: expected 1 to {len(trace.sessions)} of {trace.name}, got {count}"
        )
    errors = _sessions(trace) / np.array(astuple(means)) - 1
    chosen = _exchanged(errors, count, np.random.default_rng(seed))
    worst = np.abs(errors[chosen].mean(axis=0)).max()
    if worst > WITHIN:
        raise ConfigError(
            f"{trace.name}: found no {count} sessions with the means that were asked for: one is"
            f" {worst:.2%} off, expected {WITHIN:.0%}; ask for more sessions or give more to choose from"
        )
    return replace(trace, sessions=tuple(trace.sessions[i] for i in np.sort(chosen).tolist()))


def means_of(trace: Trace) -> TraceMeans:
    return TraceMeans(*_sessions(trace).mean(axis=0).tolist())


def _sessions(trace: Trace) -> Array:
    """[sessions, 5]: of each session what `TraceMeans` are means of."""
    flat = offline(trace, len(trace.sessions))
    first, turns = flat.first_turn[:-1], np.diff(flat.first_turn)

    def mean(values: npt.NDArray[np.int32]) -> Array:
        return np.add.reduceat(values.astype(np.float64), first) / turns

    columns = (
        turns,
        mean(flat.prompt_tokens - flat.reused_tokens),
        mean(flat.output_tokens),
        np.maximum.reduceat(flat.prompt_tokens + flat.output_tokens, first),
        mean(flat.prompt_tokens),
    )
    return np.stack(columns, axis=1).astype(np.float64)


def _exchanged(errors: Array, count: int, random: np.random.Generator) -> npt.NDArray[np.intp]:
    """`count` rows of `errors` [sessions, 5], at random and then exchanged until their mean is near zero.

    An exchange is the best of some random ones, not of all: so seldom one of the extremes, and how sessions
    are spread stays nearly as it was.
    """
    order = random.permutation(len(errors))
    total = errors[order[:count]].sum(axis=0)
    for _ in range(_EXCHANGES if count < len(errors) else 0):
        if np.abs(total).max() <= _CLOSE * count:
            break
        out = random.integers(0, count, _TRIED)
        into = random.integers(count, len(errors), _TRIED)
        after = total + errors[order[into]] - errors[order[out]]
        squares = np.square(after).sum(axis=1)
        best = squares.argmin()
        if squares[best] < np.square(total).sum():
            order[[out[best], into[best]]] = order[[into[best], out[best]]]
            total = after[best]
    return order[:count]
