"""Whether the store is worth asking: a circuit breaker over its failures.

A store that hangs or errors costs every request a deadline. After a few failures in a row lookups
are answered with "nothing stored" for a while, then one request tries again. Misses and damaged blocks
are not failures of the store.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["StoreHealth"]


@dataclass(slots=True)
class StoreHealth:
    """Pure: `now_s` comes from the caller."""

    failures_to_open: int = 3
    first_pause_s: float = 5.0
    longest_pause_s: float = 120.0
    _failures: int = 0
    _pause_s: float = 0.0
    _closed_at_s: float = 0.0

    @property
    def up(self) -> bool:
        """False from the failure that opened the circuit until a read succeeds."""
        return self._failures < self.failures_to_open

    def usable(self, now_s: float) -> bool:
        """Whether the next request may read; while down, one attempt a pause."""
        if self.up:
            return True
        if now_s < self._closed_at_s:
            return False
        self._closed_at_s = now_s + self._pause_s
        return True

    def succeeded(self) -> bool:
        """A read came back right; returns whether the store was down until now."""
        was_down = not self.up
        self._failures = 0
        self._pause_s = 0.0
        return was_down

    def failed(self, now_s: float) -> bool:
        """A read timed out or errored; returns whether this takes the store down."""
        was_up = self.up
        self._failures += 1
        if not self.up:
            self._pause_s = min(max(2 * self._pause_s, self.first_pause_s), self.longest_pause_s)
            self._closed_at_s = now_s + self._pause_s
        return was_up and not self.up
