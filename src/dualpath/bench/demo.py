"""The demonstration: a real server, a question, and recorded agent sessions, with and without stored KV.

What is run, in this order, on one server with one prefill and one decode engine in float32:

1. One chat question through the `openai` client.
2. The replay. Turn i's prompt is the recorded prompt of line i, sent verbatim as text to /v1/completions,
   so that prompts share exactly the text that the agent's prompts shared. A prompt longer than the
   model's window less the generated tokens is cut to its first tokens. Every turn generates the same
   number of tokens, greedily. The sessions run concurrently, the turns of a session one after the other.
   What is generated is not part of later prompts: those are as recorded.
3. The comparison. A few turns of each session, from the first on, are run again, one request at a time:
   once as they are (their KV is stored by now) and once with a `cache_salt` that was never used before,
   for which nothing can be stored. Time to the first token and tokens are compared; all three runs of a
   turn must give the same tokens.

The store is kept, so a second demonstration finds what the first one stored.
"""

from __future__ import annotations

import asyncio
import re
import secrets
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from dualpath.base.errors import ConfigError, InvariantViolation
from dualpath.bench.demo_report import ComparedTurn, DemoReport, SessionReport
from dualpath.bench.harness import Figure
from dualpath.bench.openai_client import (
    Completion,
    RequestFailed,
    ask,
    complete,
    connect,
    require_openai,
    tokenize,
)
from dualpath.bench.server import ServeProcess
from dualpath.engine.model_source import ModelSpec, cache_directory, resolve_model
from dualpath.traces import Session, TextPrompt

if TYPE_CHECKING:
    import openai

__all__ = [
    "QUESTION",
    "DemoOptions",
    "DemoProgress",
    "clear_store",
    "default_store",
    "default_turns",
    "fit_to_window",
    "run_demo",
    "spread_turns",
    "stored_blocks",
]

QUESTION = "What is the capital of France? Answer in one sentence."
_ANSWER_TOKENS = 48
_STORE_CAPACITY = "4GiB"
_QUOTA_S = "2"
"""Attention takes long on a CPU: the default quota would cut long prompts into chunks of a few dozen
tokens, and each reads the weights and the KV so far again."""
_TINY_TURNS = 16
DemoProgress = Callable[[str, int], None]
"""Called with what goes on now, and how many further turns are complete."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoOptions:
    """`turns`: of each session, from the first on; None for all. `compared`: turns of each session."""

    model: str
    store: Path
    log: Path
    read_path: str = "split"
    gen_tokens: int = 8
    turns: int | None = None
    compared: int = 1

    @property
    def serve_arguments(self) -> list[str]:
        return [
            self.model,
            *("--dtype", "float32"),
            *("--prefill", "1", "--decode", "1"),
            *("--read-path", self.read_path),
            *("--quota-s", _QUOTA_S),
            *("--store", str(self.store)),
            *("--store-capacity", _STORE_CAPACITY),
        ]

    def chosen_turns(self, session: Session) -> tuple[str, ...]:
        """The whole prompts, as text. Raises ConfigError when the session was not recorded in full text."""
        prompts = [turn.prompt for turn in session.turns[: self.turns]]
        texts = tuple(prompt.text for prompt in prompts if isinstance(prompt, TextPrompt))
        if len(texts) < len(prompts):
            raise ConfigError(f"session {session.id} has no full text")
        return texts

    def total_runs(self, sessions: Sequence[Session]) -> int:
        """Completions in all: each turn in the replay, each compared one twice more."""
        counts = [len(self.chosen_turns(session)) for session in sessions]
        return sum(count + 2 * len(spread_turns(count, self.compared)) for count in counts)

    def setup(self) -> dict[str, Figure]:
        return {
            "model": self.model,
            "dtype": "float32",
            "engines": "1P1D",
            "read_path": self.read_path,
            "gen_tokens": self.gen_tokens,
            "turns_of_a_session": "all" if self.turns is None else self.turns,
            "compared_of_a_session": self.compared,
        }


def default_store(model: str) -> Path:
    """Where the demonstration keeps the model's KV between runs."""
    return cache_directory() / "demo" / re.sub(r"[^\w.-]+", "_", model)


def default_turns(model: str) -> int | None:
    """The built-in models have a token a byte, so their turns are four times as long: fewer do."""
    return _TINY_TURNS if model.startswith("tiny") else None


