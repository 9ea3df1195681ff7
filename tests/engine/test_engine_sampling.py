"""Sampling: what may be drawn, with which frequency, and that a draw depends on seed and position alone."""

from __future__ import annotations

from collections import Counter

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dualpath.engine.sampling import (
    FinishReason,
    SamplingParams,
    finish_reason,
    sample,
    uniform,
)

PROBABILITIES = np.array([0.5, 0.25, 0.15, 0.07, 0.03])
LOGITS = np.log(PROBABILITIES).astype(np.float32) + 3


def draws(params: SamplingParams, count: int, logits: np.ndarray = LOGITS) -> Counter[int]:
    """Tokens drawn at `count` positions."""
    return Counter(
        sample(logits, params, tokens=range(position), prompt_tokens=0).token
        for position in range(1, count + 1)
    )


def test_frequencies_are_the_probabilities() -> None:
    found = draws(SamplingParams(seed=1), 20_000)
    shares = [found[token] / 20_000 for token in range(5)]
    # Four standard deviations of a share of one half are 0.014.
    assert shares == pytest.approx(PROBABILITIES.tolist(), abs=0.014)


def test_temperature_sharpens() -> None:
    found = draws(SamplingParams(seed=1, temperature=0.5), 20_000)
    expected = PROBABILITIES**2 / (PROBABILITIES**2).sum()
    assert [found[t] / 20_000 for t in range(5)] == pytest.approx(expected.tolist(), abs=0.014)


@pytest.mark.parametrize(
    ("params", "kept"),
    [
        ({"top_k": 2}, [0, 1]),
        ({"top_k": 99}, [0, 1, 2, 3, 4]),
        ({"top_p": 0.5}, [0]),
        ({"top_p": 0.7}, [0, 1]),
        ({"top_p": 0.91}, [0, 1, 2, 3]),
        ({"top_p": 1e-9}, [0]),
        ({"min_p": 0.29}, [0, 1, 2]),
        ({"min_p": 1.0}, [0]),
        # Of the two that top-k keeps the first has two thirds.
        ({"top_k": 2, "top_p": 0.6}, [0]),
        ({"temperature": 0}, [0]),
    ],
)
def test_what_may_be_drawn(params: dict[str, float], kept: list[int]) -> None:
    found = draws(SamplingParams(seed=3, **params), 3000)
    assert sorted(found) == kept
    weights = PROBABILITIES[kept] / PROBABILITIES[kept].sum()
    assert [found[t] / 3000 for t in kept] == pytest.approx(weights.tolist(), abs=0.04)


def test_a_nucleus_of_a_large_vocabulary_is_the_one_of_sorting_everything() -> None:
    random = np.random.default_rng(0)
    peaked = random.normal(0, 4, 10_000).astype(np.float32)
    flat = random.normal(0, 0.1, 10_000).astype(np.float32)
    for logits, top_p in ((peaked, 0.9), (flat, 0.95)):
        order = np.argsort(-logits, kind="stable")
        weights = np.exp(logits[order].astype(np.float64) - logits.max())
        share = np.cumsum(weights) / weights.sum()
        nucleus = order[: int(np.searchsorted(share, top_p)) + 1]
        for seed in range(50):
            params = SamplingParams(seed=seed, top_p=top_p)
            token = sample(logits, params, tokens=[1], prompt_tokens=1).token
            inside = np.cumsum(np.exp(logits[nucleus].astype(np.float64) - logits.max()))
            at = int(np.searchsorted(inside, uniform(seed, 1) * inside[-1], side="right"))
            assert token == nucleus[at]


def test_a_draw_depends_on_seed_and_position_alone() -> None:
    flat = np.zeros(1000, dtype=np.float32)
    params = SamplingParams(seed=5)
    once = [sample(flat, params, tokens=[0] * n, prompt_tokens=1).token for n in range(1, 40)]
    again = [sample(flat, params, tokens=[9] * n, prompt_tokens=n).token for n in range(1, 40)]
    assert once == again
    other = SamplingParams(seed=6)
    assert once != [
        sample(flat, other, tokens=[0] * n, prompt_tokens=1).token for n in range(1, 40)
    ]


def test_the_random_numbers_never_change() -> None:
    # A request that is attempted again may run on another version of the engine.
    assert uniform(0, 0) == 0.3859926107094097
    assert uniform(42, 1000) == 0.489935407511203


