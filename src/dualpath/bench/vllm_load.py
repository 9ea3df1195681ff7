"""Greedy requests to a router, some of them abandoned at a random moment; what came is compared.

Clients ask at once, one request each at a time, some of them streamed. What request number n is, and when its
client leaves, follows from the seed. It knows HTTP and the completions API, and neither servers nor faults.

Invariant: each request ends as *answered* (whole), *aborted* (its client left), or *lost*, and whatever of it
came is compared with the right tokens.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import statistics
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field

import msgspec

from dualpath.base.origin import Origin
from dualpath.bench.openai_client import RequestFailed
from dualpath.http import ConnectionPool, HttpFailed, PulledAnswer

__all__ = ["Load", "Question", "Tally"]

_DEADLINE_S = 120.0
_ANSWER_LIMIT_BYTES = 1 << 20
_ABORTED_SHARE = 0.75
_REQUESTS_LIMIT = 10
"""A router that answers nothing well is asked so many times what was wanted, not for ever."""


@dataclass(frozen=True, slots=True)
class Question:
    """`answer`: the right tokens behind `prompt`."""

    prompt: list[int]
    answer: list[int]


@dataclass(slots=True)
class Tally:
    """What became of the requests. `lost`: why, for each that did not end as it should."""

    answered: int = 0
    aborted: int = 0
    wrong_tokens: int = 0
    compared_tokens: int = 0
    lost: list[str] = field(default_factory=list)

    @property
    def ended(self) -> int:
        return self.answered + self.aborted + len(self.lost)


class _Choice(msgspec.Struct):
    token_ids: list[int] | None = None


class _Part(msgspec.Struct):
    """An answer, or one event of a stream."""

    choices: list[_Choice] = []
    error: msgspec.Raw | None = None

    @property
    def tokens(self) -> list[int]:
        return [token for choice in self.choices for token in choice.token_ids or ()]


@dataclass(frozen=True, slots=True)
class _Request:
    """The client leaves after that time, or that many tokens, unless they are 0."""

    question: Question
    streamed: bool
    leave_after_s: float = 0.0
    leave_after_tokens: int = 0


class Load:
    """Plays any number of rounds, each with requests not asked before; `tally` is of all of them."""

    def __init__(self, questions: Sequence[Question], *, clients: int, seed: int) -> None:
        self.tally = Tally()
        self._questions = questions
        self._clients = clients
        self._seed = seed
        self._numbers = itertools.count()
        self._seconds: list[float] = [1.0]

    async def play(
        self,
        base_url: str,
        *,
        answers: int,
        aborts: int = 0,
        streams: bool = True,
    ) -> None:
        """Ask until so many were answered, or lost, and so many clients left.

        `streams`: half of the answers are streamed. An answer that began to come cannot begin anew elsewhere.
        """
        tally = self.tally
        whole = tally.answered + len(tally.lost) + answers
        left = tally.aborted + aborts
        limit = tally.ended + _REQUESTS_LIMIT * (answers + aborts)
        pool = ConnectionPool(Origin.of(base_url), connect_timeout_s=_DEADLINE_S)

        async def client() -> None:
            while tally.ended < limit:
                leaves = tally.aborted < left
                if not leaves and tally.answered + len(tally.lost) >= whole:
                    return
                await self._ask(pool, base_url, self._drawn(streams=streams, leaves=leaves))

        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(self._clients):
                    group.create_task(client())
        finally:
            await pool.close()

    def _drawn(self, *, streams: bool, leaves: bool) -> _Request:
        dice = random.Random(f"{self._seed} {next(self._numbers)}")
        question = dice.choice(self._questions)
        streamed = streams and dice.random() < 0.5
        if not leaves or dice.random() >= _ABORTED_SHARE:
            return _Request(question, streamed)
        if streamed and dice.random() < 0.5:
            n_tokens = dice.randrange(1, len(question.answer))
            return _Request(question, streamed, leave_after_tokens=n_tokens)
        after_s = dice.random() * statistics.median(self._seconds)
        return _Request(question, streamed, leave_after_s=after_s)

    async def _ask(self, pool: ConnectionPool, base_url: str, request: _Request) -> None:
        tally, began_s = self.tally, time.monotonic()
        came: list[int] = []
        left = False
        failure = ""
        try:
            async with (
                asyncio.timeout(request.leave_after_s or _DEADLINE_S),
                pool.open(_post(base_url, request)) as answer,
            ):
                async for tokens in _tokens(answer, streamed=request.streamed):
                    came += tokens
                    if 0 < request.leave_after_tokens <= len(came):
                        left = True
                        break
        except TimeoutError:
            left = request.leave_after_s > 0
            failure = f"no whole answer within {_DEADLINE_S:g} s"
        except (HttpFailed, RequestFailed) as error:
            failure = str(error)
        want = request.question.answer
        tally.compared_tokens += len(came)
        tally.wrong_tokens += sum(a != b for a, b in zip(came, want, strict=False))
        if left:
            tally.aborted += 1
        elif failure or len(came) != len(want):
            tally.lost.append(failure or f"{len(came)} tokens came, expected {len(want)}")
        else:
            tally.answered += 1
            self._seconds.append(time.monotonic() - began_s)


def _post(base_url: str, request: _Request) -> bytes:
    origin = Origin.of(base_url)
    body = msgspec.json.encode(
        {
            "model": "tiny",
            "prompt": request.question.prompt,
            "max_tokens": len(request.question.answer),
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
            "stream": request.streamed,
        }
    )
    head = (
        f"POST {origin.path}/completions HTTP/1.1\r\nHost: {origin.authority}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    return head.encode("latin-1") + body


async def _tokens(answer: PulledAnswer, *, streamed: bool) -> AsyncIterator[list[int]]:
    """As they come. RequestFailed for an answer that is an error, HttpFailed for none."""
    head = await answer.head()
    if head.status != 200:
        said = (await answer.body(_ANSWER_LIMIT_BYTES))[:500].decode(errors="replace")
        raise RequestFailed(f"HTTP {head.status}: {said}")
    if not streamed:
        yield _read(await answer.body(_ANSWER_LIMIT_BYTES))
        return
    rest = b""
    while part := await answer.part():
        *lines, rest = (rest + part).split(b"\n")
        for line in lines:
            data = line.removeprefix(b"data: ").strip()
            if data and data != b"[DONE]":
                yield _read(data)


def _read(data: bytes) -> list[int]:
    try:
        part = msgspec.json.decode(data, type=_Part)
    except msgspec.MsgspecError as error:
        raise RequestFailed(f"not an answer: {error}: {data[:200]!r}") from None
    if part.error is not None:
        raise RequestFailed(bytes(part.error)[:500].decode(errors="replace"))
    return part.tokens
