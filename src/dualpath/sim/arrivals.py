"""When agents of an online run start: at random, or as the sessions of a recorded trace did.

Reads the trace; knows no cluster and no clock. Invariant: the same arrivals, rate and seed give the same
times, in order, the first of recorded ones at 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import takewhile
from pathlib import Path

import numpy as np

from dualpath.base.errors import ConfigError
from dualpath.sim.workload import Float64
from dualpath.traces import BUILT_IN, open_trace, poisson, read_arrivals, recorded

__all__ = ["POISSON", "Arrivals", "open_arrivals"]

POISSON = "poisson"


@dataclass(frozen=True, slots=True)
class Arrivals:
    """`name`: POISSON or a trace. `times_s`: of the trace's sessions, in order; none for POISSON."""

    name: str = POISSON
    times_s: tuple[float, ...] = ()

    def before(self, horizon_s: float, rate_aps: float, seed: int) -> Float64:
        """`rate_aps` a second on average: recorded ones stretched to that rate and from their start again
        after the end, others drawn with `seed`."""
        if self.name == POISSON:
            endless = poisson(rate_aps, seed)
        else:
            endless = recorded(self.times_s, rate_aps)
        return np.fromiter(takewhile(lambda at_s: at_s < horizon_s, endless), np.float64)


@lru_cache(maxsize=4)
def open_arrivals(name: str) -> Arrivals:
    """Of POISSON, a trace of the package, or a file or directory; of a CSV file only TIMESTAMP is read.

    Raises ConfigError, also for a trace that does not tell when its sessions start.
    """
    if name == POISSON:
        return Arrivals()
    path = Path(name).expanduser()
    if name not in BUILT_IN and name.endswith((".csv", ".csv.gz")) and path.is_file():
        times_s = read_arrivals(path)
    else:
        starts_s = [each.start_s for each in open_trace(name).sessions]
        times_s = tuple(sorted(each for each in starts_s if each is not None))
        if len(times_s) < len(starts_s):
            raise ConfigError(
                f"arrivals {name!r}: {len(starts_s) - len(times_s)} of {len(starts_s)} sessions do not tell "
                "when they start: expected a trace that does, such as azure-conversation"
            )
    if times_s[0] == times_s[-1]:
        raise ConfigError(f"arrivals {name!r}: expected at least two at different times")
    return Arrivals(name, times_s)
