"""Without root: run the same command again as root of a user namespace, where all lives and dies with it.

The command then has its own host network (a loopback device, and what the testbed adds), so its
HTTP port can be reached from inside only: by what it runs itself, or through `nsenter`.
"""

from __future__ import annotations

import os
import subprocess
import sys
from typing import NoReturn

from dualpath.base.errors import ConfigError

__all__ = ["become_root_of_a_user_namespace"]

_UNSHARE = ["unshare", "--user", "--map-root-user", "--net", "--mount"]
# Names of network namespaces are files in /run, which is not ours outside.
_PREPARE = 'mount -t tmpfs tmpfs /run && ip link set lo up && exec "$@"'


def become_root_of_a_user_namespace() -> NoReturn:
    """Replaces this process by the same command inside. Raises ConfigError where that is forbidden."""
    try:
        done = subprocess.run(
            [*_UNSHARE, "true"], capture_output=True, text=True, timeout=30, check=False
        )
    except OSError as error:
        raise ConfigError(f"cannot run unshare (Debian: util-linux): {error}") from None
    if done.returncode != 0:
        raise ConfigError(
            f"without root a testbed needs user namespaces, which are forbidden here "
            f"({done.stderr.strip()}): run it as root"
        )
    again = [sys.executable, *sys.orig_argv[1:]]
    os.execvp(_UNSHARE[0], [*_UNSHARE, "sh", "-c", _PREPARE, "sh", *again])
