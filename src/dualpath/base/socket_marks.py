"""Gives a socket the marks of its traffic class. Knows no protocol above it.

A mark is a request to the network; without a configuration that honours it nothing changes
(`dualpath qos`).
"""

from __future__ import annotations

import socket

from dualpath.base.traffic_class import ClassMarks

__all__ = ["mark_socket"]


def mark_socket(target: socket.socket, marks: ClassMarks) -> None:
    """Set DSCP and priority of all that the socket sends from now on; OSError where the system refuses.

    Before `connect`, so that the first packet is marked too. The ECN bits stay the kernel's.
    """
    if target.family == socket.AF_INET6:
        target.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_TCLASS, marks.tos)
    # An IPv6 socket sends IPv4 to mapped addresses, and takes this option too.
    if target.family in (socket.AF_INET, socket.AF_INET6):
        target.setsockopt(socket.IPPROTO_IP, socket.IP_TOS, marks.tos)
    # Last, because IP_TOS sets the priority as a side effect.
    target.setsockopt(socket.SOL_SOCKET, socket.SO_PRIORITY, marks.so_priority)
