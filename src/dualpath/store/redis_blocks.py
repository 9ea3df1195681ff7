"""Blocks on a Redis server: one thread's blocking I/O on one block at a time.

    dualpath:<fingerprint>:<block key>   a whole block: header page (`block_file`), then the payload
    dualpath:<fingerprint>               sorted set: block key -> time of last use, seconds since the epoch

The block's own key is the truth; the sorted set only keeps the order of eviction.

A write is one transaction: SET with an expiry at the deadline, by the server's clock, then PERSIST. Done in
time, the block stays; done late, by a server that had hung, PERSIST finds it expired. So a write that
was given up never appears later. What was cut off while its answer was under way is *in doubt*, and is
removed before the next write.

It starts no threads: `RedisStore` calls it from its I/O lanes, any number of threads at once. What
goes wrong with one block is a result; the other calls raise OSError and StoreError.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

from dualpath.base.errors import StoreError
from dualpath.base.ids import BlockKey
from dualpath.kv.chain import BlockIdentity, Fingerprint
from dualpath.kv.layout import KVLayout
from dualpath.store.block_file import (
    HEADER_BYTES,
    BlockHeader,
    Mismatch,
    find_mismatch,
    header_page,
    prove_header,
)
from dualpath.store.contract import BlockResult, ReadStatus, StoredBlock, WriteResult
from dualpath.store.io_lane import Ticket
from dualpath.store.redis_address import RedisLink
from dualpath.store.redis_connections import RedisConnections
from dualpath.store.redis_replies import (
    count_of,
    info_of,
    reason_of,
    refusal,
    unexpected,
    why_not_written,
)
from dualpath.store.resp import ErrorReply, Reply, encode_command

__all__ = ["RedisBlocks", "ScanPage", "allocated_bytes"]

_ANSWER_S = 0.01
"""An operation is cut off so long before its deadline: then its own answer comes first, and says more."""
_SCAN_COUNT = 256
_MOST_IN_DOUBT = 4096
_MOST_TOUCHED = 1024
_UNDO_S = 1.0
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ScanPage:
    """A part of a scan; `cursor` starts the next, 0 ends it. Keys may come more than once."""

    cursor: int
    blocks: list[StoredBlock]


def allocated_bytes(value_bytes: int) -> int:
    """Memory that a value takes: jemalloc, which Redis is built with, rounds up to quarter powers of two."""
    size = value_bytes + 18  # The string's own header and terminator.
    step = max(16, 1 << max(0, (size - 1).bit_length() - 3))
    return -(-size // step) * step


class RedisBlocks:
    """The blocks of one fingerprint. Thread-safe. Owns the connections."""

    def __init__(
        self,
        connections: RedisConnections,
        fingerprint: Fingerprint,
        layout: KVLayout,
        *,
        touch_interval_s: float = 10.0,
    ) -> None:
        self._connections = connections
        self._fingerprint = fingerprint
        self._payload_bytes = layout.full_block_bytes
        self._value_bytes = HEADER_BYTES + layout.full_block_bytes
        self.stored_bytes = allocated_bytes(self._value_bytes)
        self._times = f"dualpath:{fingerprint.hex()}".encode()
        self._prefix = self._times + b":"
        self._touch_interval_s = touch_interval_s
        self._scratch = threading.local()
        self._lock = threading.Lock()
        self._in_doubt: dict[BlockKey, None] = {}
        self._touched: dict[BlockKey, float] = {}
        self._next_touch = 0.0

    def name_of(self, key: BlockKey) -> bytes:
        """The Redis key of a block."""
        return self._prefix + key.hex().encode()

    def prepare(self, connections: int, deadline: float) -> None:
        """Connect, prove that blocks can be written, and tell what the server's settings mean."""
        self._connections.open(connections, deadline)
        probe = self._times + b":probe"
        replies = self._ask(
            [
                encode_command("MULTI"),
                encode_command("SET", probe, "1", "PXAT", int(time.time() * 1000) + 60_000),
                encode_command("PERSIST", probe),
                encode_command("UNLINK", probe),
                encode_command("EXEC"),
                encode_command("INFO", "persistence"),
            ],
            deadline,
        )
        refused = next((each for each in replies[:5] if isinstance(each, ErrorReply)), None)
        if refused is not None and refused.code == "OOM":
            _log.warning("%s: %s; stored blocks are read", self._where, refusal(refused))
        elif refused is not None:
            raise StoreError(f"{self._where}: {refusal(refused)}")
        if info_of(replies[5]).get("aof_enabled") == "0":
            _log.info("%s has no append-only file: a restart there loses blocks", self._where)

    def read(self, identity: BlockIdentity, into: memoryview, ticket: Ticket) -> BlockResult:
        """Fill `into` and prove that it is the block."""
        deadline = ticket.deadline - _ANSWER_S
        key = identity.key
        head = self._head()
        body = into[: self._payload_bytes]
        touches = self._due_touches()

        def get(link: RedisLink) -> int | ErrorReply | None:
            link.resp.send([*touches, encode_command("GET", self.name_of(key))], deadline)
            for _ in touches:
                link.resp.receive(deadline)  # One that may not write goes without.
            got = link.resp.receive_into(head, body, deadline)
            if isinstance(got, int) and got != self._value_bytes:
                raise _WrongSize(got)
            return got

        try:
            got = self._connections.use(get, deadline)
        except _WrongSize as wrong:
            mismatch = Mismatch("value bytes", str(self._value_bytes), str(wrong.size))
            return BlockResult(key, ReadStatus.CORRUPT, f"{self._about(key)}: {mismatch}")
        except TimeoutError:
            return BlockResult(key, ReadStatus.TIMEOUT, f"{self._about(key)}: no answer in time")
        except (OSError, StoreError) as error:
            return BlockResult(key, ReadStatus.ERROR, f"{self._about(key)}: {reason_of(error)}")
        if got is None:
            return BlockResult(key, ReadStatus.MISS)
        if isinstance(got, ErrorReply):
            status = ReadStatus.CORRUPT if got.code == "WRONGTYPE" else ReadStatus.ERROR
            return BlockResult(key, status, f"{self._about(key)}: {refusal(got)}")
        found = find_mismatch(
            head,
            into,
            fingerprint=self._fingerprint,
            identity=identity,
            payload_bytes=self._payload_bytes,
        )
        if found is not None:
            return BlockResult(key, ReadStatus.CORRUPT, f"{self._about(key)}: {found}")
        self._touch(key)
        return BlockResult(key, ReadStatus.OK)

    def write(self, identity: BlockIdentity, payload: memoryview, ticket: Ticket) -> WriteResult:
        """Store the block, or leave nothing. Durable is what the server acknowledged."""
        deadline = ticket.deadline - _ANSWER_S
        key = identity.key
        body = payload[: self._payload_bytes]
        page = header_page(self._fingerprint, identity, body)

        def put(link: RedisLink) -> str | None:
            self._settle(link, deadline)
            command = self._write_command(link, key, page, body, deadline)
            try:
                link.resp.send(command, deadline)
                refused = why_not_written([link.resp.receive(deadline) for _ in range(5)])
                link.receive_time(deadline)
            except BaseException:
                self._doubt(key)
                raise
            if ticket.claim():
                return refused
            self._doubt(key)
            self._settle(link, time.monotonic() + _UNDO_S)
            return "too late"

        detail: str | None
        try:
            detail = self._connections.use(put, deadline)
        except TimeoutError:
            detail = "no answer in time"
        except (OSError, StoreError) as error:
            detail = reason_of(error)
        if detail is None:
            return WriteResult(key, durable=True, stored_bytes=self.stored_bytes)
        return WriteResult(
            key, durable=False, stored_bytes=0, detail=f"{self._about(key)}: {detail}"
        )

    def delete(self, keys: Sequence[BlockKey], deadline: float) -> int:
        """Remove blocks; returns their bytes, which the server frees soon after."""
        if not keys:
            return 0
        replies = self._ask(self._delete_commands(keys), deadline)
        return count_of(replies[0]) * self.stored_bytes

    def scan(self, cursor: int, deadline: float) -> ScanPage:
        """Whole blocks from `cursor` (0 at first) on; values that are none are removed."""
        match = self._prefix + b"*"
        (reply,) = self._ask(
            [encode_command("SCAN", cursor, "MATCH", match, "COUNT", _SCAN_COUNT)], deadline
        )
        match reply:
            case [bytes(following), list(names)]:
                keys = [key for name in names if (key := self._key_of(name)) is not None]
                return ScanPage(int(following), self._examine(keys, deadline) if keys else [])
        raise StoreError(f"{self._where}: {unexpected('a cursor and keys', reply)}")

    def n_times(self, deadline: float) -> int:
        """How many blocks have a time of last use."""
        (reply,) = self._ask([encode_command("ZCARD", self._times)], deadline)
        return count_of(reply)

    def forget_times(self, cursor: int, deadline: float) -> int:
        """Drop times of blocks that the server evicted, from `cursor` on; returns the next, 0 at the end."""
        (reply,) = self._ask(
            [encode_command("ZSCAN", self._times, cursor, "COUNT", _SCAN_COUNT)], deadline
        )
        match reply:
            case [bytes(following), list(pairs)]:
                members = [BlockKey(each) for each in pairs[::2] if isinstance(each, bytes)]
            case _:
                raise StoreError(f"{self._where}: {unexpected('a cursor and times', reply)}")
        exist = self._ask(
            [encode_command("EXISTS", self.name_of(key)) for key in members], deadline
        )
        gone = [key for key, there in zip(members, exist, strict=True) if there == 0]
        if gone:
            self._ask([encode_command("ZREM", self._times, *gone)], deadline)
        return int(following)

    def free_bytes(self, deadline: float) -> int | None:
        """What is left of `maxmemory`; None when there is no such limit."""
        (reply,) = self._ask([encode_command("INFO", "memory")], deadline)
        memory = info_of(reply)
        most, used = memory.get("maxmemory", ""), memory.get("used_memory", "")
        if not (most.isdigit() and used.isdigit() and int(most)):
            return None
        return max(0, int(most) - int(used))

    def settle(self, deadline: float) -> None:
        """Remove what is in doubt, and save the times of use."""
        if not self._in_doubt and not self._touched:
            return

        def work(link: RedisLink) -> None:
            self._settle(link, deadline)
            touches = self._due_touches(at_once=True)
            link.resp.send(touches, deadline)
            for _ in touches:
                link.resp.receive(deadline)

        self._connections.use(work, deadline)

    def close(self, deadline: float) -> None:
        """Save what can be saved by then, and close the connections. Idempotent."""
        try:
            self.settle(deadline)
        except (OSError, StoreError) as error:
            _log.warning("%s: times of use are lost: %s", self._where, reason_of(error))
            self._touched, self._in_doubt = {}, {}
        self._connections.close()

    @property
    def _where(self) -> str:
        return f"store {self._connections.address}"

    def _about(self, key: BlockKey) -> str:
        return f"{self._connections.address} {self.name_of(key).decode()}"

    def _head(self) -> memoryview:
        """A header page for each thread."""
        head: memoryview | None = getattr(self._scratch, "head", None)
        if head is None:
            head = self._scratch.head = memoryview(bytearray(HEADER_BYTES))
        return head

    def _ask(self, commands: Sequence[bytes], deadline: float) -> list[Reply]:
        """Pipelined; one reply for each."""

        def work(link: RedisLink) -> list[Reply]:
            link.resp.send([b"".join(commands)], deadline)
            return [link.resp.receive(deadline) for _ in commands]

        return self._connections.use(work, deadline) if commands else []

    def _write_command(
        self, link: RedisLink, key: BlockKey, page: bytes, body: memoryview, deadline: float
    ) -> list[bytes | memoryview]:
        name = self.name_of(key)
        start = encode_command("MULTI") + b"*5\r\n$3\r\nSET\r\n$%d\r\n%b\r\n$%d\r\n%b" % (
            len(name),
            name,
            self._value_bytes,
            page,
        )
        expires = str(link.expiry_ms(deadline)).encode()
        end = b"\r\n$4\r\nPXAT\r\n$%d\r\n%b\r\n" % (len(expires), expires)
        end += encode_command("PERSIST", name)
        end += encode_command("ZADD", self._times, f"{time.time():.3f}", key)
        return [start, body, end + encode_command("EXEC") + encode_command("TIME")]

    def _delete_commands(self, keys: Sequence[BlockKey]) -> list[bytes]:
        return [
            encode_command("UNLINK", *map(self.name_of, keys)),
            encode_command("ZREM", self._times, *keys),
        ]

    def _doubt(self, key: BlockKey) -> None:
        with self._lock:
            full = len(self._in_doubt) >= _MOST_IN_DOUBT
            if not full:
                self._in_doubt[key] = None
        if full:
            _log.warning("%s may be stored, unaccounted until the next start", self._about(key))

    def _settle(self, link: RedisLink, deadline: float) -> None:
        with self._lock:
            keys, self._in_doubt = list(self._in_doubt), {}
        if not keys:
            return
        try:
            link.resp.send(self._delete_commands(keys), deadline)
            for _ in range(2):
                link.resp.receive(deadline)
        except BaseException:
            with self._lock:
                self._in_doubt.update(dict.fromkeys(keys))
            raise

    def _touch(self, key: BlockKey) -> None:
        with self._lock:
            if len(self._touched) < _MOST_TOUCHED:
                self._touched[key] = time.time()

    def _due_touches(self, *, at_once: bool = False) -> list[bytes]:
        """Times of use that wait for being saved: one command now and then, not one a read."""
        now = time.monotonic()
        with self._lock:
            full = len(self._touched) >= _MOST_TOUCHED
            if not self._touched or not (at_once or full or now >= self._next_touch):
                return []
            self._next_touch = now + self._touch_interval_s
            touched, self._touched = self._touched, {}
        words: list[bytes | str] = []
        for key, used_s in touched.items():
            words += [f"{used_s:.3f}", key]
        return [encode_command("ZADD", self._times, "XX", "GT", *words)]

    def _key_of(self, name: Reply) -> BlockKey | None:
        if not isinstance(name, bytes) or len(name) != len(self._prefix) + 64:
            return None
        try:
            return BlockKey(bytes.fromhex(name[len(self._prefix) :].decode()))
        except ValueError:
            return None

    def _examine(self, keys: Sequence[BlockKey], deadline: float) -> list[StoredBlock]:
        commands = [encode_command("ZMSCORE", self._times, *keys)]
        for key in keys:
            commands.append(encode_command("STRLEN", self.name_of(key)))
            commands.append(encode_command("GETRANGE", self.name_of(key), 0, HEADER_BYTES - 1))
        scores, *replies = self._ask(commands, deadline)
        if not isinstance(scores, list):
            raise StoreError(f"{self._where}: {unexpected('times of use', scores)}")
        found: list[StoredBlock] = []
        broken: list[BlockKey] = []
        parts = zip(keys, scores, replies[::2], replies[1::2], strict=True)
        for key, score, size, page in parts:
            if size == 0:  # Empty, or deleted since.
                broken.append(key)
                continue
            header = self._prove(key, size, page)
            if isinstance(header, BlockHeader):
                # Without a time it is the first to go.
                used_s = float(score) if isinstance(score, bytes) else 0.0
                found.append(StoredBlock(key, header.identity.parent, self.stored_bytes, used_s))
                continue
            _log.warning("removing broken block %s: %s", self._about(key), header)
            broken.append(key)
        if broken:
            self.delete(broken, deadline)
        return found

    def _prove(self, key: BlockKey, size: Reply, page: Reply) -> BlockHeader | Mismatch:
        if size != self._value_bytes or not isinstance(page, bytes):
            got = refusal(size) if isinstance(size, ErrorReply) else str(size)
            return Mismatch("value bytes", str(self._value_bytes), got)
        return prove_header(
            page, fingerprint=self._fingerprint, key=key, payload_bytes=self._payload_bytes
        )


class _WrongSize(Exception):
    """A value that is not the size of a block; it has not been received."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.size = size
