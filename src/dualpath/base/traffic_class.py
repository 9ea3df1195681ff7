"""The one description of traffic classes: what each is called on every fabric, and what it weighs.

Sockets are marked from it, and the configuration of switches and hosts is generated from it
(`dualpath.qos`), so that the two cannot disagree. It knows no socket and no tool. Source: paper, traffic
isolation (the lanes and weights of the compute network); the numbers of DSCP and priorities are ours.

Invariants of a `QosPlan`: every class is described once; DSCPs are distinct; what shares a lane or a priority
has the same urgency, since the network cannot tell it apart; the low classes weigh less than the high ones,
and never nothing, so that nothing starves.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum

from dualpath.base.errors import ConfigError

__all__ = [
    "DEFAULT_PLAN",
    "ClassMarks",
    "LaneArbitration",
    "QosPlan",
    "TrafficClass",
    "Urgency",
]

_ECT0 = 0b10
"""ECN-capable, in the two low bits of the traffic class byte."""


class TrafficClass(StrEnum):
    """What a flow carries."""

    CONTROL = "control"
    """Small messages that others wait for; on InfiniBand also all that nobody marked."""
    EXECUTION = "execution"
    """Collectives of model execution."""
    KV = "kv"
    """KV between engines, over the compute network."""
    DISPATCH = "dispatch"
    """Expert-parallel dispatch and combine: execution too, on a lane of its own."""
    STORAGE = "storage"
    """KV from and to storage; matters where storage shares a network with something else."""


class Urgency(StrEnum):
    HIGH = "high"
    LOW = "low"
    """Uses what is idle, and gets its small weight when nothing is."""


@dataclass(frozen=True, slots=True)
class ClassMarks:
    """How one class is told apart.

    `dscp` is the six-bit code point, `priority` the Ethernet priority (802.1p) it stands for, which with PFC
    is also the queue; `so_priority` orders packets inside Linux (0 to 6: more needs CAP_NET_ADMIN);
    `service_level` and `virtual_lane` are InfiniBand's.
    """

    traffic_class: TrafficClass
    urgency: Urgency
    dscp: int
    priority: int
    so_priority: int
    service_level: int
    virtual_lane: int
    lossless: bool = True

    def __post_init__(self) -> None:
        limits = {
            "dscp": 63,
            "priority": 7,
            "so_priority": 6,
            "service_level": 14,
            "virtual_lane": 14,
        }
        for name, limit in limits.items():
            value = getattr(self, name)
            if not 0 <= value <= limit:
                raise ConfigError(
                    f"traffic class {self.traffic_class}: expected {name} from 0 to {limit}, got {value}"
                )

    @property
    def tos(self) -> int:
        """The byte for IP_TOS and IPV6_TCLASS; the ECN bits stay the kernel's."""
        return self.dscp << 2

    @property
    def roce_traffic_class(self) -> int:
        """The byte RDMA libraries want as traffic class on RoCE: DSCP, and capable of ECN."""
        return self.dscp << 2 | _ECT0


@dataclass(frozen=True, slots=True)
class LaneArbitration:
    """Virtual-lane arbitration of an InfiniBand port (IBA 7.6.9).

    Weights count units of 64 bytes a turn. After `high_limit` times 4 KiB from the high table one packet of
    the low table goes, if one waits. Low lanes have no weight in the high table.
    """

    high_limit: int = 240
    high_lane_weight: int = 192
    low_lane_weight: int = 64

    def __post_init__(self) -> None:
        if not 1 <= self.high_limit <= 254:
            raise ConfigError(
                "qos: expected a high limit from 1 to 254 (255 lets the high table starve the low one), "
                f"got {self.high_limit}"
            )
        if not 1 <= self.low_lane_weight < self.high_lane_weight <= 255:
            raise ConfigError(
                "qos: expected 1 <= low lane weight < high lane weight <= 255, "
                f"got {self.low_lane_weight} and {self.high_lane_weight}"
            )


_HIGH, _LOW = Urgency.HIGH, Urgency.LOW
# The default mapping of switches and NICs is priority = DSCP / 8; these agree with it. SO_PRIORITY 6 is the
# first band of Linux's default queue, 2 the last.
_CLASSES = (
    ClassMarks(TrafficClass.CONTROL, _HIGH, 24, 3, 6, service_level=0, virtual_lane=0),
    ClassMarks(TrafficClass.EXECUTION, _HIGH, 46, 5, 6, service_level=1, virtual_lane=1),
    ClassMarks(TrafficClass.KV, _LOW, 8, 1, 2, service_level=2, virtual_lane=2),
    ClassMarks(TrafficClass.DISPATCH, _HIGH, 34, 4, 6, service_level=3, virtual_lane=3),
    ClassMarks(TrafficClass.STORAGE, _LOW, 10, 1, 2, service_level=4, virtual_lane=2),
)


@dataclass(frozen=True, slots=True)
class QosPlan:
    """All classes, and how bandwidth is divided when it is short.

    `low_weight` of 100 parts belong to the low classes together, the rest to the high ones, in equal
    parts for each of their priorities or lanes. Raises ConfigError for a plan that a network cannot hold.
    """

    classes: tuple[ClassMarks, ...] = _CLASSES
    low_weight: int = 1
    lanes: LaneArbitration = field(default_factory=LaneArbitration)

    def __post_init__(self) -> None:
        names = [each.traffic_class for each in self.classes]
        if sorted(names) != sorted(TrafficClass):
            raise ConfigError(
                f"qos: expected each of {', '.join(TrafficClass)} once, got {', '.join(names)}"
            )
        if not 1 <= self.low_weight <= 49:
            raise ConfigError(
                f"qos: expected a low weight from 1 to 49 of 100 parts, got {self.low_weight}"
            )
        self._check_distinct()

    def _check_distinct(self) -> None:
        by_dscp: dict[int, ClassMarks] = {}
        for marks in self.classes:
            other = by_dscp.setdefault(marks.dscp, marks)
            if other is not marks:
                raise ConfigError(
                    f"qos: {other.traffic_class} and {marks.traffic_class} both have DSCP {marks.dscp}; "
                    "give one of them another"
                )
        shared = ("priority", "service_level", "virtual_lane")
        for name in shared:
            groups: dict[int, ClassMarks] = {}
            for marks in self.classes:
                other = groups.setdefault(getattr(marks, name), marks)
                if (other.urgency, other.lossless) != (marks.urgency, marks.lossless):
                    raise ConfigError(
                        f"qos: {other.traffic_class} and {marks.traffic_class} share {name} "
                        f"{getattr(marks, name)} but differ in urgency or loss"
                    )

    @property
    def high_weight(self) -> int:
        """Parts of 100 for the high classes together."""
        return 100 - self.low_weight

    def marks(self, traffic_class: TrafficClass) -> ClassMarks:
        return next(each for each in self.classes if each.traffic_class == traffic_class)

    def of_urgency(self, urgency: Urgency) -> tuple[ClassMarks, ...]:
        return tuple(each for each in self.classes if each.urgency is urgency)

    def with_dscp(self, dscp: Mapping[TrafficClass, int]) -> QosPlan:
        """The same plan with other code points; the priorities stay."""
        return replace(
            self,
            classes=tuple(
                replace(each, dscp=dscp.get(each.traffic_class, each.dscp)) for each in self.classes
            ),
        )


DEFAULT_PLAN = QosPlan()
