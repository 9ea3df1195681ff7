"""Identifiers that cross package borders, and sizes.

Nothing here knows what the identified things are.
"""

from __future__ import annotations

from enum import StrEnum
from typing import NewType

__all__ = [
    "PAGE_BYTES",
    "BlockKey",
    "EngineId",
    "GiB",
    "GroupId",
    "KiB",
    "MiB",
    "NodeId",
    "RequestId",
    "Role",
    "Side",
]

RequestId = NewType("RequestId", str)
EngineId = NewType("EngineId", str)
GroupId = NewType("GroupId", str)
"""A group is the engines of one node, all PE or all DE (facts: paper section 4)."""
NodeId = NewType("NodeId", str)
"""A machine with one storage NIC and one read queue; named apart from its group only where they differ."""

BlockKey = NewType("BlockKey", bytes)
"""SHA-256 of (parent key, tokens of the block); 32 bytes. The chain's root holds fingerprint and salt."""

KiB = 1024
MiB = 1024 * KiB
GiB = 1024 * MiB

PAGE_BYTES = 4096
"""Alignment of everything that O_DIRECT touches."""


class Role(StrEnum):
    """What an engine does."""

    PREFILL = "prefill"
    DECODE = "decode"


class Side(StrEnum):
    """The side of a prefill/decode pair whose storage NIC reads a block."""

    PE = "pe"
    DE = "de"
