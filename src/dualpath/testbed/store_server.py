"""The storage server of a testbed: a real Redis (or Valkey) in the storage namespace.

It keeps all in memory, so that the nodes' storage NICs are the limit and not a disk. No persistence, no
eviction of its own: what is stored is accounted for by the frontend's catalog. No password: it listens on
the testbed's two addresses only, which nodes and the users of this host can reach, and nobody else.
"""

from __future__ import annotations

import socket
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

from dualpath.base.errors import ConfigError
from dualpath.testing.redis_server import redis_server_path

__all__ = ["PORT", "find_store_server", "server_command", "start_store_server"]

PORT = 6379
_START_S = 15.0


def find_store_server() -> str:
    """Path of the program. Raises ConfigError that says what to install."""
    found = redis_server_path()
    if found is None:
        raise ConfigError(
            "a testbed needs redis-server (or valkey-server), not found on PATH; on Debian: "
            "`make testbed-tools`, or apt-get install redis-server"
        )
    return found


def server_command(program: str, addresses: Sequence[str], memory_bytes: int) -> list[str]:
    """Protected mode is off because it would refuse everyone but loopback; see the module on who can come."""
    settings = {
        "port": str(PORT),
        "maxmemory": str(memory_bytes),
        "maxmemory-policy": "noeviction",
        "appendonly": "no",
        "protected-mode": "no",
        "databases": "1",
        "daemonize": "no",
    }
    command = [program, "--bind", *addresses, "--save", ""]
    for name, value in settings.items():
        command += [f"--{name}", value]
    return command


def start_store_server(command: Sequence[str], address: str, log: Path) -> subprocess.Popen[bytes]:
    """Start it and wait until it answers at `address`. The caller ends and reaps it.

    Raises ConfigError with the end of its log, which goes to the file `log`.
    """
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd=log.parent,
            start_new_session=True,  # Ctrl-C is for the frontend, which still has blocks to write.
        )
    deadline_s = time.monotonic() + _START_S
    while not _answers(address):
        if process.poll() is not None or time.monotonic() > deadline_s:
            process.kill()
            process.wait(10)
            said = log.read_text(errors="replace").strip()[-500:]
            raise ConfigError(f"the testbed's store server did not start: {said}")
        time.sleep(0.02)
    return process


def _answers(address: str) -> bool:
    try:
        with socket.create_connection((address, PORT), timeout=1) as sock:
            sock.sendall(b"PING\r\n")
            return sock.recv(16).startswith(b"+PONG")
    except OSError:
        return False
