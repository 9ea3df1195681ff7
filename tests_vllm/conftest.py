"""Servers that the tests share: a plain one, whose tokens are the right ones, and a pair of ours."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from server_kit import make_model

from dualpath.bench.vllm_server import VllmPair, VllmServer


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def logs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("logs")


@pytest.fixture(scope="session")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("store")


@pytest.fixture(scope="session")
def servers(model: Path, logs: Path, store: Path) -> Iterator[tuple[VllmServer, ...]]:
    """Plain, PE, DE; they start together. The PE caches nothing itself, so all its hits are ours."""
    connector = {"store": str(store), "buffer_bytes": 256 << 20, "lease_s": 5.0}
    uncached = ("--no-enable-prefix-caching",)
    with ExitStack() as stack:
        made = (
            VllmServer(model, logs / "plain.log"),
            VllmServer(model, logs / "pe.log", connector=connector, arguments=uncached),
            VllmServer(model, logs / "de.log", connector=connector),
        )
        for server in made:
            stack.callback(server.stop)
        for server in made:
            server.wait_ready()
        yield made


@pytest.fixture(scope="session")
def plain(servers: tuple[VllmServer, ...]) -> VllmServer:
    return servers[0]


@pytest.fixture(scope="session")
def pair(servers: tuple[VllmServer, ...]) -> VllmPair:
    return VllmPair(servers[1], servers[2])
