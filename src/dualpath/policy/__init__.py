"""The policy: which engines, which reads, which batch. Pure: events in, instructions out.

No clock, randomness, I/O or torch below this package; the same code runs in the simulator and in the product.
Modules that every event passes through may run compiled, with the same result (setup.py).
"""

from types import FunctionType

# First: it fails when what is compiled is not of these sources.
from dualpath.policy import compiled as compiled  # isort: skip
from dualpath.policy.bandwidth import (
    NodeBandwidth,
    RatioRange,
    Resource,
    bottleneck_free_range,
    resource_loads,
)
from dualpath.policy.config import PolicyConfig, ReadPlanKind, SchedulerKind
from dualpath.policy.events import (
    Assign,
    AttemptFailed,
    EngineJoined,
    EngineLost,
    EngineReport,
    Event,
    GroupFetched,
    Instruction,
    Interrupted,
    PrefillDone,
    ReadPlan,
    ReadProgressed,
    Reject,
    RejectReason,
    Release,
    RequestAborted,
    RequestArrived,
    RequestFinished,
    StartPrefill,
)
from dualpath.policy.quota import (
    AttentionFit,
    AttentionTime,
    Batch,
    BatchEntry,
    PrefillEntry,
    pack,
    pairs,
)
from dualpath.policy.read_plan import plan_reads
from dualpath.policy.requests import Phase, state_diagram
from dualpath.policy.scheduler import Scheduler
from dualpath.policy.stats import SchedulerStats, Waiting

__all__ = [
    "Assign",
    "AttemptFailed",
    "AttentionFit",
    "AttentionTime",
    "Batch",
    "BatchEntry",
    "EngineJoined",
    "EngineLost",
    "EngineReport",
    "Event",
    "GroupFetched",
    "Instruction",
    "Interrupted",
    "NodeBandwidth",
    "Phase",
    "PolicyConfig",
    "PrefillDone",
    "PrefillEntry",
    "RatioRange",
    "ReadPlan",
    "ReadPlanKind",
    "ReadProgressed",
    "Reject",
    "RejectReason",
    "Release",
    "RequestAborted",
    "RequestArrived",
    "RequestFinished",
    "Resource",
    "Scheduler",
    "SchedulerKind",
    "SchedulerStats",
    "StartPrefill",
    "Waiting",
    "bottleneck_free_range",
    "is_compiled",
    "pack",
    "pairs",
    "plan_reads",
    "resource_loads",
    "state_diagram",
]


def is_compiled() -> bool:
    """Whether the scheduler runs as an extension compiled from its source."""
    return not isinstance(Scheduler.handle, FunctionType)
