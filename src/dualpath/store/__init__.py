"""Stores of Full Blocks: the contract, the directory backend, and the catalog of what is stored."""

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
from dualpath.store.directory import DirectoryOptions, DirectoryStats, DirectoryStore
from dualpath.store.io_lane import IoLane, IoTask, LaneStats, Ticket
from dualpath.store.opening import open_store

__all__ = [
    "BlockDirectory",
    "BlockRead",
    "BlockResult",
    "BlockWrite",
    "Catalog",
    "CatalogStats",
    "DirectoryOptions",
    "DirectoryStats",
    "DirectoryStore",
    "IoLane",
    "IoTask",
    "LaneStats",
    "ReadStatus",
    "Store",
    "StoreCapabilities",
    "StoredBlock",
    "Ticket",
    "WriteResult",
    "default_capacity_bytes",
    "open_store",
]
