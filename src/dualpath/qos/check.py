"""Compares a host with the plan: what is configured, and where marked packets really go.

`compare_egress` is pure; `check_host` looks at this host, with deadlines, and changes nothing on it. What no
host can tell (lanes of a fabric, queues of a NIC) is reported as not checked, never as right.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

import msgspec

from dualpath.base.traffic_class import ClassMarks, QosPlan
from dualpath.qos.ethernet import EgressPlan, HtbClass, expected_class
from dualpath.qos.observe import ObservedEgress, TcError, observe_egress
from dualpath.qos.probe import marks_are_kept, send_marked
from dualpath.qos.rates import format_rate

__all__ = ["Check", "Finding", "Verdict", "check_host", "compare_egress"]

_RATE_TOLERANCE = 0.001
"""`tc` rounds what it prints."""
_PROBE_PACKETS = 32
_PROBE_DEADLINE_S = 2.0
_POLL_S = 0.02


class Verdict(StrEnum):
    OK = "ok"
    WRONG = "wrong"
    UNKNOWN = "cannot check"


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing looked at. `detail`: what there is; where it is wrong, what was expected and what to do."""

    subject: str
    verdict: Verdict
    detail: str


@dataclass(frozen=True, slots=True)
class Check:
    findings: tuple[Finding, ...]

    @property
    def passed(self) -> bool:
        """Nothing expected is wrong; what could not be checked does not count."""
        return all(each.verdict is not Verdict.WRONG for each in self.findings)

    def to_json(self) -> str:
        return msgspec.json.encode({"passed": self.passed, "findings": self.findings}).decode()


def check_host(plan: QosPlan, egresses: Sequence[EgressPlan], *, send: bool) -> Check:
    """`send` lets marked packets out of the interfaces that have classes, to see where they go."""
    findings = list(_socket_findings(plan))
    for egress in egresses:
        try:
            observed = observe_egress(egress.device)
        except TcError as error:
            findings.append(_wrong(egress.device, str(error)))
            continue
        found = list(compare_egress(egress, observed))
        findings += found
        if egress.filters and observed.kind == "htb":
            if send:
                findings += _probe_findings(plan, egress, observed)
            else:
                findings.append(
                    _unknown(f"{egress.device} marked packets", "sending is turned off")
                )
    if not egresses:
        findings.append(_unknown("classes of an interface", "no interface named (--dev, --snic)"))
    return Check((*findings, *_hardware_findings()))


def compare_egress(expected: EgressPlan, observed: ObservedEgress) -> Iterator[Finding]:
    """Queueing discipline, classes and filters of one interface."""
    subject = f"{expected.device} root"
    if observed.kind != "htb":
        yield _wrong(
            subject,
            f"expected htb, got {observed.kind or 'nothing'}; "
            "apply what `dualpath qos ethernet` prints",
        )
        return
    if observed.default != expected.default:
        yield _wrong(subject, f"expected default class {expected.default}, got {observed.default}")
    else:
        yield _ok(subject, f"htb, default class {observed.default}")
    for htb_class in expected.classes:
        yield _compare_class(expected.device, htb_class, observed)
    if expected.fifo_bytes is not None:
        subject = f"{expected.device} queue of {expected.default}"
        limit = observed.fifo_bytes.get(expected.default)
        if limit is None or limit < expected.fifo_bytes:
            yield _wrong(
                subject, f"expected bfifo of {expected.fifo_bytes} bytes or more, got {limit}"
            )
        else:
            yield _ok(subject, f"bfifo of {limit} bytes")
    wanted = {(each.protocol, each.dscp): each.classid for each in expected.filters}
    # The kernel takes the first that matches.
    there: dict[tuple[str, int], str] = {}
    for each in observed.filters:
        there.setdefault((each.protocol, each.dscp), each.classid)
    for (protocol, dscp), classid in wanted.items():
        subject = f"{expected.device} filter {protocol} DSCP {dscp}"
        got = there.get((protocol, dscp))
        if got == classid:
            yield _ok(subject, f"to {classid}")
        else:
            yield _wrong(subject, f"expected to {classid}, got {got or 'no such filter'}")


