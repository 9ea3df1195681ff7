"""The Redis backend under the contract suite: a real server, which is stopped when it shall hang."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest

from dualpath.base.ids import BlockKey
from dualpath.kv import Fingerprint, KVLayout
from dualpath.store import RedisAddress, RedisOptions, RedisStore
from dualpath.testing import Damage, RedisServer, damage_bytes, redis_server_path
from dualpath.testing.store_suite import StoreFactory

needs_redis = pytest.mark.skipif(
    redis_server_path() is None and os.environ.get("DUALPATH_REQUIRE_TESTBED") != "1",
    reason="no redis-server on PATH: make testbed-tools",
)


class RedisStoreFactory(StoreFactory):
    cuts_off = True

    def __init__(self, server: RedisServer) -> None:
        self.server = server

    def open(self, fp: Fingerprint, layout: KVLayout) -> RedisStore:
        return self.open_with(fp, layout)

    def open_with(self, fp: Fingerprint, layout: KVLayout, **changes: object) -> RedisStore:
        """`changes` are fields of the address."""
        options = RedisOptions(
            read_queue_limit=self.queue_limit, write_queue_limit=self.queue_limit
        )
        address = RedisAddress.parse(self.server.url, {})
        return RedisStore(replace(address, **changes), fp, layout, options=options)

    def damage(self, fp: Fingerprint, key: BlockKey, damage: Damage) -> None:
        name = self.name_of(fp, key)
        value = self.server.command("GET", name)
        assert isinstance(value, bytes)
        # A value of no bytes is what SET makes of EMPTY; Redis keeps such a key.
        assert self.server.command("SET", name, damage_bytes(value, damage)) == b"OK"

    def transplant(self, fp: Fingerprint, source: BlockKey, target: BlockKey) -> None:
        copied = self.server.command(
            "COPY", self.name_of(fp, source), self.name_of(fp, target), "REPLACE"
        )
        assert copied == 1

    @contextmanager
    def stalled(self) -> Iterator[None]:
        self.server.pause()
        try:
            yield
        finally:
            self.server.resume()

    @staticmethod
    def name_of(fp: Fingerprint, key: BlockKey) -> str:
        return f"dualpath:{fp.hex()}:{key.hex()}"
