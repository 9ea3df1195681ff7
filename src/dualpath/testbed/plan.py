"""What has to be run to build a testbed: namespaces, links, addresses, shapers. Pure.

Namespaces: one for each node, `store`, and `fab` with a bridge for each of the three networks.
Inside a node the devices are called `cnic` (compute), `snic` (storage) and `mgmt`; their other ends
lie in `fab`. Invariants: a node's `cnic` and `snic` are shaped on both ends, nothing else is; on the storage
network a node reaches the store only, on the management network the frontend's host only.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from dualpath.base.traffic_class import DEFAULT_PLAN
from dualpath.qos.ethernet import compute_egress, storage_egress
from dualpath.testbed.topology import Addresses, NodeSpec, Topology

__all__ = ["Batch", "Layout", "plan_network"]

_BRIDGES = ("br-cnic", "br-snic", "br-mgmt")


@dataclass(frozen=True, slots=True)
class Layout:
    """Everything that decides a testbed's network. `name` starts the name of all it makes on the host."""

    name: str
    topology: Topology
    snic_bits_s: int
    cnic_bits_s: int
    addresses: Addresses

    @property
    def host_device(self) -> str:
        """The only device in the host's own namespace: the way from the frontend to the nodes."""
        return self.name

    @property
    def fabric(self) -> str:
        return f"{self.name}-fab"

    @property
    def store(self) -> str:
        return f"{self.name}-store"

    def namespace(self, node: NodeSpec) -> str:
        return f"{self.name}-{node.name}"

    @property
    def namespaces(self) -> tuple[str, ...]:
        return (self.fabric, self.store, *(self.namespace(node) for node in self.topology.nodes))


@dataclass(frozen=True, slots=True)
class Batch:
    """Lines for one `ip -batch -` or `tc -batch -` in a namespace; None is the host's."""

    tool: str
    namespace: str | None
    lines: tuple[str, ...]


def plan_network(layout: Layout) -> tuple[Batch, ...]:
    """The batches in the order in which they must run. Nothing of the testbed may exist before."""
    nodes = layout.topology.nodes
    batches = [
        Batch("ip", None, _host_lines(layout)),
        Batch("ip", layout.fabric, tuple(_fabric_lines(layout))),
        Batch("tc", layout.fabric, tuple(_fabric_shapers(layout))),
        Batch("ip", layout.store, _store_lines(layout)),
    ]
    for node in nodes:
        namespace = layout.namespace(node)
        batches.append(Batch("ip", namespace, _node_lines(layout, node)))
        batches.append(Batch("tc", namespace, _shapers(layout, "cnic", "snic")))
    return tuple(batches)


def _host_lines(layout: Layout) -> tuple[str, ...]:
    device = layout.host_device
    return (
        *(f"netns add {namespace}" for namespace in layout.namespaces),
        f"link add {device} type veth peer name host-mgmt netns {layout.fabric}",
        f"link set dev {device} addrgenmode none",
        f"addr add {layout.addresses.frontend}/24 dev {device}",
        f"link set dev {device} up",
    )


def _fabric_lines(layout: Layout) -> Iterator[str]:
    for bridge in _BRIDGES:
        yield f"link add {bridge} type bridge"
        yield f"link set dev {bridge} addrgenmode none"
        yield f"link set dev {bridge} up"
    yield from _port("host-mgmt", "br-mgmt", isolated=False)
    yield from _veth("store-snic", "snic", layout.store, "br-snic", isolated=False)
    yield from _veth("store-mgmt", "mgmt", layout.store, "br-mgmt", isolated=True)
    for node in layout.topology.nodes:
        namespace = layout.namespace(node)
        yield from _veth(f"{node.name}-cnic", "cnic", namespace, "br-cnic", isolated=False)
        yield from _veth(f"{node.name}-snic", "snic", namespace, "br-snic", isolated=True)
        yield from _veth(f"{node.name}-mgmt", "mgmt", namespace, "br-mgmt", isolated=True)


def _veth(port: str, device: str, namespace: str, bridge: str, *, isolated: bool) -> Iterator[str]:
    yield f"link add {port} type veth peer name {device} netns {namespace}"
    yield from _port(port, bridge, isolated=isolated)


def _port(port: str, bridge: str, *, isolated: bool) -> Iterator[str]:
    """Isolated ports of a bridge reach only those that are not."""
    yield f"link set dev {port} addrgenmode none"
    yield f"link set dev {port} master {bridge}"
    if isolated:
        yield f"link set dev {port} type bridge_slave isolated on"
    yield f"link set dev {port} up"


def _fabric_shapers(layout: Layout) -> Iterator[str]:
    for node in layout.topology.nodes:
        yield from _shapers(layout, f"{node.name}-cnic", f"{node.name}-snic")


def _shapers(layout: Layout, cnic: str, snic: str) -> tuple[str, ...]:
    """A shaper limits what a device sends; with both ends shaped both directions are."""
    return (
        *compute_egress(DEFAULT_PLAN, cnic, layout.cnic_bits_s).commands(),
        *storage_egress(snic, layout.snic_bits_s).commands(),
    )


def _store_lines(layout: Layout) -> tuple[str, ...]:
    addresses = layout.addresses
    return (
        *_up("lo"),
        *_up("snic", addresses.store),
        *_up("mgmt", addresses.store_management),
    )


def _node_lines(layout: Layout, node: NodeSpec) -> tuple[str, ...]:
    addresses = layout.addresses
    return (
        *_up("lo"),
        *_up("cnic", addresses.compute(node)),
        *_up("snic", addresses.storage(node)),
        *_up("mgmt", addresses.management(node)),
    )


def _up(device: str, address: str | None = None) -> Iterator[str]:
    if address is not None:
        yield f"link set dev {device} addrgenmode none"
        yield f"addr add {address}/24 dev {device}"
    yield f"link set dev {device} up"
