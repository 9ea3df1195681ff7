"""Linux traffic control: an htb tree for the compute NIC, a shaped storage NIC.

Pure: a plan of what an interface should have, its `tc` commands, and the text of both. Measured on veth
pairs: priority as on virtual lanes, rates within 0.25 % (both ends shaped). A software shaper works on the
host's own sending; it replaces no lanes on a fabric, where bursts are shorter than it can react.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dualpath.base.errors import ConfigError
from dualpath.base.ids import KiB, MiB
from dualpath.base.traffic_class import ClassMarks, QosPlan, TrafficClass, Urgency
from dualpath.qos.fabric_config import FabricConfig, Section
from dualpath.qos.rates import format_rate

__all__ = [
    "HIGH_CLASS",
    "LOW_CLASS",
    "DscpFilter",
    "EgressPlan",
    "HtbClass",
    "compute_egress",
    "ethernet_config",
    "expected_class",
    "storage_egress",
]

HIGH_CLASS = "1:10"
LOW_CLASS = "1:20"
_ROOT_CLASS = "1:1"
_ROOT_QUANTUM_BYTES = 60_000
_QUANTUM_BYTES = 2_000
"""A turn of one part of the weight; one packet at least."""
_MAX_QUANTUM_BYTES = 198_000
"""The kernel warns above 200,000."""
_BURST_S = 256 * KiB * 8 / 3.2e9
"""A burst must cover what the link sends between two runs of the shaper; this worked at all rates tried."""
_QUEUE_S = 0.08
"""Queue of a storage NIC. With 1 MiB at 400 Mb/s it dropped from the tail; 4 to 16 MiB held the rate."""
_MIN_RATE_BIT_S = 10**6


@dataclass(frozen=True, slots=True)
class HtbClass:
    """`prio` 0 borrows first; None for a class that divides nothing."""

    classid: str
    parent: str
    rate_bit_s: int
    ceil_bit_s: int
    prio: int | None
    burst_bytes: int
    cburst_bytes: int
    quantum_bytes: int | None = None

    def command(self, device: str) -> str:
        parts = [f"class add dev {device} parent {self.parent} classid {self.classid} htb"]
        parts.append(f"rate {format_rate(self.rate_bit_s)}")
        if self.ceil_bit_s != self.rate_bit_s:
            parts.append(f"ceil {format_rate(self.ceil_bit_s)}")
        if self.prio is not None:
            parts.append(f"prio {self.prio}")
        parts.append(f"burst {_kib(self.burst_bytes)} cburst {_kib(self.cburst_bytes)}")
        if self.quantum_bytes is not None:
            parts.append(f"quantum {self.quantum_bytes}")
        return " ".join(parts)


@dataclass(frozen=True, slots=True)
class DscpFilter:
    """Packets of `protocol` (ip or ipv6) with `dscp` go to `classid`."""

    protocol: str
    dscp: int
    classid: str

    def command(self, device: str) -> str:
        # Filters of one number have one protocol.
        number, field = (1, "ip dsfield") if self.protocol == "ip" else (2, "ip6 priority")
        return (
            f"filter add dev {device} parent 1: protocol {self.protocol} prio {number} "
            f"u32 match {field} {self.dscp << 2:#04x} 0xfc flowid {self.classid}"
        )


@dataclass(frozen=True, slots=True)
class EgressPlan:
    """What `device` should have for sending. `default` is the class of what no filter takes."""

    device: str
    rate_bit_s: int
    default: str
    classes: tuple[HtbClass, ...]
    filters: tuple[DscpFilter, ...] = ()
    fifo_bytes: int | None = None
    """Limit of the queue in bytes; None leaves Linux's own."""

    def commands(self) -> tuple[str, ...]:
        """For `tc -batch`, onto an interface without a queueing discipline of its own (delete it first)."""
        minor = self.default.partition(":")[2]
        lines = [f"qdisc add dev {self.device} root handle 1: htb default {minor}"]
        lines += [each.command(self.device) for each in self.classes]
        if self.fifo_bytes is not None:
            lines.append(
                f"qdisc add dev {self.device} parent {self.default} bfifo "
                f"limit {_kib(self.fifo_bytes)}"
            )
        lines += [each.command(self.device) for each in self.filters]
        return tuple(lines)


