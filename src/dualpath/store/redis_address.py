"""Where a Redis server is, who we are to it, and how its connections are made and marked.

    redis://[user[:password]@]host[:port][/db][?connections=4&dscp=10&so_priority=2]
    rediss://...     TLS, and the further options ssl_ca_certs, ssl_certfile, ssl_keyfile: files in PEM

User and password are better given as DUALPATH_REDIS_USERNAME and DUALPATH_REDIS_PASSWORD: an argument can
be seen by every user of the machine. They are in no text that this makes. It knows no commands beyond
those of a greeting.
"""

from __future__ import annotations

import os
import socket
import ssl
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

from dualpath.base.errors import ConfigError, StoreError
from dualpath.base.socket_marks import mark_socket
from dualpath.base.traffic_class import DEFAULT_PLAN, ClassMarks, TrafficClass
from dualpath.store.redis_replies import refusal
from dualpath.store.resp import ErrorReply, RespConnection, encode_command

__all__ = ["RedisAddress", "RedisLink", "TlsFiles", "connect"]

_DEFAULT_PORT = 6379
_MARKS = DEFAULT_PLAN.marks(TrafficClass.STORAGE)
_MOST_CONNECTIONS = 64
_NUMBERS = ("connections", "dscp", "so_priority")
_FILES = ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile")


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """Paths in PEM. Without `ca_certs` the system's authorities are trusted."""

    ca_certs: str | None = None
    certfile: str | None = None
    keyfile: str | None = None


@dataclass(frozen=True, slots=True)
class RedisAddress:
    """`str()` has no user and no password. `connections` read; half as many, but one, write."""

    host: str
    port: int = _DEFAULT_PORT
    db: int = 0
    username: str | None = field(default=None, repr=False)
    password: str | None = field(default=None, repr=False)
    tls: TlsFiles | None = None
    connections: int = 4
    marks: ClassMarks = _MARKS

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"redis{'s' if self.tls else ''}://{host}:{self.port}/{self.db}"

    @classmethod
    def parse(cls, text: str, environ: Mapping[str, str] = os.environ) -> RedisAddress:
        """Raises ConfigError that says what is wrong, without what might be secret."""
        scheme = text.partition(":")[0].lower()
        try:
            url = urlsplit(text)
            host, port = url.hostname, url.port or _DEFAULT_PORT
        except ValueError:
            host = None
        # What follows a stray "/", "?" or "#" of a password must not be taken for anything else, or shown.
        if not host or url.fragment or "@" in url.path + url.query:
            raise ConfigError(
                f"store {scheme}://...: write {scheme}://host:port/db; "
                f"in a user or password, write %2F for / and so on"
            )
        secure = scheme == "rediss"
        address = cls(
            host,
            port,
            username=_secret(url.username, environ.get("DUALPATH_REDIS_USERNAME")),
            password=_secret(url.password, environ.get("DUALPATH_REDIS_PASSWORD")),
            tls=TlsFiles() if secure else None,
        )
        address = replace(address, db=_number(address, "db", url.path.strip("/") or "0", 0, 65535))
        return _with_options(address, url)


def _secret(in_url: str | None, in_environment: str | None) -> str | None:
    return unquote(in_url) if in_url else in_environment or None


def _number(address: RedisAddress, name: str, text: str, least: int, most: int) -> int:
    if not (text.isascii() and text.isdigit() and least <= int(text) <= most):
        raise ConfigError(f"store {address}: expected {name} from {least} to {most}, got {text!r}")
    return int(text)


def _with_options(address: RedisAddress, url: SplitResult) -> RedisAddress:
    known = (*_NUMBERS, *(_FILES if address.tls else ()))
    options = dict(parse_qsl(url.query, keep_blank_values=True))
    for name in options:
        if name not in known:
            raise ConfigError(f"store {address}: no option {name}; there are {', '.join(known)}")
    limits = {"connections": (1, _MOST_CONNECTIONS), "dscp": (0, 63), "so_priority": (0, 6)}
    numbers = {
        name: _number(address, name, options[name], *limits[name])
        for name in _NUMBERS
        if name in options
    }
    marks = address.marks
    return replace(
        address,
        connections=numbers.get("connections", address.connections),
        marks=replace(
            marks,
            dscp=numbers.get("dscp", marks.dscp),
            so_priority=numbers.get("so_priority", marks.so_priority),
        ),
        tls=TlsFiles(*(options.get(name) for name in _FILES)) if address.tls else None,
    )


class RedisLink:
    """A connection whose greeting is done, and what the server's clock says."""

    def __init__(self, resp: RespConnection, address: RedisAddress) -> None:
        self.resp = resp
        self._address = address
        self._clock_ahead_s = 0.0

    def receive_time(self, deadline: float) -> None:
        """Receive the reply to TIME. Now and then, so that neither drift nor a set clock lasts."""
        now = self.resp.receive(deadline)
        match now:
            case [bytes(seconds), bytes(micros)]:
                self._clock_ahead_s = int(seconds) + int(micros) / 1e6 - time.monotonic()
            case ErrorReply():
                raise StoreError(f"{self._address}: {refusal(now)}")
            case _:
                raise StoreError(f"{self._address}: expected the time, got {now!r:.80}")

    def expiry_ms(self, at: float) -> int:
        """The expiry that has passed when `time.monotonic` is `at`, however soon the server looks.

        Too early rather than too late, by the way of a reply; and Redis lets a value live through the
        millisecond of its expiry.
        """
        return int((at + self._clock_ahead_s) * 1000) - 1


def connect(address: RedisAddress, deadline: float) -> RedisLink:
    """Connect, authenticate, choose the database, read the clock. Raises OSError and StoreError."""
    link = RedisLink(RespConnection(_open_socket(address, deadline)), address)
    try:
        _greet(link, address, deadline)
    except BaseException:
        link.resp.close()
        raise
    return link


def _open_socket(address: RedisAddress, deadline: float) -> socket.socket:
    found = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
    failed: OSError = ConnectionError(f"{address.host} has no address")
    for family, kind, protocol, _, target in found:
        raw = socket.socket(family, kind, protocol)
        try:
            mark_socket(raw, address.marks)
            raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            raw.settimeout(max(0.001, deadline - time.monotonic()))
            raw.connect(target)
            return raw if address.tls is None else _secured(raw, address, address.tls)
        except OSError as error:
            raw.close()
            failed = error
    raise failed


def _secured(raw: socket.socket, address: RedisAddress, files: TlsFiles) -> ssl.SSLSocket:
    context = ssl.create_default_context(cafile=files.ca_certs)
    if files.certfile is not None:
        context.load_cert_chain(files.certfile, files.keyfile)
    return context.wrap_socket(raw, server_hostname=address.host)


def _greet(link: RedisLink, address: RedisAddress, deadline: float) -> None:
    commands: list[bytes] = []
    if address.password is not None:
        user = () if address.username is None else (address.username,)
        commands.append(encode_command("AUTH", *user, address.password))
    if address.db:
        commands.append(encode_command("SELECT", address.db))
    link.resp.send([*commands, encode_command("TIME")], deadline)
    for _ in commands:
        reply = link.resp.receive(deadline)
        if isinstance(reply, ErrorReply):
            raise StoreError(f"{address}: {refusal(reply)}")
    link.receive_time(deadline)
