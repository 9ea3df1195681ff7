"""Shared memory between processes of one host: a pull is one copy out of the peer's pool.

The socket (Unix, in the abstract namespace: no file is left behind) carries the greeting, messages,
the peer's death, and once a read-only descriptor of its pool's memory file. The owner takes no part
in a pull: the stamps of the slots are compared before and after the copy, so that bytes which
changed hands meanwhile are never reported as good.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import secrets
import socket
import struct
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import numpy.typing as npt

from dualpath.base.errors import DeadlineExceeded, LeaseLost, PeerLost, TransferError
from dualpath.base.ids import EngineId, MiB
from dualpath.base.kv_threads import kv_executor
from dualpath.base.traffic_class import TrafficClass
from dualpath.kv.pool import BufferPool, PoolGeometry
from dualpath.transfer.connection import Patience, PeerContext, SocketChannel
from dualpath.transfer.contract import ChannelCapabilities, EndpointEvents
from dualpath.transfer.endpoint import SocketEndpoint
from dualpath.transfer.pulls import Pull
from dualpath.transfer.spans import copy_bytes
from dualpath.transfer.transport import Transport
from dualpath.transfer.wire import Link

__all__ = [
    "MappedChannel",
    "MappedPool",
    "ShmEndpoint",
    "ShmTransport",
    "host_identity",
]

_BACKLOG = 128
_PEER_CREDENTIALS = struct.Struct("3i")
# Between two looks at the deadline: well under a millisecond of copying.
_STEP_BYTES = 4 * MiB


def host_identity() -> str:
    """Equal in two processes exactly if they can share memory through an abstract socket.

    That takes one running kernel, one network namespace, and one user (in one user namespace).
    """
    digest = hashlib.sha256()
    digest.update(Path("/proc/sys/kernel/random/boot_id").read_bytes())
    for namespace in ("net", "user"):
        digest.update(os.readlink(f"/proc/self/ns/{namespace}").encode())
    digest.update(str(os.geteuid()).encode())
    return digest.hexdigest()[:32]


class MappedPool:
    """A peer's pool, mapped read-only. Unmapped at `close`, or when the last use after it ends.

    Takes no ownership of `fd`. Raises PeerLost when the memory file is smaller than its geometry.
    """

    def __init__(self, fd: int, geometry: PoolGeometry) -> None:
        size = os.fstat(fd).st_size
        if size < geometry.total_bytes:
            raise PeerLost(f"a pool of {geometry.total_bytes} bytes in a file of {size}")
        self.geometry = geometry
        self._map = mmap.mmap(fd, geometry.total_bytes, prot=mmap.PROT_READ)
        self._lock = threading.Lock()
        self._uses = 0
        self._closed = False

    @contextmanager
    def use(self) -> Iterator[None]:
        """While inside, the memory stays mapped. Raises PeerLost after `close`."""
        with self._lock:
            if self._closed:
                raise PeerLost("the peer's pool is unmapped")
            self._uses += 1
        try:
            yield
        finally:
            with self._lock:
                self._uses -= 1
                self._unmap_unused()

    def close(self) -> None:
        """Idempotent."""
        with self._lock:
            self._closed = True
            self._unmap_unused()

    def _unmap_unused(self) -> None:
        if self._closed and not self._uses:
            self._map.close()

    def copy(self, pull: Pull) -> TransferError | None:
        """Copy a pull's spans; returns why it failed, or None. Only inside `use`."""
        slots = pull.spans[:, 0]
        stamps = np.frombuffer(self._map, dtype=np.uint64, count=self.geometry.n_slots)
        lost = _stamp_lost(stamps, slots, pull)
        if lost is None:
            stopped = self._copy_spans(pull)
            if stopped is not None:
                return stopped
            lost = _stamp_lost(stamps, slots, pull)
        return lost

    def _copy_spans(self, pull: Pull) -> TransferError | None:
        source = memoryview(self._map)
        starts = self.geometry.table_bytes + pull.spans[:, 0] * self.geometry.slot_bytes
        starts += pull.spans[:, 1]
        since_look = 0
        for start, target in zip(starts.tolist(), pull.into, strict=True):
            length = target.nbytes
            for done in range(0, length, _STEP_BYTES):
                size = min(_STEP_BYTES, length - done)
                copy_bytes(target[done : done + size], source[start + done : start + done + size])
                since_look += size
                if since_look >= _STEP_BYTES:
                    since_look = 0
                    stop = pull.must_stop()
                    if stop is not None:
                        return stop
        return pull.must_stop()


class MappedChannel(SocketChannel):
    """Pulls by copying from the mapped pool, on the transport's copy threads."""

    def __init__(
        self,
        link: Link,
        region: MappedPool,
        capabilities: ChannelCapabilities,
        context: PeerContext,
        copiers: ThreadPoolExecutor,
    ) -> None:
        super().__init__(link, region.geometry, capabilities, context)
        self._region = region
        self._copiers = copiers

    def _submit(self, pull: Pull) -> None:
        try:
            self._copiers.submit(self._move, pull)
        except RuntimeError:
            pull.interrupt(PeerLost(f"{pull.name}: the endpoint is closed"))

    def _move(self, pull: Pull) -> None:
        if not pull.begin():
            return
        error: TransferError | None = None
        try:
            with self._region.use():
                error = pull.must_stop() or self._region.copy(pull)
        except TransferError as lost:
            error = lost
        except BaseException:
            pull.fail(TransferError(f"{pull.name}: the copy failed"))
            self.abort("a copy failed")
            raise
        if error is None:
            pull.complete()
        else:
            pull.fail(error)

    def _broken(self, reason: str) -> None:
        super()._broken(reason)
        self._region.close()


