"""Whether loading stored KV is worth it, or computing is faster (case 18).

A store that answers, but slowly, can cost more than it saves. The gate compares what loading was
measured to take with what computing was measured to take, and lets a hit go unused when loading
would clearly take longer. Now and then a request loads all the same, so that a store that recovered
is noticed. Pure: times come from the caller.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["LoadGate"]

_NEW_WEIGHT = 0.3
_FEWEST_TOKENS = 256
"""Measurements of fewer tokens are mostly latency."""


@dataclass(slots=True)
class LoadGate:
    """Rates are in tokens a second, exponentially averaged; None until something was measured.

    The gate closes on a hit whose loading is estimated to take `margin` times as long as computing
    it, and at least `least_s`: below that the estimate is noise and the gain nothing. `probe_s`:
    where it is closed, one request in so many seconds loads.
    """

    margin: float = 2.0
    least_s: float = 0.5
    probe_s: float = 10.0
    load_rate: float | None = None
    compute_rate: float | None = None
    _probe_at_s: float = 0.0

    def loaded(self, tokens: int, seconds: float) -> None:
        """So many hit tokens took so long, from the reservation to the last read, queueing included."""
        if tokens >= _FEWEST_TOKENS:
            self.load_rate = _averaged(self.load_rate, tokens, seconds)

    def computed(self, tokens: int, seconds: float) -> None:
        """So many missed tokens were prefilled in so long."""
        if tokens >= _FEWEST_TOKENS:
            self.compute_rate = _averaged(self.compute_rate, tokens, seconds)

    def worth_loading(self, hit_tokens: int, now_s: float) -> bool:
        """Whether a hit of so many tokens should be read from the store."""
        if self.load_rate is None or self.compute_rate is None:
            return True
        load_s, compute_s = hit_tokens / self.load_rate, hit_tokens / self.compute_rate
        if load_s <= max(self.margin * compute_s, self.least_s):
            return True
        if now_s < self._probe_at_s:
            return False
        self._probe_at_s = now_s + self.probe_s
        return True


def _averaged(known: float | None, tokens: int, seconds: float) -> float:
    rate = tokens / max(seconds, 1e-6)
    return rate if known is None else known + _NEW_WEIGHT * (rate - known)
