"""What is in the testbed's store, put back to how it was: every system starts from the same blocks.

Speaks to the server over the management network, while no `dualpath serve` uses it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

from dualpath.base.errors import StoreError
from dualpath.store.redis_address import RedisAddress, RedisLink, connect
from dualpath.store.resp import Reply, encode_command

__all__ = ["StoreState"]

_DEADLINE_S = 60.0
_COUNT = 1000
_PREFIX = b"dualpath:"
_KEY_PARTS = 3  # dualpath:<fingerprint>:<block key>


class StoreState:
    """Remembers the blocks in the store at the time it is made; `restore` removes what came since."""

    def __init__(self, address: str) -> None:
        self._address = RedisAddress.parse(address)
        link = self._connect()
        try:
            self.blocks = frozenset(_blocks(link))
        finally:
            link.resp.close()

    def restore(self) -> int:
        """How many blocks were removed. Raises StoreError when a remembered one is missing."""
        link = self._connect()
        try:
            now = set(_blocks(link))
            if missing := len(self.blocks - now):
                raise StoreError(f"{missing} of {len(self.blocks)} stored blocks are gone")
            for name in now - self.blocks:
                times, _, key = name.rpartition(b":")
                _ask(link, encode_command("UNLINK", name))
                _ask(link, encode_command("ZREM", times, bytes.fromhex(key.decode())))
            return len(now - self.blocks)
        finally:
            link.resp.close()

    def _connect(self) -> RedisLink:
        return connect(self._address, time.monotonic() + _DEADLINE_S)


def _blocks(link: RedisLink) -> Iterator[bytes]:
    cursor = b"0"
    while True:
        match _ask(link, encode_command("SCAN", cursor, "MATCH", _PREFIX + b"*", "COUNT", _COUNT)):
            case [bytes(cursor), list(names)]:
                for name in names:
                    if isinstance(name, bytes) and name.count(b":") == _KEY_PARTS - 1:
                        yield name
            case reply:
                raise StoreError(f"expected a cursor and keys, got {reply!r:.80}")
        if cursor == b"0":
            return


def _ask(link: RedisLink, command: bytes) -> Reply:
    deadline = time.monotonic() + _DEADLINE_S
    link.resp.send([command], deadline)
    return link.resp.receive(deadline)
