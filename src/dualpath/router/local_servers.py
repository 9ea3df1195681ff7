"""The processes of vLLM servers on this host: started, watched, started again, and ended.

`EngineProcesses` does the watching. Each server has a session of its own, which is ended as a whole, since a
vLLM server is several processes; it ends too when the router is gone, however that ended (`tied`). Whether a
server is up the router finds out as of any other.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import signal
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager

from dualpath.base.errors import EngineLost
from dualpath.base.ids import EngineId, GroupId
from dualpath.router.local_plan import LocalServer
from dualpath.serve.processes import EngineProcesses, EngineSlot, Process
from dualpath.vllm.launch import vllm_arguments, vllm_environment
from dualpath.vllm.settings import SECRET_ENV

__all__ = ["LocalServers", "running_servers"]

_END_S = 20.0


class LocalServers:
    """The processes. `command` is the Python that has vLLM, with what precedes the module."""

    def __init__(
        self,
        servers: Sequence[LocalServer],
        *,
        command: Sequence[str] = (sys.executable,),
        environ: Mapping[str, str] = os.environ,
    ) -> None:
        self._servers = {each.name: each for each in servers}
        self._command = command
        # Made for this run alone; servers of other hosts have no business here.
        self._environ = {SECRET_ENV: secrets.token_hex(32), **environ}
        self._given_up = asyncio.Event()
        self._processes = EngineProcesses(
            [EngineSlot(each.name, GroupId(each.role.value), each.role) for each in servers],
            self._spawn,
            lost=self._lost,
            restarted=lambda slot: None,
            end=lambda process: _signal_session(process, signal.SIGTERM),
            destroy=lambda process: _signal_session(process, signal.SIGKILL),
        )

    async def start(self) -> None:
        await self._processes.start()

    async def stop(self) -> None:
        """No process of any server is left."""
        await self._processes.stop(0.0, _END_S)

    async def failed(self) -> None:
        """Returns only by raising: EngineLost when a server is given up, or a bug of the watching."""
        watching = asyncio.create_task(self._processes.failed())
        given_up = asyncio.create_task(self._given_up.wait())
        try:
            await asyncio.wait({watching, given_up}, return_when=asyncio.FIRST_COMPLETED)
            if watching.done():
                watching.result()
        finally:
            watching.cancel()
            given_up.cancel()
            await asyncio.gather(watching, given_up, return_exceptions=True)
        names = ", ".join(slot.name for slot in self._processes.slots if slot.given_up)
        raise EngineLost(f"{names} does not stay up; see its messages above")

    def _lost(self, slot: EngineSlot, engine: EngineId, reason: str) -> None:
        if slot.given_up:
            self._given_up.set()
        # What the server's process leaves behind holds its device.
        if slot.process is not None:
            _signal_session(slot.process, signal.SIGKILL)

    async def _spawn(self, slot: EngineSlot) -> Process:
        launch = self._servers[slot.name].launch
        return await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "dualpath.router.tied", str(os.getpid())),
            *self._command,
            *vllm_arguments(launch),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=sys.stderr,
            env=vllm_environment(launch, self._environ),
            start_new_session=True,  # Ctrl-C in the terminal reaches the router only, which drains.
        )


def _signal_session(process: Process, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, number)


@asynccontextmanager
async def running_servers(servers: LocalServers) -> AsyncIterator[asyncio.Task[None]]:
    """They run inside the context; the task ends only when one is given up."""
    failed: asyncio.Task[None] | None = None
    try:
        await servers.start()
        failed = asyncio.create_task(servers.failed())
        yield failed
    finally:
        if failed is not None:
            failed.cancel()
            await asyncio.gather(failed, return_exceptions=True)
        await servers.stop()
