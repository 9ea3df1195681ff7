"""The control plane: msgspec over ZeroMQ, authenticated and encrypted with CURVE.

The frontend binds one ROUTER socket; each engine connects one DEALER. Keys are made for every run of the
cluster and reach the engines through their standard input, never through arguments or environment.
A peer without the cluster's key pair cannot complete the handshake.
"""

from __future__ import annotations

import os
import select
import threading
from collections import deque
from collections.abc import AsyncIterator
from typing import Generic, TypeVar

import msgspec
import zmq
import zmq.asyncio
from zmq.auth.asyncio import AsyncioAuthenticator

from dualpath.base.errors import ConfigError, InvariantViolation
from dualpath.base.ids import EngineId
from dualpath.serve.messages import FromEngine, ToEngine

__all__ = ["ControlKeys", "ControlServer", "EngineControl", "Inbox"]

_MAX_MESSAGE_BYTES = 64 * 1024 * 1024
_HIGH_WATER_MESSAGES = 100_000

T = TypeVar("T")


class ControlKeys(msgspec.Struct, frozen=True):
    """CURVE key pairs (Z85 text) of the server and of the engines, all engines sharing one."""

    server_public: str
    server_secret: str
    engine_public: str
    engine_secret: str

    @classmethod
    def generate(cls) -> ControlKeys:
        server_public, server_secret = zmq.curve_keypair()
        engine_public, engine_secret = zmq.curve_keypair()
        return cls(
            server_public.decode(),
            server_secret.decode(),
            engine_public.decode(),
            engine_secret.decode(),
        )

    def for_engine(self) -> ControlKeys:
        """Without the server's secret, which no engine needs."""
        return msgspec.structs.replace(self, server_secret="")


class ControlServer:
    """The frontend's end, on an address of this machine that engines reach. Use from one asyncio loop.

    Raises ConfigError when it cannot listen there.
    """

    def __init__(self, keys: ControlKeys, host: str = "127.0.0.1") -> None:
        self._context = zmq.asyncio.Context()
        self._auth = AsyncioAuthenticator(self._context)
        self._auth.start()
        self._auth.configure_curve_callback(
            domain="*", credentials_provider=_OneKey(keys.engine_public)
        )
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.curve_server = True
        self._socket.curve_secretkey = keys.server_secret.encode()
        self._socket.curve_publickey = keys.server_public.encode()
        self._socket.linger = 0
        self._socket.maxmsgsize = _MAX_MESSAGE_BYTES
        self._socket.sndhwm = self._socket.rcvhwm = _HIGH_WATER_MESSAGES
        try:
            port = self._socket.bind_to_random_port(f"tcp://{host}")
        except zmq.ZMQError as error:
            self.close()
            raise ConfigError(
                f"the control plane cannot listen on {host} ({error}): it takes one of this machine's "
                "addresses"
            ) from None
        self.address = f"tcp://{host}:{port}"
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(FromEngine)

    async def messages(self) -> AsyncIterator[tuple[EngineId, FromEngine]]:
        """Every message of every engine, in order for one engine."""
        while True:
            sender, body = await self._socket.recv_multipart()
            yield EngineId(sender.decode()), self._decoder.decode(body)

    def send(self, engine: EngineId, message: ToEngine) -> None:
        """Queue a message; one for an engine that is gone is dropped, its loss is an event."""
        frames = [engine.encode(), self._encoder.encode(message)]
        self._socket.send_multipart(frames, flags=zmq.DONTWAIT)

    def close(self) -> None:
        self._auth.stop()
        self._socket.close(0)
        self._context.term()


class _OneKey:
    """Accepts the engines' key only."""

    def __init__(self, public_key: str) -> None:
        self._public_key = public_key.encode()

    def callback(self, domain: str, key: bytes) -> bool:
        return (
            zmq.utils.z85.encode(key) == self._public_key
            if len(key) == 32
            else key == self._public_key
        )


class Inbox(Generic[T]):
    """Things for an actor's thread, from any thread; wakes a poll through an eventfd."""

    def __init__(self) -> None:
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._items: deque[T] = deque()
        self._lock = threading.Lock()
        self._closed = False

    def put(self, item: T) -> None:
        with self._lock:
            if self._closed:
                return
            self._items.append(item)
            os.eventfd_write(self.fd, 1)

    def take(self) -> list[T]:
        with self._lock:
            try:
                os.eventfd_read(self.fd)
            except BlockingIOError:
                pass
            items = list(self._items)
            self._items.clear()
            return items

    def close(self) -> None:
        with self._lock:
            self._closed = True
            os.close(self.fd)


class EngineControl:
    """An engine's end. `wait` and `send` belong to one thread, the actor's."""

    def __init__(self, address: str, keys: ControlKeys, engine: EngineId) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.curve_serverkey = keys.server_public.encode()
        self._socket.curve_publickey = keys.engine_public.encode()
        self._socket.curve_secretkey = keys.engine_secret.encode()
        self._socket.identity = engine.encode()
        self._socket.linger = 1000
        self._socket.sndhwm = self._socket.rcvhwm = _HIGH_WATER_MESSAGES
        self._socket.maxmsgsize = _MAX_MESSAGE_BYTES
        self._socket.connect(address)
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(ToEngine)
        self._poller = select.poll()
        self._poller.register(self._socket.fileno(), select.POLLIN)

    def watch(self, fd: int) -> None:
        """`wait` also returns when this descriptor becomes readable."""
        self._poller.register(fd, select.POLLIN)

    def wait(self, timeout_s: float) -> list[ToEngine]:
        """Messages that have come, in order; empty after the timeout or a watched descriptor."""
        messages = self._drain()
        if not messages:
            self._poller.poll(timeout_s * 1000)
            messages = self._drain()
        return messages

    def send(self, message: FromEngine) -> None:
        try:
            self._socket.send(self._encoder.encode(message), flags=zmq.DONTWAIT)
        except zmq.Again:
            raise InvariantViolation("the frontend has stopped taking messages") from None

    def close(self) -> None:
        self._socket.close()
        self._context.term()

    def _drain(self) -> list[ToEngine]:
        messages: list[ToEngine] = []
        while True:
            try:
                messages.append(self._decoder.decode(self._socket.recv(flags=zmq.NOBLOCK)))
            except zmq.Again:
                return messages
