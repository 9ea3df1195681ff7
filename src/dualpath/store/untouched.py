"""A store that is listed and never changed: for a catalog that counts blocks which nobody keeps.

The `oracle` baseline plans as if its blocks were stored, and neither reads nor writes any. What it evicts
must not take a real block away.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from dualpath.base.errors import InvariantViolation
from dualpath.base.ids import BlockKey
from dualpath.store.contract import (
    BlockRead,
    BlockResult,
    BlockWrite,
    Store,
    StoredBlock,
    WriteResult,
)

__all__ = ["UntouchedStore"]


class UntouchedStore(Store):
    """`scan` lists what `inner` has; deletions free nothing. The inner store is closed with this one."""

    def __init__(self, inner: Store) -> None:
        self._inner = inner
        self.capabilities = inner.capabilities

    def read(
        self,
        blocks: Sequence[BlockRead],
        *,
        deadline_s: float,
        done: Callable[[BlockResult], None],
    ) -> None:
        raise InvariantViolation("an untouched store is not read")

    def write(
        self,
        blocks: Sequence[BlockWrite],
        *,
        deadline_s: float,
        done: Callable[[WriteResult], None],
    ) -> None:
        raise InvariantViolation("an untouched store is not written")

    def delete(self, keys: Sequence[BlockKey]) -> int:
        return 0

    def scan(self) -> Iterator[StoredBlock]:
        return self._inner.scan()

    def free_bytes(self) -> int | None:
        return self._inner.free_bytes()

    def close(self) -> None:
        self._inner.close()
