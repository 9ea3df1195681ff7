"""Page-aligned buffer pools with leases: the staging DRAM of an engine (PE buffer, DE buffer).

A pool is one anonymous memory file: a table of stamps, then `n_slots` slots of one Full Block each.
It has no name in any file system, so nothing is left behind however the process ends; a peer on the
same host maps it through the descriptor it is handed.

Ownership
    A `Lease` owns its slots from `try_lease` until `release`. All slots of a request are
    leased at once or not at all, so two requests never each hold half of the pool (case 9).
    `lease.hold()` says that I/O may touch the memory, `lease.hold(i)` that it may touch one slot; a slot
    returns to the pool when the lease is released *and* no hold on it is left, so a hung read never
    writes into another request's slot, and takes no other slot out of use.
    The stamp (unique, never 0) stands in the table while the lease lives, and goes at `release`;
    a peer compares it before and after copying (case 11).

The pool knows no I/O, no request states and no peers.
"""

from __future__ import annotations

import itertools
import mmap
import os
import secrets
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec
import numpy as np
import numpy.typing as npt

from dualpath.base.errors import InvariantViolation
from dualpath.base.ids import PAGE_BYTES

__all__ = ["BufferPool", "Lease", "PoolGeometry"]

_STAMP_BYTES = 8