def clear_store(store: Path) -> None:
    """Remove what a store made in this directory, and nothing else. Raises ConfigError."""
    if not store.is_dir():
        return
    for each in store.iterdir():
        # A store's directory of one fingerprint.
        if (each / "model.json").is_file():
            try:
                shutil.rmtree(each)
            except OSError as error:
                raise ConfigError(f"the stored KV in {each} cannot be removed: {error}") from error


def stored_blocks(store: Path) -> int:
    """How many blocks lie in the store's directory."""
    return sum(1 for _ in store.rglob("*.kv"))


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


def run_demo(
    options: DemoOptions,
    sessions: Sequence[Session],
    answered: Callable[[str], None],
    progress: DemoProgress,
) -> DemoReport:
    """Start the server, run all, stop it. `answered` gets the answer to QUESTION as soon as it is there.

    Raises ConfigError when a package or the model is missing, ServerFailed, RequestFailed.
    """
    require_openai()
    started_s = time.monotonic()
    # The server does this too, but here what is missing is told in one line.
    progress(f"preparing {options.model}", 0)
    resolve_model(ModelSpec(options.model))
    progress(f"starting {options.model} (log: {options.log})", 0)
    with ServeProcess(options.serve_arguments, options.log) as server:
        start_s = time.monotonic() - started_s
        try:
            reports, replay_s = asyncio.run(
                _talk(server.base_url, options, sessions, answered, progress)
            )
        except RequestFailed as error:
            raise RequestFailed(f"{error}; the server's log is {options.log}") from error
        progress("stopping the server", 0)
    return DemoReport(reports, start_s, replay_s, time.monotonic() - started_s)


async def _talk(
    base_url: str,
    options: DemoOptions,
    sessions: Sequence[Session],
    answered: Callable[[str], None],
    progress: DemoProgress,
) -> tuple[list[SessionReport], float]:
    async with connect(base_url) as client:
        progress("asking a question", 0)
        answered(await ask(client, options.model, QUESTION, max_tokens=_ANSWER_TOKENS))
        replays = [_Replay(base_url, client, options, session, progress) for session in sessions]
        await asyncio.gather(*(replay.prepare() for replay in replays))
        started_s = time.monotonic()
        await asyncio.gather(*(replay.run() for replay in replays))
        replay_s = time.monotonic() - started_s
        for replay in replays:
            await replay.compare()
        return [replay.report for replay in replays], replay_s


class _Replay:
    """One session: its prompts as they are sent, and what came back."""

    def __init__(
        self,
        base_url: str,
        client: openai.AsyncOpenAI,
        options: DemoOptions,
        session: Session,
        progress: DemoProgress,
    ) -> None:
        self._base_url = base_url
        self._client = client
        self._options = options
        self._session = session
        self._progress = progress
        self._prompts: list[str | list[int]] = []
        self.report = SessionReport(session.id)

    async def prepare(self) -> None:
        """Cut the prompts that do not fit."""
        for text in self._options.chosen_turns(self._session):
            tokenized = await tokenize(self._base_url, self._options.model, text)
            room = tokenized.max_model_len - self._options.gen_tokens
            prompt = fit_to_window(text, tokenized.tokens, room)
            self.report.cut_turns += prompt is not text
            self._prompts.append(prompt)

    async def run(self) -> None:
        """All turns, in order."""
        for prompt in self._prompts:
            self.report.turns.append(
                await complete(
                    self._client,
                    self._options.model,
                    prompt,
                    max_tokens=self._options.gen_tokens,
                )
            )
            self._progress("replaying agent sessions", 1)

    async def compare(self) -> None:
        """A few turns again, with stored KV and without."""
        for turn in spread_turns(len(self._prompts), self._options.compared):
            prompt = self._prompts[turn]
            salt = f"demo-{secrets.token_hex(16)}"
            stored = await self._once_more(prompt, None)
            computed = await self._once_more(prompt, salt)
            if computed.cached_tokens:
                raise InvariantViolation(
                    f"{computed.cached_tokens} tokens were found under a salt never used before"
                )
            self.report.compared.append(
                ComparedTurn(turn, self.report.turns[turn], stored, computed)
            )

    async def _once_more(self, prompt: str | list[int], salt: str | None) -> Completion:
        done = await complete(
            self._client,
            self._options.model,
            prompt,
            max_tokens=self._options.gen_tokens,
            cache_salt=salt,
        )
        self._progress("comparing with no stored KV", 1)
        return done
