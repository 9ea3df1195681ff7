"""The Redis backend: Full Blocks as values on a Redis or Valkey server.

`RedisBlocks` does the I/O of one block; this puts it on the lanes of a `LaneStore`, one connection a
thread. A hung server is cut off by closing the connection, so memory is never held past a deadline.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from dualpath.base.errors import ConfigError, StoreError
from dualpath.base.ids import BlockKey
from dualpath.kv.chain import Fingerprint
from dualpath.kv.layout import KVLayout
from dualpath.store.block_file import require_fitting_header
from dualpath.store.contract import (
    BlockRead,
    BlockResult,
    BlockWrite,
    StoreCapabilities,
    StoredBlock,
    WriteResult,
)
from dualpath.store.io_lane import IoLane, Ticket
from dualpath.store.lane_store import LaneStore
from dualpath.store.redis_address import RedisAddress
from dualpath.store.redis_blocks import RedisBlocks, ScanPage
from dualpath.store.redis_connections import RedisConnections

__all__ = ["RedisOptions", "RedisStore"]

_DELETE_BATCH = 256
_LAST_WORDS_S = 1.0
"""How long closing may take to save times of use: they are worth no more."""


@dataclass(frozen=True, slots=True)
class RedisOptions:
    """How a `RedisStore` uses its time. `call_deadline_s` as in `DirectoryOptions`.

    `touch_interval_s`: times of last use are sent to the server so often, together.
    """

    read_queue_limit: int = 4096
    write_queue_limit: int = 1024
    call_deadline_s: float = 30.0
    touch_interval_s: float = 10.0


class RedisStore(LaneStore):
    """Blocks of one fingerprint at `address`. Thread-safe; many processes may open the same one."""

    capabilities = StoreCapabilities(persistent=True, direct_io=False, scan=True)

    def __init__(
        self,
        address: RedisAddress,
        fingerprint: Fingerprint,
        layout: KVLayout,
        *,
        options: RedisOptions | None = None,
    ) -> None:
        """Connects. Raises ConfigError when blocks cannot be stored there, with what to do."""
        options = options or RedisOptions()
        require_fitting_header(layout.block_tokens)
        n_writers = max(1, address.connections // 2)
        super().__init__(
            layout,
            reads=IoLane(
                f"store {address} (reads)",
                n_threads=address.connections,
                queue_limit=options.read_queue_limit,
            ),
            writes=IoLane(
                f"store {address} (writes)",
                n_threads=n_writers,
                queue_limit=options.write_queue_limit,
            ),
            call_deadline_s=options.call_deadline_s,
        )
        self.blocks = RedisBlocks(
            RedisConnections(address),
            fingerprint,
            layout,
            touch_interval_s=options.touch_interval_s,
        )
        prepare = partial(self.blocks.prepare, address.connections + n_writers)
        try:
            self._call(self._writes, "opening", lambda ticket: prepare(ticket.deadline))
        except StoreError as error:
            self.close()
            raise ConfigError(
                f"the store {address} cannot be used: {error}. Give the address of a Redis server of "
                f"version 6.2 or later that runs and that this machine may use"
            ) from error

    def delete(self, keys: Sequence[BlockKey]) -> int:
        freed_bytes = 0
        for start in range(0, len(keys), _DELETE_BATCH):
            batch = keys[start : start + _DELETE_BATCH]
            freed_bytes += self._call(self._writes, "deleting", partial(self._delete, batch))
        return freed_bytes

    def scan(self) -> Iterator[StoredBlock]:
        self.tidy()
        seen: set[BlockKey] = set()
        cursor = 0
        while True:
            page = self._call(self._reads, "scanning", partial(self._scan, cursor))
            for block in page.blocks:
                if block.key not in seen:
                    seen.add(block.key)
                    yield block
            cursor = page.cursor
            if cursor == 0:
                break
        if self._call(self._reads, "counting", self._n_times) > len(seen):
            self._forget_times()

    def tidy(self) -> None:
        self._call(self._writes, "removing failed writes", self._settle)

    def free_bytes(self) -> int | None:
        return self._call(
            self._reads,
            "asking for free memory",
            lambda ticket: self.blocks.free_bytes(ticket.deadline),
        )

    def close(self) -> None:
        super().close()
        self.blocks.close(time.monotonic() + _LAST_WORDS_S)

    def _read_block(self, block: BlockRead, ticket: Ticket) -> BlockResult:
        return self.blocks.read(block.identity, block.into, ticket)

    def _write_block(self, block: BlockWrite, ticket: Ticket) -> WriteResult:
        return self.blocks.write(block.identity, block.payload, ticket)

    def _delete(self, keys: Sequence[BlockKey], ticket: Ticket) -> int:
        return self.blocks.delete(keys, ticket.deadline)

    def _scan(self, cursor: int, ticket: Ticket) -> ScanPage:
        return self.blocks.scan(cursor, ticket.deadline)

    def _n_times(self, ticket: Ticket) -> int:
        return self.blocks.n_times(ticket.deadline)

    def _settle(self, ticket: Ticket) -> None:
        self.blocks.settle(ticket.deadline)

    def _forget_times(self) -> None:
        """Of blocks that the server has evicted by itself."""
        cursor = 0
        while True:
            step = partial(self._forget_step, cursor)
            cursor = self._call(self._writes, "forgetting times of use", step)
            if cursor == 0:
                return

    def _forget_step(self, cursor: int, ticket: Ticket) -> int:
        return self.blocks.forget_times(cursor, ticket.deadline)
