"""An engine's endpoint in a process of its own, to be stopped, continued and killed by a test.

`RemotePeer` starts `python -m dualpath.testing.channel_peer` with the factory's name; the process
leases its whole pool, fills it with `pattern`, prints where it is, and obeys one command a line.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
from abc import ABC, abstractmethod
from types import TracebackType

import msgspec
import numpy as np

from dualpath.base.ids import EngineId, MiB
from dualpath.kv.pool import BufferPool
from dualpath.transfer import Endpoint, EndpointEvents

__all__ = ["REMOTE_SLOTS", "REMOTE_SLOT_BYTES", "ChannelFactory", "RemotePeer", "pattern"]

REMOTE_SLOTS = 8
REMOTE_SLOT_BYTES = 1 * MiB


class ChannelFactory(ABC):
    """What an implementation gives the suite. Importable, with a constructor without arguments."""

    authenticated = True
    """Whether an endpoint with another secret is refused."""
    crosses_processes = True
    """Whether endpoints of different processes reach each other; if not, kill tests are skipped."""

    @abstractmethod
    def open(
        self, engine: EngineId, pool: BufferPool, secret: bytes, events: EndpointEvents
    ) -> Endpoint:
        """A new endpoint that reaches all others of this factory; on loopback or in memory."""


def pattern(seed: int, n_bytes: int) -> bytes:
    """Bytes that differ everywhere between two seeds, for telling right content from wrong."""
    return np.random.default_rng(seed).bytes(n_bytes)


class _Greeting(msgspec.Struct, frozen=True):
    address: str
    stamp: int
    slots: list[int]


class RemotePeer:
    """A process that serves `REMOTE_SLOTS` slots, the i-th of its lease filled by `pattern(seed + i)`.

    Leaving the context kills the process if it still runs.
    """

    def __init__(self, factory: ChannelFactory, engine: EngineId, secret: bytes, seed: int) -> None:
        made_by = f"{type(factory).__module__}:{type(factory).__qualname__}"
        environment = dict(os.environ, PYTHONPATH=os.pathsep.join(sys.path))
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__, made_by, engine, secret.hex(), str(seed)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
        )
        self.engine = engine
        assert self._process.stdout is not None
        greeting = msgspec.json.decode(self._process.stdout.readline(), type=_Greeting)
        self.address = greeting.address
        self.stamp = greeting.stamp
        self.slots = greeting.slots
        """Slot numbers in lease order."""

    def __enter__(self) -> RemotePeer:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.kill()
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.stdout.close()

    def release(self) -> None:
        """Have it release its lease; returns when it has."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(b"release\n")
        self._process.stdin.flush()
        self._process.stdout.readline()

    def stop(self) -> None:
        """It stands still, as a hung process; its sockets stay open."""
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """kill -9. Idempotent."""
        self._process.kill()
        self._process.wait()


def main(made_by: str, engine: str, secret: str, seed: int) -> None:
    """The peer's process; ends with its standard input."""
    module, _, name = made_by.partition(":")
    factory_type: type[ChannelFactory] = getattr(importlib.import_module(module), name)
    pool = BufferPool(REMOTE_SLOTS, REMOTE_SLOT_BYTES, name=engine)
    lease = pool.try_lease("suite", REMOTE_SLOTS)
    assert lease is not None
    for index in range(REMOTE_SLOTS):
        lease.view(index)[:] = pattern(seed + index, REMOTE_SLOT_BYTES)
    ignored = EndpointEvents(lambda peer, message: None, lambda peer, reason: None)
    endpoint = factory_type().open(EngineId(engine), pool, bytes.fromhex(secret), ignored)
    greeting = {"address": endpoint.address, "stamp": lease.stamp, "slots": lease.slots}
    print(json.dumps(greeting), flush=True)
    for line in sys.stdin:
        if line == "release\n":
            lease.release()
            print("released", flush=True)
    endpoint.close()
    pool.close()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]))
