"""The figures of `dualpath bench pooling`, from what was measured. Pure.

A figure whose topologies or systems were left out of the run is absent.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from dualpath.bench.cluster.answers import Answers, wrong_tokens
from dualpath.bench.cluster.bounds import ReadBound, equal_pair_error, read_bound
from dualpath.bench.cluster.nics import balance, utilisation
from dualpath.bench.cluster.passes import Pass
from dualpath.bench.cluster.systems import SYSTEMS
from dualpath.bench.harness import Figure
from dualpath.kv.layout import KVLayout
from dualpath.testbed.topology import Topology

__all__ = ["WINDOW_S", "Measured", "Measurements", "utilisation_over_time"]

WINDOW_S = 1.0
_POOLED = "split"
"""The default read plan, whose figures are the headline's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One system on one topology in one round. Of single requests on the idle cluster: `alone_ttft_s`;
    `alone_s`, until the end of the answer; `alone_read_over_compute`, seconds of reading by seconds of
    prefill. `long`: of the agents that append much. None: not measured."""

    topology: str
    system: str
    offline: Pass | None = None
    alone_ttft_s: tuple[float, ...] = ()
    alone_s: tuple[float, ...] = ()
    alone_read_over_compute: float | None = None
    long: Pass | None = None


@dataclass(frozen=True, slots=True)
class Measurements:
    """All of one run, in order. `snic_bytes_s`: what one storage NIC can receive of a TCP stream."""

    measured: Sequence[Measured]
    layout: KVLayout
    snic_bytes_s: float

    def figures(self) -> dict[str, Figure]:
        """All that can be told, the issue's figures first."""
        figures: dict[str, Figure | None] = {
            "speedup_split_1p1d": self.speedup("1P1D", "split"),
            "speedup_shorter_1p1d": self.speedup("1P1D", "shorter"),
            "speedup_split_1p2d": self.speedup("1P2D", "split"),
            "pool_utilisation": _least(self.pool_utilisation(_POOLED).values()),
            "equal_pair_error": self._equal_pair_error(),
            "ttft_split_gain": self._ttft_gain(),
            "compute_bound_ratio": self._compute_bound_ratio(),
            "balance_max_avg": self.balance("1P2D", _POOLED),
            "jct_s": self._by_topology(self.jct_s),
            "speedup": self._by_topology(self.speedup),
            "bound_s": self._by_topology(self._bound_s),
            "bound_share": self._by_topology(self._bound_share),
            "utilisation": self._by_topology(self.utilisation),
            "pool_utilisation_by_topology": self.pool_utilisation(_POOLED),
            "balance_by_system": self._by_topology(self.balance),
            "hit_rate": self._by_topology(self._hit_rate),
            "ttft_alone_s": self._by_system(self._alone_ttft_s),
            "alone_s": self._by_system(self._alone_s),
            "read_over_compute": self._read_over_compute(),
            "jct_long_s": self._by_system(self._long_s),
            "hit_rate_long": self._by_system(self._long_hit_rate),
        }
        return {name: each for name, each in figures.items() if each not in (None, {})}

    @property
    def topologies(self) -> list[str]:
        return list(dict.fromkeys(each.topology for each in self.measured))

    def systems(self, topology: str) -> list[str]:
        """Whose agents were measured."""
        return list(
            dict.fromkeys(
                each.system
                for each in self.measured
                if each.topology == topology and each.offline is not None
            )
        )

    def passes(self, topology: str, system: str) -> list[Pass]:
        return [
            each.offline
            for each in self.measured
            if (each.topology, each.system) == (topology, system) and each.offline is not None
        ]

    def jct_s(self, topology: str, system: str) -> float | None:
        """The median of the rounds."""
        return _median(each.jct_s for each in self.passes(topology, system))

    def speedup(self, topology: str, system: str) -> float | None:
        """Over basic, the median of the rounds' ratios."""
        pairs = zip(self.passes(topology, "basic"), self.passes(topology, system), strict=False)
        return _median(basic.jct_s / each.jct_s for basic, each in pairs)

    def bound(self, topology: str, system: str, measured: Pass) -> ReadBound:
        """Of a pass: what it read, at the rates of the NICs that its system reads with."""
        nodes = Topology.parse(topology)
        nics = nodes.prefill + (nodes.decode if SYSTEMS[system].both_sides else 0)
        return read_bound(
            measured.read_tokens, self.layout, nics=nics, rate_bytes_s=self.snic_bytes_s
        )

    def utilisation(self, topology: str, system: str) -> dict[str, float]:
        """Of each node's NIC, from the first to the last read; the mean of the rounds. {} for who reads
        nothing."""
        found = [
            utilisation(each.nics.reading(self.snic_bytes_s), self.snic_bytes_s)
            for each in self.passes(topology, system)
        ]
        known = [each for each in found if each]
        return (
            {node: statistics.fmean(each[node] for each in known) for node in known[0]}
            if known
            else {}
        )

    def pool_utilisation(self, system: str) -> dict[str, float]:
        """Of all NICs together, by topology."""
        found = {topology: self.utilisation(topology, system) for topology in self.topologies}
        return {name: statistics.fmean(each.values()) for name, each in found.items() if each}

    def balance(self, topology: str, system: str) -> float | None:
        """The busiest NIC over the mean of all in windows of a second, while KV is read."""
        ratios = (
            balance(each.nics.reading(self.snic_bytes_s).windows(WINDOW_S))
            for each in self.passes(topology, system)
        )
        return _median(each for each in ratios if each is not None)

    def wrong_tokens(self, expected: Answers) -> int:
        """Of all answers of systems whose answers mean something."""
        return sum(
            wrong_tokens(expected, each.offline.answers)
            for each in self.measured
            if each.offline is not None and SYSTEMS[each.system].exact
        )

    def _by_topology(
        self, figure: Callable[[str, str], Figure | None]
    ) -> dict[str, dict[str, Figure]]:
        found = {
            topology: {
                system: value
                for system in self.systems(topology)
                if (value := figure(topology, system)) not in (None, {})
            }
            for topology in self.topologies
        }
        return {topology: each for topology, each in found.items() if each}

    def _by_system(self, figure: Callable[[str], float | None]) -> dict[str, Figure]:
        names = dict.fromkeys(each.system for each in self.measured)
        return {name: value for name in names if (value := figure(name)) is not None}

    def _bound_s(self, topology: str, system: str) -> float | None:
        if system == "oracle":
            return None
        found = (self.bound(topology, system, each) for each in self.passes(topology, system))
        return _median(each.seconds for each in found)

    def _bound_share(self, topology: str, system: str) -> float | None:
        """How close a system comes to its bound: 1 is all that its NICs could do."""
        bound_s, jct_s = self._bound_s(topology, system), self.jct_s(topology, system)
        return None if bound_s is None or jct_s is None else bound_s / jct_s

    def _hit_rate(self, topology: str, system: str) -> float | None:
        return _median(
            each.read_tokens / each.prompt_tokens for each in self.passes(topology, system)
        )

    def _equal_pair_error(self) -> float | None:
        pairs = (
            (self.jct_s("1P1D", _POOLED), self.jct_s("2P1D", "basic")),
            (self.jct_s("2P1D", _POOLED), self.jct_s("1P2D", _POOLED)),
        )
        known = [(a, b) for a, b in pairs if a is not None and b is not None]
        return equal_pair_error(known) if len(known) == len(pairs) else None

    def _alone_s(self, system: str) -> float | None:
        return _median(
            seconds for each in self.measured if each.system == system for seconds in each.alone_s
        )

    def _alone_ttft_s(self, system: str) -> float | None:
        return _median(
            ttft_s
            for each in self.measured
            if each.system == system
            for ttft_s in each.alone_ttft_s
        )

    def _ttft_gain(self) -> float | None:
        """The better of the single sides by both."""
        single = [self._alone_ttft_s("basic"), self._alone_ttft_s("decode side")]
        both = self._alone_ttft_s("split")
        known = [each for each in single if each is not None]
        return None if both is None or len(known) < len(single) else min(known) / both

    def _read_over_compute(self) -> float | None:
        return _median(
            each.alone_read_over_compute
            for each in self.measured
            if each.system == "basic" and each.alone_read_over_compute is not None
        )

    def _long_s(self, system: str) -> float | None:
        return _median(
            each.long.jct_s
            for each in self.measured
            if each.system == system and each.long is not None
        )

    def _long_hit_rate(self, system: str) -> float | None:
        return _median(
            each.long.read_tokens / each.long.prompt_tokens
            for each in self.measured
            if each.system == system and each.long is not None
        )

    def _compute_bound_ratio(self) -> float | None:
        """1: dual takes as long as basic; less: it is worse."""
        basic, dual = self._long_s("basic"), self._long_s(_POOLED)
        return None if basic is None or dual is None else basic / dual


def utilisation_over_time(
    measured: Pass, rate_bytes_s: float, window_s: float = WINDOW_S
) -> Mapping[str, list[float]]:
    """Of each node's NIC in windows from the start of a pass on."""
    windows = measured.nics.windows(window_s)
    return {
        node: [round(each.rates[index] / rate_bytes_s, 4) for each in windows]
        for index, node in enumerate(measured.nics.nodes)
    }


def _median(values: Iterable[float]) -> float | None:
    known = list(values)
    return statistics.median(known) if known else None


def _least(values: Iterable[float]) -> float | None:
    return min(values, default=None)
