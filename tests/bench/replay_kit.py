"""A server for the runner's tests, in virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from dualpath.bench.replay.conversation import PromptBody
from dualpath.bench.replay.endpoint import Answer
from dualpath.traces.model import AppendPrompt, Session, Turn


def make_session(
    name: str, *turns: tuple[int, int, float], start_s: float | None = None
) -> Session:
    """Turns of (append, output, delay)."""
    return Session(
        name, tuple(Turn(AppendPrompt(a), g, delay) for a, g, delay in turns), start_s=start_s
    )


class PlainTalk:
    """A conversation whose prompt names its session and turn."""

    def __init__(self, session: Session, log: list[tuple[str, int]] | None = None) -> None:
        self._session = session
        self._log = log
        self.answers: list[Sequence[int] | None] = []

    @property
    def turns(self) -> tuple[Turn, ...]:
        return self._session.turns

    def prompt(self, index: int) -> PromptBody:
        assert len(self.answers) == index, "each turn is answered before the next is asked for"
        if self._log is not None:
            self._log.append((self._session.id, index))
        return PromptBody(f'"{self._session.id} {index}"'.encode(), 10 + index)

    def take_answer(self, index: int, token_ids: Sequence[int] | None) -> None:
        assert len(self.answers) == index
        self.answers.append(token_ids)


@dataclass
class FakeServer:
    """First token after `ttft_s`, the others `tpot_s` apart. `fail(name, turn)`: the error answered instead.

    From `stall[0]` to `stall[1]` nothing comes: what would, comes at the end of the stall.
    """

    ttft_s: float = 0.5
    tpot_s: float = 0.125
    stall: tuple[float, float] = (0.0, 0.0)
    fail: Callable[[str, int], str] = lambda name, turn: ""
    cached: int = -1
    metrics_now: Callable[[float], dict[str, float]] = lambda now: {}
    sends: list[tuple[float, str]] = field(default_factory=list)
    most_at_once: int = 0
    at_once: int = 0

    async def send(
        self,
        prompt: PromptBody,
        output_tokens: int,
        on_first: Callable[[float], None] | None = None,
    ) -> Answer:
        loop = asyncio.get_running_loop()
        sent_s = loop.time()
        name, turn = prompt.json.decode().strip('"').split()
        self.sends.append((sent_s, f"{name} {turn}"))
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        try:
            await self._sleep(self.ttft_s)
            error = self.fail(name, int(turn))
            if error:
                return Answer(sent_s=sent_s, end_s=loop.time(), error=error)
            first_s = loop.time()
            if on_first is not None:
                on_first(first_s)
            times = [first_s]
            for _ in range(output_tokens - 1):
                await self._sleep(self.tpot_s)
                times.append(loop.time())
        finally:
            self.at_once -= 1
        return Answer(
            sent_s=sent_s,
            first_s=first_s,
            second_s=times[1] if output_tokens > 1 else None,
            last_s=times[-1],
            end_s=times[-1],
            gaps_s=[b - a for a, b in pairwise(times)],
            token_ids=list(range(output_tokens)),
            prompt_tokens=prompt.tokens,
            output_tokens=output_tokens,
            cached_tokens=self.cached,
        )

    async def metrics(self) -> dict[str, float]:
        return self.metrics_now(asyncio.get_running_loop().time())

    async def _sleep(self, seconds: float) -> None:
        loop = asyncio.get_running_loop()
        until = loop.time() + seconds
        if self.stall[0] <= until < self.stall[1]:
            until = self.stall[1]
        await asyncio.sleep(until - loop.time())
