"""The Redis backend against a real server: the contract, and the server's own faults."""

from __future__ import annotations

import logging
import re
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import settings as hypothesis_settings
from hypothesis.stateful import run_state_machine_as_test
from redis_factory import RedisStoreFactory, needs_redis
from test_store_model import StoreMachine

from dualpath.base.errors import ConfigError, StoreError
from dualpath.base.ids import MiB
from dualpath.kv import (
    BlockIdentity,
    BufferPool,
    KVLayout,
    RowPart,
    block_chain,
    fingerprint,
    root_key,
)
from dualpath.store import (
    BlockRead,
    BlockResult,
    BlockWrite,
    ReadStatus,
    RedisAddress,
    RedisStore,
    WriteResult,
    open_store,
    redis_blocks,
)
from dualpath.store.redis_address import connect
from dualpath.store.redis_blocks import allocated_bytes
from dualpath.store.resp import encode_command
from dualpath.testing import RedisServer, Results, wait_until
from dualpath.testing.store_suite import StoreContractSuite, StoreFactory

pytestmark = needs_redis

LAYOUT = KVLayout("gqa", 2, 8, (RowPart("key", 1, 100), RowPart("value", 1, 100)), "float16", 2)
BIG = KVLayout("gqa", 16, 64, (RowPart("key", 8, 256), RowPart("value", 8, 256)), "float16", 2)
"""8 MiB a block: more than sockets hold."""
FP = fingerprint("model", "r1", LAYOUT)
LONG_S = 30.0


