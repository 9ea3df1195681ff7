"""Collectives of model execution on the compute NICs of an instance that spans nodes: the high class of its
links.

In a step, collectives and compute take turns, layer by layer. While a collective runs it has the NIC for
itself, so KV gets what is left on the average of the step: 1 - collectives' share of it. If the classes are
not isolated, a collective is one more flow on the NIC, shares it with those that are there when the step
starts, and all ranks wait for the slowest: KV then gets more while collectives run, and these run for
longer, which is the same on average.

Collectives that compute hides (`Efficiency.overlap`) are not counted.
"""

from __future__ import annotations

from dualpath.sim.kernel.jit import compiled
from dualpath.sim.kernel.links import set_high_share
from dualpath.sim.kernel.state import State

__all__ = ["leave_nics", "with_collectives_s"]

_MOST = 0.99
"""Of a NIC: the low class is never starved (paper, traffic isolation)."""


@compiled
def with_collectives_s(s: State, instance: int, own_s: float, collective_s: float) -> float:
    """How long a step takes that is `own_s` long beside collectives, `collective_s` if they have NICs for
    themselves. They use NICs from now on."""
    group = s.instances[instance]
    if not group.spread:
        return own_s + collective_s
    first = s.engines[group.first_engine].nic_out
    nics = range(first, first + 2 * group.engines)
    step_s = own_s + collective_s
    if not s.parameters[0].isolated:
        flows = 0
        for link in nics:
            flows = max(flows, s.links[link].active)
        step_s += flows * collective_s
    share = min(_MOST, collective_s / step_s)
    for link in nics:
        set_high_share(s, link, share, s.clock[0].now_s)
    return step_s


@compiled
def leave_nics(s: State, instance: int) -> None:
    """The instance computes no more."""
    group = s.instances[instance]
    if group.spread:
        first = s.engines[group.first_engine].nic_out
        for link in range(first, first + 2 * group.engines):
            set_high_share(s, link, 0.0, s.clock[0].now_s)
