"""What an interface really has: runs `tc` and reads its answer.

Classes are read from text: `tc -j` gives JSON for queueing disciplines and filters, but for htb classes
only in newer releases. Knows no plan.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec

from dualpath.base.errors import ConfigError, DualPathError
from dualpath.qos.rates import parse_rate

__all__ = [
    "ObservedClass",
    "ObservedEgress",
    "ObservedFilter",
    "TcError",
    "observe_egress",
    "parse_classes",
    "parse_fifos",
    "parse_filters",
    "parse_root",
]

_TIMEOUT_S = 10.0
_CLASS = re.compile(
    r"^class htb (?P<classid>\S+) (?:root|parent (?P<parent>\S+)) (?:leaf \S+ )?"
    r"(?:prio (?P<prio>\d+) )?(?:quantum \d+ )?rate (?P<rate>\S+) ceil (?P<ceil>\S+)"
)
_SENT = re.compile(r"^ Sent \d+ bytes (?P<packets>\d+) pkt")


class TcError(DualPathError):
    """`tc` refused, or did not answer in time."""


@dataclass(frozen=True, slots=True)
class ObservedClass:
    classid: str
    rate_bit_s: int
    ceil_bit_s: int
    prio: int | None
    packets: int
    """Sent since the class was made."""


@dataclass(frozen=True, slots=True)
class ObservedFilter:
    """A filter on the DSCP alone; others are not reported."""

    protocol: str
    dscp: int
    classid: str


@dataclass(frozen=True, slots=True)
class ObservedEgress:
    """`kind` of the root queueing discipline; None where there is none."""

    device: str
    kind: str | None
    default: str | None
    classes: Mapping[str, ObservedClass] = field(default_factory=dict)
    filters: tuple[ObservedFilter, ...] = ()
    fifo_bytes: Mapping[str, int] = field(default_factory=dict)
    """Limit of the bfifo of a class, where it has one."""


class _QdiscOptions(msgspec.Struct):
    default: str | None = None
    limit: int | None = None


class _Qdisc(msgspec.Struct):
    kind: str
    handle: str = ""
    root: bool = False
    parent: str | None = None
    options: _QdiscOptions = msgspec.field(default_factory=_QdiscOptions)


class _Match(msgspec.Struct):
    value: str
    mask: str
    off: int = 0


class _FilterOptions(msgspec.Struct):
    flowid: str | None = None
    match: _Match | None = None


class _Filter(msgspec.Struct):
    kind: str
    protocol: str
    options: _FilterOptions = msgspec.field(default_factory=_FilterOptions)


def observe_egress(device: str) -> ObservedEgress:
    """Raises ConfigError when there is no `tc`, TcError when it refuses (no such interface, say)."""
    qdiscs = _tc("-j", "qdisc", "show", "dev", device)
    kind, default = parse_root(qdiscs)
    if kind != "htb":
        return ObservedEgress(device, kind, default)
    return ObservedEgress(
        device,
        kind,
        default,
        parse_classes(_tc("-s", "class", "show", "dev", device)),
        parse_filters(_tc("-j", "filter", "show", "dev", device)),
        parse_fifos(qdiscs),
    )


def parse_root(text: str) -> tuple[str | None, str | None]:
    """Kind of the root discipline and its default class (htb), from `tc -j qdisc show`."""
    for each in msgspec.json.decode(text or "[]", type=list[_Qdisc]):
        if each.root:
            default = each.options.default
            if default is not None:
                default = f"{each.handle}{int(default, 16):x}"
            return each.kind, default
    return None, None


def parse_fifos(text: str) -> dict[str, int]:
    """Limit in bytes of each bfifo by the class it belongs to, from `tc -j qdisc show`."""
    return {
        each.parent: each.options.limit
        for each in msgspec.json.decode(text or "[]", type=list[_Qdisc])
        if each.kind == "bfifo" and each.parent is not None and each.options.limit is not None
    }


def parse_classes(text: str) -> dict[str, ObservedClass]:
    """htb classes by id, from `tc -s class show`."""
    classes: dict[str, ObservedClass] = {}
    current: re.Match[str] | None = None
    for line in text.splitlines():
        if line.startswith("class "):
            current = _CLASS.match(line)
        elif current is not None and (sent := _SENT.match(line)) is not None:
            prio = current["prio"]
            classes[current["classid"]] = ObservedClass(
                current["classid"],
                parse_rate(current["rate"], "tc"),
                parse_rate(current["ceil"], "tc"),
                None if prio is None else int(prio),
                int(sent["packets"]),
            )
            current = None
    return classes


def parse_filters(text: str) -> tuple[ObservedFilter, ...]:
    """Filters on nothing but the DSCP, from `tc -j filter show`."""
    found = []
    for each in msgspec.json.decode(text or "[]", type=list[_Filter]):
        match, classid = each.options.match, each.options.flowid
        if each.kind != "u32" or match is None or classid is None or match.off != 0:
            continue
        # First word of the header: IPv4 has the byte at bits 16 to 23, IPv6 at 20 to 27.
        shift = {"ip": 16, "ipv6": 20}.get(each.protocol)
        if shift is not None and int(match.mask, 16) == 0xFC << shift:
            found.append(ObservedFilter(each.protocol, int(match.value, 16) >> shift >> 2, classid))
    return tuple(found)


def _tc(*arguments: str) -> str:
    executable = shutil.which("tc") or shutil.which("tc", path="/usr/sbin:/sbin")
    if executable is None:
        raise ConfigError("qos check: no tc on PATH; Debian has it in the package iproute2")
    try:
        done = subprocess.run(
            [executable, *arguments],
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise TcError(f"tc {' '.join(arguments)}: no answer in {_TIMEOUT_S:g} s") from None
    if done.returncode != 0:
        raise TcError(f"tc {' '.join(arguments)}: {done.stderr.strip()}")
    return done.stdout
