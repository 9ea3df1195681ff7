"""What agents do in a benchmark on a testbed: who has a stored context, what each turn appends.

Pure: makes sessions. Invariant: the stored part of a session is the beginning of its first prompt, token for
token, so the measured turns read long prefixes and compute little.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dualpath.base.errors import ConfigError
from dualpath.sim.paper_traces import PAPER_TRACES
from dualpath.traces.model import (
    AppendPrompt,
    BlockPrompt,
    Session,
    TextPrompt,
    Trace,
    Turn,
)

__all__ = [
    "LONG_APPEND",
    "Shape",
    "Workload",
    "paper_shape",
    "shared_contexts",
    "text_workload",
    "workload",
]


@dataclass(frozen=True, slots=True)
class Shape:
    """An agent: `context_tokens` are stored before; each of `turns` appends and generates."""

    context_tokens: int
    append_tokens: int
    output_tokens: int
    turns: int

    @property
    def longest_tokens(self) -> int:
        """Its last prompt and answer."""
        return self.context_tokens + self.turns * (self.append_tokens + self.output_tokens)

    @property
    def fed_tokens(self) -> int:
        """Prompt tokens of all turns, before what servers find stored of them."""
        grown = self.append_tokens + self.output_tokens
        return sum(
            self.context_tokens + turn * grown + self.append_tokens for turn in range(self.turns)
        )


def paper_shape(context_tokens: int, turns: int) -> Shape:
    """The means of the paper's longest trace, append and generation scaled as the context is."""
    means = PAPER_TRACES["64k"]
    scale = context_tokens / means.context_tokens
    return Shape(
        context_tokens,
        max(1, round(means.append_tokens * scale)),
        max(2, round(means.output_tokens * scale)),
        turns,
    )


LONG_APPEND = Shape(context_tokens=240, append_tokens=512, output_tokens=4, turns=1)
"""Computing takes a little longer than reading by one NIC."""


@dataclass(frozen=True, slots=True)
class Workload:
    """`stored`: played once before, to fill the store. `agents`: start together. `alone`: one after
    another on an idle cluster. `long`: start together, computing is what takes their time; the first one only
    warms up."""

    stored: tuple[Session, ...]
    agents: tuple[Session, ...]
    alone: tuple[Session, ...]
    long: tuple[Session, ...] = ()


def workload(shape: Shape, *, agents: int, alone: int, long: int) -> Workload:
    """Trajectories of one shape, of random tokens."""
    lone = Shape(shape.context_tokens, shape.append_tokens, shape.output_tokens, 1)
    measured = [_sessions(f"agent {agents}", shape, agents), _sessions("alone", lone, alone)]
    measured.append(_sessions("long", LONG_APPEND, long))
    shapes = [shape, lone, LONG_APPEND]
    stored = [
        Session(each.id, (Turn(AppendPrompt(of.context_tokens), 1),))
        for of, group in zip(shapes, measured, strict=True)
        for each in group
    ]
    return Workload(tuple(stored), *measured)


def text_workload(
    trace: Trace, *, max_context_tokens: int, agents: int, alone: int, turns: int
) -> Workload:
    """Recorded text: of each session the last turns that fit; the turn before them is what is stored.

    Agents are told apart by a number in front of their text. Raises ConfigError when nothing fits.
    """
    chosen = [
        fitting
        for session in trace.sessions
        if len(fitting := _that_fit(session, max_context_tokens)) > turns
    ]
    if not chosen:
        raise ConfigError(
            f"{trace.name}: no session has more than {turns} turns of at most {max_context_tokens} tokens: "
            "raise --context (6000) or lower --turns"
        )
    sessions: list[Session] = []
    stored: list[Session] = []
    for number in range(agents + alone):
        recorded = chosen[number % len(chosen)]
        name = f"{trace.name} {number}"
        played = recorded[-turns:] if number < agents else recorded[-turns : -turns + 1 or None]
        sessions.append(Session(name, tuple(_numbered(turn, number) for turn in played)))
        first = _numbered(recorded[-turns - 1], number)
        stored.append(Session(name, (Turn(first.prompt, 1),)))
    return Workload(tuple(stored), tuple(sessions[:agents]), tuple(sessions[agents:]))


def shared_contexts(
    shape: Shape, *, sessions: int, contexts: int, block_tokens: int
) -> tuple[tuple[Session, ...], tuple[Session, ...]]:
    """What to store, and sessions that begin with it, each with turns of its own.

    A context is read again for every session that begins with it, as no engine keeps KV that it has read.
    """
    blocks = shape.context_tokens // block_tokens

    def prompt(number: int, tokens: int) -> BlockPrompt:
        return BlockPrompt(f"context {number % contexts}", block_tokens, ((0, blocks),), tokens)

    stored = tuple(
        Session(f"context {number}", (Turn(prompt(number, blocks * block_tokens), 1),))
        for number in range(contexts)
    )
    first = blocks * block_tokens + shape.append_tokens
    later = (Turn(AppendPrompt(shape.append_tokens), shape.output_tokens),) * (shape.turns - 1)
    measured = tuple(
        Session(f"agent {n}", (Turn(prompt(n, first), shape.output_tokens), *later))
        for n in range(sessions)
    )
    return stored, measured


def _sessions(name: str, shape: Shape, count: int) -> tuple[Session, ...]:
    first = Turn(AppendPrompt(shape.context_tokens + shape.append_tokens), shape.output_tokens)
    later = (Turn(AppendPrompt(shape.append_tokens), shape.output_tokens),) * (shape.turns - 1)
    return tuple(Session(f"{name} {number}", (first, *later)) for number in range(count))


def _that_fit(session: Session, max_context_tokens: int) -> Sequence[Turn]:
    """With four characters a token, as recorded text is estimated everywhere."""
    fitting: list[Turn] = []
    for turn in session.turns:
        if (
            not isinstance(turn.prompt, TextPrompt)
            or len(turn.prompt.text) // 4 > max_context_tokens
        ):
            break
        fitting.append(turn)
    return fitting


def _numbered(turn: Turn, number: int) -> Turn:
    assert isinstance(turn.prompt, TextPrompt)
    return Turn(TextPrompt(f"[{number}] {turn.prompt.text}"), turn.output_tokens)
