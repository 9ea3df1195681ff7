"""The stored prefix of a prompt, as far as the store can be trusted at the moment and is worth reading.

Puts the catalog (what is stored), the health of the store (whether it answers) and the load gate
(whether computing would be faster) together, so that the driver asks one question. Knows no requests
but their ids, and no engines.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence

from dualpath.base.ids import BlockKey, RequestId
from dualpath.kv.chain import Fingerprint, block_chain, root_key
from dualpath.monitor.metrics import Metrics
from dualpath.serve.load_gate import LoadGate
from dualpath.serve.store_health import StoreHealth
from dualpath.store.catalog import Catalog

__all__ = ["StoredPrefixes"]

log = logging.getLogger(__name__)


class StoredPrefixes:
    """`catalog` None: this server has no store, nothing is ever found."""

    def __init__(
        self,
        catalog: Catalog | None,
        fingerprint: Fingerprint,
        block_tokens: int,
        metrics: Metrics,
    ) -> None:
        self.health = StoreHealth()
        self.gate = LoadGate()
        self._catalog = catalog
        self._fingerprint = fingerprint
        self._block_tokens = block_tokens
        self._metrics = metrics
        self._evicted_seen = 0

    @property
    def store_up(self) -> bool | None:
        """Whether the store answers; None without a store."""
        return None if self._catalog is None else self.health.up

    def root(self, cache_salt: str) -> BlockKey:
        """Parent of the first block of a tenant's prompts."""
        return root_key(self._fingerprint, cache_salt)

    def pin(self, request: RequestId, cache_salt: str, tokens: Sequence[int], now_s: float) -> int:
        """Leading tokens of `tokens` that are stored, a multiple of the block size.

        Their blocks stay until `release`; what the request had pinned before is released.
        """
        if self._catalog is None:
            return 0
        self._catalog.release(request)
        if not self.health.usable(now_s):
            return 0
        chain = block_chain(self.root(cache_salt), tokens, self._block_tokens)
        hit_tokens = self._catalog.lookup(chain, request) * self._block_tokens
        if self.gate.worth_loading(hit_tokens, now_s):
            return hit_tokens
        self._metrics.kv_load_skipped()
        self._catalog.release(request)
        return 0

    def release(self, request: RequestId) -> None:
        """Idempotent."""
        if self._catalog is not None:
            self._catalog.release(request)

    def persisted(self, key: BlockKey, parent: BlockKey, stored_bytes: int) -> None:
        """An engine made this block durable (case 1)."""
        if self._catalog is not None:
            self._catalog.published(key, parent, stored_bytes)

    def not_persisted(self, key: BlockKey) -> None:
        """A write failed; whatever the key had before cannot be trusted either."""
        if self._catalog is not None and self._catalog.contains(key):
            self._catalog.invalidate(key)

    def forget(self, bad_keys: Iterable[BlockKey]) -> None:
        """These blocks are missing or damaged (case 6)."""
        if self._catalog is not None:
            for key in bad_keys:
                self._catalog.invalidate(key)

    def answered(self) -> None:
        """A block was read and right."""
        if self.health.succeeded():
            log.info("the store answers again")
            self._metrics.store_up(True)

    def failed(self, detail: str, now_s: float) -> None:
        """A read timed out or errored."""
        if self.health.failed(now_s):
            log.error("the store fails (%s): serving without it", detail)
            self._metrics.store_up(False)

    def observe(self) -> None:
        """Set the gauges of the store's content."""
        if self._catalog is None:
            return
        stats = self._catalog.stats
        self._metrics.store_content(
            blocks=stats.blocks,
            used_bytes=stats.stored_bytes,
            pinned_requests=stats.pinned_requests,
        )
        self._metrics.store_evicted(stats.evicted_blocks - self._evicted_seen)
        self._evicted_seen = stats.evicted_blocks
