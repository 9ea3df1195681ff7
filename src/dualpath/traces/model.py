"""What a trace is: sessions of turns, each turn a prompt and a number of tokens to generate.

Pure data, the same for every file format. Knows no files, no tokens and no server. Invariants: a session
has at least one turn; times are seconds and never negative; token counts are positive.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

__all__ = [
    "AppendPrompt",
    "BlockPrompt",
    "BlockRun",
    "Prompt",
    "Session",
    "TextPrompt",
    "Trace",
    "Turn",
]

BlockRun = tuple[int, int]
"""`(first_id, count)`: the blocks first_id, first_id + 1, ..."""


@dataclass(frozen=True, slots=True)
class BlockPrompt:
    """The whole prompt, by the ids of its blocks: two prompts share exactly the tokens of the ids that they
    share from the start on.

    `scope` says where an id means the same: "" everywhere in the trace, otherwise in that scope only.
    `blocks` are run-length coded ids of `block_tokens` tokens each. `tokens` is the prompt's length: when the
    ids cover more, the last block is cut; when they cover less, the rest belongs to this turn alone.
    """

    scope: str
    block_tokens: int
    blocks: tuple[BlockRun, ...]
    tokens: int

    def block_ids(self) -> Iterator[int]:
        for first, count in self.blocks:
            yield from range(first, first + count)


@dataclass(frozen=True, slots=True)
class AppendPrompt:
    """The conversation so far, prompts and answers, and `tokens` new ones."""

    tokens: int


@dataclass(frozen=True, slots=True)
class TextPrompt:
    """The whole prompt, as it was recorded."""

    text: str


Prompt = BlockPrompt | AppendPrompt | TextPrompt


@dataclass(frozen=True, slots=True)
class Turn:
    """One request. `delay_s`: between the end of the turn before and the start of this one, for a tool or
    for thinking; of no meaning in a session's first turn."""

    prompt: Prompt
    output_tokens: int
    delay_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Session:
    """One agent's trajectory. `start_s`: when it starts, from the start of the trace; None: not recorded.

    `first_round_tokens`: if above zero, `copy` tells this session from others of the same turns: every
    prompt starts with that many random tokens of its own, and a first round with them as its prompt and one
    token to generate precedes the turns (paper, section 7: how more trajectories are made from few).
    """

    id: str
    turns: tuple[Turn, ...]
    start_s: float | None = None
    first_round_tokens: int = 0
    copy: int = 0


@dataclass(frozen=True, slots=True)
class Trace:
    """`name`: the path or built-in name it was read from. `format`: "mooncake", "coding-agent",
    "trajectories", "full-text", "azure" or "generated"."""

    name: str
    format: str
    sessions: tuple[Session, ...]

    @property
    def turns(self) -> int:
        return sum(len(session.turns) for session in self.sessions)
