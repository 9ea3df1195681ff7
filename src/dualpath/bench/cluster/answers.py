"""The tokens of answers, kept and compared.

Two systems that work give the same answers, so their agents ask the same prompts: an answer is found again by
its prompt. Knows no HTTP and no model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from dualpath.bench.replay.answer import Answer
from dualpath.bench.replay.conversation import PromptBody
from dualpath.bench.replay.endpoint import Sender

__all__ = ["AnswerLog", "Answers", "LoggedSender", "wrong_tokens"]


Answers = Mapping[bytes, tuple[int, ...]]
"""The tokens of each answer, by its prompt as it was sent (JSON)."""


@dataclass(slots=True)
class AnswerLog:
    """Collects the answers that ended well."""

    answers: dict[bytes, tuple[int, ...]] = field(default_factory=dict)

    def add(self, prompt: PromptBody, answer: Answer) -> None:
        if not answer.error and answer.token_ids is not None:
            self.answers[prompt.json] = tuple(answer.token_ids)


class LoggedSender:
    """A `Sender` that asks for the ids of every answer's tokens and keeps them."""

    def __init__(self, sender: Sender, log: AnswerLog) -> None:
        self._sender = sender
        self._log = log

    async def send(
        self,
        prompt: PromptBody,
        output_tokens: int,
        on_first: Callable[[float], None] | None = None,
    ) -> Answer:
        asked = replace(prompt, wants_answer_ids=True)
        answer = await self._sender.send(asked, output_tokens, on_first)
        self._log.add(prompt, answer)
        return answer

    async def metrics(self) -> dict[str, float]:
        return await self._sender.metrics()


def wrong_tokens(expected: Answers, got: Answers) -> int:
    """Tokens of `got` that are not as expected, missing ones included.

    A prompt that nobody expected goes on from an answer that was wrong: all tokens of its answer count.
    """
    wrong = 0
    for prompt in expected.keys() | got.keys():
        want, have = expected.get(prompt, ()), got.get(prompt, ())
        same = sum(a == b for a, b in zip(want, have, strict=False))
        wrong += max(len(want), len(have)) - same
    return wrong
