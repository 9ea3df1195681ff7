"""Answers compared with those of plain `transformers`, without any of our engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice

import msgspec

from dualpath.bench.cluster.answers import Answers
from dualpath.engine.model_source import ModelFiles, load_tokenizer

__all__ = ["Sequenced", "sequenced", "wrong_by_transformers"]


@dataclass(frozen=True, slots=True)
class Sequenced:
    """A prompt with its answer, and where in it tokens were generated: `generated` as [start, stop)."""

    tokens: tuple[int, ...]
    generated: tuple[tuple[int, int], ...]


def sequenced(prompts: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[Sequenced]:
    """Of (prompt, answer) pairs. What is the beginning of a longer one is told there, not by itself; longest
    first."""
    found: list[Sequenced] = []
    for prompt, answer in sorted(prompts, key=lambda pair: len(pair[0]), reverse=True):
        whole = (*prompt, *answer)
        span = (len(prompt), len(whole))
        for index, longer in enumerate(found):
            if longer.tokens[: len(whole)] == whole:
                found[index] = Sequenced(longer.tokens, (span, *longer.generated))
                break
        else:
            found.append(Sequenced(whole, (span,)))
    return found


def wrong_by_transformers(
    files: ModelFiles, answers: Answers, trajectories: int
) -> tuple[int, int]:
    """How many tokens of the first `trajectories` are not plain `transformers`' greedy choice, and how many
    were compared.

    One forward pass over each trajectory gives the choice at every position: while all before are
    right, that is what generating would give. Takes seconds each.
    """
    import torch
    from transformers import AutoModelForCausalLM

    encode = _encoder(files)
    chosen = islice(
        sequenced([(encode(each), tokens) for each, tokens in answers.items()]), trajectories
    )
    model = AutoModelForCausalLM.from_pretrained(files.directory, dtype=torch.float32).eval()
    wrong = compared = 0
    for each in chosen:
        places = [place for start, stop in each.generated for place in range(start, stop)]
        with torch.inference_mode():
            logits = model(
                torch.tensor([each.tokens]),
                use_cache=False,
                logits_to_keep=torch.tensor(places) - 1,
            ).logits[0]
        greedy = logits.argmax(dim=-1).tolist()
        wrong += sum(a != each.tokens[b] for a, b in zip(greedy, places, strict=True))
        compared += len(places)
    return wrong, compared


def _encoder(files: ModelFiles) -> Callable[[bytes], Sequence[int]]:
    """Token ids of a prompt as it was sent, ids or text."""
    tokenizer = None

    def encode(prompt: bytes) -> Sequence[int]:
        nonlocal tokenizer
        sent = msgspec.json.decode(prompt, type=list[int] | str)
        if not isinstance(sent, str):
            return sent
        tokenizer = tokenizer or load_tokenizer(files)
        ids: list[int] = tokenizer(sent)["input_ids"]
        return ids

    return encode
