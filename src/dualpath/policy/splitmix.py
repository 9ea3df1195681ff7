"""A seeded stream of numbers, because the pure policy imports no randomness: splitmix64.

Source: G. Steele, D. Lea, C. Flood, "Fast splittable pseudorandom number generators", 2014. The same
seed gives the same stream on every machine and Python version.
"""

from __future__ import annotations

__all__ = ["SplitMix64"]

_MASK = (1 << 64) - 1


class SplitMix64:
    """Mutable; one per scheduler."""

    __slots__ = ("_state",)

    def __init__(self, seed: int) -> None:
        self._state = seed & _MASK

    def next_u64(self) -> int:
        """Uniform in [0, 2**64)."""
        self._state = (self._state + 0x9E3779B97F4A7C15) & _MASK
        mixed = self._state
        mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _MASK
        return mixed ^ (mixed >> 31)

    def below(self, bound: int) -> int:
        """In [0, bound); the bias is below bound / 2**64."""
        return (self.next_u64() * bound) >> 64