def _compare_class(device: str, expected: HtbClass, observed: ObservedEgress) -> Finding:
    subject = f"{device} class {expected.classid}"
    got = observed.classes.get(expected.classid)
    if got is None:
        return _wrong(subject, "expected, but it is not there; apply the configuration again")
    differences = [
        f"{name} expected {format_rate(wanted)}, got {format_rate(there)}"
        for name, wanted, there in (
            ("rate", expected.rate_bit_s, got.rate_bit_s),
            ("ceil", expected.ceil_bit_s, got.ceil_bit_s),
        )
        if abs(wanted - there) > wanted * _RATE_TOLERANCE
    ]
    if expected.prio is not None and got.prio != expected.prio:
        differences.append(f"prio expected {expected.prio}, got {got.prio}")
    if differences:
        return _wrong(subject, "; ".join(differences))
    prio = "" if expected.prio is None else f", prio {expected.prio}"
    return _ok(
        subject, f"rate {format_rate(got.rate_bit_s)}, ceil {format_rate(got.ceil_bit_s)}{prio}"
    )


def _probe_findings(
    plan: QosPlan, egress: EgressPlan, observed: ObservedEgress
) -> Iterator[Finding]:
    for marks in plan.classes:
        for protocol in ("ip", "ipv6"):
            classid = expected_class(egress, marks, protocol)
            if classid in observed.classes:
                yield _probe(egress, marks, protocol)
            else:
                yield _wrong(
                    _probe_subject(egress, marks, protocol),
                    f"expected to leave by class {classid}, which is not there",
                )


def _probe_subject(egress: EgressPlan, marks: ClassMarks, protocol: str) -> str:
    return f"{egress.device} {protocol} packets of {marks.traffic_class}"


def _probe(egress: EgressPlan, marks: ClassMarks, protocol: str) -> Finding:
    subject = _probe_subject(egress, marks, protocol)
    expected = expected_class(egress, marks, protocol)
    leaves = [each.classid for each in egress.classes if each.prio is not None]
    try:
        before = _packets(egress.device, leaves)
        send_marked(egress.device, protocol, marks, _PROBE_PACKETS)
        deadline = time.monotonic() + _PROBE_DEADLINE_S
        while True:
            now = _packets(egress.device, leaves)
            grown = {classid: now[classid] - before[classid] for classid in leaves}
            if grown[expected] >= _PROBE_PACKETS or time.monotonic() > deadline:
                break
            time.sleep(_POLL_S)
    except OSError as error:
        return _unknown(subject, f"could not send: {error.strerror}")
    except TcError as error:
        return _unknown(subject, str(error))
    counts = ", ".join(f"{classid} {count}" for classid, count in grown.items())
    detail = f"DSCP {marks.dscp}: of {_PROBE_PACKETS} sent, counters grew: {counts}"
    if grown[expected] < _PROBE_PACKETS:
        return _wrong(subject, f"{detail}; expected all in {expected}")
    if any(count >= _PROBE_PACKETS for classid, count in grown.items() if classid != expected):
        return _unknown(subject, f"{detail}; other traffic hides the answer, try when it is quiet")
    return _ok(subject, detail)


def _packets(device: str, classids: Sequence[str]) -> dict[str, int]:
    classes = observe_egress(device).classes
    return {each: classes[each].packets if each in classes else 0 for each in classids}


def _socket_findings(plan: QosPlan) -> Iterator[Finding]:
    for marks in plan.classes:
        subject = f"sockets of {marks.traffic_class}"
        wanted = f"IP_TOS {marks.tos}, SO_PRIORITY {marks.so_priority}"
        problem = marks_are_kept(marks)
        if problem is None:
            yield _ok(subject, wanted)
        else:
            yield _wrong(subject, f"expected {wanted}, got {problem}")


def _hardware_findings(sysfs: Path = Path("/sys/class/infiniband")) -> Iterator[Finding]:
    devices = sorted(each.name for each in sysfs.iterdir()) if sysfs.is_dir() else []
    tools = [name for name in ("rdma", "ibstat", "mlnx_qos") if shutil.which(name)]
    there = f"RDMA devices: {', '.join(devices) or 'none'}; tools: {', '.join(tools) or 'none'}"
    yield _unknown(
        "InfiniBand lanes", f"{there}; look with `smpquery sl2vl` and `smpquery vlarb` of each port"
    )
    yield _unknown(
        "RoCE priorities, PFC, ECN", f"{there}; look with `mlnx_qos -i`, and on the switches"
    )


def _ok(subject: str, detail: str) -> Finding:
    return Finding(subject, Verdict.OK, detail)


def _wrong(subject: str, detail: str) -> Finding:
    return Finding(subject, Verdict.WRONG, detail)


def _unknown(subject: str, detail: str) -> Finding:
    return Finding(subject, Verdict.UNKNOWN, detail)
