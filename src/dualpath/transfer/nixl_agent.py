"""One NIXL agent over UCX, and the one thread that calls it: one-sided reads of peers' memory.

It knows addresses, peers' metadata and reads in flight; no spans, stamps or pulls. NIXL is optional
(`dualpath[nixl]`): nothing here imports it before an agent is made.

Invariants: all calls into NIXL are made by the agent's thread, one after the other; memory that a
read may write to is never freed before NIXL says that the read ended, or the agent is gone. (NIXL
releases a read that is in flight without an error, and UCX still writes what arrives later.)
"""

from __future__ import annotations

import atexit
import importlib
import importlib.util
import logging
import queue
import threading
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from enum import IntEnum
from types import ModuleType
from typing import Protocol, TypeVar, cast

import numpy as np
import numpy.typing as npt

from dualpath.base.errors import ConfigError, DeadlineExceeded, PeerLost
from dualpath.base.kv_threads import kv_thread

__all__ = ["NixlAgent", "Pace", "Read", "ReadDriver", "address_of", "nixl_missing"]

log = logging.getLogger(__name__)

_MODULES = ("nixl_cu12", "nixl_cu13")
# Between two looks at reads in flight: short at first, for reads that end at once, then longer.
_SHORTEST_WAIT_S = 20e-6
_LONGEST_WAIT_S = 1e-3
_CLOSE_S = 5.0

_Result = TypeVar("_Result")

Descriptors = npt.NDArray[np.uint64]
"""(n, 3): address, length, device of each piece of memory; the device is 0."""


class _Nixl(Protocol):
    """What is used of `nixl_agent`, which has no types that could be relied on."""

    def register_memory(self, descriptors: Descriptors, mem_type: str) -> object: ...
    def deregister_memory(self, registered: object) -> None: ...
    def get_agent_metadata(self) -> bytes: ...
    def add_remote_agent(self, metadata: bytes) -> str: ...
    def remove_remote_agent(self, agent: str) -> None: ...
    def get_xfer_descs(self, descriptors: Descriptors, mem_type: str) -> object: ...
    def initialize_xfer(
        self, operation: str, local: object, remote: object, agent: str
    ) -> object: ...
    def transfer(self, handle: object) -> str: ...
    def check_xfer_state(self, handle: object) -> str: ...
    def release_xfer_handle(self, handle: object) -> None: ...


def nixl_missing() -> str | None:
    """Why there is no NIXL here; None when there is."""
    if any(importlib.util.find_spec(name) is not None for name in _MODULES):
        return None
    return "NIXL is not installed: make nixl, or pip install --no-deps nixl-cu12"


def address_of(memory: memoryview) -> int:
    """Where the memory lies. It stays there as long as its owner keeps it."""
    return int(np.frombuffer(memory, dtype=np.uint8).ctypes.data)


class Read:
    """One read in flight; `state` is "PROC" until it is "DONE" or failed with `error`."""

    __slots__ = ("error", "handle", "state")

    def __init__(self) -> None:
        self.handle: object = None
        self.state = "PROC"
        self.error = ""

    @property
    def ended(self) -> bool:
        return self.state != "PROC"


class Pace(IntEnum):
    """How soon to look again."""

    IDLE = 0
    """When something was posted."""
    WAITING = 1
    """A read is in flight."""
    MOVING = 2
    """A read ended, or was posted."""


class ReadDriver(ABC):
    """Someone who posts reads and looks after them, when the agent's thread calls."""

    @abstractmethod
    def advance(self) -> Pace:
        """Look at reads in flight and post what can be; never waits."""

    @abstractmethod
    def abandon(self) -> None:
        """The agent ends: forget the reads in flight, which would keep it."""


