"""Blocks of one prompt in leased slots of the pool, by their number in the prompt.

Who has a `HeldBlocks` owns its leases, and releases them once. It knows no I/O.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from dualpath.kv import Lease
from dualpath.vllm.peer_messages import OfferedBlock

__all__ = ["BlockSlot", "HeldBlocks"]


@dataclass(frozen=True, slots=True)
class BlockSlot:
    """The `index`-th slot of a lease."""

    lease: Lease
    index: int

    @property
    def number(self) -> int:
        """Of the slot, in the pool."""
        return self.lease.slots[self.index]


class HeldBlocks:
    """Slots by block, and which of them hold their block by now. Not thread-safe."""

    def __init__(self) -> None:
        self.slots: dict[int, BlockSlot] = {}
        self.filled: set[int] = set()
        self._leases: list[Lease] = []

    def reserve(self, blocks: Sequence[int], lease: Lease) -> None:
        """The lease's slots are for these blocks, and ours to release."""
        self._leases.append(lease)
        for index, block in enumerate(blocks):
            self.slots[block] = BlockSlot(lease, index)

    def absorb(self, other: HeldBlocks) -> None:
        """Take over what `other` owns; where both have a block, ours stays."""
        self._leases += other._leases
        self.filled |= other.filled
        self.slots = other.slots | self.slots
        other._leases, other.slots, other.filled = [], {}, set()

    def lacking(self, blocks: Iterable[int]) -> list[int]:
        """Those of the blocks that are not filled, in order."""
        return [block for block in blocks if block not in self.filled]

    def filled_stop(self, first_block: int) -> int:
        """The end of the unbroken run of filled blocks that starts with `first_block`."""
        stop = first_block
        while stop in self.filled:
            stop += 1
        return stop

    def offers(self, first_block: int) -> tuple[OfferedBlock, ...]:
        """That run, for a peer to pull."""
        return tuple(
            OfferedBlock(block, self.slots[block].number, self.slots[block].lease.stamp)
            for block in range(first_block, self.filled_stop(first_block))
        )

    def release(self) -> None:
        """Give all slots back. Idempotent."""
        for lease in self._leases:
            lease.release()
        self._leases, self.slots, self.filled = [], {}, set()
