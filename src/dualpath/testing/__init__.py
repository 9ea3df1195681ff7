"""Public test kits: doubles, faults and contract suites for third parties' backends.

The suites need pytest and are imported by their modules: `dualpath.testing.store_suite`.
"""

from __future__ import annotations

from dualpath.testing.damage import Damage, damage_bytes, damage_file
from dualpath.testing.faults import (
    Fault,
    FaultPlan,
    FaultRule,
    FaultyStore,
    Operation,
    with_faults,
)
from dualpath.testing.memory_store import MemoryDevice, MemoryStore
from dualpath.testing.model_cluster import ModelCluster
from dualpath.testing.redis_server import RedisServer, redis_server_path
from dualpath.testing.results import Results, wait_until
from dualpath.testing.virtual_time import VirtualTimeLoop, run_virtual

__all__ = [
    "Damage",
    "Fault",
    "FaultPlan",
    "FaultRule",
    "FaultyStore",
    "MemoryDevice",
    "MemoryStore",
    "ModelCluster",
    "Operation",
    "RedisServer",
    "Results",
    "VirtualTimeLoop",
    "damage_bytes",
    "damage_file",
    "redis_server_path",
    "run_virtual",
    "wait_until",
    "with_faults",
]
