"""Ways to spoil a stored block, as disks, file systems and people do."""

from __future__ import annotations

import os
from enum import StrEnum
from pathlib import Path

from dualpath.base.ids import PAGE_BYTES

__all__ = ["Damage", "damage_bytes", "damage_file"]


class Damage(StrEnum):
    """What happened to the bytes of a block file."""

    TRUNCATE = "truncate"
    """The last page is gone."""
    EMPTY = "empty"
    FLIP_PAYLOAD = "flip"
    """One bit of the payload."""
    FLIP_HEADER = "flip_header"
    """One bit of the token ids."""


def damage_bytes(data: bytes, damage: Damage) -> bytes:
    """The bytes of a block file after the damage."""
    if damage is Damage.EMPTY:
        return b""
    if damage is Damage.TRUNCATE:
        return data[:-PAGE_BYTES]
    spoiled = bytearray(data)
    spoiled[PAGE_BYTES if damage is Damage.FLIP_PAYLOAD else 128] ^= 0x04
    return bytes(spoiled)


def damage_file(path: Path, damage: Damage) -> bool:
    """Spoil a block file in place; returns False when there is none."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        size = os.fstat(fd).st_size
        if damage is Damage.EMPTY:
            os.ftruncate(fd, 0)
        elif damage is Damage.TRUNCATE:
            os.ftruncate(fd, max(0, size - PAGE_BYTES))
        else:
            offset = PAGE_BYTES if damage is Damage.FLIP_PAYLOAD else 128
            byte = os.pread(fd, 1, offset)
            if byte:
                os.pwrite(fd, bytes([byte[0] ^ 0x04]), offset)
        os.fsync(fd)
    finally:
        os.close(fd)
    return True
