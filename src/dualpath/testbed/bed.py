"""A testbed that runs: built, counted, and removed without a trace.

One network namespace for each engine node, one with a real store server, and between them a compute and
a storage network whose NICs have the rates that were asked for. Knows no engine: whoever runs
something in a node puts `node.command(...)` before it.
"""

from __future__ import annotations

import logging
import os
import secrets
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from dualpath.base.errors import ConfigError
from dualpath.base.ids import GroupId, Role
from dualpath.testbed.config import TestbedConfig
from dualpath.testbed.kernel import (
    end_processes,
    enter_command,
    host_subnets,
    namespace_exists,
    read_device_bytes,
    remove_network,
    require_tools,
    run_batch,
    why_no_namespaces,
)
from dualpath.testbed.plan import Layout, plan_network
from dualpath.testbed.state import BedState, Owner, StateDirectory
from dualpath.testbed.store_server import (
    PORT,
    find_store_server,
    server_command,
    start_store_server,
)
from dualpath.testbed.topology import Addresses, Topology

__all__ = [
    "TCP_SHARE",
    "Counters",
    "NicBytes",
    "Node",
    "NodeBytes",
    "Testbed",
    "existing_testbeds",
    "take_down",
    "why_no_testbed",
]

log = logging.getLogger(__name__)

_GRACE_S = 3.0
_SUBNETS = range(1, 255)
TCP_SHARE = 1448 / 1514
"""Payload of a full frame at MTU 1500: the shaper counts Ethernet, IP and TCP headers with options."""


@dataclass(frozen=True, slots=True)
class Node:
    """A node of a running testbed. `group` is what `dualpath serve` calls its engines."""

    name: str
    role: Role
    group: GroupId
    namespace: str
    compute_address: str
    storage_address: str
    management_address: str

    def command(self, argv: Sequence[str] = ()) -> list[str]:
        """What runs `argv` in this node; the process stays the same one."""
        return [*enter_command(self.namespace), *argv]


@dataclass(frozen=True, slots=True)
class NicBytes:
    """Since the testbed was built, as the node sees it.

    Counted by the kernel before it cuts segments: headers are in it once for up to 64 KiB.
    """

    received: int
    sent: int


@dataclass(frozen=True, slots=True)
class NodeBytes:
    snic: NicBytes
    cnic: NicBytes


@dataclass(frozen=True, slots=True)
class Counters:
    """All NICs at one moment of the monotonic clock. `store` is the store server's storage NIC."""

    at_s: float
    nodes: Mapping[str, NodeBytes]
    store: NicBytes


