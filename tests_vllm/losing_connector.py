"""A connector for tests, whose staged KV is gone when it shall be copied in, every third time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from dualpath.vllm.agent import KvAgent
from dualpath.vllm.connector import DualPathConnector

__all__ = ["LosingConnector"]


class LosingConnector(DualPathConnector):
    """See the module."""

    def register_kv_caches(self, kv_caches: Any) -> None:
        super().register_kv_caches(kv_caches)
        assert self._worker is not None
        agent: KvAgent = self._worker.agent
        keeps = agent.staged_slots
        count = 0

        @contextmanager
        def loses(request: str, serial: int) -> Iterator[dict[int, int] | None]:
            nonlocal count
            count += 1
            with keeps(request, serial) as slots:
                yield None if count % 3 == 0 else slots

        agent.staged_slots = loses  # type: ignore[method-assign]
