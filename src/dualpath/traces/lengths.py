"""How long a trace's prompts are, and how much of each an earlier one already had.

Exact for prompts of blocks and appended ones, estimated for recorded text. Knows no server: what is counted
is what an endless cache that starts empty would find, token by token.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from dualpath.traces.blocks import common_blocks
from dualpath.traces.full_text import estimated_tokens
from dualpath.traces.model import (
    AppendPrompt,
    BlockPrompt,
    BlockRun,
    Session,
    TextPrompt,
    Trace,
)

__all__ = ["context_tokens", "reused_tokens"]


def context_tokens(session: Session) -> tuple[int, ...]:
    """The prompt length of each turn, the tokens of a synthetic first round at its start included."""
    return tuple(prompt for prompt, _ in _lengths(session))


def reused_tokens(trace: Trace) -> tuple[tuple[int, ...], ...]:
    """Of each session's turns, how many tokens of the prompt an earlier prompt began with, too.

    Sessions are taken one after the other, in order. An appended prompt finds the whole conversation before
    it; blocks are found by their ids, in any session of their scope; text is compared with the text of the
    session's turn before.
    """
    known = _KnownBlocks()
    return tuple(tuple(_reused(session, known)) for session in trace.sessions)


def _lengths(session: Session) -> Iterator[tuple[int, int]]:
    """Of each turn, the prompt's length and how much of that was there before if it is appended."""
    # A synthetic first round generates one token.
    conversation = session.first_round_tokens + 1 if session.first_round_tokens else 0
    for turn in session.turns:
        before = conversation
        match turn.prompt:
            case AppendPrompt(tokens):
                prompt = conversation + tokens
            case BlockPrompt(tokens=tokens):
                prompt = session.first_round_tokens + tokens
            case TextPrompt(text):
                prompt = session.first_round_tokens + estimated_tokens(len(text))
        yield prompt, before
        conversation = prompt + turn.output_tokens


def _reused(session: Session, known: _KnownBlocks) -> Iterator[int]:
    # Copies of a session share nothing with each other.
    copy = f"{session.copy} {session.id}" if session.first_round_tokens else ""
    text_before = ""
    for turn, (prompt_tokens, conversation) in zip(session.turns, _lengths(session), strict=True):
        match turn.prompt:
            case AppendPrompt():
                yield conversation
            case BlockPrompt() as prompt:
                yield session.first_round_tokens + known.take(prompt, copy)
            case TextPrompt(text):
                common = _common_characters(text, text_before)
                found = estimated_tokens(common) if common else 0
                yield min(session.first_round_tokens + found, prompt_tokens)
                text_before = text


def _common_characters(a: str, b: str) -> int:
    """How many `a` and `b` share from the start on."""
    shared, end = 0, min(len(a), len(b))
    while shared < end:
        middle = (shared + end + 1) // 2
        if a.startswith(b[shared:middle], shared):
            shared = middle
        else:
            end = middle - 1
    return shared


@dataclass(slots=True)
class _Tree:
    """The prompts of one scope. A node is one block after those of its parent; 0 is the root.

    `last` and `path`: the prompt taken last and the nodes of its blocks. A session's prompts mostly go on
    where the one before ended, so most blocks are found by comparing runs instead of walking the tree.
    """

    children: dict[tuple[int, int], int] = field(default_factory=dict)
    tokens: list[int] = field(default_factory=lambda: [0])
    last: tuple[BlockRun, ...] = ()
    path: list[int] = field(default_factory=list)


class _KnownBlocks:
    """The prompts seen so far, by their block ids."""

    def __init__(self) -> None:
        self._trees: dict[tuple[str, int, str], _Tree] = {}

    def take(self, prompt: BlockPrompt, copy: str) -> int:
        """How many tokens of `prompt` are known. From then on, all of its blocks are."""
        size = prompt.block_tokens
        tree = self._trees.setdefault((prompt.scope, size, copy), _Tree())
        full_blocks = prompt.tokens // size
        shared = min(common_blocks(tree.last, prompt.blocks), len(tree.path), full_blocks)
        # The last block of the prompt before may have been cut short.
        while shared and tree.tokens[tree.path[shared - 1]] < size:
            shared -= 1
        path = tree.path[:shared]
        found, known = shared * size, True
        for i, block in enumerate(prompt.block_ids()):
            if i < shared:
                continue
            needed = min(size, prompt.tokens - i * size)
            if needed <= 0:
                break
            parent = path[-1] if path else 0
            node = tree.children.setdefault((parent, block), len(tree.tokens))
            if node == len(tree.tokens):
                tree.tokens.append(0)
            if known:
                found += min(tree.tokens[node], needed)
                known = tree.tokens[node] >= needed
            tree.tokens[node] = max(tree.tokens[node], needed)
            path.append(node)
        tree.last, tree.path = prompt.blocks, path
        return found
