"""What every test gets: a cache directory that is not the user's, for itself and the processes it starts; and
examples that may take as long as they do, as a busy machine must not decide a test."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile("any speed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any speed")


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


@pytest.fixture(scope="session")
def testbed_possible() -> None:
    """Tests that build a testbed are skipped where that is impossible, unless they are required."""
    if os.environ.get("DUALPATH_REQUIRE_TESTBED") == "1":
        return
    from dualpath.testbed import why_no_testbed

    if (reason := why_no_testbed()) is not None:
        pytest.skip(f"no testbed: {reason} (DUALPATH_REQUIRE_TESTBED=1 makes this an error)")
