"""KV threads and their place: as all others, until the process says that it computes."""

from __future__ import annotations

import subprocess
import sys

import pytest

_SAY = """
import os, threading
from dualpath.base.kv_threads import kv_executor, kv_thread, stand_behind_compute

def place():
    return os.sched_getscheduler(0), os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

def places():
    found = []
    thread = kv_thread(lambda name: found.append(place()), name="one", args=("x",))
    thread.start()
    thread.join()
    with kv_executor(1, name="pool") as executor:
        found.append(executor.submit(place).result())
    return found

mine = place()
assert places() == [mine, mine], (places(), mine)
stand_behind_compute()
(policy, nice), again = places()
assert policy == os.SCHED_BATCH and nice == max(mine[1], 10), (policy, nice, mine)
assert again == (policy, nice)
assert place() == mine, "the thread that computes stays where it was"
"""


_FURTHER_BEHIND = """
import os
from dualpath.base.kv_threads import kv_executor, stand_behind_compute

os.nice(15)
stand_behind_compute()
with kv_executor(1, name="pool") as executor:
    assert executor.submit(os.nice, 0).result() >= 15
"""

_REFUSED = """
import os
from dualpath.base.kv_threads import kv_executor, stand_behind_compute

def refuse(*args):
    raise PermissionError("no")

os.sched_setscheduler = refuse
stand_behind_compute()
with kv_executor(1, name="pool") as executor:
    assert executor.submit(lambda: 1).result() == 1
"""


@pytest.mark.skipif(sys.platform != "linux", reason="scheduling classes of Linux")
@pytest.mark.parametrize("program", [_SAY, _FURTHER_BEHIND, _REFUSED])
def test_kv_threads_stand_behind_those_that_compute(program: str) -> None:
    """Also where the process is behind already, and where the system refuses. In processes of their own, as
    there is no way back."""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
