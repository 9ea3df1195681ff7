"""Addresses of Redis servers: what they mean, and what they never show."""

from __future__ import annotations

import socket
import time

import pytest
from redis_factory import needs_redis

from dualpath.base.errors import ConfigError
from dualpath.store import RedisAddress, printable_address
from dualpath.store.redis_address import TlsFiles, connect
from dualpath.store.redis_connections import RedisConnections
from dualpath.testing import RedisServer

ENVIRONMENT = {"DUALPATH_REDIS_USERNAME": "anna", "DUALPATH_REDIS_PASSWORD": "hidden"}


@pytest.mark.parametrize(
    ("text", "host", "port", "db", "printed"),
    [
        ("redis://kv", "kv", 6379, 0, "redis://kv:6379/0"),
        ("redis://kv:7000/3", "kv", 7000, 3, "redis://kv:7000/3"),
        ("REDIS://[::1]:7000", "::1", 7000, 0, "redis://[::1]:7000/0"),
        ("rediss://u:hidden@kv/1", "kv", 6379, 1, "rediss://kv:6379/1"),
    ],
)
def test_forms(text: str, host: str, port: int, db: int, printed: str) -> None:
    address = RedisAddress.parse(text, {})
    assert (address.host, address.port, address.db) == (host, port, db)
    assert str(address) == printed
    assert "hidden" not in repr(address) + printable_address(text)


def test_options() -> None:
    address = RedisAddress.parse(
        "rediss://kv?connections=8&dscp=12&so_priority=1&ssl_ca_certs=/a%20b&ssl_keyfile=/k", {}
    )
    assert address.connections == 8
    assert (address.marks.dscp, address.marks.so_priority) == (12, 1)
    assert address.tls == TlsFiles(ca_certs="/a b", certfile=None, keyfile="/k")


def test_user_and_password_of_the_url_come_before_those_of_the_environment() -> None:
    address = RedisAddress.parse("redis://kv", ENVIRONMENT)
    assert (address.username, address.password) == ("anna", "hidden")
    address = RedisAddress.parse("redis://b%2Fob:p%40ss@kv", ENVIRONMENT)
    assert (address.username, address.password) == ("b/ob", "p@ss")
    address = RedisAddress.parse("redis://:only@kv", {})
    assert (address.username, address.password) == (None, "only")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("redis:", "write redis://host:port/db"),
        ("redis:///0", "write redis://host:port/db"),
        ("redis://kv:port", "write redis://host:port/db"),
        ("redis://[::1", "write redis://host:port/db"),
        ("redis://u:hid/den@kv:1/0", "write %2F"),
        ("redis://:12/hidden@kv", "write %2F"),
        ("redis://u:hid?den@kv", "write %2F"),
        ("redis://u:hid#den@kv", "write %2F"),
        ("redis://u:hidden@kv/x", "expected db from 0 to 65535, got 'x'"),
        ("redis://u:hidden@kv?connections=0", "expected connections from 1 to 64, got '0'"),
        ("redis://kv?dscp=64", "expected dscp from 0 to 63"),
        ("redis://kv?colour=red", "no option colour; there are connections, dscp, so_priority"),
        ("redis://kv?ssl_ca_certs=/a", "no option ssl_ca_certs"),
    ],
)
def test_what_cannot_be_meant_is_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as raised:
        RedisAddress.parse(text, {})
    for part in ("hidden", "hid/", "den@"):
        assert part not in str(raised.value)


@needs_redis
def test_connections_carry_their_marks(tmp_path_factory: pytest.TempPathFactory) -> None:
    with RedisServer(tmp_path_factory.mktemp("redis")) as server:
        link = connect(
            RedisAddress.parse(server.url + "?dscp=12&so_priority=3"), time.monotonic() + 20
        )
        marked = link.resp._socket
        assert marked.getsockopt(socket.IPPROTO_IP, socket.IP_TOS) == 12 << 2
        assert marked.getsockopt(socket.SOL_SOCKET, socket.SO_PRIORITY) == 3
        link.resp.close()


def test_refused_connection_is_not_tried_again_at_once() -> None:
    with socket.socket() as taken:  # Bound and not listening: refused, and nobody else gets it.
        taken.bind(("127.0.0.1", 0))
        connections = RedisConnections(RedisAddress("127.0.0.1", taken.getsockname()[1]))
        soon = time.monotonic() + 20
        with pytest.raises(ConnectionRefusedError):
            connections.use(lambda _: None, soon)
        with pytest.raises(ConnectionError, match=r"refused; tried again in 0\.. s"):
            connections.use(lambda _: None, soon)
        connections.close()
