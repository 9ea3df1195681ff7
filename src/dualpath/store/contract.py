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
    """How the read of one block ended. Everything but OK means: recompute, drop from the index."""

    OK = "ok"
    MISS = "miss"
    CORRUPT = "corrupt"
    """Truncated, checksum differs, or the header names another model, key or tokens."""
    TIMEOUT = "timeout"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class BlockRead:
    """Read the block `identity` into `into` (writable, page-aligned, `full_block_bytes` or more).

    `hold` is entered before the first byte may be written and left when no I/O can touch `into`
    any more, which after a TIMEOUT may be long after the result was given.
    """

    identity: BlockIdentity
    into: memoryview
    hold: AbstractContextManager[object]


@dataclass(frozen=True, slots=True)
class BlockWrite:
    """Write `payload` (page-aligned, exactly one slot) as the block `identity`. `hold` as in a read."""

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
        """Start reads; `done` is called exactly once a block, within `deadline_s` from now."""

    @abstractmethod
    def write(
        self,
        blocks: Sequence[BlockWrite],
        *,
        deadline_s: float,
        done: Callable[[WriteResult], None],
    ) -> None:
        """Start writes; `done` is called exactly once a block. Rewriting a key that exists is fine."""

    @abstractmethod
    def delete(self, keys: Sequence[BlockKey]) -> int:
        """Remove blocks; returns the bytes freed. Absent keys count 0. Raises StoreError."""

    @abstractmethod
    def scan(self) -> Iterator[StoredBlock]:
        """Every complete block of this fingerprint, in no order; clears left-over temp files."""

    @abstractmethod
    def close(self) -> None:
        """Ends I/O threads (a hung one is abandoned) and frees descriptors. Idempotent."""
