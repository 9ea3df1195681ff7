"""vLLM's KV tensors as rows of bytes, and copies between them and slots of the pool.

Whatever the attention backend's shape is, the dimension that counts blocks is found by its size, and the
rest of a block is opaque. Block by block, so that nothing is copied twice. This is the only module that
touches tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from dualpath.base.errors import UnsupportedModel
from dualpath.kv import BufferPool

__all__ = ["KvTensors"]


class KvTensors:
    """The caches of one worker by layer, in the order in which their bytes lie in a Full Block.

    `caches`: tensor by layer name; layers that share one tensor count once. `n_blocks`: vLLM's number of
    blocks."""

    def __init__(self, caches: Mapping[str, torch.Tensor], n_blocks: int) -> None:
        self._rows: dict[str, torch.Tensor] = {}
        seen: set[int] = set()
        for name, cache in caches.items():
            if cache.data_ptr() not in seen:
                seen.add(cache.data_ptr())
                self._rows[name] = _blocks_first(name, cache, n_blocks)
        self._index = {name: index for index, name in enumerate(self._rows)}
        self._slots: torch.Tensor | None = None

    @property
    def layers(self) -> tuple[tuple[str, tuple[int, ...], str], ...]:
        """Name, shape of one block, and element type, of each layer."""
        return tuple(
            (name, tuple(rows.shape[1:]), str(rows.dtype)) for name, rows in self._rows.items()
        )

    @property
    def block_bytes(self) -> tuple[int, ...]:
        """Of one block, layer by layer."""
        return tuple(rows[0].numel() * rows.element_size() for rows in self._rows.values())

    def __contains__(self, layer: str) -> bool:
        return layer in self._index

    def names(self) -> Sequence[str]:
        return list(self._rows)

    def use(self, pool: BufferPool) -> None:
        """Copy from and to this pool's slots from now on; it must outlive this object's use."""
        geometry = pool.geometry
        memory = torch.frombuffer(pool.memory, dtype=torch.uint8)[geometry.table_bytes :]
        self._slots = memory.view(geometry.n_slots, geometry.slot_bytes)

    def load(self, layer: str, slots: Sequence[int], block_ids: Sequence[int]) -> None:
        """Copy one layer of these slots into these blocks."""
        rows, staged = self._rows[layer], self._part(layer)
        for slot, block in zip(slots, block_ids, strict=True):
            rows[block].copy_(staged[slot].view(rows.dtype).view(rows.shape[1:]))

    def save(self, layer: str, slots: Sequence[int], block_ids: Sequence[int]) -> None:
        """Copy one layer of these blocks into these slots; complete when it returns."""
        rows, staged = self._rows[layer], self._part(layer)
        for slot, block in zip(slots, block_ids, strict=True):
            staged[slot].view(rows.dtype).view(rows.shape[1:]).copy_(rows[block])

    def close(self) -> None:
        """Let go of the pool's memory."""
        self._slots = None

    def _part(self, layer: str) -> torch.Tensor:
        """`[n_slots, bytes of one block of this layer]`."""
        assert self._slots is not None
        size = self.block_bytes[0]
        start = self._index[layer] * size
        return self._slots[:, start : start + size]


def _blocks_first(name: str, cache: torch.Tensor, n_blocks: int) -> torch.Tensor:
    """A view whose first dimension counts vLLM's blocks. Kernels may cut each into several of theirs."""
    for dim, size in enumerate(cache.shape[:2]):
        if size >= n_blocks and size % n_blocks == 0:
            rows = cache.movedim(dim, 0)
            if size > n_blocks:
                rows = rows.view(n_blocks, size // n_blocks, *rows.shape[1:])
            return rows
    raise UnsupportedModel(
        f"KV cache {name} of shape {tuple(cache.shape)} has no dimension for its {n_blocks} blocks: this "
        f"attention backend does not work with the connector; choose another by --attention-backend"
    )
