"""Testbeds that a test builds."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from testbed_kit import leftovers

from dualpath.base.ids import MiB
from dualpath.testbed import Testbed, TestbedConfig


@pytest.fixture
def build(testbed_possible: None) -> Iterator[Callable[..., Testbed]]:
    """Builds testbeds that are removed, and searched for what they left, after the test."""
    built: list[Testbed] = []

    def make(**settings: Any) -> Testbed:
        bed = Testbed(TestbedConfig(**{"store_memory": 256 * MiB, **settings}))
        built.append(bed.__enter__())
        return bed

    yield make
    for bed in built:
        bed.__exit__(None, None, None)
    for bed in built:
        assert leftovers(bed.layout) == []
