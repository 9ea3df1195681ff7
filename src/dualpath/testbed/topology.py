"""Which nodes a testbed has, what they are called and which addresses they get.

Pure. A node holds one group of engines; `1P2D` is one node of prefill and two of decode engines.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from dualpath.base.errors import ConfigError
from dualpath.base.ids import GroupId, Role

__all__ = ["Addresses", "NodeSpec", "Topology"]

_MOST_NODES = 32
_FIRST_NODE_HOST = 11
_STORE_HOST = 2
_FRONTEND_HOST = 1


@dataclass(frozen=True, slots=True)
class NodeSpec:
    """One engine node. `index` counts all nodes of the testbed and decides its addresses."""

    name: str
    role: Role
    index: int
    group: GroupId
    """What `dualpath serve` calls the group of engines that this node holds."""


@dataclass(frozen=True, slots=True)
class Topology:
    """P prefill nodes and D decode nodes."""

    prefill: int
    decode: int

    @classmethod
    def parse(cls, text: str) -> Topology:
        """`2P1D` in either case. Raises ConfigError."""
        match = re.fullmatch(r"(\d{1,4})[pP](\d{1,4})[dD]", text.strip())
        prefill, decode = (int(match[1]), int(match[2])) if match else (0, 0)
        if prefill < 1 or decode < 1 or prefill + decode > _MOST_NODES:
            raise ConfigError(
                f"--topology: expected prefill and decode nodes such as 1P2D, at least one of each and "
                f"at most {_MOST_NODES} together, got {text!r}"
            )
        return cls(prefill, decode)

    def __str__(self) -> str:
        return f"{self.prefill}P{self.decode}D"

    @property
    def nodes(self) -> tuple[NodeSpec, ...]:
        """pe0, pe1, ..., de0, de1, ..."""
        found: list[NodeSpec] = []
        for role, short, count in (
            (Role.PREFILL, "pe", self.prefill),
            (Role.DECODE, "de", self.decode),
        ):
            for i in range(count):
                group = GroupId(f"{short}-node{i}")
                found.append(NodeSpec(f"{short}{i}", role, len(found), group))
        return tuple(found)


@dataclass(frozen=True, slots=True)
class Addresses:
    """IPv4 addresses, all in 198.18.0.0/15, which RFC 2544 sets aside for tests.

    The management network reaches the frontend's host, so `subnet` must be free there; compute and
    storage networks exist inside namespaces only and are the same in every testbed.
    """

    subnet: int

    @property
    def frontend(self) -> str:
        return self._management(_FRONTEND_HOST)

    @property
    def store_management(self) -> str:
        return self._management(_STORE_HOST)

    @property
    def store(self) -> str:
        """Where nodes reach the store, through their SNICs."""
        return _storage(_STORE_HOST)

    def management(self, node: NodeSpec) -> str:
        return self._management(_FIRST_NODE_HOST + node.index)

    @staticmethod
    def storage(node: NodeSpec) -> str:
        return _storage(_FIRST_NODE_HOST + node.index)

    @staticmethod
    def compute(node: NodeSpec) -> str:
        return f"198.19.1.{_FIRST_NODE_HOST + node.index}"

    def _management(self, host: int) -> str:
        return f"198.18.{self.subnet}.{host}"


def _storage(host: int) -> str:
    return f"198.19.2.{host}"
