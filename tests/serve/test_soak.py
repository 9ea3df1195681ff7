"""The soak benchmark in small: a few sessions, every fault once."""

from __future__ import annotations

import argparse

import pytest

from dualpath.bench import soak


def arguments(*flags: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    soak.add_arguments(parser)
    return parser.parse_args(flags)


@pytest.mark.slow
def test_soak_in_small(own_cache: None) -> None:
    faults = (
        "fault=read:flip:0.02,read:miss:0.02,read:error:0.02,write:error:0.05,write:hang:0.01;"
        "seed=1;hang_s=3"
    )
    args = arguments("--clients", "5", "--turns", "8", "--seed", "1", "--store-faults", faults)
    lines: list[str] = []
    result = soak.run(args, lines.append)
    figures = result.figures
    assert figures["wrong_tokens"] == figures["lost_requests"] == figures["leaks"] == 0, lines
    assert figures["turns"] == 40
    assert figures["kills"] == 2
    assert figures["aborts"] > 0
    assert figures["compared_tokens"] > 40 * 8
    assert result.setup["seed"] == 1


def test_a_wrong_token_is_found(own_cache: None) -> None:
    """The comparison is able to fail."""
    from cluster_kit import Reference, prompt_of

    from dualpath.engine.model_source import ModelSpec, resolve_model

    plain = Reference(resolve_model(ModelSpec(model="tiny")).directory)
    prompt = prompt_of(1, 50)
    answer = plain.generate(prompt, 10)
    cut_off = plain.generate([*prompt, *answer, 1, 2, 3], 4)
    talk = soak._Conversation(
        tokens=[*prompt, *answer, 1, 2, 3], answers=[range(50, 60)], partial=[(63, cut_off)]
    )
    assert soak._compare([talk]) == {"right": 14, "ties": 0, "wrong": 0}
    talk.tokens[55] = (talk.tokens[55] + 1) % 256
    assert soak._compare([talk])["wrong"] >= 1
    talk.tokens[55] = answer[5]
    talk.partial[0] = (63, [cut_off[0], (cut_off[1] + 1) % 256])
    assert soak._compare([talk])["wrong"] == 1
