"""Compute rates from measured seconds."""

from __future__ import annotations

import pytest

from dualpath.bench.cluster.rates import (
    MeasuredShapes,
    Seconds,
    fit_rates,
    measure_round,
    model_spec,
)
from dualpath.bench.cluster.workload import Shape, paper_shape
from dualpath.policy.quota import pairs

SHAPES = MeasuredShapes.of(paper_shape(1024, 4), agents=8)


def seconds(factor: float = 1.0) -> Seconds:
    """Of a machine with known costs."""
    return Seconds(
        prefill=tuple(
            factor * (0.005 + 0.0002 * new + 1e-6 * pairs(cached, new))
            for cached, new in SHAPES.prefill
        ),
        decode=tuple(
            factor * (0.003 + 0.0004 * batch + 8e-6 * batch * context)
            for batch, context in SHAPES.decode
        ),
        join=factor * 0.02,
    )


def test_shapes_are_around_what_agents_ask_for() -> None:
    assert SHAPES.prefill[0] == (1024, 13)
    assert {(1, 1024), (4, 512), (8, 1024)} <= set(SHAPES.decode)
    assert SHAPES.join_tokens == 1024


def test_costs_are_those_of_an_engine_that_is_alone() -> None:
    rates = fit_rates(SHAPES, [[[seconds()], [seconds(1.5), seconds(1.7)]]])
    assert rates.prefill_base_s == pytest.approx(0.005)
    assert rates.prefill_token_s == pytest.approx(0.0002)
    assert rates.prefill_pair_s == pytest.approx(1e-6)
    assert rates.decode_base_s == pytest.approx(0.003)
    assert rates.decode_sequence_s == pytest.approx(0.0004)
    assert rates.decode_context_token_s == pytest.approx(8e-6)
    assert rates.join_token_s == pytest.approx(0.02 / 1024)


def test_slowdown_is_the_mean_of_all_that_compute_and_never_falls() -> None:
    two, three = [seconds(1.5), seconds(1.7)], [seconds(1.4)] * 3
    rates = fit_rates(SHAPES, [[[seconds()], two, three]])
    assert rates.slowdown == pytest.approx((1.0, 1.6, 1.6))


def test_a_round_while_the_machine_was_slow_does_not_count() -> None:
    quick, slow = [[seconds()], [seconds(1.5)] * 2], [[seconds(3.0)], [seconds(9.0)] * 2]
    rates = fit_rates(SHAPES, [quick, slow, quick])
    assert rates.decode_sequence_s == pytest.approx(0.0004)
    assert rates.join_token_s == pytest.approx(0.02 / 1024)
    assert rates.slowdown == pytest.approx((1.0, 1.5))


@pytest.mark.slow
def test_rates_of_a_tiny_model_are_measured() -> None:
    said: list[str] = []
    shapes = MeasuredShapes.of(Shape(64, 8, 4, 2), agents=2)
    found = measure_round(
        model_spec("tiny", threads=1, block_tokens=16), shapes, engines=2, progress=said.append
    )
    rates = fit_rates(shapes, [found])
    assert len(said) == len(rates.slowdown) == 2
    assert rates.slowdown[0] == 1.0
    assert rates.request_s(64, 8, 4) > 0
