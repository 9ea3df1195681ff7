"""Clusters of these tests share one model, made in a cache directory of their own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from cluster_kit import Reference, Served

from dualpath.engine.model_source import ModelSpec, resolve_model


@pytest.fixture(scope="session")
def plain(own_cache: None) -> Reference:
    """Plain `transformers` on the model that the clusters serve."""
    return Reference(resolve_model(ModelSpec(model="tiny")).directory)


@pytest.fixture
def serve(plain: Reference, tmp_path: Path) -> Iterator[Callable[..., Served]]:
    """Starts a cluster that is stopped, and searched for what it left, after the test."""
    started: list[Served] = []

    def start(**settings: object) -> Served:
        settings.setdefault("store", str(tmp_path / "store"))
        served = Served(plain, **settings)
        started.append(served)
        served.start()
        return served

    yield start
    for served in started:
        served.close()
