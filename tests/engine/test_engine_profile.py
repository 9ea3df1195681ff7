"""The attention fit: exact on exact samples, never negative, measured for every kind of model, remembered."""

from __future__ import annotations

from pathlib import Path

import pytest
from engine_kit import Loader

from dualpath.engine import profile
from dualpath.engine.profile import (
    AttentionSample,
    fit_attention,
    measure_attention,
    profile_attention,
)
from dualpath.policy.quota import AttentionFit


def test_the_fit_of_exact_samples() -> None:
    shapes = [(1, 100), (8, 2000), (1, 50_000), (4, 30_000), (1, 500_000)]
    samples = [AttentionSample(e, p, 2e-3 + 1e-4 * e + 3e-9 * p) for e, p in shapes]
    fit = fit_attention(samples)
    assert fit.base_s == pytest.approx(2e-3)
    assert fit.per_entry_s == pytest.approx(1e-4)
    assert fit.per_pair_s == pytest.approx(3e-9)


def test_no_coefficient_is_negative() -> None:
    shapes = [(1, 100), (8, 2000), (1, 50_000), (4, 30_000), (1, 500_000)]
    samples = [AttentionSample(e, p, 1e-4 + 3e-9 * p - 2e-6 * e) for e, p in shapes]
    fit = fit_attention(samples)
    assert fit.per_entry_s == 0
    assert fit.base_s == pytest.approx(1e-4, rel=0.1)
    assert fit.per_pair_s == pytest.approx(3e-9, rel=0.1)


def test_measuring_every_kind_of_attention(family: str, load: Loader) -> None:
    samples = measure_attention(load(family))
    assert len(samples) >= 4
    assert all(s.seconds > 0 for s in samples)


def test_it_is_remembered(load: Loader, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    loaded, other = load("tiny"), load("tiny-mha")
    # Whoever profiled these models before wrote to the cache that all tests share.
    monkeypatch.setenv("DUALPATH_CACHE_DIR", str(tmp_path))
    samples = [AttentionSample(e, e * 100, 1e-3 * e) for e in (1, 2, 3)]
    measured: list[int] = []

    def measure(_: object) -> list[AttentionSample]:
        measured.append(1)
        return samples

    monkeypatch.setattr(profile, "measure_attention", measure)
    first = profile_attention(loaded)
    assert isinstance(first, AttentionFit)
    assert profile_attention(loaded) == first
    assert len(measured) == 1
    assert profile_attention(other) == first
    assert len(measured) == 2