class Testbed:
    """Builds on entry, removes on exit, and is removed later if this process dies in between.

    Needs root, or a user namespace with an own /run (`dualpath testbed run`). Enter it on a thread that
    lives as long as the testbed: the store server dies with that thread.
    Raises ConfigError with what is missing.
    """

    __test__ = False

    def __init__(self, config: TestbedConfig) -> None:
        self.config = config
        self.topology = Topology.parse(config.topology)
        self._states = StateDirectory()
        self._layout: Layout | None = None
        self._server: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Testbed:
        self._build(Owner.this_process())
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        take_down(self.name)
        if self._server is not None:
            self._server.wait(10)

    def leave_running(self) -> None:
        """Build it to stay until `take_down`, beyond this process."""
        self._build(None)

    @property
    def name(self) -> str:
        return self.layout.name

    @property
    def layout(self) -> Layout:
        if self._layout is None:
            raise ConfigError("the testbed is not built yet: use it as a context manager")
        return self._layout

    @property
    def nodes(self) -> dict[str, Node]:
        """By name: pe0, pe1, ..., de0, ..."""
        layout, addresses = self.layout, self.layout.addresses
        return {
            spec.name: Node(
                name=spec.name,
                role=spec.role,
                group=spec.group,
                namespace=layout.namespace(spec),
                compute_address=addresses.compute(spec),
                storage_address=addresses.storage(spec),
                management_address=addresses.management(spec),
            )
            for spec in self.topology.nodes
        }

    @property
    def frontend_address(self) -> str:
        """The host's address that nodes reach, over the management network."""
        return self.layout.addresses.frontend

    @property
    def store_address(self) -> str:
        """The store, for the frontend: over the management network, which is not shaped."""
        return f"redis://{self.layout.addresses.store_management}:{PORT}/0"

    @property
    def node_store_address(self) -> str:
        """The store, for engines in nodes: over their storage NICs."""
        return f"redis://{self.layout.addresses.store}:{PORT}/0"

    @property
    def snic_goodput_bytes_s(self) -> float:
        """What TCP can carry through a storage NIC each way, without headers; counters show hardly more."""
        return self.layout.snic_bits_s / 8 * TCP_SHARE

    @property
    def cnic_goodput_bytes_s(self) -> float:
        """The same for a compute NIC, all classes together."""
        return self.layout.cnic_bits_s / 8 * TCP_SHARE

    @property
    def files(self) -> Path:
        """A directory that is removed with the testbed."""
        return self._states.files(self.name)

    def counters(self) -> Counters:
        """Cheap enough for a hundred times a second."""
        at_s = time.monotonic()
        ports = read_device_bytes(self.layout.fabric)
        nodes = {
            spec.name: NodeBytes(
                snic=_nic(ports[f"{spec.name}-snic"]), cnic=_nic(ports[f"{spec.name}-cnic"])
            )
            for spec in self.topology.nodes
        }
        return Counters(at_s=at_s, nodes=nodes, store=_nic(ports["store-snic"]))

    def _build(self, owner: Owner | None) -> None:
        if (reason := why_no_testbed()) is not None:
            raise ConfigError(reason)
        server = find_store_server()
        with self._states.locked():
            for state in self._states.read():
                if state.orphaned:
                    log.warning("removing testbed %s, whose process died", state.name)
                    _remove(self._states, state)
            layout = self._free_layout()
            state = _state_of(layout, owner)
            self._states.write(state)
            self._layout = layout
            try:
                for batch in plan_network(layout):
                    run_batch(batch)
                self._server = self._start_store(server, owner)
            except BaseException:
                _remove(self._states, state)
                raise

    def _free_layout(self) -> Layout:
        states = self._states.read()
        names = {state.name for state in states}
        name = self.config.testbed_name or f"dp-{secrets.token_hex(3)}"
        if name in names:
            raise ConfigError(
                f"there is a testbed {name} already; `dualpath testbed down {name}` removes it"
            )
        taken = host_subnets() | {state.subnet for state in states}
        subnet = next((number for number in _SUBNETS if number not in taken), None)
        if subnet is None:
            raise ConfigError("no free management subnet in 198.18.0.0/16")
        return Layout(
            name=name,
            topology=self.topology,
            snic_bits_s=self.config.snic_bits_s,
            cnic_bits_s=self.config.cnic_bits_s,
            addresses=Addresses(subnet),
        )

    def _start_store(self, program: str, owner: Owner | None) -> subprocess.Popen[bytes]:
        addresses = self.layout.addresses
        command = enter_command(self.layout.store)
        if owner is not None:
            command += ["setpriv", "--pdeathsig", "KILL"]
        command += server_command(
            program, [addresses.store, addresses.store_management], self.config.store_memory
        )
        return start_store_server(
            command, addresses.store_management, self.files / "store-server.log"
        )


def why_no_testbed() -> str | None:
    """What prevents this process from building one, and what to do; None when nothing does."""
    try:
        require_tools()
        find_store_server()
    except ConfigError as error:
        return str(error)
    if os.geteuid() != 0:
        return (
            "making network namespaces needs root; without it `dualpath testbed run` and "
            "`dualpath testbed serve` do all inside a user namespace of their own"
        )
    return why_no_namespaces()


def existing_testbeds() -> list[tuple[BedState, bool]]:
    """Every testbed that was made on this host, and whether its network is complete."""
    return [
        (state, all(namespace_exists(each) for each in _layout_of(state).namespaces))
        for state in StateDirectory().read()
    ]


def take_down(name: str) -> None:
    """End all processes in the testbed and delete all it made; nothing when there is no such testbed."""
    states = StateDirectory()
    with states.locked():
        for state in states.read():
            if state.name == name:
                _remove(states, state)


def _remove(states: StateDirectory, state: BedState) -> None:
    layout = _layout_of(state)
    end_processes(layout.namespaces, _GRACE_S)
    remove_network(layout.host_device, layout.namespaces)
    states.remove(state.name)


def _state_of(layout: Layout, owner: Owner | None) -> BedState:
    return BedState(
        name=layout.name,
        topology=str(layout.topology),
        snic_bits_s=layout.snic_bits_s,
        cnic_bits_s=layout.cnic_bits_s,
        subnet=layout.addresses.subnet,
        owner=owner,
    )


def _layout_of(state: BedState) -> Layout:
    return Layout(
        name=state.name,
        topology=Topology.parse(state.topology),
        snic_bits_s=state.snic_bits_s,
        cnic_bits_s=state.cnic_bits_s,
        addresses=Addresses(state.subnet),
    )


def _nic(port: tuple[int, int]) -> NicBytes:
    """A port of the fabric receives what the node's NIC sends."""
    received, sent = port
    return NicBytes(received=sent, sent=received)
