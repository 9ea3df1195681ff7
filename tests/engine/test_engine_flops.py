"""The cost of a forward pass, against counting the model's weights by hand."""

from __future__ import annotations

from collections.abc import Callable

from dualpath.engine.flops import forward_cost
from dualpath.engine.model import LoadedModel


def test_a_dense_model(load: Callable[[str], LoadedModel]) -> None:
    cost = forward_cost(load("tiny"))
    hidden, inner, heads, kv_heads, dim, layers = 128, 256, 4, 2, 32, 4
    attention = 2 * hidden * heads * dim + 2 * hidden * kv_heads * dim
    assert cost.per_token == 2 * layers * (attention + 3 * hidden * inner)
    assert cost.per_pair == 4 * layers * heads * dim
    assert cost.of(10, 100) == 10 * cost.per_token + 100 * cost.per_pair


def test_a_mixture_counts_the_experts_that_a_token_visits(
    load: Callable[[str], LoadedModel],
) -> None:
    cost = forward_cost(load("tiny-mla"))
    one_expert = 3 * 128 * 64
    # One dense layer, three of 8 experts with 2 visited, 1 shared and a router.
    mlp = 3 * 128 * 256 + 3 * (2 * one_expert + one_expert + 8 * 128)
    attention = 128 * 48 + 48 * 4 * 40 + 128 * (32 + 16) + 32 * 4 * (24 + 20) + 4 * 20 * 128
    assert cost.per_token == 2 * (mlp + 4 * attention)
    assert cost.per_pair == 2 * 4 * 4 * (24 + 16 + 20)
