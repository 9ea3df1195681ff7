"""Recorded agent sessions with their full text, and how a turn is cut to a model's window.

The sessions come with the package (data/miniswe, see the ATTRIBUTION there): each is one software-
engineering task, each line of its file one call of the agent's model. Knows no server.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from importlib import resources
from importlib.resources.abc import Traversable

import msgspec

from dualpath.base.errors import ConfigError

__all__ = ["AgentSession", "fit_to_window", "load_sessions", "spread_turns"]

_SUFFIX = ".jsonl"


@dataclass(frozen=True, slots=True)
class AgentSession:
    """One session: `prompts[i]` is the whole text that was sent in turn i."""

    name: str
    prompts: tuple[str, ...]


class _Line(msgspec.Struct):
    input: str


def load_sessions(directory: Traversable | None = None) -> tuple[AgentSession, ...]:
    """The sessions of the package, or of another directory of `.jsonl` files, by file name.

    Each line is an object whose field `input` is the prompt; other fields are ignored. Raises ConfigError.
    """
    if directory is None:
        directory = resources.files("dualpath.bench") / "data" / "miniswe"
    files = sorted(
        (each for each in directory.iterdir() if each.name.endswith(_SUFFIX)),
        key=lambda each: each.name,
    )
    if not files:
        raise ConfigError(f"{directory} has no {_SUFFIX} files with agent sessions")
    return tuple(_load(file) for file in files)


def fit_to_window(text: str, token_ids: list[int], room_tokens: int) -> str | list[int]:
    """The prompt to send: the text itself when it fits, else its first `room_tokens` tokens.

    `token_ids` are those of `text`. The end is cut off, not the start: what a turn has in common with earlier
    ones is its start.
    """
    if room_tokens < 1:
        raise ConfigError("the model's window has no room for a prompt: generate fewer tokens")
    return text if len(token_ids) <= room_tokens else token_ids[:room_tokens]


def spread_turns(turns: int, chosen: int) -> tuple[int, ...]:
    """`chosen` of `turns` turns, evenly spread from the first on; all when there are no more."""
    count = min(chosen, turns)
    return tuple(i * turns // count for i in range(count))


def _load(file: Traversable) -> AgentSession:
    lines = file.read_bytes().splitlines()
    return AgentSession(file.name.removesuffix(_SUFFIX), tuple(_prompts(file, lines)))


def _prompts(file: Traversable, lines: Iterable[bytes]) -> Iterable[str]:
    for number, line in enumerate(lines, start=1):
        try:
            yield msgspec.json.decode(line, type=_Line).input
        except msgspec.MsgspecError as error:
            raise ConfigError(f"{file} line {number} is no recorded turn: {error}") from error