class PoolGeometry(msgspec.Struct, frozen=True):
    """Where a pool's parts lie in its memory file; enough for a peer to map it."""

    n_slots: int
    slot_bytes: int

    @property
    def table_bytes(self) -> int:
        return -(-self.n_slots * _STAMP_BYTES // PAGE_BYTES) * PAGE_BYTES

    @property
    def total_bytes(self) -> int:
        return self.table_bytes + self.n_slots * self.slot_bytes

    def slot_offset(self, slot: int) -> int:
        """Byte offset of a slot in the memory file."""
        if not 0 <= slot < self.n_slots:
            raise ValueError(f"slot {slot} is not in [0, {self.n_slots})")
        return self.table_bytes + slot * self.slot_bytes


class Lease:
    """Slots of one owner. Made by `BufferPool.try_lease`; thread-safe."""

    __slots__ = (
        "_holds",
        "_pool",
        "_released",
        "_returned",
        "_slot_holds",
        "owner",
        "slots",
        "stamp",
    )

    def __init__(self, pool: BufferPool, owner: str, slots: tuple[int, ...], stamp: int) -> None:
        self._pool = pool
        self.owner = owner
        self.slots = slots
        self.stamp = stamp
        self._holds = 0
        self._slot_holds: dict[int, int] = {}
        """Holds on single slots, by index."""
        self._returned: set[int] = set()
        """Indexes of slots that are in the pool again, while others are still held."""
        self._released = False

    @property
    def released(self) -> bool:
        return self._released

    @property
    def holds(self) -> int:
        """Operations that may still touch the memory."""
        return self._holds + sum(self._slot_holds.values())

    def view(self, index: int) -> memoryview:
        """The writable bytes of the lease's `index`-th slot.

        Valid until the lease is released, or as long as a hold on the slot is left.
        """
        if self._released and self._holds == 0 and index not in self._slot_holds:
            raise InvariantViolation(f"view of a slot after the lease of {self.owner} was released")
        return self._pool.view(self.slots[index])

    @contextmanager
    def hold(self, index: int | None = None) -> Iterator[None]:
        """While inside, the `index`-th slot (None: all) stays out of the pool, even after `release`."""
        with self._pool._lock:
            if self._released:
                raise InvariantViolation(f"hold on released lease of {self.owner}")
            self._begin_hold(index)
        try:
            yield
        finally:
            self._end_hold(index)

    def _begin_hold(self, index: int | None = None) -> None:
        if index is None:
            self._holds += 1
        else:
            self._slot_holds[index] = self._slot_holds.get(index, 0) + 1

    def _end_hold(self, index: int | None = None) -> None:
        with self._pool._lock:
            if index is None:
                self._holds -= 1
            elif self._slot_holds[index] == 1:
                del self._slot_holds[index]
            else:
                self._slot_holds[index] -= 1
            if self._released:
                self._pool._take_back(self)

    @property
    def _owned(self) -> list[int]:
        """Indexes of the slots that are not in the pool again."""
        return [index for index in range(len(self.slots)) if index not in self._returned]

    def release(self) -> None:
        """Give the slots back. Idempotent: every path of a request may call it."""
        with self._pool._lock:
            if self._released:
                return
            self._released = True
            self._pool._clear_stamps(self)
            self._pool._take_back(self)


class BufferPool:
    """`n_slots` slots of `slot_bytes` (a multiple of the page size). Thread-safe.

    Close it only when no lease is held and no view is in use.
    """

    def __init__(self, n_slots: int, slot_bytes: int, *, name: str = "pool") -> None:
        if n_slots < 1 or slot_bytes < PAGE_BYTES or slot_bytes % PAGE_BYTES:
            raise ValueError(f"{n_slots} slots of {slot_bytes} bytes: need >= 1, whole pages")
        self.name = name
        self.geometry = PoolGeometry(n_slots=n_slots, slot_bytes=slot_bytes)
        self.fd = os.memfd_create(f"dualpath-{name}", os.MFD_CLOEXEC)
        os.ftruncate(self.fd, self.geometry.total_bytes)
        self._map = mmap.mmap(self.fd, self.geometry.total_bytes)
        self._bytes = memoryview(self._map)
        table = np.frombuffer(self._map, dtype=np.uint64, count=n_slots)
        self._stamps: npt.NDArray[np.uint64] = table
        self._free = list(range(n_slots - 1, -1, -1))
        self._leases: dict[int, Lease] = {}
        # A random start tells the stamps of a restarted engine from those of its predecessor.
        self._next_stamp = itertools.count(secrets.randbits(62) | 1)
        self._lock = threading.Lock()

    @property
    def n_free(self) -> int:
        return len(self._free)

    @property
    def leases(self) -> list[Lease]:
        """Leases not yet taken back, for reports and leak checks."""
        with self._lock:
            return list(self._leases.values())

    def try_lease(self, owner: str, n_slots: int) -> Lease | None:
        """All `n_slots` slots, or None when fewer are free. Contents are undefined.

        Raises ValueError when the pool could never hold that many.
        """
        if not 0 <= n_slots <= self.geometry.n_slots:
            raise ValueError(
                f"{owner} asks for {n_slots} slots, pool {self.name} has {self.geometry.n_slots}"
            )
        with self._lock:
            if len(self._free) < n_slots:
                return None
            slots = tuple(self._free.pop() for _ in range(n_slots))
            lease = Lease(self, owner, slots, next(self._next_stamp))
            self._leases[lease.stamp] = lease
            for slot in slots:
                self._stamps[slot] = lease.stamp
            return lease

    @property
    def memory(self) -> memoryview:
        """The memory file, by the offsets of `geometry`; the stamps at its start are not to be written."""
        return self._bytes

    def view(self, slot: int) -> memoryview:
        """The writable bytes of a slot."""
        start = self.geometry.slot_offset(slot)
        return self._bytes[start : start + self.geometry.slot_bytes]

    def holds_stamp(self, stamp: int, slot: int) -> bool:
        """Whether the slot is leased under this stamp now. Lock-free, for serving peers."""
        return 0 <= slot < self.geometry.n_slots and int(self._stamps[slot]) == stamp

    @contextmanager
    def hold(self, stamp: int) -> Iterator[Lease | None]:
        """Find the live lease with this stamp and hold it, in one step, while a peer is served.

        Gives None when the lease was released or never was.
        """
        with self._lock:
            lease = self._leases.get(stamp)
            if lease is not None and lease._released:
                lease = None
            if lease is not None:
                lease._begin_hold()
        try:
            yield lease
        finally:
            if lease is not None:
                lease._end_hold()

    def check(self) -> None:
        """Integrity: each slot is free or in one lease, and stamps agree. Raises InvariantViolation.

        Cheap enough to run in production whenever the engine is idle.
        """
        with self._lock:
            owner_of: dict[int, str] = dict.fromkeys(self._free, "the free list")
            if len(owner_of) != len(self._free):
                raise InvariantViolation(f"pool {self.name}: a slot is twice in the free list")
            for slot in self._free:
                if self._stamps[slot]:
                    raise InvariantViolation(f"pool {self.name}: free slot {slot} has a stamp")
            for stamp, lease in self._leases.items():
                for slot in [lease.slots[index] for index in lease._owned]:
                    if slot in owner_of:
                        raise InvariantViolation(
                            f"pool {self.name}: slot {slot} is owned by {owner_of[slot]} "
                            f"and by {lease.owner}"
                        )
                    owner_of[slot] = lease.owner
                    expected = 0 if lease.released else stamp
                    if int(self._stamps[slot]) != expected:
                        raise InvariantViolation(
                            f"pool {self.name}: slot {slot} of {lease.owner} has stamp "
                            f"{int(self._stamps[slot])}, expected {expected}"
                        )
            if len(owner_of) != self.geometry.n_slots:
                raise InvariantViolation(
                    f"pool {self.name}: {self.geometry.n_slots - len(owner_of)} slots have no owner"
                )

    def close(self) -> None:
        """Unmap and close. Idempotent. Views still in use keep the memory until they go."""
        if self.fd < 0:
            return
        os.close(self.fd)
        self.fd = -1
        with self._lock:
            # A lease may still be released after this, and a peer may still ask for a stamp.
            self._stamps = np.zeros(self.geometry.n_slots, dtype=np.uint64)
        self._bytes.release()
        try:
            self._map.close()
        except BufferError:
            pass  # A hung read still owns a view: the memory goes with it, or with the process.
        del self._map

    def _clear_stamps(self, lease: Lease) -> None:
        for slot in lease.slots:
            self._stamps[slot] = 0

    def _take_back(self, lease: Lease) -> None:
        """Those slots of a released lease that nothing holds."""
        if lease._holds:
            return
        free = [index for index in lease._owned if index not in lease._slot_holds]
        self._free.extend(lease.slots[index] for index in free)
        lease._returned.update(free)
        if len(lease._returned) == len(lease.slots):
            del self._leases[lease.stamp]