def compute_egress(plan: QosPlan, device: str, rate_bit_s: int) -> EgressPlan:
    """Two classes on a compute NIC: high (1:10) and low (1:20, and all that is unmarked)."""
    _check(device, rate_bit_s)
    burst_bytes = max(256 * KiB, _whole_kib(rate_bit_s * _BURST_S / 8))
    low_bit_s = rate_bit_s * plan.low_weight // 100

    def leaf(classid: str, rate: int, prio: int, burst: int, weight: int) -> HtbClass:
        quantum_bytes = min(_QUANTUM_BYTES * weight, _MAX_QUANTUM_BYTES)
        return HtbClass(
            classid, _ROOT_CLASS, rate, rate_bit_s, prio, burst, burst_bytes, quantum_bytes
        )

    return EgressPlan(
        device=device,
        rate_bit_s=rate_bit_s,
        default=LOW_CLASS,
        classes=(
            HtbClass(
                _ROOT_CLASS,
                "1:",
                rate_bit_s,
                rate_bit_s,
                None,
                burst_bytes,
                burst_bytes,
                _ROOT_QUANTUM_BYTES,
            ),
            leaf(HIGH_CLASS, rate_bit_s - low_bit_s, 0, burst_bytes, plan.high_weight),
            # A small burst: after a pause the low class must not send long at the full rate.
            leaf(LOW_CLASS, low_bit_s, 1, 64 * KiB, plan.low_weight),
        ),
        filters=tuple(
            DscpFilter(protocol, each.dscp, HIGH_CLASS)
            for protocol in ("ip", "ipv6")
            for each in _high_first(plan)
        ),
    )


def storage_egress(device: str, rate_bit_s: int) -> EgressPlan:
    """A storage NIC that is limited and carries one class."""
    _check(device, rate_bit_s)
    burst_bytes = 512 * KiB
    fifo_bytes = min(max(4 * MiB, _whole_kib(rate_bit_s * _QUEUE_S / 8)), 16 * MiB)
    return EgressPlan(
        device=device,
        rate_bit_s=rate_bit_s,
        default=_ROOT_CLASS,
        classes=(
            HtbClass(
                _ROOT_CLASS,
                "1:",
                rate_bit_s,
                rate_bit_s,
                None,
                burst_bytes,
                burst_bytes,
                _ROOT_QUANTUM_BYTES,
            ),
        ),
        fifo_bytes=fifo_bytes,
    )


def expected_class(egress: EgressPlan, marks: ClassMarks, protocol: str) -> str:
    """The htb class that a marked packet should leave by."""
    taken = (
        each.classid
        for each in egress.filters
        if (each.protocol, each.dscp) == (protocol, marks.dscp)
    )
    return next(taken, egress.default)


def ethernet_config(plan: QosPlan, egresses: Sequence[EgressPlan], *, batch: bool) -> FabricConfig:
    """`batch` gives input for `tc -batch -`, otherwise the text is a shell script."""
    sections = tuple(_section(each, batch=batch) for each in egresses)
    return FabricConfig(
        fabric="Ethernet, Linux tc",
        plan=plan,
        apply="as root, at both ends of each link: it shapes what an interface sends. "
        + ("Pipe into: tc -batch -" if batch else "Run with sh."),
        tested="on veth pairs between network namespaces. NOT with a physical NIC.",
        sections=(*sections, _sockets_section(plan)),
    )


def _section(egress: EgressPlan, *, batch: bool) -> Section:
    prefix = "" if batch else "tc "
    notes = [f"Replace what is there first: tc qdisc del dev {egress.device} root"]
    if egress.filters:
        title = (
            f"{egress.device}: the compute network, two classes in {format_rate(egress.rate_bit_s)}"
        )
        notes += [
            "The rate is that of the link or just below: where packets queue must be here, not in the NIC.",
            "rate is what a class gets when both are busy, ceil what it may take of what is idle, and",
            f"prio decides who takes first. High DSCPs go to {HIGH_CLASS}; KV and all else to {LOW_CLASS}.",
        ]
    else:
        title = f"{egress.device}: the storage network, held at {format_rate(egress.rate_bit_s)}"
        notes += [
            "The queue is long enough that bursts of one reader are not dropped from its tail."
        ]
    return Section(title, tuple(notes), tuple(prefix + line for line in egress.commands()))


def _sockets_section(plan: QosPlan) -> Section:
    lines = [
        f"{each.traffic_class}: IP_TOS {each.tos} (IPv6: IPV6_TCLASS), SO_PRIORITY {each.so_priority}"
        for each in plan.classes
    ]
    return Section(
        "What a socket sets to be in a class",
        (
            "The filters look at the DSCP. SO_PRIORITY is for interfaces with Linux's default queue instead.",
        ),
        tuple(lines),
        where="in programs",
    )


def _high_first(plan: QosPlan) -> list[ClassMarks]:
    """High classes, that of model execution first: filters are tried in order."""
    high = plan.of_urgency(Urgency.HIGH)
    return sorted(high, key=lambda each: each.traffic_class is not TrafficClass.EXECUTION)


def _check(device: str, rate_bit_s: int) -> None:
    if not device or len(device) > 15 or any(each.isspace() or each == "/" for each in device):
        raise ConfigError(f"qos: expected the name of a network interface, got {device!r}")
    if rate_bit_s < _MIN_RATE_BIT_S:
        raise ConfigError(
            f"qos: expected a rate of 1mbit or more for {device}, got {format_rate(rate_bit_s)}"
        )


def _whole_kib(count: float) -> int:
    return -(-round(count) // KiB) * KiB


def _kib(count: int) -> str:
    """As `tc` reads sizes: k and m are binary there."""
    return f"{count // MiB}m" if count % MiB == 0 else f"{count // KiB}k"
