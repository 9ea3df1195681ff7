"""Descriptors of a pull, merged: fewer and larger ones for the same bytes. Pure.

An array of pieces has the shape (n, 4), of int64: slot, offset and length in the peer's pool, and the place
in the destination's memory. Source: paper, on block layouts (Layer Blocks lie next to one another in a Full
Block) and on traffic isolation (each descriptor costs the submitter).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from dualpath.transfer.contract import RemoteSpan

__all__ = ["PieceArray", "coalesced", "pieces_array", "remote_spans"]

PieceArray = npt.NDArray[np.int64]
"""(n, 4): slot, offset, length, place."""


def pieces_array(pieces: Iterable[tuple[int, int, int, int]]) -> PieceArray:
    return np.array(list(pieces), dtype=np.int64).reshape(-1, 4)


def coalesced(arrays: Sequence[PieceArray]) -> PieceArray:
    """The pieces of all arrays, by slot and offset, with neighbours merged.

    Two are neighbours when one follows the other both in its slot and in the destination. Pieces that are
    empty go; no byte of a destination is named twice unless it was before.
    """
    pieces = np.concatenate(arrays) if len(arrays) > 1 else arrays[0]
    pieces = pieces[pieces[:, 2] > 0]
    if len(pieces) < 2:
        return pieces
    pieces = pieces[np.lexsort((pieces[:, 1], pieces[:, 0]))]
    slots, offsets, lengths, places = pieces.T
    follows = (
        (slots[1:] == slots[:-1])
        & (offsets[1:] == offsets[:-1] + lengths[:-1])
        & (places[1:] == places[:-1] + lengths[:-1])
    )
    heads = np.flatnonzero(np.append(True, ~follows))
    merged = pieces[heads]
    merged[:, 2] = np.add.reduceat(lengths, heads)
    return merged


def remote_spans(pieces: PieceArray) -> list[RemoteSpan]:
    """As a channel wants them."""
    return [RemoteSpan(slot, offset, length) for slot, offset, length in pieces[:, :3].tolist()]
