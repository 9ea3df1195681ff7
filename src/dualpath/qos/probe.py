"""Sends a few marked packets out of one interface, to see by its counters which class they leave by.

They are small UDP datagrams to the link's multicast group for experiments (IPv4 224.0.0.254, IPv6 ff02::114),
port 9 (discard), with a hop limit of 1: no route and no neighbour is needed, no router passes them on, and no
host listens.
"""

from __future__ import annotations

import socket

from dualpath.base.socket_marks import mark_socket
from dualpath.base.traffic_class import ClassMarks

__all__ = ["marks_are_kept", "send_marked"]

_DISCARD_PORT = 9
_PAYLOAD = bytes(64)


def send_marked(device: str, protocol: str, marks: ClassMarks, count: int) -> None:
    """Send `count` datagrams; OSError when the interface has no address of the protocol, or is down."""
    family = socket.AF_INET if protocol == "ip" else socket.AF_INET6
    with socket.socket(family, socket.SOCK_DGRAM) as sender:
        sender.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, device.encode())
        mark_socket(sender, marks)
        target: tuple[str, int] | tuple[str, int, int, int]
        if family == socket.AF_INET:
            sender.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_TTL, 1)
            target = ("224.0.0.254", _DISCARD_PORT)
        else:
            sender.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_MULTICAST_HOPS, 1)
            target = ("ff02::114", _DISCARD_PORT, 0, socket.if_nametoindex(device))
        for _ in range(count):
            sender.sendto(_PAYLOAD, target)


def marks_are_kept(marks: ClassMarks) -> str | None:
    """None when a TCP socket takes the marks and gives them back, else what is wrong."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            mark_socket(probe, marks)
            tos = probe.getsockopt(socket.IPPROTO_IP, socket.IP_TOS) & 0xFC
            priority = probe.getsockopt(socket.SOL_SOCKET, socket.SO_PRIORITY)
    except OSError as error:
        return f"refused: {error.strerror}"
    if (tos, priority) != (marks.tos, marks.so_priority):
        return f"IP_TOS {tos}, SO_PRIORITY {priority}"
    return None
