"""OpenSM configuration: service levels to virtual lanes, and the arbitration between lanes.

Pure. Sources: paper, traffic isolation; InfiniBand Architecture 7.6.6 (SL to VL) and 7.6.9 (arbitration);
OpenSM's qos-config.txt.
"""

from __future__ import annotations

from dataclasses import dataclass

from dualpath.base.errors import ConfigError
from dualpath.base.traffic_class import QosPlan, TrafficClass, Urgency
from dualpath.qos.fabric_config import ClassEnvironment, FabricConfig, Section

__all__ = ["infiniband_config", "low_lane_share", "low_table_share"]

_LANE_COUNTS = (1, 2, 4, 8, 15)
"""What a port can operate with (IBA 14.2.5.6)."""
_SERVICE_LEVELS = 16


def infiniband_config(plan: QosPlan) -> FabricConfig:
    """Raises ConfigError when the lanes are not numbered from 0 without a gap."""
    lanes = _lane_weights(plan)
    arbitration = plan.lanes
    high = ",".join(f"{lane}:{weight.high}" for lane, weight in enumerate(lanes))
    low = ",".join(f"{lane}:{weight.low}" for lane, weight in enumerate(lanes))
    max_vls = next(count for count in _LANE_COUNTS if count >= len(lanes))
    sections = (
        Section("Without this OpenSM sets up none of the rest.", (), ("qos TRUE",)),
        Section(
            f"Lanes in use: {len(lanes)}, of {max_vls} that ports are set to.",
            ("A lane has its own buffers and credits: one that is full does not stop the others.",),
            (f"qos_max_vls {max_vls}",),
        ),
        Section(
            "Lane of each service level, 0 to 15.",
            (
                *(
                    f"SL {each.service_level} -> VL {each.virtual_lane}: {each.traffic_class}"
                    for each in sorted(plan.classes, key=lambda each: each.service_level)
                ),
                "Traffic that nobody marked has SL 0. Levels that are not ours go to the low lane: they",
                "pass, and disturb nothing.",
            ),
            (f"qos_sl2vl {_service_level_map(plan)}",),
        ),
        Section(
            "Lanes that go first, as lane:weight; a weight is in units of 64 bytes a turn.",
            (
                f"High lanes take turns of {arbitration.high_lane_weight * 64} bytes; "
                "a low lane has 0 here.",
            ),
            (f"qos_vlarb_high {high}",),
        ),
        Section(
            "Lanes that go when no high lane has a packet, or the limit below is reached.",
            (
                f"All lanes are here too; a low one has {arbitration.low_lane_weight} "
                f"({arbitration.low_lane_weight * 64} bytes a turn).",
            ),
            (f"qos_vlarb_low {low}",),
        ),
        Section(
            "After this many times 4 KiB from the high table, one waiting packet of the low table goes.",
            (
                f"So the low table gets at least {low_table_share(plan):.2%} of packets (of 4 KiB), "
                "however busy the high lanes are,",
                f"and of that a low lane {low_lane_share(plan):.0%} by weight when every lane waits. "
                "KV never starves, and all that is",
                "idle is its. 255 would mean no limit, 0 a low packet after each high one.",
            ),
            (f"qos_high_limit {arbitration.high_limit}",),
        ),
        Section(
            "To look at what ports really have",
            (
                "qos_ca_*, qos_swe_* and qos_rtr_* in the same file override these for a kind of port.",
            ),
            ("smpquery sl2vl LID PORT", "smpquery vlarb LID PORT"),
            where="any host, package infiniband-diags",
        ),
    )
    return FabricConfig(
        fabric="InfiniBand, OpenSM",
        plan=plan,
        apply="append to opensm.conf (opensm -c writes one), restart OpenSM on the master",
        tested="the syntax, by OpenSM 3.3.23 reading it. NOT on InfiniBand hardware, which no test of ours "
        "had.",
        sections=sections,
        environment=_environment(plan),
    )


def low_table_share(plan: QosPlan) -> float:
    """Least share of packets of 4 KiB that the low table gets, while high lanes always have one waiting."""
    return 1 / (plan.lanes.high_limit + 1)


def low_lane_share(plan: QosPlan) -> float:
    """Share of the low table that a low lane has by weight, while every lane has a packet waiting."""
    weights = [each.low for each in _lane_weights(plan)]
    return plan.lanes.low_lane_weight / sum(weights)


@dataclass(frozen=True, slots=True)
class _LaneWeight:
    """Weights of one lane in the high and in the low table."""

    high: int
    low: int


def _lane_weights(plan: QosPlan) -> list[_LaneWeight]:
    arbitration = plan.lanes
    weights = {
        Urgency.HIGH: _LaneWeight(arbitration.high_lane_weight, arbitration.high_lane_weight),
        Urgency.LOW: _LaneWeight(0, arbitration.low_lane_weight),
    }
    urgency = {each.virtual_lane: each.urgency for each in plan.classes}
    if sorted(urgency) != list(range(len(urgency))):
        raise ConfigError(
            f"qos infiniband: expected lanes from 0 without a gap, got {sorted(urgency)}"
        )
    return [weights[urgency[lane]] for lane in sorted(urgency)]


def _service_level_map(plan: QosPlan) -> str:
    known = {each.service_level: each.virtual_lane for each in plan.classes}
    other = plan.of_urgency(Urgency.LOW)[0].virtual_lane
    return ",".join(str(known.get(level, other)) for level in range(_SERVICE_LEVELS))


def _environment(plan: QosPlan) -> tuple[ClassEnvironment, ...]:
    def level(traffic_class: TrafficClass) -> str:
        return str(plan.marks(traffic_class).service_level)

    kv = level(TrafficClass.KV)
    return (
        ClassEnvironment(
            TrafficClass.EXECUTION, {"NCCL_IB_SL": level(TrafficClass.EXECUTION)}, "NCCL, RCCL"
        ),
        ClassEnvironment(
            TrafficClass.DISPATCH,
            {"NVSHMEM_IB_SL": level(TrafficClass.DISPATCH)},
            "NVSHMEM: DeepEP and its like",
        ),
        ClassEnvironment(
            TrafficClass.KV,
            {"UCX_IB_SL": kv},
            f"all of UCX in the process; NIXL: engine_config IB_SL={kv} for one agent's UCX backend",
        ),
        ClassEnvironment(
            TrafficClass.STORAGE,
            {"UCX_IB_SL": level(TrafficClass.STORAGE)},
            "clients of a store over UCX, in a process of their own",
        ),
    )
