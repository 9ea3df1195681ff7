"""RoCE: DSCP to priority to queue, PFC and ECN, on the NIC and on an example of a switch.

Pure. Sources: paper, traffic isolation (four lossless classes, weights as on InfiniBand); NVIDIA's manuals
of mlnx_qos and of NVUE. Weights are of ETS: a least share for each queue while all are busy; what one leaves
the others take.
"""

from __future__ import annotations

from collections.abc import Iterator

from dualpath.base.errors import ConfigError
from dualpath.base.traffic_class import QosPlan, TrafficClass, Urgency
from dualpath.qos.fabric_config import ClassEnvironment, FabricConfig, Section

__all__ = ["ets_weights", "roce_config"]

_PRIORITIES = 8
_BEST_EFFORT = 0
"""Priority of what nobody marked: lossy, with the weight of the low classes."""
_CNP_PRIORITY = 6
_CNP_DSCP = 48
"""Congestion notifications of DCQCN: they make senders slow down, so nothing goes before them."""
_ECN_MIN_BYTES = 150_000
_ECN_MAX_BYTES = 1_500_000


def roce_config(plan: QosPlan, device: str, rdma_device: str) -> FabricConfig:
    """Raises ConfigError when a class has the priority of unmarked traffic or of notifications."""
    return FabricConfig(
        fabric="RoCE v2, NVIDIA NICs and Cumulus switches",
        plan=plan,
        apply="as root on each host (sh); the part of the switch on each switch between them",
        tested="only as text. NOT on RoCE hardware, which no test of ours had; compare with your vendor's "
        "guide.",
        sections=(*_host_sections(plan, device, rdma_device), _switch_section(plan)),
        environment=_environment(plan),
    )


def ets_weights(plan: QosPlan) -> tuple[int, ...]:
    """Percent for the queue of each of the eight priorities, in all 100; 0 where strict or unused."""
    high = _priorities(plan, Urgency.HIGH)
    low = _priorities(plan, Urgency.LOW)
    for marks in plan.classes:
        if marks.priority in (_BEST_EFFORT, _CNP_PRIORITY):
            raise ConfigError(
                f"qos roce: {marks.traffic_class} has priority {marks.priority}, which is kept for "
                "unmarked traffic (0) and congestion notifications (6)"
            )
        if marks.dscp == _CNP_DSCP:
            raise ConfigError(
                f"qos roce: {marks.traffic_class} has DSCP {_CNP_DSCP}, which is that of congestion "
                "notifications"
            )
    weights = [0] * _PRIORITIES
    for priority in (_BEST_EFFORT, *low):
        weights[priority] = plan.low_weight
    rest = 100 - sum(weights)
    if rest < len(high) * (plan.low_weight + 1):
        raise ConfigError(
            f"qos roce: a low weight of {plan.low_weight} leaves {rest} for {len(high)} high priorities"
        )
    for place, priority in enumerate(sorted(high, reverse=True)):
        weights[priority] = rest // len(high) + (place < rest % len(high))
    return tuple(weights)


def _priorities(plan: QosPlan, urgency: Urgency) -> list[int]:
    return sorted({each.priority for each in plan.of_urgency(urgency)})


def _lossless(plan: QosPlan) -> list[int]:
    return sorted({each.priority for each in plan.classes if each.lossless})


def _queue_of(plan: QosPlan) -> list[int]:
    """Queue (traffic class) of each priority: its own where it is used, else that of unmarked traffic."""
    used = {each.priority for each in plan.classes} | {_CNP_PRIORITY}
    return [priority if priority in used else _BEST_EFFORT for priority in range(_PRIORITIES)]


def _comma(values: list[int] | tuple[int, ...] | list[str]) -> str:
    return ",".join(str(value) for value in values)


