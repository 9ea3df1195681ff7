"""Trajectories: one session a line, `[[append, gen, think_s], ...]` or `{"id": ..., "turns": [[...], ...]}`.

A turn appends `append` tokens to the conversation so far, has `gen` tokens generated, and starts `think_s`
after the end of the turn before.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from dualpath.traces.lines import Line
from dualpath.traces.model import AppendPrompt, Session, Turn

__all__ = ["read"]

_Turns = list[tuple[int, int, float]]


class _Trajectory(msgspec.Struct, frozen=True):
    turns: _Turns
    id: str | None = None


_decoder: msgspec.json.Decoder[_Trajectory | _Turns] = msgspec.json.Decoder(_Trajectory | _Turns)


def read(lines: Iterable[Line]) -> tuple[Session, ...]:
    """Raises ConfigError."""
    sessions: dict[str, Session] = {}
    for line in lines:
        session = _session(line)
        if session.id in sessions:
            raise line.wrong(
                f"id: expected one that no session before has, got {session.id!r} again"
            )
        sessions[session.id] = session
    return tuple(sessions.values())


def _session(line: Line) -> Session:
    value = line.decode(_decoder)
    name = None if isinstance(value, list) else value.id
    recorded = value if isinstance(value, list) else value.turns
    if not recorded:
        raise line.wrong("turns: expected at least one, got none")
    turns = tuple(
        Turn(
            AppendPrompt(line.tokens(f"turns[{i}] append", append)),
            line.tokens(f"turns[{i}] gen", gen),
            line.seconds(f"turns[{i}] think_s", think_s),
        )
        for i, (append, gen, think_s) in enumerate(recorded)
    )
    return Session(name or line.label, turns)
