"""The contract of a store: Full Blocks by key, whole or not at all.

A store moves bytes; it knows no requests and no tokens beyond a block's identity. Its promises,
which `dualpath.testing.store_suite` checks for every backend:

- a reader gets a whole block that proved its identity and checksum, or a value that says why not;
- a write is visible to readers and to `scan` only when it is durable and complete (cases 1, 3);
- every operation completes by its deadline, on a hung device with `TIMEOUT` (case 8); memory that
  a hung operation may still touch is reported as held until it really ends (`BlockRead.hold`);
- nothing grows without a bound: operations beyond the queue's limit complete with `ERROR` at once.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from enum import StrEnum

from dualpath.base.ids import BlockKey
from dualpath.kv.chain import BlockIdentity

__all__ = [
    "BlockRead",
    "BlockResult",
    "BlockWrite",
    "ReadStatus",
    "Store",
    "StoreCapabilities",
    "StoredBlock",
    "WriteResult",
]


class ReadStatus(StrEnum):
    """How the read of one block ended. Everything but OK means: recompute it.

    After MISS and CORRUPT it also leaves the index; TIMEOUT and ERROR are about the store, and say
    nothing about the block.
    """

    OK = "ok"
    MISS = "miss"
    CORRUPT = "corrupt"
    """Truncated, unreadable, checksum differs, or the header names another model, key or tokens."""
    TIMEOUT = "timeout"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class BlockRead:
    """Read the block `identity` into `into` (writable, page-aligned, `slot_bytes` or more).

    `hold` is entered inside `read`, on the caller's thread, and left when no I/O can touch `into`
    any more: before the result is given or, after a TIMEOUT, perhaps long after. What `into` holds
    after any status but OK is undefined.
    """

    identity: BlockIdentity
    into: memoryview
    hold: AbstractContextManager[object]


@dataclass(frozen=True, slots=True)
class BlockWrite:
    """Write `payload` (page-aligned, `slot_bytes`) as the block `identity`. `hold` as in a read.

    Only its first `full_block_bytes` are stored; nothing may change them until the result is given.
    """

    identity: BlockIdentity
    payload: memoryview
    hold: AbstractContextManager[object]


@dataclass(frozen=True, slots=True)
class BlockResult:
    """Outcome of one read; `detail` names file, expected and got for a log line."""

    key: BlockKey
    status: ReadStatus
    detail: str = ""


@dataclass(frozen=True, slots=True)
class WriteResult:
    """Outcome of one write. `stored_bytes` is what it occupies; 0 unless `durable`."""

    key: BlockKey
    durable: bool
    stored_bytes: int
    detail: str = ""


@dataclass(frozen=True, slots=True)
class StoredBlock:
    """One block as `scan` finds it: enough to rebuild the index (case 13).

    `used_s` is the time of last use, seconds since the epoch, for eviction order.
    """

    key: BlockKey
    parent: BlockKey
    stored_bytes: int
    used_s: float


@dataclass(frozen=True, slots=True)
class StoreCapabilities:
    """What a backend can do beyond the contract; callers adapt, they never probe by type."""

    persistent: bool
    direct_io: bool
    scan: bool


class Store(ABC):
    """Full Blocks by key. Completion callbacks run on the store's threads: hand over and return."""

    capabilities: StoreCapabilities

    @abstractmethod
    def read(
        self,
        blocks: Sequence[BlockRead],
        *,
        deadline_s: float,
        done: Callable[[BlockResult], None],
    ) -> None:
        """Start reads; `done` is called exactly once a block, within `deadline_s` from now.

        Never from inside this call. A view that is too small or read-only raises ValueError.
        """

    @abstractmethod
    def write(
        self,
        blocks: Sequence[BlockWrite],
        *,
        deadline_s: float,
        done: Callable[[WriteResult], None],
    ) -> None:
        """Start writes; `done` as in `read`. Rewriting a key that exists is fine.

        A write that is reported as not durable may have replaced an older block of that key, or have
        removed it: drop the key from the index.
        """

    @abstractmethod
    def delete(self, keys: Sequence[BlockKey]) -> int:
        """Remove blocks; returns the bytes freed. Absent keys count 0. Blocks, with a deadline.

        Raises StoreError; then some of them may be gone.
        """

    @abstractmethod
    def scan(self) -> Iterator[StoredBlock]:
        """Every complete block of this fingerprint, in no order; clears what broken writes left.

        Blocks, with a deadline on every step. Raises StoreError.
        """

    def free_bytes(self) -> int | None:
        """Space that is left for blocks; None when the backend does not know. Raises StoreError."""
        return None

    def tidy(self) -> None:  # noqa: B027 (most backends leave nothing half-written)
        """Remove what writers that died left half-written. Blocks, with a deadline. Raises StoreError."""

    @abstractmethod
    def close(self) -> None:
        """Ends I/O threads (a hung one is abandoned) and frees descriptors. Idempotent."""
