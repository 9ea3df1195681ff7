"""Stores of Full Blocks: the contract, its backends (directory, Redis), and the catalog of what is stored."""

from __future__ import annotations

from dualpath.store.block_directory import BlockDirectory
from dualpath.store.catalog import Catalog, CatalogStats, default_capacity_bytes
from dualpath.store.contract import (
    BlockRead,
    BlockResult,
    BlockWrite,
    ReadStatus,
    Store,
    StoreCapabilities,
    StoredBlock,
    WriteResult,
)
from dualpath.store.directory import DirectoryOptions, DirectoryStore
from dualpath.store.io_lane import IoLane, IoTask, LaneStats, Ticket
from dualpath.store.lane_store import LaneStore, LaneStoreStats
from dualpath.store.opening import open_store, printable_address
from dualpath.store.redis_address import RedisAddress
from dualpath.store.redis_store import RedisOptions, RedisStore
from dualpath.store.untouched import UntouchedStore

__all__ = [
    "BlockDirectory",
    "BlockRead",
    "BlockResult",
    "BlockWrite",
    "Catalog",
    "CatalogStats",
    "DirectoryOptions",
    "DirectoryStore",
    "IoLane",
    "IoTask",
    "LaneStats",
    "LaneStore",
    "LaneStoreStats",
    "ReadStatus",
    "RedisAddress",
    "RedisOptions",
    "RedisStore",
    "Store",
    "StoreCapabilities",
    "StoredBlock",
    "Ticket",
    "UntouchedStore",
    "WriteResult",
    "default_capacity_bytes",
    "open_store",
    "printable_address",
]
