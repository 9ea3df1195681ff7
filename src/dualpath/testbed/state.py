"""What is known on this host of the testbeds that exist, so that any later process can remove them.

One file for each, written before the first namespace is made and removed after the last is gone. All changes
happen under one lock. Knows no network.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TextIO

import msgspec

from dualpath.base.errors import ConfigError

__all__ = ["BedState", "Owner", "StateDirectory"]

_LOCK_S = 60.0


class Owner(msgspec.Struct, frozen=True):
    """A process, told from later ones of the same id by the time of its start (clock ticks since boot)."""

    pid: int
    started_ticks: int

    @classmethod
    def this_process(cls) -> Owner:
        return cls(os.getpid(), _started_ticks(os.getpid()) or 0)

    @property
    def alive(self) -> bool:
        return _started_ticks(self.pid) == self.started_ticks


class BedState(msgspec.Struct, frozen=True, kw_only=True):
    """`owner` None: it stays until `dualpath testbed down`. Else it must not outlive that process."""

    name: str
    topology: str
    snic_bits_s: int
    cnic_bits_s: int
    subnet: int
    owner: Owner | None

    @property
    def orphaned(self) -> bool:
        return self.owner is not None and not self.owner.alive


class StateDirectory:
    """Files of all testbeds of this host, readable by their user only."""

    def __init__(self, root: Path = Path("/run/dualpath-testbed")) -> None:
        self._root = root

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Alone on this host among all that make or remove testbeds. Raises ConfigError."""
        try:
            self._root.mkdir(mode=0o700, exist_ok=True)
            file = (self._root / "lock").open("w")
        except OSError as error:
            raise ConfigError(f"testbeds keep their state in {self._root}: {error}") from None
        with file:
            self._lock(file)
            yield

    def _lock(self, file: TextIO) -> None:
        end_s = time.monotonic() + _LOCK_S
        while True:
            try:
                return fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() > end_s:
                    raise ConfigError(
                        f"another process has been making or removing a testbed for {_LOCK_S:g} s: "
                        f"`fuser {self._root / 'lock'}` tells which"
                    ) from None
            time.sleep(0.02)

    def files(self, name: str) -> Path:
        """A directory for other files of a testbed, removed with it."""
        return self._root / name

    def read(self) -> list[BedState]:
        """All testbeds, by name."""
        return [
            msgspec.json.decode(path.read_bytes(), type=BedState)
            for path in sorted(self._root.glob("*.json"))
        ]

    def write(self, state: BedState) -> None:
        self.files(state.name).mkdir(mode=0o700, exist_ok=True)
        new = self._root / f".{state.name}.new"
        new.write_bytes(msgspec.json.encode(state))
        new.rename(self._root / f"{state.name}.json")

    def remove(self, name: str) -> None:
        shutil.rmtree(self.files(name), ignore_errors=True)
        (self._root / f"{name}.json").unlink(missing_ok=True)


def _started_ticks(pid: int) -> int | None:
    """None when there is no such process, or it has ended and waits to be reaped."""
    with suppress(OSError):
        # The name in parentheses may hold anything; field 3 (state) follows it, 22 is the start.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return None if fields[0] in "ZX" else int(fields[19])
    return None
