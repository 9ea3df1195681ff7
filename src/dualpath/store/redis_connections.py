"""Connections to one server: kept, replaced when they break, and not tried again too soon.

Each is used by one thread at a time; there are as many as threads ask at once. A connection whose use
raised is closed, so that no late byte can reach its user's memory. It knows no commands.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TypeVar

from dualpath.store.redis_address import RedisAddress, RedisLink, connect

__all__ = ["RedisConnections"]

R = TypeVar("R")
_FIRST_PAUSE_S = 0.1
_LONGEST_PAUSE_S = 5.0


class RedisConnections:
    """Thread-safe. Owns what is idle; the one who uses a connection owns it meanwhile."""

    def __init__(self, address: RedisAddress) -> None:
        self.address = address
        self._lock = threading.Lock()
        self._idle: list[RedisLink] = []
        self._closed = False
        self._pause_s = 0.0
        self._next_try = 0.0
        self._last_failure = ""

    def use(self, work: Callable[[RedisLink], R], deadline: float) -> R:
        """Run `work` on a connection; once more on a new one if a kept one turns out to be dead.

        So `work` must be right when it is done twice. Raises what it raises, and OSError.
        """
        link = self._take()
        if link is not None:
            try:
                return self._run(link, work)
            except ConnectionError:
                # The server was restarted, or dropped us when idle: the others are dead as well.
                self._close_idle()
        return self._run(self._connect(deadline), work)

    def open(self, count: int, deadline: float) -> None:
        """Connect `count` times ahead. Raises OSError and StoreError."""
        for _ in range(count):
            self._put(self._connect(deadline))

    def close(self) -> None:
        """Close what is idle, and what is in use when it comes back. Idempotent."""
        with self._lock:
            self._closed = True
        self._close_idle()

    def _run(self, link: RedisLink, work: Callable[[RedisLink], R]) -> R:
        try:
            result = work(link)
        except BaseException:
            link.resp.close()
            raise
        self._put(link)
        return result

    def _take(self) -> RedisLink | None:
        with self._lock:
            return self._idle.pop() if self._idle else None

    def _put(self, link: RedisLink) -> None:
        with self._lock:
            if not self._closed:
                self._idle.append(link)
                return
        link.resp.close()

    def _close_idle(self) -> None:
        with self._lock:
            idle, self._idle = self._idle, []
        for link in idle:
            link.resp.close()

    def _connect(self, deadline: float) -> RedisLink:
        with self._lock:
            wait_s = self._next_try - time.monotonic()
            if wait_s > 0:
                raise ConnectionError(f"{self._last_failure}; tried again in {wait_s:.1f} s")
        try:
            link = connect(self.address, deadline)
        except TimeoutError:
            raise  # It cost its deadline: that is pause enough.
        except OSError as error:
            self._failed(str(error.strerror or error))
            raise
        with self._lock:
            self._pause_s = self._next_try = 0.0
        return link

    def _failed(self, reason: str) -> None:
        now = time.monotonic()
        with self._lock:
            self._last_failure = reason
            if now >= self._next_try:  # Threads that failed together count once.
                self._pause_s = min(max(2 * self._pause_s, _FIRST_PAUSE_S), _LONGEST_PAUSE_S)
                self._next_try = now + self._pause_s
