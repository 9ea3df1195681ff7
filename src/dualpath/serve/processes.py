"""Engine processes: started, watched, restarted, and ended without a trace.

An engine process gets its configuration as one line on standard input and ends when that pipe
closes, so none outlives the frontend, however the frontend ends. A process that dies is
started again as a new engine (a new incarnation with a new id); one that keeps dying is given up.

`EngineProcesses` knows no engine: how a process is started and told to end is given to it.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import time
from collections.abc import Awaitable, Callable, Container, Sequence
from dataclasses import dataclass, field

import msgspec

from dualpath.base.ids import EngineId, GroupId, Role
from dualpath.serve.engine_config import EngineConfig

__all__ = ["EngineProcesses", "EngineSlot", "Process", "start_engine"]

Process = asyncio.subprocess.Process

log = logging.getLogger(__name__)

_FIRST_RETRY_S = 0.5
_LONGEST_RETRY_S = 30.0
_STABLE_S = 60.0
"""A process that lived this long was healthy: its next failure starts counting anew."""
_MOST_FAILURES = 5


def _close_pipe(process: Process) -> None:
    if process.stdin is not None:
        process.stdin.close()


def _kill(process: Process) -> None:
    process.kill()


@dataclass(slots=True)
class EngineSlot:
    """One place of the cluster, filled by one process at a time."""

    name: str
    group: GroupId
    role: Role
    launch: tuple[str, ...] = ()
    """Goes before the engine's command, and must end by executing it."""
    incarnation: int = 0
    failures: int = 0
    process: Process | None = None
    started_s: float = 0.0
    given_up: bool = False

    @property
    def engine(self) -> EngineId:
        return EngineId(f"{self.name}.{self.incarnation}")


@dataclass(slots=True)
class EngineProcesses:
    """`spawn(slot)` starts the slot's next process.

    `lost(slot, engine, reason)` is called once for every process that ended unasked, `restarted(slot)`
    when its successor is about to start. `end` tells a process to end, `destroy` makes it.
    """

    slots: Sequence[EngineSlot]
    spawn: Callable[[EngineSlot], Awaitable[Process]]
    lost: Callable[[EngineSlot, EngineId, str], None]
    restarted: Callable[[EngineSlot], None]
    end: Callable[[Process], None] = _close_pipe
    destroy: Callable[[Process], None] = _kill
    _watchers: dict[str, asyncio.Task[None]] = field(default_factory=dict)

    async def start(self) -> None:
        for slot in self.slots:
            await self._spawn(slot)
            self._watchers[slot.name] = asyncio.create_task(self._watch(slot))

    def slot_of(self, engine: EngineId) -> EngineSlot | None:
        """The slot that this engine fills now."""
        return next((slot for slot in self.slots if slot.engine == engine), None)

    def kill(self, engine: EngineId) -> None:
        """SIGKILL; the loss is then reported like any other."""
        slot = self.slot_of(engine)
        if slot is not None and slot.process is not None and self.runs(engine):
            self.destroy(slot.process)

    def runs(self, engine: EngineId) -> bool:
        """Whether the process of this engine lives; what still comes from a dead one is stale."""
        slot = self.slot_of(engine)
        return slot is not None and slot.process is not None and slot.process.returncode is None

    def hung_starts(self, longer_than_s: float, started: Container[EngineId]) -> list[EngineId]:
        """Engines whose process has run for so long and that are not in `started`."""
        limit = time.monotonic() - longer_than_s
        return [
            slot.engine
            for slot in self.slots
            if slot.started_s < limit and slot.engine not in started and self.runs(slot.engine)
        ]

    async def failed(self) -> None:
        """Returns only by raising: watching a process failed, which is a bug."""
        # Not gather: a caller who waits no longer must not end the watching.
        ended, _ = await asyncio.wait(self._watchers.values(), return_when=asyncio.FIRST_EXCEPTION)
        for task in ended:
            task.result()
        await asyncio.Event().wait()  # Every slot is given up: that is no failure of the watching.

    async def stop(self, grace_s: float, end_s: float = 2.0) -> None:
        """Wait `grace_s` for those that were asked to exit, tell others to end, destroy after `end_s`."""
        for task in self._watchers.values():
            task.cancel()  # First: from now on none is started.
        await asyncio.gather(*self._watchers.values(), return_exceptions=True)
        processes = [slot.process for slot in self.slots if slot.process is not None]
        stages = ((grace_s, self.end), (end_s, self.destroy), (5.0, self.destroy))
        for wait_s, end in stages:
            running = [p for p in processes if p.returncode is None]
            if not running:
                break
            waits = [asyncio.create_task(p.wait()) for p in running]
            _, pending = await asyncio.wait(waits, timeout=wait_s)
            for wait in pending:
                wait.cancel()
            for process in running:
                if process.returncode is None:
                    end(process)

    async def _spawn(self, slot: EngineSlot) -> None:
        slot.incarnation += 1
        slot.started_s = time.monotonic()
        slot.process = await self.spawn(slot)
        log.info("%s starts as process %d", slot.engine, slot.process.pid)

    async def _watch(self, slot: EngineSlot) -> None:
        while True:
            assert slot.process is not None
            code = await slot.process.wait()
            lived_s = time.monotonic() - slot.started_s
            slot.failures = 1 if lived_s > _STABLE_S else slot.failures + 1
            slot.given_up = slot.failures >= _MOST_FAILURES
            reason = (
                f"process ended by signal {-code}" if code < 0 else f"process exited with {code}"
            )
            log.error("%s: %s after %.1f s", slot.engine, reason, lived_s)
            self.lost(slot, slot.engine, reason)
            if slot.given_up:
                log.error("%s: %d failures in a row: given up", slot.name, slot.failures)
                return
            delay_s = min(_FIRST_RETRY_S * 2 ** (slot.failures - 1), _LONGEST_RETRY_S)
            await asyncio.sleep(delay_s)
            self.restarted(slot)
            await self._spawn(slot)


async def start_engine(slot: EngineSlot, config: EngineConfig) -> Process:
    """The process of one of our own engines, with its configuration on the way to it."""
    process = await asyncio.create_subprocess_exec(
        *slot.launch,
        sys.executable,
        "-m",
        "dualpath.serve.engine_process",
        stdin=asyncio.subprocess.PIPE,
        env=_environment(config),
        start_new_session=True,  # Ctrl-C in the terminal reaches the frontend only, which drains.
    )
    assert process.stdin is not None
    process.stdin.write(msgspec.json.encode(config) + b"\n")
    return process


def _environment(config: EngineConfig) -> dict[str, str]:
    """Threads must be limited before a native library starts its own.

    They wait without spinning: engines that share cores would keep each other from computing.
    """
    threads = str(config.threads)
    return {
        "OMP_WAIT_POLICY": "PASSIVE",
        **os.environ,
        "OMP_NUM_THREADS": threads,
        "MKL_NUM_THREADS": threads,
    }
