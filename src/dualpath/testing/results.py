"""Collects completion callbacks, so that a test can wait for them with a deadline."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

__all__ = ["Results", "wait_until"]

R = TypeVar("R")


class Results(Generic[R]):
    """A `done` callback that keeps what it is called with, in order. Thread-safe."""

    def __init__(self) -> None:
        self._items: list[R] = []
        self._arrived = threading.Condition()

    def __call__(self, item: R) -> None:
        with self._arrived:
            self._items.append(item)
            self._arrived.notify_all()

    @property
    def items(self) -> list[R]:
        """What has come so far."""
        with self._arrived:
            return list(self._items)

    def wait(self, count: int, timeout_s: float = 30.0) -> list[R]:
        """The results, once there are `count`. Raises TimeoutError, and AssertionError for more."""
        with self._arrived:
            if not self._arrived.wait_for(lambda: len(self._items) >= count, timeout_s):
                raise TimeoutError(f"{len(self._items)} of {count} results in {timeout_s} s")
            if len(self._items) > count:
                raise AssertionError(f"{len(self._items)} results, expected {count}: {self._items}")
            return list(self._items)


def wait_until(condition: Callable[[], bool], what: str, timeout_s: float = 30.0) -> None:
    """Poll until `condition` holds. Raises TimeoutError that names `what`."""
    limit = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > limit:
            raise TimeoutError(f"{what}: not within {timeout_s} s")
        time.sleep(0.002)
