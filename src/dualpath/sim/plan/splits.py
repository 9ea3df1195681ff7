"""How a number of nodes can be divided into prefill and decode nodes. Pure.

Knows models only by how many nodes an instance can span, and what it does then. Invariants: a split has an
instance of each role; the nodes of a role are a multiple of those of its instances.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from dualpath.base.errors import ConfigError

__all__ = ["InstanceNodes", "Split", "splits"]

_ABOUT = 0.98
"""Of what the best size does, that makes a smaller one as good."""


@dataclass(frozen=True, slots=True)
class InstanceNodes:
    """Of one role: how many nodes an instance can span, each with how much an engine of it does.

    Sizes on which the model does not fit are left out. `fixed`: the operator's choice, whatever it does.
    """

    rates: Mapping[int, float]
    fixed: int | None = None

    def of(self, nodes: int) -> int | None:
        """Of a role of so many nodes, the size that does most, or the smallest of about as good ones; None:
        the role cannot have that many nodes."""
        if self.fixed is not None:
            return self.fixed if nodes and nodes % self.fixed == 0 else None
        fitting = [size for size in sorted(self.rates) if nodes % size == 0]
        most = max((self.rates[size] for size in fitting), default=0.0)
        return next((size for size in fitting if self.rates[size] >= _ABOUT * most), None)

    @property
    def least(self) -> int:
        return self.fixed or min(self.rates)


class Split(msgspec.Struct, frozen=True):
    """Nodes of each role, and nodes of each of its instances."""

    prefill_nodes: int
    decode_nodes: int
    prefill_instance_nodes: int
    decode_instance_nodes: int

    @property
    def name(self) -> str:
        """As the paper writes it: 2P4D."""
        return f"{self.prefill_nodes}P{self.decode_nodes}D"

    @property
    def nodes(self) -> int:
        return self.prefill_nodes + self.decode_nodes


def splits(nodes: int, prefill: InstanceNodes, decode: InstanceNodes, most: int) -> list[Split]:
    """All of `nodes`, by prefill nodes; of more than `most` so many, spread evenly, with both ends.

    Raises ConfigError when there is none.
    """
    found = []
    for prefill_nodes in range(1, nodes):
        of_prefill, of_decode = prefill.of(prefill_nodes), decode.of(nodes - prefill_nodes)
        if of_prefill is not None and of_decode is not None:
            found.append(Split(prefill_nodes, nodes - prefill_nodes, of_prefill, of_decode))
    if not found:
        raise ConfigError(
            f"--nodes {nodes}: an instance needs {prefill.least} prefill and {decode.least} decode nodes "
            f"or more, and whole instances cannot make {nodes} nodes; "
            "take more nodes, GPUs with more memory, or other instance sizes"
        )
    if len(found) <= most:
        return found
    if most == 1:
        return [found[len(found) // 2]]
    return [found[round(i * (len(found) - 1) / (most - 1))] for i in range(most)]
