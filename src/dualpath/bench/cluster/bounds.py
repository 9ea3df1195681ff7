"""What a storage-bound pass could take at best. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dualpath.kv.layout import KVLayout
from dualpath.store.block_file import HEADER_BYTES

__all__ = ["ReadBound", "equal_pair_error", "read_bound"]


@dataclass(frozen=True, slots=True)
class ReadBound:
    """`read_bytes`: that must come from the store; `seconds`: at the rates of the NICs that read."""

    read_bytes: int
    seconds: float


def read_bound(read_tokens: int, layout: KVLayout, *, nics: int, rate_bytes_s: float) -> ReadBound:
    """`read_tokens` in whole blocks, through `nics` NICs that are all busy from start to end."""
    blocks = layout.blocks_for(read_tokens)
    read_bytes = blocks * (layout.full_block_bytes + HEADER_BYTES)
    return ReadBound(read_bytes, read_bytes / (nics * rate_bytes_s))


def equal_pair_error(pairs: Sequence[tuple[float, float]]) -> float:
    """How far the times of pairs that should be equal are apart: the largest difference, by the second."""
    return max(abs(first / second - 1) for first, second in pairs)
