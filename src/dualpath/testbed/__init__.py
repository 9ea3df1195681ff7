"""A cluster on one machine: a network namespace for each node, NICs with real limits, a real store.

    with Testbed(TestbedConfig(topology="1P2D", snic="400mbit")) as bed:
        subprocess.run(bed.nodes["pe0"].command(["ip", "addr"]))
        bed.counters().nodes["pe0"].snic.received

`placement` puts the engines of `dualpath serve` there; nothing else here knows them.
"""

from dualpath.testbed.bed import (
    Counters,
    NicBytes,
    Node,
    NodeBytes,
    Testbed,
    existing_testbeds,
    take_down,
    why_no_testbed,
)
from dualpath.testbed.config import TestbedConfig
from dualpath.testbed.topology import Topology

__all__ = [
    "Counters",
    "NicBytes",
    "Node",
    "NodeBytes",
    "Testbed",
    "TestbedConfig",
    "Topology",
    "existing_testbeds",
    "take_down",
    "why_no_testbed",
]
