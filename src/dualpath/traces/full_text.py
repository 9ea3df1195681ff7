"""Recorded sessions with their full text, as LMCache publishes them.

One request a line: `input`, the whole prompt; `output`, what was answered; `timestamp` (us); `session_id`.
Lines of one `session_id` are a session, in order; where it is missing, those of one file are. What is not
recorded is estimated: a token is taken for four characters, so `output` of n characters asks for n / 4
tokens, rounded up, and at least one. The difference of two turns' timestamps stands for the delay between
them, although it holds the recorded service time as well; below zero it counts as zero.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import msgspec

from dualpath.traces.arrivals import rebased
from dualpath.traces.lines import Line
from dualpath.traces.model import Session, TextPrompt, Turn

__all__ = ["estimated_tokens", "read"]

_CHARACTERS_A_TOKEN = 4
_US = 1e-6


def estimated_tokens(characters: int) -> int:
    """Of text without a tokenizer. At least one."""
    return max(1, -(-characters // _CHARACTERS_A_TOKEN))


class _Request(msgspec.Struct, frozen=True):
    input: str
    output: str = ""
    timestamp: float | None = None
    session_id: str | int | None = None


@dataclass(slots=True)
class _Session:
    start_s: float | None
    last_s: float | None
    turns: list[Turn] = field(default_factory=list)


_decoder = msgspec.json.Decoder(_Request)


def read(lines: Iterable[Line]) -> tuple[Session, ...]:
    """Raises ConfigError."""
    sessions: dict[str, _Session] = {}
    for line in lines:
        request = line.decode(_decoder)
        if not request.input:
            raise line.wrong("input: expected text, got an empty string")
        at_s = (
            None if request.timestamp is None else line.seconds("timestamp", request.timestamp, _US)
        )
        name = line.stem if request.session_id is None else str(request.session_id)
        session = sessions.setdefault(name, _Session(at_s, at_s))
        between_s = 0.0 if at_s is None or session.last_s is None else at_s - session.last_s
        session.last_s = at_s
        prompt = TextPrompt(request.input)
        output_tokens = estimated_tokens(len(request.output))
        session.turns.append(Turn(prompt, output_tokens, max(between_s, 0.0)))
    return rebased(
        Session(name, tuple(each.turns), each.start_s) for name, each in sessions.items()
    )
