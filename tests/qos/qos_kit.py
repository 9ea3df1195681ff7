"""A network namespace of the test's own, with veth pairs; gone when the process that holds it ends."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest

_TIMEOUT_S = 60


@dataclass(frozen=True)
class Namespace:
    enter: tuple[str, ...]

    def run(
        self, *command: str, stdin: str = "", check: bool = True
    ) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            [*self.enter, *command],
            input=stdin,
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
            check=False,
        )
        assert not check or done.returncode == 0, done.stderr
        return done

    def sh(self, line: str) -> None:
        self.run(*shlex.split(line))

    def dualpath(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return self.run(sys.executable, "-m", "dualpath", *arguments, check=False)

    def python(self, code: str, *arguments: str) -> str:
        return self.run(sys.executable, "-c", code, *arguments).stdout


@contextmanager
def network_namespace() -> Iterator[Namespace]:
    """With interfaces cnic and snic, up, each with its other end beside it; skips where it cannot be."""
    as_root = os.geteuid() == 0
    missing = [name for name in ("unshare", "nsenter", "ip", "tc") if shutil.which(name) is None]
    if missing:
        _cannot(f"not installed: {', '.join(missing)}")
    user = [] if as_root else ["--user", "--map-root-user"]
    holder = subprocess.Popen(
        ["unshare", *user, "--net", "sh", "-c", "echo ready; exec cat"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert holder.stdout is not None and holder.stderr is not None
        if holder.stdout.readline() != "ready\n":
            _cannot(f"no network namespaces here: {holder.stderr.read().strip()}")
        user_flags = () if as_root else ("--user", "--preserve-credentials")
        namespace = Namespace(("nsenter", "--target", str(holder.pid), *user_flags, "--net"))
        made = namespace.run(
            "ip",
            "-batch",
            "-",
            stdin="link add cnic type veth peer name far-cnic\n"
            "link add snic type veth peer name far-snic\n"
            + "".join(f"link set {name} up\n" for name in ("cnic", "far-cnic", "snic", "far-snic"))
            + "addr add 10.99.0.1/24 dev cnic\n",
            check=False,
        )
        if made.returncode != 0:
            _cannot(f"no veth here: {made.stderr.strip()}")
        yield namespace
    finally:
        holder.communicate(timeout=10)


def _cannot(reason: str) -> None:
    if os.environ.get("DUALPATH_REQUIRE_TESTBED") == "1":
        pytest.fail(reason)
    pytest.skip(reason)
