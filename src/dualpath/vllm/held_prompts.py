"""Blocks of prompts that wait for a peer, or for our own part of a request; each with the time when it ends.

What a prefill leaves for its DE, and what a DE read for a PE. It knows no I/O; times are of the monotonic
clock.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from dualpath.kv import Lease
from dualpath.vllm.held_blocks import HeldBlocks
from dualpath.vllm.peer_messages import OfferedBlock, PairName

__all__ = ["HeldPrompts", "Offer"]


@dataclass(frozen=True, slots=True)
class Offer:
    """KV of a prompt up to `tokens`, in these blocks."""

    tokens: int = 0
    blocks: tuple[OfferedBlock, ...] = ()


@dataclass(slots=True)
class _Held:
    blocks: HeldBlocks = field(default_factory=HeldBlocks)
    tokens: int = 0
    until_s: float = math.inf


class HeldPrompts:
    """By name of the request. Owns the leases of all blocks in it. Not thread-safe."""

    def __init__(self, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._held: dict[PairName, _Held] = {}

    def __contains__(self, name: PairName) -> bool:
        return name in self._held

    def begin(self, name: PairName) -> None:
        """A new attempt at this prompt: what there was of it goes."""
        self.drop(name)
        self._held[name] = _Held()

    def add(self, name: PairName, blocks: range, lease: Lease, stop_token: int) -> None:
        """These blocks lie in the lease's slots, with tokens up to `stop_token`."""
        held = self._held.setdefault(name, _Held())
        held.blocks.reserve(blocks, lease)
        held.blocks.filled.update(blocks)
        held.tokens = max(held.tokens, stop_token)

    def absorb(self, name: PairName, blocks: HeldBlocks, stop_token: int) -> None:
        """Take over what `blocks` owns."""
        held = self._held.setdefault(name, _Held())
        held.blocks.absorb(blocks)
        held.tokens = max(held.tokens, stop_token)

    def keep_until(self, name: PairName, until_s: float) -> None:
        """From now on it may expire."""
        if name in self._held:
            self._held[name].until_s = until_s

    def offer(self, name: PairName, first_block: int) -> Offer:
        """The unbroken run from `first_block` on; nothing when there is none."""
        held = self._held.get(name)
        if held is None:
            return Offer()
        blocks = held.blocks.offers(first_block)
        stop = (first_block + len(blocks)) * self._block_tokens
        return Offer(min(held.tokens, stop), blocks)

    def take(self, name: PairName) -> HeldBlocks | None:
        """The blocks, which become the caller's."""
        held = self._held.pop(name, None)
        return held.blocks if held is not None else None

    def drop(self, name: PairName) -> None:
        """Give its slots back. Idempotent."""
        held = self._held.pop(name, None)
        if held is not None:
            held.blocks.release()

    def expire(self, now_s: float) -> list[PairName]:
        """Drop what has ended; returns what it was."""
        late = [name for name, held in self._held.items() if held.until_s <= now_s]
        for name in late:
            self.drop(name)
        return late