def _host_sections(plan: QosPlan, device: str, rdma_device: str) -> Iterator[Section]:
    lossless = _lossless(plan)
    yield Section(
        "The NIC looks at the DSCP, also of packets without a VLAN tag.",
        ("dcbx os: what a switch announces does not overwrite this.",),
        (f"mlnx_qos -i {device} --dcbx=os --trust=dscp",),
    )
    yield Section(
        "DSCP to priority, and congestion notifications (CNP) to theirs.",
        tuple(f"DSCP {each.dscp}: {each.traffic_class}" for each in plan.classes),
        (
            *(
                f"mlnx_qos -i {device} --dscp2prio=set,{each.dscp},{each.priority}"
                for each in plan.classes
            ),
            f"mlnx_qos -i {device} --dscp2prio=set,{_CNP_DSCP},{_CNP_PRIORITY}",
        ),
    )
    yield Section(
        "Priority to queue (-p), how a queue is scheduled (-s), and its weight in percent (-t).",
        (
            f"The low classes have {plan.low_weight}, and so has unmarked traffic (queue 0); "
            "high classes share the rest.",
        ),
        (
            f"mlnx_qos -i {device} -p {_comma(_queue_of(plan))} -s {_comma(_schedulers())} "
            f"-t {_comma(ets_weights(plan))}",
        ),
    )
    yield Section(
        "PFC: a full buffer pauses the sender of that priority instead of dropping.",
        ("Only where all hops agree; a switch commonly has buffers for few lossless priorities.",),
        (
            f"mlnx_qos -i {device} -f "
            + _comma([int(each in lossless) for each in range(_PRIORITIES)]),
        ),
    )
    yield Section(
        "ECN slows senders before PFC must pause them (DCQCN: notification point and reaction point).",
        (),
        (
            *(
                f"echo 1 > /sys/class/net/{device}/ecn/{point}/enable/{priority}"
                for priority in lossless
                for point in ("roce_np", "roce_rp")
            ),
            f"echo {_CNP_DSCP} > /sys/class/net/{device}/ecn/roce_np/cnp_dscp",
            f"echo {_CNP_PRIORITY} > /sys/class/net/{device}/ecn/roce_np/cnp_802p_prio",
        ),
    )
    control = plan.marks(TrafficClass.CONTROL)
    yield Section(
        "Traffic class byte (DSCP * 4 + 2) of connections made by RDMA CM that set none: control.",
        (
            f"Leave /sys/class/infiniband/{rdma_device}/tc/1/traffic_class alone: it would put ALL "
            "into one class.",
        ),
        (f"cma_roce_tos -d {rdma_device} -t {control.roce_traffic_class}",),
    )


def _schedulers() -> list[str]:
    return ["strict" if each == _CNP_PRIORITY else "ets" for each in range(_PRIORITIES)]


def _switch_section(plan: QosPlan) -> Section:
    lossless = _comma(_lossless(plan))
    weights = ets_weights(plan)
    lines = [
        "nv set qos mapping default-global trust l3",
        *(
            f"nv set qos mapping default-global dscp {each.dscp} switch-priority {each.priority}"
            for each in plan.classes
        ),
        f"nv set qos mapping default-global dscp {_CNP_DSCP} switch-priority {_CNP_PRIORITY}",
        *(
            f"nv set qos egress-queue-mapping default-global switch-priority {priority} "
            f"traffic-class {queue}"
            for priority, queue in enumerate(_queue_of(plan))
        ),
        f"nv set qos pfc default-global switch-priority {lossless}",
        "nv set qos pfc default-global tx enable",
        "nv set qos pfc default-global rx enable",
    ]
    ecn = f"nv set qos congestion-control default-global traffic-class {lossless}"
    lines += [
        f"{ecn} min-threshold {_ECN_MIN_BYTES}",
        f"{ecn} max-threshold {_ECN_MAX_BYTES}",
        f"{ecn} ecn enable",
    ]
    scheduler = "nv set qos egress-scheduler default-global traffic-class"
    for queue, weight in enumerate(weights):
        if queue == _CNP_PRIORITY:
            lines.append(f"{scheduler} {queue} mode strict")
        elif weight:
            lines += [f"{scheduler} {queue} mode dwrr", f"{scheduler} {queue} bw-percent {weight}"]
    return Section(
        "The same on a switch, in NVUE of Cumulus Linux; other vendors have it by other names.",
        (
            "Size buffers and thresholds for your ports and cables: the byte figures are a common start.",
        ),
        (*lines, "nv config apply"),
        where="each switch",
    )


def _environment(plan: QosPlan) -> tuple[ClassEnvironment, ...]:
    def byte(traffic_class: TrafficClass) -> str:
        return str(plan.marks(traffic_class).roce_traffic_class)

    kv = byte(TrafficClass.KV)
    return (
        ClassEnvironment(
            TrafficClass.EXECUTION,
            {
                "NCCL_IB_TC": byte(TrafficClass.EXECUTION),
                "NCCL_IB_FIFO_TC": byte(TrafficClass.CONTROL),
            },
            "NCCL, RCCL; the second for its own control messages",
        ),
        ClassEnvironment(
            TrafficClass.DISPATCH,
            {"NVSHMEM_IB_TRAFFIC_CLASS": byte(TrafficClass.DISPATCH)},
            "NVSHMEM: DeepEP and its like",
        ),
        ClassEnvironment(
            TrafficClass.KV,
            {"UCX_IB_TRAFFIC_CLASS": kv},
            "all of UCX in the process; NIXL: engine_config "
            f"IB_TRAFFIC_CLASS={kv} for one agent's UCX backend",
        ),
        ClassEnvironment(
            TrafficClass.STORAGE,
            {"UCX_IB_TRAFFIC_CLASS": byte(TrafficClass.STORAGE)},
            "clients of a store over UCX, in a process of their own",
        ),
    )
