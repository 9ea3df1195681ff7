"""Configuration of networks for our traffic classes: generated from one plan, and checked on a host.

Pure generators for InfiniBand (OpenSM), RoCE (mlnx_qos, NVUE) and Linux (tc), and a checker that looks at the
host it runs on. It knows nothing of transfers. The plan is `dualpath.base.traffic_class`.
"""

from __future__ import annotations

from dualpath.qos.check import Check, Finding, Verdict, check_host
from dualpath.qos.ethernet import (
    HIGH_CLASS,
    LOW_CLASS,
    EgressPlan,
    compute_egress,
    ethernet_config,
    storage_egress,
)
from dualpath.qos.fabric_config import FabricConfig
from dualpath.qos.infiniband import infiniband_config
from dualpath.qos.rates import format_rate, parse_rate
from dualpath.qos.roce import roce_config

__all__ = [
    "HIGH_CLASS",
    "LOW_CLASS",
    "Check",
    "EgressPlan",
    "FabricConfig",
    "Finding",
    "Verdict",
    "check_host",
    "compute_egress",
    "ethernet_config",
    "format_rate",
    "infiniband_config",
    "parse_rate",
    "roce_config",
    "storage_egress",
]
