"""Ctrl-C at a call that is counted, so that no test depends on when it comes."""

from __future__ import annotations

import itertools
import signal
from collections.abc import Callable
from typing import Any

__all__ = ["interrupting"]


def interrupting(call: Callable[..., Any], *, after: int) -> Callable[..., Any]:
    """`call`, or the method `call`, with SIGINT at the beginning of the call after so many."""
    numbers = itertools.count()

    def counted(*args: Any) -> Any:
        if next(numbers) == after:
            signal.raise_signal(signal.SIGINT)
        return call(*args)

    return counted
