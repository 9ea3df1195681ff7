"""Small models on disk, loaded once a session, and the plain `transformers` to compare with."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
from engine_kit import Reference

from dualpath.engine.model import LoadedModel, load_model
from dualpath.engine.model_source import ModelSpec, resolve_model

FAMILIES = ["tiny", "tiny-qwen3", "tiny-mha", "tiny-mla", "tiny-gpt-oss"]


@pytest.fixture(scope="session")
def load(own_cache: None) -> Callable[[str], LoadedModel]:
    """Loads a built-in model in float32 with blocks of 16 tokens, once; on DUALPATH_TEST_DEVICE if set."""
    device = os.environ.get("DUALPATH_TEST_DEVICE", "cpu")
    made: dict[str, LoadedModel] = {}

    def get(name: str) -> LoadedModel:
        if name not in made:
            made[name] = load_model(
                ModelSpec(model=name, dtype="float32", device=device, block_tokens=16)
            )
        return made[name]

    return get


@pytest.fixture(scope="session")
def plain(own_cache: None) -> Callable[[str], Reference]:
    """The same model under plain `transformers`, once."""
    made: dict[str, Reference] = {}

    def get(name: str) -> Reference:
        if name not in made:
            made[name] = Reference.load(resolve_model(ModelSpec(model=name)).directory)
        return made[name]

    return get


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)
