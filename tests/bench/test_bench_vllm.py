"""`bench vllm`: what can be tested without vLLM; the rest is shown by its published result."""

from __future__ import annotations

import argparse

import pytest

from dualpath.base.errors import ConfigError
from dualpath.bench import vllm
from dualpath.traces import AppendPrompt, Session, TextPrompt, Turn


def arguments(*given: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    vllm.add_arguments(parser)
    return parser.parse_args(given)


def test_what_texts_share_their_tokens_share() -> None:
    text = "what the first turn said, " * 20
    turns = tuple(Turn(TextPrompt(text[:n]), 1) for n in (101, 240, 400))
    first, second, third = vllm._prompts(Session("s", turns), 10)
    assert [len(each) for each in (first, second, third)] == [26, 60, 100]
    assert second[:25] == first[:25]
    assert third[:60] == second
    assert len(list(vllm._prompts(Session("s", turns), 2))) == 2


def test_sessions_without_text_are_refused() -> None:
    session = Session("s", (Turn(AppendPrompt(5), 1),))
    with pytest.raises(ConfigError, match="has no text"):
        list(vllm._prompts(session, 1))


@pytest.mark.parametrize("given", [("--rounds", "0"), ("--stored-tokens", "200"), ("--turns", "0")])
def test_bad_sizes(given: tuple[str, str]) -> None:
    with pytest.raises(ConfigError, match="needs a round"):
        vllm.run(arguments(*given), print)
