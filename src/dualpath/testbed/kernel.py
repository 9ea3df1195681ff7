"""Runs batches in network namespaces, and finds and ends what is in them. Knows no topology.

Everything goes through `nsenter --net=FILE`, not `ip netns exec`: that one also mounts /sys again, which an
unprivileged user namespace inside a container may not.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path

import msgspec

from dualpath.base.errors import ConfigError
from dualpath.testbed.plan import Batch

__all__ = [
    "end_processes",
    "enter_command",
    "host_subnets",
    "in_namespace",
    "namespace_exists",
    "processes_in",
    "read_device_bytes",
    "remove_network",
    "require_tools",
    "run_batch",
    "why_no_namespaces",
]

_NETNS = Path("/run/netns")
_CLONE_NEWNET = 0x40000000
_COMMAND_S = 30.0
_PACKAGES = {
    "ip": "iproute2",
    "tc": "iproute2",
    "nsenter": "util-linux",
    "setpriv": "util-linux",
    "unshare": "util-linux",
}


def require_tools() -> None:
    """Raises ConfigError that says which Debian packages to install."""
    missing = {name: package for name, package in _PACKAGES.items() if not shutil.which(name)}
    if missing:
        raise ConfigError(
            f"a testbed needs {', '.join(missing)}, not found on PATH; on Debian: "
            f"`make testbed-tools`, or apt-get install {' '.join(sorted(set(missing.values())))}"
        )


def why_no_namespaces() -> str | None:
    """The kernel's reason to make no network namespace for this process; None when it makes them."""
    done = subprocess.run(
        ["unshare", "--net", "true"],
        capture_output=True,
        text=True,
        timeout=_COMMAND_S,
        check=False,
    )
    return None if done.returncode == 0 else f"no network namespaces: {done.stderr.strip()}"


def enter_command(namespace: str) -> list[str]:
    """Put before a command, it runs there; the process stays the same one (nsenter execs)."""
    return ["nsenter", f"--net={_NETNS / namespace}"]


def run_batch(batch: Batch) -> None:
    """Raises ConfigError with the tool's words."""
    enter = [] if batch.namespace is None else enter_command(batch.namespace)
    done = subprocess.run(
        [*enter, batch.tool, "-batch", "-"],
        input="".join(f"{line}\n" for line in batch.lines),
        capture_output=True,
        text=True,
        timeout=_COMMAND_S,
        check=False,
    )
    if done.returncode != 0:
        where = batch.namespace or "the host's namespace"
        raise ConfigError(
            f"{batch.tool} failed in {where}: {_explained(done.stderr, batch.lines)}. A testbed needs "
            "CAP_NET_ADMIN and CAP_SYS_ADMIN, and the kernel's veth, bridge, sch_htb and cls_u32"
        )


def _explained(stderr: str, lines: Sequence[str]) -> str:
    """The tool's words; a line number is followed by that line."""
    said = " ".join(stderr.split())
    number = said.rpartition("Command failed -:")[2]
    if number.isdigit() and 0 < int(number) <= len(lines):
        return f"{said} ({lines[int(number) - 1]!r})"
    return said


def namespace_exists(namespace: str) -> bool:
    return (_NETNS / namespace).exists()


class _AddressInfo(msgspec.Struct):
    local: str = ""


class _LinkInfo(msgspec.Struct):
    addr_info: list[_AddressInfo] = []


def host_subnets() -> set[int]:
    """Third bytes of the host's addresses in 198.18.0.0/16: management subnets that are taken."""
    done = subprocess.run(
        ["ip", "-json", "-4", "addr"], capture_output=True, timeout=_COMMAND_S, check=True
    )
    links = msgspec.json.decode(done.stdout or b"[]", type=list[_LinkInfo])
    parts = [info.local.split(".") for link in links for info in link.addr_info]
    return {int(part[2]) for part in parts if part[:2] == ["198", "18"]}


def in_namespace(namespace: str, read: Callable[[], str]) -> str:
    """What `read` gives in the namespace: on a thread of its own, which alone moves there."""
    result: list[str] = []
    failure: list[OSError] = []

    def move_and_read() -> None:
        try:
            with (_NETNS / namespace).open() as file:
                libc = ctypes.CDLL(None, use_errno=True)
                if libc.setns(file.fileno(), _CLONE_NEWNET) != 0:
                    raise OSError(ctypes.get_errno(), f"cannot enter namespace {namespace}")
            result.append(read())
        except OSError as error:
            failure.append(error)

    thread = threading.Thread(target=move_and_read, name="dualpath-netns")
    thread.start()
    thread.join()
    if failure:
        raise ConfigError(f"testbed namespace {namespace}: {failure[0]}")
    return result[0]


def read_device_bytes(namespace: str) -> dict[str, tuple[int, int]]:
    """Device -> (received, sent) bytes, as the kernel counts them. Under a millisecond, no process."""
    text = in_namespace(namespace, Path("/proc/thread-self/net/dev").read_text)
    counts: dict[str, tuple[int, int]] = {}
    for line in text.splitlines()[2:]:
        device, _, rest = line.partition(":")
        fields = rest.split()
        counts[device.strip()] = (int(fields[0]), int(fields[8]))
    return counts


def processes_in(namespaces: Iterable[str]) -> list[int]:
    """Processes whose network namespace is one of these."""
    inodes = set()
    for namespace in namespaces:
        with suppress(OSError):
            inodes.add((_NETNS / namespace).stat().st_ino)
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError):  # It ended meanwhile.
                if (entry / "ns" / "net").stat().st_ino in inodes:
                    found.append(int(entry.name))
    return found


def end_processes(namespaces: Sequence[str], grace_s: float) -> None:
    """SIGTERM, then SIGKILL, to all processes in the namespaces; returns when none is left.

    Raises ConfigError when one survives SIGKILL (it hangs in the kernel).
    """
    for number, wait_s in ((signal.SIGTERM, grace_s), (signal.SIGKILL, 10.0)):
        end_s = time.monotonic() + wait_s
        signalled: set[int] = set()
        while running := processes_in(namespaces):
            for pid in set(running) - signalled:
                with suppress(ProcessLookupError):
                    os.kill(pid, number)
                signalled.add(pid)
            if time.monotonic() > end_s:
                break
            time.sleep(0.02)
        else:
            return
    raise ConfigError(f"processes {processes_in(namespaces)} of the testbed cannot be ended")


def remove_network(host_device: str, namespaces: Sequence[str]) -> None:
    """Delete what exists of it. The kernel then frees the devices inside the namespaces."""
    # The host's end goes at once; with its peer's namespace it would go some time later.
    lines = [f"link del {host_device}"] if _has_device(host_device) else []
    lines += [f"netns del {each}" for each in namespaces if namespace_exists(each)]
    if lines:
        run_batch(Batch("ip", None, tuple(lines)))


def _has_device(device: str) -> bool:
    lines = Path("/proc/thread-self/net/dev").read_text().splitlines()
    return any(line.partition(":")[0].strip() == device for line in lines)