class NixlAgent:
    """An agent named `name` whose peers may read `memory`, which stays the caller's.

    Raises ConfigError when NIXL is missing or does not start.
    """

    def __init__(self, name: str, memory: memoryview) -> None:
        self.base = address_of(memory)
        self._size = memory.nbytes
        self._name = name
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._drivers: list[ReadDriver] = []
        self._peer_uses: Counter[str] = Counter()
        self._kept: list[memoryview] = []
        self._nixl: _Nixl | None = None
        self._registered: object = None
        self._closed = False
        self._lock = threading.Lock()
        self._thread = kv_thread(self._run, name=f"dualpath-nixl-{name}")
        self._thread.start()
        try:
            self.metadata = self.call(self._start, _CLOSE_S * 4)
        except Exception as error:
            self.close()
            if isinstance(error, ConfigError):
                raise
            raise ConfigError(f"NIXL does not start: {error}") from error
        # UCX may crash an interpreter that ends while an agent lives.
        atexit.register(self.close)

    def call(self, function: Callable[[], _Result], timeout_s: float) -> _Result:
        """Run it on the agent's thread, and wait for its result.

        Raises what it raises; DeadlineExceeded when it did not run in time, PeerLost after `close`.
        """
        result: Future[_Result] = Future()

        def run() -> None:
            if result.set_running_or_notify_cancel():
                try:
                    result.set_result(function())
                except BaseException as error:
                    result.set_exception(error)

        self.post(run)
        try:
            return result.result(timeout_s)
        except TimeoutError:
            if result.cancel():
                raise DeadlineExceeded("NIXL did not answer in time") from None
            return result.result()  # It runs already: what it makes must have an owner.

    def post(self, call: Callable[[], None]) -> None:
        """Have the agent's thread run it. Raises PeerLost after `close`."""
        with self._lock:
            if self._closed:
                raise PeerLost("the NIXL agent is closed")
            self._calls.put(call)

    def close(self) -> None:
        """End the thread, and the agent with all that it knows. Idempotent."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self._calls.put(None)
        if self._thread is not threading.current_thread():
            self._thread.join(_CLOSE_S)
        atexit.unregister(self.close)

    # What follows is for the agent's thread only.

    def add_driver(self, driver: ReadDriver) -> None:
        self._drivers.append(driver)

    def remove_driver(self, driver: ReadDriver) -> None:
        self._drivers.remove(driver)

    def register(self, memory: memoryview) -> object:
        """Memory that reads may write to; to be given back with `deregister`."""
        return self._agent.register_memory(_one(address_of(memory), memory.nbytes), "DRAM")

    def deregister(self, registered: object) -> None:
        self._agent.deregister_memory(registered)

    def add_peer(self, metadata: bytes) -> str:
        """Its name; to be removed as often as it was added. Raises PeerLost for bad metadata."""
        try:
            name = self._agent.add_remote_agent(metadata)
        except Exception as error:
            raise PeerLost(f"NIXL does not take the peer's metadata: {error}") from None
        self._peer_uses[name] += 1
        return name

    def remove_peer(self, name: str) -> None:
        """Disconnect, unless it was added again; NIXL then says nothing of its reads any more."""
        self._peer_uses[name] -= 1
        if self._peer_uses[name]:
            return
        del self._peer_uses[name]
        try:
            self._agent.remove_remote_agent(name)
        except Exception as error:
            log.debug("NIXL forgot the peer %s before: %s", name, error)

    def keep(self, memory: memoryview) -> None:
        """Keep registered memory, to which a read may still write, for the rest of the agent's life."""
        self._kept.append(memory)

    def read(self, peer: str, local: Descriptors, remote: Descriptors) -> Read:
        """Post a read of remote pieces into local ones, pairwise of one length."""
        read = Read()
        agent = self._agent
        try:
            read.handle = agent.initialize_xfer(
                "READ",
                agent.get_xfer_descs(local, "DRAM"),
                agent.get_xfer_descs(remote, "DRAM"),
                peer,
            )
            self._note(read, agent.transfer(read.handle))
        except Exception as error:
            self._failed(read, error)
        return read

    def look(self, read: Read) -> bool:
        """Whether the read has ended."""
        if not read.ended:
            try:
                self._note(read, self._agent.check_xfer_state(read.handle))
            except Exception as error:
                self._failed(read, error)
        return read.ended

    @property
    def _agent(self) -> _Nixl:
        assert self._nixl is not None
        return self._nixl

    def _note(self, read: Read, state: str) -> None:
        read.state = state
        if state == "PROC":
            return
        if state != "DONE":
            read.error = "NIXL says that the read failed"
        self._release(read)

    def _failed(self, read: Read, error: Exception) -> None:
        read.state = "ERR"
        read.error = str(error) or type(error).__name__
        self._release(read)

    def _release(self, read: Read) -> None:
        if read.handle is not None:
            try:
                self._agent.release_xfer_handle(read.handle)
            except Exception as error:
                log.debug("NIXL keeps the handle of a read: %s", error)
            read.handle = None

    def _start(self) -> bytes:
        module = _import_nixl()
        config = module.nixl_agent_config(
            # Peers that reach us over TCP need it: their reads are served by us.
            enable_prog_thread=True,
            backends=["UCX"],
            sync_mode=module.nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT,
        )
        self._nixl = cast(_Nixl, module.nixl_agent(self._name, config))
        self._registered = self._nixl.register_memory(_one(self.base, self._size), "DRAM")
        return bytes(self._nixl.get_agent_metadata())

    def _run(self) -> None:
        wait_s = _SHORTEST_WAIT_S
        try:
            while True:
                pace = max((driver.advance() for driver in list(self._drivers)), default=Pace.IDLE)
                wait_s = (
                    _SHORTEST_WAIT_S if pace is Pace.MOVING else min(2 * wait_s, _LONGEST_WAIT_S)
                )
                if not self._run_calls(None if pace is Pace.IDLE else wait_s):
                    return
        finally:
            with self._lock:
                self._closed = True
            for driver in self._drivers:
                driver.abandon()
            if self._nixl is not None and self._registered is not None:
                self._nixl.deregister_memory(self._registered)
            self._registered = None
            self._nixl = None  # Its destructor ends UCX's threads, here.
            self._kept.clear()

    def _run_calls(self, wait_s: float | None) -> bool:
        """Wait for what is posted, so long, and run it. False when closed."""
        while True:
            try:
                call = self._calls.get(timeout=wait_s)
            except queue.Empty:
                return True
            if call is None:
                return False
            call()
            wait_s = 0.0


def _one(address: int, length: int) -> Descriptors:
    return np.array([[address, length, 0]], dtype=np.uint64)


def _import_nixl() -> ModuleType:
    missing = nixl_missing()
    if missing is not None:
        raise ConfigError(missing)
    name = next(name for name in _MODULES if importlib.util.find_spec(name) is not None)
    raises = logging.raiseExceptions
    try:
        module = importlib.import_module(name)
    except ImportError as error:
        raise ConfigError(f"NIXL cannot be loaded: {error}") from error
    # On import it sets up logging of its own, to standard output, and changes that of everyone.
    logging.raiseExceptions = raises
    its_log = logging.getLogger("nixl")
    its_log.handlers.clear()
    its_log.propagate = True
    its_log.setLevel(logging.WARNING)
    return module
