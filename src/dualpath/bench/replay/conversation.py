"""The prompts of one session, made of tokens that depend on the trace and a seed alone.

Knows no server and no time. Invariants, for two prompts of a trace:

- Blocks of one scope with equal ids have equal tokens; so the prompts have in common at least what their
  block ids say, and in whole blocks of the trace exactly that: where they part, blocks differ for certain.
- In single tokens it is exact too, with certainty, where the ids (or turns of one session) that could follow
  the common part differ by less than a third of the token range, 9,600 for a vocabulary of 32,000: so it is
  for session-local ids of coding agents. Beyond that, and between sessions, the next token is the same by
  chance one time in that number, the next two in its square; within one scope never more than
  `TokenSource.lead_tokens` - 1. Servers count in blocks of 16 tokens or more, which so few do not fill.

A session's last prompt is kept encoded, and the next one takes over the bytes of what they have in common.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import msgspec
import numpy as np
import numpy.typing as npt

from dualpath.base.errors import ConfigError, InvariantViolation
from dualpath.bench.replay.tokens import Form, RunKind, TokenSource
from dualpath.traces.model import AppendPrompt, BlockPrompt, Session, TextPrompt, Turn

__all__ = ["Conversation", "PromptBody", "TokenSource"]

_NO_IDS: npt.NDArray[np.uint64] = np.empty(0, dtype=np.uint64)


@dataclass(frozen=True, slots=True)
class PromptBody:
    """`json`: the value of the request's prompt, encoded: an array of token ids, or a string. `tokens`: its
    length; 0 where only the server can tell (recorded text), approximate for words. `wants_answer_ids`: the
    next prompt goes on with the answer's token ids (else asking for them costs for nothing: servers send back
    the prompt's ids too)."""

    json: bytes
    tokens: int
    wants_answer_ids: bool = True


class Conversation:
    """One session's prompts, in order. Owned by the one task that replays the session.

    Holds its last prompt encoded, about six bytes a token. Raises ConfigError where a session mixes recorded
    text with other prompts.
    """

    def __init__(self, session: Session, source: TokenSource) -> None:
        kinds = {isinstance(turn.prompt, TextPrompt) for turn in session.turns}
        if len(kinds) > 1:
            raise ConfigError(
                f"session {session.id!r} mixes recorded text with token counts or block ids; "
                "a session must be one or the other"
            )
        self._text = True in kinds
        # Text can only be preceded by text.
        self._source = (
            TokenSource.words(source.seed)
            if self._text and source.form is not Form.TEXT
            else source
        )
        self._form = self._source.form
        self._session = session
        self._own_key = f"{session.copy} {session.id}"
        self._turns = _with_first_round(session)
        self._first_round = b""
        if session.first_round_tokens > 0:
            self._first_round = self._source.encode(
                RunKind.FIRST_ROUND, session.id, [session.copy], session.first_round_tokens
            )
        self._cells = b""
        """The last prompt with the answer to it, as far as known: cells, the last separator included."""
        self._tokens = 0
        self._scope = ""
        self._block_tokens = 0
        self._ids = _NO_IDS
        """Of the whole blocks at the start of `_cells`, after the first round."""
        self._answered = -1

    @property
    def turns(self) -> tuple[Turn, ...]:
        """The session's turns, after its synthetic first round if it has one."""
        return self._turns

    def prompt(self, index: int) -> PromptBody:
        """Of `turns[index]`. Turns are asked for in order, each answered before the next is asked for."""
        first_round = index == 0 and bool(self._first_round)
        match self._turns[index].prompt:
            case AppendPrompt() if first_round:
                self._keep(self._first_round, self._session.first_round_tokens)
            case AppendPrompt(tokens):
                if self._answered != index - 1:
                    raise InvariantViolation(
                        f"session {self._session.id!r}: the prompt of turn {index} was asked for, but the "
                        f"last answer taken is that of turn {self._answered}"
                    )
                added = self._source.encode(RunKind.TURN, self._own_key, [index], tokens)
                self._cells += added
                self._tokens += tokens
            case BlockPrompt() as blocks:
                self._make_of_blocks(index, blocks)
            case TextPrompt(text):
                opening = self._form.opening + self._first_round
                return PromptBody(opening + msgspec.json.encode(text)[1:], 0, False)
        return PromptBody(
            b"".join((self._form.opening, memoryview(self._cells)[:-1], self._form.closing)),
            self._tokens,
            self._form is Form.IDS and self._goes_on(index),
        )

    def take_answer(self, index: int, token_ids: Sequence[int] | None) -> None:
        """What was generated for `turns[index]`: the context of an AppendPrompt goes on with it. None: the
        server does not return token ids, so tokens of the source stand for them (and are no prefix hits).
        The same holds for prompts of words, whatever the server returns."""
        self._answered = index
        if not self._goes_on(index):
            return
        if token_ids is None or self._form is Form.TEXT:
            count = self._turns[index].output_tokens
            self._cells += self._source.encode(
                RunKind.TURN, f"answer {self._own_key}", [index], count
            )
        else:
            count = len(token_ids)
            if count:
                self._cells += msgspec.json.encode(list(token_ids))[1:-1] + b","
        self._tokens += count

    def _goes_on(self, index: int) -> bool:
        """The turn after `index` continues its answer."""
        following = self._turns[index + 1 : index + 2]
        return bool(following) and isinstance(following[0].prompt, AppendPrompt)

    def _keep(self, cells: bytes, tokens: int) -> None:
        self._cells, self._tokens = cells, tokens

    def _make_of_blocks(self, index: int, prompt: BlockPrompt) -> None:
        size, width = prompt.block_tokens, self._source.width
        ids = _expanded(prompt)[: -(-prompt.tokens // size)]
        whole = min(len(ids), prompt.tokens // size)
        start = self._session.first_round_tokens * width
        kept = 0
        if self._scope == prompt.scope and self._block_tokens == size:
            kept = _common(self._ids, ids[:whole])
        parts: list[bytes | memoryview] = [self._first_round]
        if kept:
            parts = [memoryview(self._cells)[: start + kept * size * width]]
        parts.append(self._source.encode(RunKind.BLOCK, prompt.scope, ids[kept:], size))
        cells = b"".join(parts)
        missing = prompt.tokens - len(ids) * size
        if missing > 0:
            cells += self._source.encode(RunKind.TURN, self._own_key, [index], missing)
        else:
            cells = cells[: start + prompt.tokens * width]
        self._keep(cells, self._session.first_round_tokens + prompt.tokens)
        self._scope, self._block_tokens, self._ids = prompt.scope, size, ids[:whole]


def _with_first_round(session: Session) -> tuple[Turn, ...]:
    if session.first_round_tokens <= 0:
        return session.turns
    first = Turn(prompt=AppendPrompt(session.first_round_tokens), output_tokens=1)
    # A delay of the turn that was the first has no meaning, also now.
    return (first, replace(session.turns[0], delay_s=0.0), *session.turns[1:])


def _expanded(prompt: BlockPrompt) -> npt.NDArray[np.uint64]:
    if not prompt.blocks:
        return _NO_IDS
    runs = [np.arange(first, first + count, dtype=np.uint64) for first, count in prompt.blocks]
    return np.concatenate(runs)


def _common(a: npt.NDArray[np.uint64], b: npt.NDArray[np.uint64]) -> int:
    """Length of the common prefix."""
    length = min(len(a), len(b))
    different = np.flatnonzero(a[:length] != b[:length])
    return int(different[0]) if len(different) else length
