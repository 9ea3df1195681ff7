"""What `dualpath testbed` can be told; its flags come from here."""

from __future__ import annotations

import re
from typing import Annotated

from dualpath.base.config import Config, Unit, option
from dualpath.base.errors import ConfigError
from dualpath.base.ids import GiB, MiB
from dualpath.qos.rates import format_rate, parse_rate
from dualpath.testbed.topology import Topology

__all__ = ["TestbedConfig"]

_LEAST_BITS_S = 10**6
_MOST_BITS_S = 100 * 10**9


class TestbedConfig(Config, frozen=True, kw_only=True):
    """One testbed. `testbed_name` None: one that is free."""

    __test__ = False

    topology: Annotated[
        str,
        option(
            "Nodes: 1P2D is one with prefill and two with decode engines.",
            group="Testbed",
            metavar="nPmD",
        ),
    ] = "1P1D"
    snic: Annotated[
        str,
        option("Rate of each node's storage NIC, each way.", group="Testbed", metavar="RATE"),
    ] = "400mbit"
    cnic: Annotated[
        str,
        option("Rate of each node's compute NIC, each way.", group="Testbed", metavar="RATE"),
    ] = "3200mbit"
    store_memory: Annotated[
        int,
        option(
            "Most memory of the store server. When it is full, blocks are not stored.",
            group="Testbed",
            metavar="SIZE",
            unit=Unit.BYTES,
            ge=16 * MiB,
        ),
    ] = 4 * GiB
    testbed_name: Annotated[
        str | None,
        option(
            "Name of the testbed; namespaces and the host's device start with it. A free one if absent.",
            group="Testbed",
            metavar="NAME",
        ),
    ] = None

    def check(self) -> None:
        Topology.parse(self.topology)
        for flag, bits_s in (("--snic", self.snic_bits_s), ("--cnic", self.cnic_bits_s)):
            if not _LEAST_BITS_S <= bits_s <= _MOST_BITS_S:
                raise ConfigError(
                    f"{flag}: expected a rate from 1mbit to 100gbit, got {format_rate(bits_s)}"
                )
        if self.testbed_name is not None and not re.fullmatch(
            r"[a-z][a-z0-9-]{0,10}", self.testbed_name
        ):
            raise ConfigError(
                "--testbed-name: expected at most 11 small letters, digits and dashes, first a letter, "
                f"got {self.testbed_name!r}"
            )

    @property
    def snic_bits_s(self) -> int:
        return parse_rate(self.snic, "--snic")

    @property
    def cnic_bits_s(self) -> int:
        return parse_rate(self.cnic, "--cnic")
