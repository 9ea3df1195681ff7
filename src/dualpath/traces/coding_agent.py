"""Recorded sessions of coding agents, as kv-cache-tester publishes them.

One session a line, or a `.json` file: `id`, `block_size`, `hash_id_scope`, and `requests` of `in` and `out`
tokens, `think_time` (s), and the ids of the prompt's blocks: `hr`, run-length coded [[first_id, count], ...],
or `hash_ids`, one by one. What a request means:

- The ids give the prompt's full blocks. What `in` has beyond them belongs to the request alone.
- `hash_id_scope` "local": an id means the same in the session, its sub-agents included; "global": in all
  sessions; without it, in one agent's requests only.
- `think_time` goes by between the end of the request before and the start of this one. Traces without it
  give the difference of the starts, `t`, which holds the recorded service time as well.
- An entry of `type` "subagent" has `requests` of its own. Sub-agents are played at their place in the
  session, one after the other, and the main agent waits for them, also where they ran at the same time when
  they were recorded. The main agent's next `think_time` holds the time that they took, so what goes by after
  them is at most the time from the last sub-agent's start.
- An `out` of 0 counts as 1: a request has to be answered.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import msgspec

from dualpath.traces.blocks import checked_runs, cut_runs, to_runs
from dualpath.traces.lines import Line
from dualpath.traces.model import BlockPrompt, BlockRun, Session, Turn

__all__ = ["read"]

_BLOCK_TOKENS = 64
_SCOPES = (None, "per_context", "local", "global")


class _Request(msgspec.Struct, frozen=True):
    """A request, or a sub-agent with requests."""

    type: str = ""
    t: float | None = None
    think_time: float | None = None
    input_tokens: int | None = msgspec.field(default=None, name="in")
    output_tokens: int | None = msgspec.field(default=None, name="out")
    hr: list[tuple[int, int]] | None = None
    hash_ids: list[int] | None = None
    agent_id: str | None = None
    requests: list[_Request] | None = None


class _Session(msgspec.Struct, frozen=True):
    requests: list[_Request]
    id: str | None = None
    block_size: int = _BLOCK_TOKENS
    hash_id_scope: str | None = None


_decoder = msgspec.json.Decoder(_Session)


def read(lines: Iterable[Line]) -> tuple[Session, ...]:
    """Raises ConfigError."""
    sessions: dict[str, Session] = {}
    for line in lines:
        recorded = line.decode(_decoder)
        name = recorded.id or line.label
        if name in sessions:
            raise line.wrong(f"id: expected one that no session before has, got {name!r} again")
        if recorded.hash_id_scope not in _SCOPES:
            raise line.wrong(
                f"hash_id_scope: expected 'local' or 'global', got {recorded.hash_id_scope!r}"
            )
        line.tokens("block_size", recorded.block_size)
        turns = tuple(_Turns(line, recorded, name).of(recorded.requests, "requests", name))
        if not turns:
            raise line.wrong("requests: expected at least one, got none")
        sessions[name] = Session(name, turns)
    return tuple(sessions.values())


class _Turns:
    """The turns of one line."""

    def __init__(self, line: Line, session: _Session, name: str) -> None:
        self._line = line
        self._block_tokens = session.block_size
        self._scope = {"local": name, "global": ""}.get(session.hash_id_scope or "")

    def of(self, requests: list[_Request], at: str, agent: str) -> Iterator[Turn]:
        """`at`: the field that they are. `agent`: whose they are."""
        before: _Request | None = None
        for i, request in enumerate(requests):
            field = f"{at}[{i}]"
            if request.requests is not None:
                named = request.agent_id or str(i)
                yield from self.of(request.requests, f"{field}.requests", f"{agent}/{named}")
            elif request.type == "subagent":
                raise self._line.wrong(f"{field}.requests: expected a list, got nothing")
            else:
                yield self._turn(request, before, field, agent)
            before = request

    def _turn(self, request: _Request, before: _Request | None, field: str, agent: str) -> Turn:
        line = self._line
        tokens = line.tokens(f"{field}.in", request.input_tokens)
        output_tokens = line.tokens(f"{field}.out", request.output_tokens, at_least=0)
        runs = cut_runs(self._runs(request, field), -(-tokens // self._block_tokens))
        scope = agent if self._scope is None else self._scope
        prompt = BlockPrompt(scope, self._block_tokens, runs, tokens)
        return Turn(prompt, max(output_tokens, 1), self._delay_s(request, before, field))

    def _runs(self, request: _Request, field: str) -> tuple[BlockRun, ...]:
        if request.hr is not None:
            return checked_runs(self._line, f"{field}.hr", request.hr)
        if request.hash_ids is not None:
            return checked_runs(self._line, f"{field}.hash_ids", to_runs(request.hash_ids))
        raise self._line.wrong(f"{field}.hr: expected block ids, got neither hr nor hash_ids")

    def _delay_s(self, request: _Request, before: _Request | None, field: str) -> float:
        since_s = None
        if before is not None and before.t is not None and request.t is not None:
            since_s = self._line.seconds(f"{field}.t", max(request.t - before.t, 0.0))
        if request.think_time is None:
            return since_s or 0.0
        think_s = self._line.seconds(f"{field}.think_time", request.think_time)
        after_subagent = before is not None and before.requests is not None
        return min(think_s, since_s) if after_subagent and since_s is not None else think_s