class ShmTransport(Transport):
    """`copy_threads` copies run at once, over all peers: memory bandwidth is shared anyway."""

    kind = "shm"

    def __init__(self, *, copy_threads: int = 2) -> None:
        self._host = host_identity()
        self._copiers = kv_executor(copy_threads, name="dualpath-copy")

    def listen(self) -> socket.socket:
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            listener.bind(_abstract(f"dualpath-{secrets.token_hex(16)}"))
            listener.listen(_BACKLOG)
            listener.setblocking(False)
        except OSError:
            listener.close()
            raise
        return listener

    def location(self, listener: socket.socket) -> str:
        name = bytes(listener.getsockname()).lstrip(b"\0").decode()
        return f"{self._host}/{name}"

    def dial(self, location: str, timeout_s: float) -> socket.socket:
        host, _, name = location.partition("/")
        if host != self._host:
            raise PeerLost("the peer is not on this host, or is of another user")
        if timeout_s <= 0:
            raise DeadlineExceeded(f"no time left to connect to {name}")
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.settimeout(timeout_s)
            sock.connect(_abstract(name))
            self.accepted(sock)
        except TimeoutError:
            sock.close()
            raise DeadlineExceeded(f"no connection to {name} in time") from None
        except OSError as error:
            sock.close()
            raise PeerLost(f"cannot connect to {name}: {error}") from None
        except PeerLost:
            sock.close()
            raise
        return sock

    def mark(self, sock: socket.socket, traffic: TrafficClass) -> None:
        pass  # Nothing of it crosses a network.

    def accepted(self, sock: socket.socket) -> None:
        """Abstract names have no permissions: only processes of our user may connect."""
        raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER_CREDENTIALS.size)
        _, uid, _ = _PEER_CREDENTIALS.unpack(raw)
        if uid != os.geteuid():
            raise PeerLost(f"a process of user {uid} is on the other end, not {os.geteuid()}")

    def introduce(self, sock: socket.socket, pool: BufferPool, deadline_s: float) -> None:
        # Opened anew for reading only: no slip of a peer can write into our pool.
        try:
            fd = os.open(f"/proc/self/fd/{pool.fd}", os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise PeerLost(f"the pool is closed: {error}") from None
        try:
            sock.settimeout(max(deadline_s - time.monotonic(), 0.001))
            socket.send_fds(sock, [b"\0"], [fd])
        except OSError as error:
            raise PeerLost(f"cannot hand over the pool: {error}") from None
        finally:
            os.close(fd)

    def channel(
        self,
        socks: Sequence[socket.socket],
        geometry: PoolGeometry,
        context: PeerContext,
        deadline_s: float,
    ) -> SocketChannel:
        (sock,) = socks
        fd = _receive_fd(sock, deadline_s)
        try:
            region = MappedPool(fd, geometry)
        finally:
            os.close(fd)
        link = Link(sock, stall_s=context.patience.peer_timeout_s)
        capabilities = ChannelCapabilities(kind=self.kind, same_host=True)
        return MappedChannel(link, region, capabilities, context, self._copiers)

    def close(self) -> None:
        self._copiers.shutdown(wait=True)


class ShmEndpoint(SocketEndpoint):
    """An endpoint that peers on the same host reach by shared memory. See `SocketEndpoint`."""

    def __init__(
        self,
        engine: EngineId,
        pool: BufferPool,
        secret: bytes,
        events: EndpointEvents,
        *,
        copy_threads: int = 2,
        patience: Patience | None = None,
    ) -> None:
        transport = ShmTransport(copy_threads=copy_threads)
        super().__init__(engine, pool, secret, events, [transport], patience=patience)


def _abstract(name: str) -> bytes:
    return b"\0" + name.encode()


def _receive_fd(sock: socket.socket, deadline_s: float) -> int:
    try:
        sock.settimeout(max(deadline_s - time.monotonic(), 0.001))
        data, fds, _, _ = socket.recv_fds(sock, 1, 1, socket.MSG_CMSG_CLOEXEC)
    except TimeoutError:
        raise DeadlineExceeded("the peer did not hand over its pool in time") from None
    except OSError as error:
        raise PeerLost(f"the peer did not hand over its pool: {error}") from None
    if not data or len(fds) != 1:
        for fd in fds:
            os.close(fd)
        raise PeerLost("the peer closed the connection instead of handing over its pool")
    return fds[0]


def _stamp_lost(
    stamps: npt.NDArray[np.uint64], slots: npt.NDArray[np.int64], pull: Pull
) -> LeaseLost | None:
    held = stamps[slots] == np.uint64(pull.stamp)
    if held.all():
        return None
    slot = int(slots[int(np.argmin(held))])
    return LeaseLost(f"{pull.name}: slot {slot} is not leased under stamp {pull.stamp}")
