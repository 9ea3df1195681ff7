"""What a testbed leaves, and small programs that run in its nodes."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from dualpath.testbed.kernel import namespace_exists
from dualpath.testbed.plan import Layout

DEADLINE_S = 20.0

_REACH = """
import json, socket, sys
from concurrent.futures import ThreadPoolExecutor
def reach(target):
    host, port = target
    try:
        socket.create_connection((host, port), timeout=1.5).close()
    except OSError:
        return False
    return True
targets = json.loads(sys.argv[1])
with ThreadPoolExecutor(len(targets)) as pool:
    print(json.dumps(list(pool.map(reach, targets))))
"""
_LISTEN = """
import socket, sys
server = socket.create_server(("0.0.0.0", int(sys.argv[1])))
print("listens", flush=True)
sys.stdin.read()
"""
_SINK = """
import socket, sys
server = socket.create_server((sys.argv[1], 5001))
print("listens", flush=True)
connection, _ = server.accept()
while connection.recv(1 << 20):
    pass
"""
_SOURCE = """
import socket, sys, time
connection = socket.create_connection((sys.argv[1], 5001), timeout=10)
block = bytes(1 << 18)
end_s = time.monotonic() + float(sys.argv[2])
while time.monotonic() < end_s:
    connection.send(block)
"""


def until(condition: Callable[[], bool]) -> None:
    end_s = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < end_s, condition
        time.sleep(0.02)


def leftovers(layout: Layout) -> list[str]:
    """Namespaces, devices of the host, files and processes that bear the testbed's name."""
    found = [name for name in layout.namespaces if namespace_exists(name)]
    found += [
        line.split(":")[0].strip()
        for line in Path("/proc/net/dev").read_text().splitlines()
        if line.split(":")[0].strip().startswith(layout.name)
    ]
    found += [str(path) for path in Path("/run/dualpath-testbed").glob(f"{layout.name}*")]
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                command = (entry / "cmdline").read_bytes()
            except OSError:
                continue
            if layout.addresses.store_management.encode() in command:
                found.append(f"process {entry.name}: {command!r}")
    return found


def reachable(enter: Sequence[str], targets: Sequence[tuple[str, int]]) -> list[bool]:
    """Which of the targets take a TCP connection from there."""
    done = subprocess.run(
        [*enter, sys.executable, "-c", _REACH, json.dumps(targets)],
        stdout=subprocess.PIPE,
        timeout=30,
        check=True,
    )
    answer: list[bool] = json.loads(done.stdout)
    return answer


def listen(enter: Sequence[str], port: int) -> subprocess.Popen[bytes]:
    """Takes connections on all addresses there until its standard input is closed."""
    return _started([*enter, sys.executable, "-c", _LISTEN, str(port)])


def stream(
    source: Sequence[str], sink: Sequence[str], address: str, seconds: float
) -> list[subprocess.Popen[bytes]]:
    """TCP from one place to the other as fast as it goes, in two processes."""
    server = _started([*sink, sys.executable, "-c", _SINK, address])
    command = [*source, sys.executable, "-c", _SOURCE, address, str(seconds)]
    return [server, subprocess.Popen(command)]


def _started(command: list[str]) -> subprocess.Popen[bytes]:
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"listens\n"
    return process