@pytest.fixture(scope="module")
def shared_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with RedisServer(tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture
def server(shared_server: RedisServer) -> RedisServer:
    """An empty one."""
    assert shared_server.command("FLUSHALL") == b"OK"
    return shared_server


class TestRedisStore(StoreContractSuite):
    @pytest.fixture
    def store_factory(self, server: RedisServer) -> StoreFactory:
        return RedisStoreFactory(server)


def test_against_a_dictionary(server: RedisServer) -> None:
    class RedisMachine(StoreMachine):
        def set_up(self) -> None:
            assert server.command("FLUSHALL") == b"OK"
            self.factory = RedisStoreFactory(server)

    run_state_machine_as_test(
        RedisMachine,
        settings=hypothesis_settings(max_examples=15, stateful_step_count=15),
    )


class Blocks:
    """A store and memory for it: one call a step."""

    def __init__(self, store: RedisStore, layout: KVLayout = LAYOUT, n_slots: int = 8) -> None:
        self.store = store
        self.layout = layout
        self.n_slots = n_slots
        self.pool = BufferPool(n_slots, layout.slot_bytes)

    def write(
        self, chain: Sequence[BlockIdentity], fill: int = 7, deadline_s: float = LONG_S
    ) -> list[WriteResult]:
        lease = self.pool.try_lease("writer", len(chain))
        assert lease is not None
        for index in range(len(chain)):
            lease.view(index)[:] = bytes([fill]) * self.layout.slot_bytes
        results = Results[WriteResult]()
        writes = [BlockWrite(each, lease.view(i), lease.hold()) for i, each in enumerate(chain)]
        self.store.write(writes, deadline_s=deadline_s, done=results)
        written = results.wait(len(chain))
        lease.release()
        return written

    def read(self, chain: Sequence[BlockIdentity], deadline_s: float = LONG_S) -> list[BlockResult]:
        lease = self.pool.try_lease("reader", len(chain))
        assert lease is not None
        results = Results[BlockResult]()
        reads = [BlockRead(each, lease.view(i), lease.hold()) for i, each in enumerate(chain)]
        self.store.read(reads, deadline_s=deadline_s, done=results)
        read = {result.key: result for result in results.wait(len(chain))}
        lease.release()
        return [read[each.key] for each in chain]

    def status(self, identity: BlockIdentity, deadline_s: float = LONG_S) -> ReadStatus:
        (result,) = self.read([identity], deadline_s)
        return result.status

    def close(self) -> None:
        self.store.close()
        wait_until(lambda: self.pool.n_free == self.n_slots, "slots are still held")
        self.pool.check()
        self.pool.close()


def chain_of(n_blocks: int, layout: KVLayout = LAYOUT) -> list[BlockIdentity]:
    size = layout.block_tokens
    return block_chain(root_key(FP, ""), range(size * n_blocks), size)


@pytest.fixture
def blocks(server: RedisServer) -> Iterator[Blocks]:
    blocks = Blocks(RedisStoreFactory(server).open(FP, LAYOUT))
    yield blocks
    blocks.close()


def name_of(identity: BlockIdentity) -> str:
    return RedisStoreFactory.name_of(FP, identity.key)


def test_address_opens_it(server: RedisServer) -> None:
    store = open_store(server.url + "?connections=1", FP, LAYOUT, model="m")
    assert isinstance(store, RedisStore)
    store.close()


def test_value_and_time_of_use_lie_where_the_docs_say(blocks: Blocks, server: RedisServer) -> None:
    (identity,) = chain = chain_of(1)
    before_s = time.time() - 1
    (written,) = blocks.write(chain)
    value = server.command("GET", name_of(identity))
    assert isinstance(value, bytes)
    assert value[4096:] == bytes([7]) * LAYOUT.full_block_bytes
    assert written.stored_bytes == allocated_bytes(len(value))
    assert server.command("PTTL", name_of(identity)) == -1
    score = server.command("ZSCORE", f"dualpath:{FP.hex()}", identity.key)
    assert isinstance(score, bytes)
    assert before_s < float(score) < time.time() + 1


def test_allocated_bytes_are_what_the_server_allocates(server: RedisServer) -> None:
    for size in (100, 5000, 12_000, 100_000, 1 * MiB, 4 * MiB + 4096, 7 * MiB):
        assert server.command("SET", "k", bytes(size)) == b"OK"
        used = server.command("MEMORY", "USAGE", "k")
        assert isinstance(used, int)
        assert 0 <= used - allocated_bytes(size) <= 128  # The entry of the key itself.


# The server goes, hangs, and comes back.


def test_killed_server_is_an_error_and_is_found_again(tmp_path: Path) -> None:
    chain = chain_of(4)
    with RedisServer(tmp_path, appendonly="yes", appendfsync="always") as server:
        blocks = Blocks(RedisStoreFactory(server).open(FP, LAYOUT))
        assert all(result.durable for result in blocks.write(chain))
        server.kill()
        started_s = time.monotonic()
        assert {result.status for result in blocks.read(chain)} == {ReadStatus.ERROR}
        (failed,) = blocks.write(chain[:1])
        assert not failed.durable
        assert "refused" in failed.detail
        with pytest.raises(StoreError, match="refused"):
            blocks.store.delete([chain[0].key])
        with pytest.raises(StoreError):
            list(blocks.store.scan())
        assert time.monotonic() - started_s < LONG_S / 2
        server.start()
        wait_until(
            lambda: blocks.status(chain[0]) is not ReadStatus.ERROR, "the server is not found again"
        )
        assert {result.status for result in blocks.read(chain)} == {ReadStatus.OK}
        assert len(list(blocks.store.scan())) == 4
        blocks.close()


def test_restarted_server_is_not_noticed_by_idle_connections(tmp_path: Path) -> None:
    """They are all dead; the first use finds out and connects again within the same operation."""
    chain = chain_of(2)
    with RedisServer(tmp_path, appendonly="yes", appendfsync="always") as server:
        blocks = Blocks(RedisStoreFactory(server).open(FP, LAYOUT))
        blocks.write(chain)
        server.kill()
        server.start()
        assert {result.status for result in blocks.read(chain)} == {ReadStatus.OK}
        assert all(result.durable for result in blocks.write(chain))
        blocks.close()


def test_server_without_persistence_forgets(tmp_path: Path) -> None:
    (identity,) = chain = chain_of(1)
    with RedisServer(tmp_path) as server:
        blocks = Blocks(RedisStoreFactory(server).open(FP, LAYOUT))
        blocks.write(chain)
        server.kill()
        server.start()
        assert blocks.status(identity) is ReadStatus.MISS
        blocks.close()


def test_hung_server_costs_the_deadline_in_every_call(server: RedisServer) -> None:
    """Blocks larger than sockets hold: reads and writes hang half-way through a value."""
    chain = chain_of(3, BIG)
    fp_store = RedisStoreFactory(server).open_with(FP, BIG, connections=2)
    blocks = Blocks(fp_store, BIG)
    assert all(result.durable for result in blocks.write(chain[:2]))
    server.pause()
    try:
        assert {r.status for r in blocks.read(chain[:2], 0.2)} == {ReadStatus.TIMEOUT}
        (failed,) = blocks.write(chain[2:], deadline_s=0.2)
        assert not failed.durable
        assert failed.stored_bytes == 0
        wait_until(lambda: blocks.pool.n_free == blocks.n_slots, "memory is still held")
    finally:
        server.resume()
    assert [r.status for r in blocks.read(chain)] == [ReadStatus.OK] * 2 + [ReadStatus.MISS]
    assert len(list(blocks.store.scan())) == 2
    blocks.close()


def test_close_does_not_wait_for_a_hung_server(server: RedisServer) -> None:
    blocks = Blocks(RedisStoreFactory(server).open(FP, LAYOUT))
    results = Results[BlockResult]()
    lease = blocks.pool.try_lease("reader", 1)
    assert lease is not None
    server.pause()
    try:
        read = BlockRead(chain_of(1)[0], lease.view(0), lease.hold())
        blocks.store.read([read], deadline_s=0.2, done=results)
        wait_until(lambda: blocks.store.stats.reads.queued == 0, "the read does not start")
        blocks.store.close()
    finally:
        server.resume()
    (result,) = results.wait(1)
    assert result.status is ReadStatus.TIMEOUT
    lease.release()
    blocks.close()


# Writes that were reported as failed.


def test_write_that_nobody_waits_for_is_undone(blocks: Blocks, server: RedisServer) -> None:
    (identity,) = chain_of(1)
    ticket = SimpleNamespace(
        deadline=time.monotonic() + LONG_S, abandoned=False, claim=lambda: False
    )
    payload = memoryview(bytes(LAYOUT.slot_bytes))
    result = blocks.store.blocks.write(identity, payload, ticket)
    assert not result.durable
    assert "too late" in result.detail
    assert server.command("DBSIZE") == 0


def test_write_whose_answer_is_lost_is_removed_before_the_next(
    blocks: Blocks, server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = chain_of(2)

    def lost(_: object) -> str | None:
        raise TimeoutError("lost")

    with monkeypatch.context() as patch:
        patch.setattr(redis_blocks, "why_not_written", lost)
        (result,) = blocks.write([first])
    assert not result.durable
    assert server.command("EXISTS", name_of(first)) == 1
    (result,) = blocks.write([second])
    assert result.durable
    assert server.command("EXISTS", name_of(first), name_of(second)) == 1
    assert [block.key for block in blocks.store.scan()] == [second.key]


def test_expiry_of_now_has_passed_for_the_server(server: RedisServer) -> None:
    """Also within the same millisecond: what was given up is not applied a moment later."""
    soon = time.monotonic() + LONG_S
    link = connect(RedisAddress.parse(server.url, {}), soon)
    applied = []
    for _ in range(300):
        commands = [
            encode_command("MULTI"),
            encode_command("SET", "k", "v", "PXAT", link.expiry_ms(time.monotonic())),
            encode_command("PERSIST", "k"),
            encode_command("EXEC"),
            encode_command("TIME"),
        ]
        link.resp.send(commands, soon)
        replies = [link.resp.receive(soon) for _ in range(4)]
        link.receive_time(soon)
        applied.append(replies[3])
    link.resp.close()
    assert applied == [[b"OK", 0]] * 300
    assert server.command("EXISTS", "k") == 0


def test_two_stores_write_the_same_blocks(server: RedisServer) -> None:
    chain = chain_of(4)
    factory = RedisStoreFactory(server)
    stores = [Blocks(factory.open(FP, LAYOUT)) for _ in range(2)]
    durable: list[bool] = []

    def write(blocks: Blocks, fill: int) -> None:
        for _ in range(10):
            durable.extend(result.durable for result in blocks.write(chain, fill))

    threads = [
        threading.Thread(target=write, args=(blocks, fill))
        for fill, blocks in enumerate(stores, start=1)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert durable == [True] * 80
    for blocks in stores:
        assert {result.status for result in blocks.read(chain)} == {ReadStatus.OK}
        blocks.close()


# The server refuses.


def test_full_server_refuses_writes_and_serves_reads(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    chain = chain_of(3, BIG)
    with RedisServer(tmp_path, maxmemory="24mb", maxmemory_policy="noeviction") as server:
        blocks = Blocks(RedisStoreFactory(server).open(FP, BIG), BIG)
        free_bytes = blocks.store.free_bytes()
        assert free_bytes is not None
        assert 15 * MiB < free_bytes < 24 * MiB
        results = [blocks.write([identity])[0] for identity in chain]
        durable = [identity for identity, r in zip(chain, results, strict=True) if r.durable]
        refused = [result for result in results if not result.durable]
        assert durable and refused
        assert all("maxmemory" in result.detail for result in refused)
        assert {result.status for result in blocks.read(durable)} == {ReadStatus.OK}
        assert {block.key for block in blocks.store.scan()} == {each.key for each in durable}
        assert server.command("CONFIG", "SET", "maxmemory", "1mb") == b"OK"
        with caplog.at_level(logging.WARNING):
            again = Blocks(RedisStoreFactory(server).open(FP, BIG), BIG)
        assert "reached its maxmemory" in caplog.text
        assert {result.status for result in again.read(durable)} == {ReadStatus.OK}
        again.close()
        blocks.close()


def test_without_a_limit_free_memory_is_unknown(blocks: Blocks) -> None:
    assert blocks.store.free_bytes() is None


def test_password(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    chain = chain_of(1)
    with RedisServer(tmp_path, requirepass="right-secret") as server:
        factory = RedisStoreFactory(server)
        with pytest.raises(ConfigError, match="set DUALPATH_REDIS_PASSWORD"):
            factory.open(FP, LAYOUT)
        with pytest.raises(ConfigError, match="check DUALPATH_REDIS_USERNAME") as raised:
            factory.open_with(FP, LAYOUT, password="wrong-secret")
        with caplog.at_level(logging.DEBUG):
            blocks = Blocks(factory.open_with(FP, LAYOUT, password="right-secret"))
            assert blocks.write(chain)[0].durable
            assert blocks.status(chain[0]) is ReadStatus.OK
        blocks.close()
    assert "secret" not in str(raised.value) + caplog.text


def test_user_without_the_right_to_write(server: RedisServer) -> None:
    user = ("ACL", "SETUSER", "reader", "on", ">pw", "~dualpath:*", "+@all", "-@write")
    assert server.command(*user) == b"OK"
    try:
        with pytest.raises(ConfigError, match="allow this user"):
            RedisStoreFactory(server).open_with(FP, LAYOUT, username="reader", password="pw")
    finally:
        server.command("ACL", "DELUSER", "reader")


def test_user_with_the_rights_that_the_docs_name_is_enough(server: RedisServer) -> None:
    text = (Path(__file__).parents[2] / "docs" / "store.md").read_text()
    match = re.search(r"`ACL SETUSER kv on >password (.+?)`", text)
    assert match is not None
    rights = match.group(1).split()
    user = ("ACL", "SETUSER", "kv", "on", ">password", *rights)
    assert server.command(*user) == b"OK"
    try:
        store = RedisStoreFactory(server).open_with(
            FP, LAYOUT, username="kv", password="password", db=1
        )
        blocks = Blocks(store)
        chain = chain_of(2)
        assert all(result.durable for result in blocks.write(chain))
        assert {result.status for result in blocks.read(chain)} == {ReadStatus.OK}
        assert len(list(store.scan())) == 2
        assert store.delete([chain[0].key]) > 0
        store.blocks.settle(time.monotonic() + LONG_S)
        store.blocks.forget_times(0, time.monotonic() + LONG_S)
        assert store.free_bytes() is None
        blocks.close()
    finally:
        server.command("ACL", "DELUSER", "kv")


def test_what_is_no_redis_server_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"cannot be used: opening: .*refused"):
        open_store("redis://127.0.0.1:1/0", FP, LAYOUT)


def test_tls(tmp_path: Path) -> None:
    if shutil.which("openssl") is None:
        pytest.skip("no openssl on PATH to make a certificate with")
    key, certificate = tmp_path / "key.pem", tmp_path / "cert.pem"
    subject = ("-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1")
    new = ("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", *subject)
    files = ("-keyout", str(key), "-out", str(certificate))
    subprocess.run([*new, *files], check=True, capture_output=True, timeout=60)
    tls_port = RedisServer(tmp_path).port
    chain = chain_of(1)
    settings = {"tls_cert_file": certificate, "tls_key_file": key, "tls_ca_cert_file": certificate}
    paths = {name: str(path) for name, path in settings.items()}
    with RedisServer(tmp_path, tls_port=str(tls_port), tls_auth_clients="no", **paths):
        address = f"rediss://localhost:{tls_port}/0"
        with pytest.raises(ConfigError, match="certificate"):
            open_store(address, FP, LAYOUT)
        store = open_store(f"{address}?ssl_ca_certs={certificate}", FP, BIG)
        assert isinstance(store, RedisStore)
        blocks = Blocks(store, BIG)
        assert blocks.write(chain)[0].durable
        assert blocks.status(chain[0]) is ReadStatus.OK
        assert len(list(store.scan())) == 1
        blocks.close()


# Values that are not blocks.


def test_values_of_another_kind_or_size_are_corrupt(blocks: Blocks, server: RedisServer) -> None:
    chain = chain_of(4)
    blocks.write(chain)
    assert server.command("DEL", name_of(chain[0])) == 1
    assert server.command("RPUSH", name_of(chain[0]), "a list") == 1
    assert server.command("SET", name_of(chain[1]), bytes(30 * MiB)) == b"OK"
    assert server.command("SET", name_of(chain[2]), "") == b"OK"
    results = blocks.read(chain)
    assert [result.status for result in results] == [ReadStatus.CORRUPT] * 3 + [ReadStatus.OK]
    assert all(name_of(each) in r.detail for each, r in zip(chain[:3], results, strict=False))
    assert "expected" in results[1].detail and str(30 * MiB) in results[1].detail
    assert [block.key for block in blocks.store.scan()] == [chain[3].key]
    assert server.command("EXISTS", *map(name_of, chain)) == 1


def test_other_keys_are_left_alone(blocks: Blocks, server: RedisServer) -> None:
    blocks.write(chain_of(1))
    others = [f"dualpath:{FP.hex()}:not-hex", f"dualpath:{FP.hex()}:{'z' * 64}", "user:1"]
    for other in others:
        server.command("SET", other, "theirs")
    assert len(list(blocks.store.scan())) == 1
    assert server.command("EXISTS", *others) == 3


# Scanning, and times of use.


def test_scan_of_ten_thousand_blocks(blocks: Blocks) -> None:
    chain = chain_of(10_000)
    for start in range(0, len(chain), 8):
        assert all(result.durable for result in blocks.write(chain[start : start + 8]))
    found = {block.key: block.parent for block in blocks.store.scan()}
    assert found == {each.key: each.parent for each in chain}


def test_reading_renews_the_time_of_use(server: RedisServer) -> None:
    (identity,) = chain = chain_of(1)
    factory = RedisStoreFactory(server)
    blocks = Blocks(factory.open(FP, LAYOUT))
    blocks.write(chain)
    times = f"dualpath:{FP.hex()}"
    server.command("ZADD", times, 1000, identity.key)
    assert [block.used_s for block in blocks.store.scan()] == [1000.0]
    before_s = time.time() - 1
    assert blocks.status(identity) is ReadStatus.OK
    blocks.close()  # Saves what has not been sent yet.
    again = Blocks(factory.open(FP, LAYOUT))
    (block,) = again.store.scan()
    assert before_s < block.used_s < time.time() + 1
    again.close()


def test_what_the_server_evicted_is_forgotten(blocks: Blocks, server: RedisServer) -> None:
    chain = chain_of(6)
    blocks.write(chain)
    server.command("DEL", name_of(chain[2]), name_of(chain[4]))
    assert blocks.status(chain[2]) is ReadStatus.MISS
    assert len(list(blocks.store.scan())) == 4
    assert server.command("ZCARD", f"dualpath:{FP.hex()}") == 4


def test_block_without_a_time_of_use_is_the_first_to_go(
    blocks: Blocks, server: RedisServer
) -> None:
    blocks.write(chain_of(1))
    server.command("DEL", f"dualpath:{FP.hex()}")
    assert [block.used_s for block in blocks.store.scan()] == [0.0]
