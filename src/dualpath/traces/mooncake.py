"""Mooncake's trace format, with the multi-turn fields that AIPerf adds to it.

One request a line: `timestamp` (ms), `input_length`, `output_length`, `hash_ids` of blocks of 512 tokens;
`session_id`, `delay` (ms), `text_input`. What a line means:

- A line without `session_id` is a session of one turn. Lines with the same one are one session, in the
  order of the file; its first line's `timestamp` is its start, and each later one starts `delay` after the
  end of the one before. Where there is no `delay`, the difference of the timestamps stands for it, although
  it holds the recorded service time as well.
- `hash_ids` give the whole prompt, and an id means the same in all lines. Without them, `input_length` is
  what the turn appends to the conversation so far; `text_input` is a whole prompt.
- An `output_length` of 0 counts as 1: a request has to be answered.

Times are rebased: the first session starts at 0.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import msgspec

from dualpath.traces.arrivals import rebased
from dualpath.traces.blocks import checked_runs, cut_runs, to_runs
from dualpath.traces.lines import Line
from dualpath.traces.model import AppendPrompt, BlockPrompt, Prompt, Session, TextPrompt, Turn

__all__ = ["BLOCK_TOKENS", "read"]

BLOCK_TOKENS = 512
_MS = 1e-3


class _Request(msgspec.Struct, frozen=True):
    output_length: int
    input_length: int | None = None
    text_input: str | None = None
    hash_ids: list[int] | None = None
    timestamp: float | None = None
    delay: float | None = None
    session_id: str | int | None = None


@dataclass(slots=True)
class _Session:
    id: str
    start_s: float | None
    last_s: float | None
    turns: list[Turn] = field(default_factory=list)


_decoder = msgspec.json.Decoder(_Request)


def read(lines: Iterable[Line], block_tokens: int = BLOCK_TOKENS) -> tuple[Session, ...]:
    """Raises ConfigError."""
    sessions: list[_Session] = []
    by_id: dict[str, _Session] = {}
    for line in lines:
        request = line.decode(_decoder)
        at_s = (
            None if request.timestamp is None else line.seconds("timestamp", request.timestamp, _MS)
        )
        name = None if request.session_id is None else str(request.session_id)
        session = None if name is None else by_id.get(name)
        if session is None:
            session = _Session(line.label if name is None else name, at_s, at_s)
            sessions.append(session)
            if name is not None:
                by_id[name] = session
            delay_s = 0.0
        else:
            delay_s = _delay_s(line, request, session.last_s, at_s)
            session.last_s = at_s
        prompt = _prompt(line, request, block_tokens)
        output_tokens = line.tokens("output_length", request.output_length, at_least=0)
        session.turns.append(Turn(prompt, max(output_tokens, 1), delay_s))
    return rebased(Session(each.id, tuple(each.turns), each.start_s) for each in sessions)


def _delay_s(line: Line, request: _Request, last_s: float | None, at_s: float | None) -> float:
    if request.delay is not None:
        return line.seconds("delay", request.delay, _MS)
    if last_s is None or at_s is None:
        return 0.0
    if at_s < last_s:
        raise line.wrong(
            f"timestamp: expected at least {last_s / _MS:g}, that of the session's turn before,"
            f" got {at_s / _MS:g}"
        )
    return at_s - last_s


def _prompt(line: Line, request: _Request, block_tokens: int) -> Prompt:
    if request.text_input is not None:
        if not request.text_input:
            raise line.wrong("text_input: expected text, got an empty string")
        return TextPrompt(request.text_input)
    if request.input_length is None:
        raise line.wrong("expected the field input_length or text_input, got neither")
    tokens = line.tokens("input_length", request.input_length)
    if not request.hash_ids:
        return AppendPrompt(tokens)
    runs = checked_runs(line, "hash_ids", to_runs(request.hash_ids))
    return BlockPrompt("", block_tokens, cut_runs(runs, -(-tokens // block_tokens)), tokens)