@given(st.integers(-(2**63), 2**63 - 1), st.integers(0, 10**9))
def test_uniform_is_in_the_unit_interval(seed: int, position: int) -> None:
    assert 0 <= uniform(seed, position) < 1


@settings(max_examples=60)
@given(
    st.lists(st.floats(-30, 30, width=32), min_size=1, max_size=50),
    st.floats(0.01, 5),
    st.floats(0.001, 1),
    st.integers(0, 60),
    st.floats(0, 1),
    st.integers(0, 2**32),
)
def test_any_parameters_draw_a_token_no_less_likely_than_they_allow(
    values: list[float], temperature: float, top_p: float, top_k: int, min_p: float, seed: int
) -> None:
    logits = np.array(values, dtype=np.float32)
    params = SamplingParams(
        temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p, seed=seed
    )
    token = sample(logits, params, tokens=[0], prompt_tokens=1).token
    if top_k:
        assert (logits > logits[token]).sum() < top_k
    assert np.exp((logits[token] - logits.max()) / temperature) >= min_p - 1e-5


def test_logprobs_are_of_the_raw_logits() -> None:
    params = SamplingParams(temperature=0, logprobs=3, logit_bias={4: 100.0})
    found = sample(LOGITS, params, tokens=[1], prompt_tokens=1)
    assert found.token == 4
    assert found.logprobs is not None
    assert found.logprobs.token == 4
    assert found.logprobs.logprob == pytest.approx(np.log(0.03), abs=1e-5)
    assert [t.token for t in found.logprobs.top] == [0, 1, 2]
    assert [t.logprob for t in found.logprobs.top] == pytest.approx(
        np.log([0.5, 0.25, 0.15]).tolist(), abs=1e-5
    )
    assert sample(LOGITS, SamplingParams(), tokens=[1], prompt_tokens=1).logprobs is None
    zero = sample(LOGITS, SamplingParams(logprobs=0), tokens=[1], prompt_tokens=1).logprobs
    assert zero is not None
    assert zero.top == ()


def test_penalties() -> None:
    logits = np.array([2.0, 1.9, -1.0, 1.0], dtype=np.float32)

    def token(tokens: list[int], prompt_tokens: int, **penalties: float) -> int:
        params = SamplingParams(temperature=0, **penalties)
        return sample(logits, params, tokens=tokens, prompt_tokens=prompt_tokens).token

    assert token([0, 0], 1) == 0
    # Repetition counts the prompt too, presence and frequency the text only.
    assert token([0], 1, repetition_penalty=1.2) == 1
    assert token([0], 1, presence_penalty=1.5, frequency_penalty=1.5) == 0
    assert token([3, 0], 1, presence_penalty=0.2) == 1
    assert token([3, 0, 1, 1], 1, frequency_penalty=0.5) == 0
    assert token([3, 0, 1, 1], 1, frequency_penalty=1.5) == 3


def test_min_tokens_forbids_every_end() -> None:
    params = SamplingParams(temperature=0, min_tokens=2, eos_tokens=(0,), stop_token_ids=(1,))
    assert sample(LOGITS, params, tokens=[7], prompt_tokens=1).token == 2
    assert sample(LOGITS, params, tokens=[7, 2], prompt_tokens=1).token == 2
    last = sample(LOGITS, params, tokens=[7, 2, 2], prompt_tokens=1)
    assert (last.token, last.finish_reason) == (0, FinishReason.STOP)


def test_how_texts_end() -> None:
    params = SamplingParams(max_tokens=3, eos_tokens=(8,), stop_token_ids=(9,))
    assert finish_reason(8, params, 1) is FinishReason.STOP
    assert finish_reason(9, params, 3) is FinishReason.STOP
    assert finish_reason(7, params, 2) is None
    assert finish_reason(7, params, 3) is FinishReason.LENGTH
    ignoring = msgspec.structs.replace(params, ignore_eos=True)
    assert finish_reason(8, ignoring, 1) is None
    assert finish_reason(9, ignoring, 1) is FinishReason.STOP
    assert finish_reason(7, SamplingParams(), 10**6) is None


def test_parameters_cross_the_wire() -> None:
    params = SamplingParams(temperature=0.3, stop_token_ids=(1, 2), logit_bias={3: -1.0}, seed=9)
    wire = msgspec.msgpack.encode(params)
    assert msgspec.msgpack.decode(wire, type=SamplingParams) == params
