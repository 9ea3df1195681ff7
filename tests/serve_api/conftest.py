from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from api_kit import EchoGenerator, Server, running_server

from dualpath.base.errors import RequestError


@pytest.fixture(scope="module")
def shared() -> Iterator[Server]:
    with running_server(EchoGenerator()) as server:
        yield server


@pytest.fixture
def server(shared: Server) -> Iterator[Server]:
    """The module's server with a generator as new; nothing may be left open after a test."""
    generator = shared.generator
    fresh = EchoGenerator()
    for name in vars(fresh):
        setattr(generator, name, getattr(fresh, name))
    yield shared
    assert not generator.open


@pytest.fixture
def serving() -> Callable[..., object]:
    """Starts a server with other settings: `with serving(api_key="x") as server`."""

    def start(generator: EchoGenerator | None = None, **changes: object) -> object:
        return running_server(generator or EchoGenerator(), **changes)

    return start


@pytest.fixture
def refused() -> RequestError:
    return RequestError("a refusal", status=400, code="refused", param="prompt")
