"""Executes a command that is ended when the process that started it is gone, however that ended.

    python -m dualpath.router.tied PID COMMAND...

Linux tells it (`PR_SET_PDEATHSIG`); where that is not to be had, the command runs without. PID is the
starter's.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

__all__ = ["main"]

_PR_SET_PDEATHSIG = 1


def main(arguments: list[str]) -> None:
    """Returns only when the starter is gone already."""
    starter, *command = arguments
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() == int(starter):
        os.execvp(command[0], command)


if __name__ == "__main__":
    main(sys.argv[1:])
