"""What storage NICs did in a pass: counters read many times a second, and figures of them.

`NicWatch` reads; the rest is pure. All rates are of received bytes, which is what reads from the store are.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from types import TracebackType

from dualpath.testbed.bed import Counters

__all__ = ["NicSeries", "NicWatch", "WindowRates", "balance", "utilisation"]

_EVERY_S = 0.05
_READING_SHARE = 0.05
"""Less than this share of all NICs' rates is no reading: acknowledgements and control."""


@dataclass(frozen=True, slots=True)
class NicSeries:
    """Received bytes since the testbed was built, of each node at each time (seconds, ascending)."""

    nodes: tuple[str, ...]
    times_s: tuple[float, ...]
    received: tuple[tuple[int, ...], ...]
    """`[time][node]`."""

    def between(self, from_s: float, to_s: float) -> NicSeries:
        """The samples in [from_s, to_s]."""
        kept = [index for index, at_s in enumerate(self.times_s) if from_s <= at_s <= to_s]
        return NicSeries(
            self.nodes,
            tuple(self.times_s[index] for index in kept),
            tuple(self.received[index] for index in kept),
        )

    def since(self, start_s: float) -> NicSeries:
        """From `start_s` on, which becomes time 0."""
        kept = self.between(start_s, self.times_s[-1] if self.times_s else start_s)
        times_s = tuple(each - start_s for each in kept.times_s)
        return NicSeries(kept.nodes, times_s, kept.received)

    def reading(self, rate_bytes_s: float) -> NicSeries:
        """From the first to the last moment in which KV came in. `rate_bytes_s`: of one NIC."""
        least = _READING_SHARE * rate_bytes_s * len(self.nodes)
        busy = [
            (before_s, after_s)
            for (before_s, before), (after_s, after) in pairwise(
                zip(self.times_s, self.received, strict=True)
            )
            if after_s > before_s and (sum(after) - sum(before)) / (after_s - before_s) > least
        ]
        if not busy:
            return NicSeries(self.nodes, (), ())
        return self.between(busy[0][0], busy[-1][1])

    def windows(self, window_s: float) -> list[WindowRates]:
        """Mean rates in whole windows, from the first sample on."""
        found: list[WindowRates] = []
        start = 0
        for index, at_s in enumerate(self.times_s):
            # Samples come a little late: half a sampling interval decides to which window one belongs.
            if index and at_s >= self.times_s[start] + window_s - _EVERY_S / 2:
                seconds = at_s - self.times_s[start]
                moved = zip(self.received[start], self.received[index], strict=True)
                rates = tuple((after - before) / seconds for before, after in moved)
                found.append(WindowRates(self.times_s[start], at_s, rates))
                start = index
        return found


@dataclass(frozen=True, slots=True)
class WindowRates:
    """Bytes a second of each node."""

    from_s: float
    to_s: float
    rates: tuple[float, ...]


def utilisation(series: NicSeries, rate_bytes_s: float) -> dict[str, float]:
    """Share of `rate_bytes_s` that each node's NIC received over the whole series; {} without samples."""
    if len(series.times_s) < 2:
        return {}
    seconds = series.times_s[-1] - series.times_s[0]
    moved = zip(series.nodes, series.received[0], series.received[-1], strict=True)
    return {node: (after - before) / seconds / rate_bytes_s for node, before, after in moved}


def balance(windows: Sequence[WindowRates]) -> float | None:
    """The busiest NIC over the mean of all, averaged over windows in which anything was read."""
    ratios = [
        max(each.rates) * len(each.rates) / sum(each.rates) for each in windows if sum(each.rates)
    ]
    return sum(ratios) / len(ratios) if ratios else None


class NicWatch:
    """Reads counters on a thread of its own while inside the context; `series` is there afterwards.

    Times are of `time.monotonic`, as those of the counters.
    """

    def __init__(self, read: Callable[[], Counters], nodes: Sequence[str]) -> None:
        self._read = read
        self._nodes = tuple(nodes)
        self._seen: list[Counters] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="nic-watch", daemon=True)

    @property
    def series(self) -> NicSeries:
        return NicSeries(
            self._nodes,
            tuple(each.at_s for each in self._seen),
            tuple(
                tuple(each.nodes[node].snic.received for node in self._nodes) for each in self._seen
            ),
        )

    def __enter__(self) -> NicWatch:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        while True:
            self._seen.append(self._read())
            if self._stop.wait(_EVERY_S):
                self._seen.append(self._read())
                return
