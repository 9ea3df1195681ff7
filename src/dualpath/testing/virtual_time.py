"""An asyncio loop whose time is a number: tests of schedules run at once and always the same.

When nothing is ready the clock jumps to the next timer. Knows no threads and no sockets: what waits for one
of them would never be woken, so waiting with no timer set is an error. Invariant: time never goes back.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine, Mapping
from typing import Any, TypeVar

__all__ = ["VirtualTimeLoop", "run_virtual"]

R = TypeVar("R")


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """`loop.time()` starts at 0 and moves only when every task waits. Close it as any loop."""

    def __init__(self) -> None:
        self._now_s = 0.0
        super().__init__(_JumpingSelector(self))

    def time(self) -> float:
        return self._now_s

    def jump(self, seconds: float) -> None:
        """Called when nothing can run for `seconds`."""
        self._now_s += seconds


class _JumpingSelector(selectors.BaseSelector):
    """Looks at the real sockets (the loop has one for itself) without waiting, and lets time pass instead."""

    def __init__(self, loop: VirtualTimeLoop) -> None:
        self._loop = loop
        self._real = selectors.DefaultSelector()

    def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        return self._real.register(fileobj, events, data)

    def unregister(self, fileobj: Any) -> selectors.SelectorKey:
        return self._real.unregister(fileobj)

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = self._real.select(0)
        if not ready:
            if timeout is None:
                raise RuntimeError(
                    "every task waits and no timer is set: nothing can happen any more"
                )
            self._loop.jump(timeout)
        return ready

    def close(self) -> None:
        self._real.close()

    def get_map(self) -> Mapping[Any, selectors.SelectorKey]:
        return self._real.get_map()


def run_virtual(main: Coroutine[Any, Any, R]) -> R:
    """As `asyncio.run`, in virtual time."""
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(main)
