"""Names of writing processes, so that a scan can tell a dead writer's temp file from a live one's.

A process id means something only on one boot of one machine, in one PID namespace; the name holds
them. It knows no files of ours.
"""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

__all__ = ["WriterName"]


@dataclass(frozen=True)
class WriterName:
    """`place` is a digest of boot and PID namespace; `started` tells a reused process id."""

    place: str
    pid: int
    started: int

    @classmethod
    def of_this_process(cls) -> WriterName:
        pid = os.getpid()
        return cls(_this_place(), pid, _started(pid) or 0)

    @classmethod
    def parse(cls, text: str) -> WriterName | None:
        """The inverse of `str`; None for anything else."""
        place, _, rest = text.partition("-")
        pid, _, started = rest.partition("-")
        if not (place and pid.isdecimal() and started.isdecimal()):
            return None
        return cls(place, int(pid), int(started))

    def __str__(self) -> str:
        return f"{self.place}-{self.pid}-{self.started}"

    @cached_property
    def is_here(self) -> bool:
        """Whether this process can tell if the writer is alive."""
        return self.place == _this_place()

    @property
    def is_alive(self) -> bool:
        """Meaningful only where `is_here`."""
        return _started(self.pid) == self.started


def _this_place() -> str:
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    namespace = os.readlink("/proc/self/ns/pid")
    return hashlib.sha256(f"{boot} {namespace}".encode()).hexdigest()[:12]


def _started(pid: int) -> int | None:
    """Start of a process in clock ticks since boot; None when there is none."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    # The command's name, in parentheses, may hold anything; field 22 counts from after it.
    return int(stat.rpartition(")")[2].split()[19])
