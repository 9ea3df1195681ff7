"""What every test gets: a cache directory that is not the user's, for itself and the processes it starts."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DUALPATH_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(autouse=True)
def one_torch_thread() -> None:
    """Small models are quickest on one thread; only for tests that have torch loaded."""
    if (torch := sys.modules.get("torch")) is not None:
        torch.set_num_threads(1)
