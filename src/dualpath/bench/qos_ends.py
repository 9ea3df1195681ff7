"""The ends of `dualpath bench qos`: processes in the nodes of a testbed, steered over standard input.

Each obeys one JSON command a line, the first one a `Start`, and answers each with one line; it ends with its
standard input. In the high class "ping" is the near end, "echo" the far one, which also streams; of KV "pull"
is the near end, "own" the far one. Knows no testbed and no figures. Times are of `time.monotonic`, which all
processes of a machine share.

Ends of the high class run at real-time priority where the system allows it: on a fabric no core that is busy
with KV delays a collective, and what is measured is the network. All settings have the same.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing, suppress

import msgspec

from dualpath.base.ids import EngineId, KiB, MiB, RequestId
from dualpath.base.socket_marks import mark_socket
from dualpath.base.traffic_class import DEFAULT_PLAN, TrafficClass
from dualpath.kv.pool import BufferPool
from dualpath.transfer import (
    Channel,
    Endpoint,
    EndpointEvents,
    Patience,
    RemoteSpan,
    TransferName,
    open_endpoint,
)
from dualpath.transfer.endpoint import SocketEndpoint
from dualpath.transfer.tcp import TcpTransport

__all__ = [
    "MESSAGE_BYTES",
    "Command",
    "EchoGreeting",
    "OwnerGreeting",
    "Ping",
    "PingRun",
    "Pull",
    "PullRun",
    "Start",
    "StartEcho",
    "StartOwner",
    "StartPing",
    "StartPull",
    "Stop",
    "Stream",
    "StreamRun",
]

MESSAGE_BYTES = 64 * KiB
_POOL_SLOTS = 16
_SLOT_BYTES = 1 * MiB
_PULLS_OUT = 8
_OWNER = EngineId("owner")
_SECRET = bytes(range(32))
_DEADLINE_S = 60.0
_PATIENCE_S = 20.0
_PULL = TransferName(RequestId("bench-qos"), 1, 0)


class EchoGreeting(msgspec.Struct, frozen=True):
    """`real_time`: whether the system let this end run at real-time priority."""

    port: int
    real_time: bool


class OwnerGreeting(msgspec.Struct, frozen=True):
    """Addresses of two endpoints: KV in its own class, and KV in the high one."""

    low_address: str
    high_address: str
    stamp: int
    slots: list[int]


class StartEcho(msgspec.Struct, frozen=True, tag="echo"):
    """Answered with `EchoGreeting`. `host`: address to listen on."""

    host: str


class StartPing(msgspec.Struct, frozen=True, tag="ping"):
    """Answered with null, as is `StartPull`. `host`: where the far end is."""

    host: str
    echo: EchoGreeting


class StartOwner(msgspec.Struct, frozen=True, tag="own"):
    """Answered with `OwnerGreeting`. `host`: address to listen on."""

    host: str


class StartPull(msgspec.Struct, frozen=True, tag="pull"):
    owner: OwnerGreeting


class Ping(msgspec.Struct, frozen=True, tag="pings"):
    """Send a message and wait for its echo, every `interval_s` or as soon as the last one is back."""

    seconds: float
    interval_s: float


class PingRun(msgspec.Struct, frozen=True):
    from_s: float
    to_s: float
    round_trips_us: list[float]

    @property
    def total_bytes(self) -> int:
        """Sent each way."""
        return len(self.round_trips_us) * MESSAGE_BYTES


class Stream(msgspec.Struct, frozen=True, tag="stream"):
    """Receive in the high class as fast as it goes."""

    warm_up_s: float
    seconds: float


class StreamRun(msgspec.Struct, frozen=True):
    from_s: float
    to_s: float
    received_bytes: int


class Pull(msgspec.Struct, frozen=True, tag="pulls"):
    """Pull one after another, several at once, until `Stop`. Answered when the first one is done."""

    high: bool
    span_bytes: int


class Stop(msgspec.Struct, frozen=True, tag="stop"):
    """Pull no more. Answered when the last one is done."""


class PullRun(msgspec.Struct, frozen=True):
    """When each pull of `span_bytes` was done."""

    span_bytes: int
    done_s: list[float]

    @property
    def total_bytes(self) -> int:
        return len(self.done_s) * self.span_bytes


Start = StartEcho | StartPing | StartOwner | StartPull
Command = Ping | Stream | Pull | Stop


class _UnsortedTransport(TcpTransport):
    """TCP without traffic classes: all it sends is in that of model execution."""

    def mark(self, sock: socket.socket, traffic: TrafficClass) -> None:
        super().mark(sock, TrafficClass.EXECUTION)


def _endpoints(engine: EngineId, pool: BufferPool, host: str, stack: ExitStack) -> list[Endpoint]:
    """KV in its own class, and KV in the high one."""
    events = EndpointEvents(lambda peer, message: None, lambda peer, reason: None)
    patience = Patience(peer_timeout_s=_PATIENCE_S)
    own = open_endpoint("tcp", engine, pool, _SECRET, events, host=host, patience=patience)
    stack.enter_context(closing(own))
    transport = _UnsortedTransport(_SECRET, patience, host=host)
    unsorted = SocketEndpoint(engine, pool, _SECRET, events, [transport], patience=patience)
    stack.enter_context(closing(unsorted))
    return [own, unsorted]


def _serve_owner(start: StartOwner, stack: ExitStack) -> None:
    _precede_other_programs()
    pool = stack.enter_context(closing(BufferPool(_POOL_SLOTS, _SLOT_BYTES, name="bench-qos-far")))
    lease = pool.try_lease("bench", _POOL_SLOTS)
    assert lease is not None
    for slot in lease.slots:
        pool.view(slot)[:] = b"\1" * _SLOT_BYTES  # Real pages, not the kernel's one of zeros.
    low, high = _endpoints(_OWNER, pool, start.host, stack)
    _say(OwnerGreeting(low.address, high.address, lease.stamp, list(lease.slots)))
    sys.stdin.read()


def _serve_echo(start: StartEcho, stack: ExitStack) -> None:
    real_time = _become_real_time()
    listener = stack.enter_context(socket.create_server((start.host, 0)))
    # Accepted sockets inherit the marks, so the handshake's packets have them too.
    mark_socket(listener, DEFAULT_PLAN.marks(TrafficClass.EXECUTION))
    threading.Thread(target=_accept, args=(listener,), daemon=True).start()
    _say(EchoGreeting(listener.getsockname()[1], real_time))
    sys.stdin.read()


def _accept(listener: socket.socket) -> None:
    while True:
        try:
            sock, _ = listener.accept()
        except OSError:  # The process ends.
            return
        threading.Thread(target=_serve_high, args=(sock,), daemon=True).start()


def _serve_high(sock: socket.socket) -> None:
    """The first byte says what the peer wants, "e"cho or "s"tream."""
    buffer = bytearray(MESSAGE_BYTES)
    with sock, suppress(OSError):
        _prepare(sock)
        wanted = sock.recv(1)
        if wanted == b"s":
            while True:
                sock.sendall(buffer)
        while wanted == b"e" and _receive(sock, buffer):
            sock.sendall(buffer)


def _serve_ping(start: StartPing, stack: ExitStack) -> None:
    _become_real_time()
    place = (start.host, start.echo.port)
    echo = stack.enter_context(_connect(place, b"e"))
    _say(None)
    for command in _commands():
        match command:
            case Ping():
                _say(_ping(echo, command))
            case Stream():
                _say(_stream(place, command))
            case _:
                raise RuntimeError(f"not for this end: {command}")


def _ping(sock: socket.socket, command: Ping) -> PingRun:
    message = bytearray(MESSAGE_BYTES)
    round_trips_us = []
    from_s = now_s = time.monotonic()
    next_s = from_s
    while now_s < from_s + command.seconds:
        started = time.perf_counter()
        sock.sendall(message)
        if not _receive(sock, message):
            raise RuntimeError("the far end is gone")
        round_trips_us.append((time.perf_counter() - started) * 1e6)
        next_s = max(next_s + command.interval_s, time.monotonic())
        time.sleep(max(0.0, next_s - time.monotonic()))
        now_s = time.monotonic()
    return PingRun(from_s, now_s, round_trips_us)


def _stream(place: tuple[str, int], command: Stream) -> StreamRun:
    buffer = bytearray(1 * MiB)
    received = 0
    from_s: float | None = None
    with _connect(place, b"s") as sock:
        begun_s = time.monotonic()
        while True:
            count = sock.recv_into(buffer)
            if not count:
                raise RuntimeError("the far end is gone")
            now_s = time.monotonic()
            if from_s is None:
                from_s = now_s if now_s >= begun_s + command.warm_up_s else None
                continue
            received += count
            if now_s >= from_s + command.seconds:
                return StreamRun(from_s, now_s, received)


def _serve_pull(start: StartPull, stack: ExitStack) -> None:
    _precede_other_programs()
    owner = start.owner
    pool = stack.enter_context(closing(BufferPool(_PULLS_OUT, _SLOT_BYTES, name="bench-qos-near")))
    endpoints = _endpoints(EngineId("puller"), pool, "127.0.0.1", stack)
    addresses = (owner.low_address, owner.high_address)
    low, high = (
        endpoint.connect(address, _OWNER, deadline_s=_DEADLINE_S)
        for endpoint, address in zip(endpoints, addresses, strict=True)
    )
    _say(None)
    commands = _commands()
    for command in commands:
        if not isinstance(command, Pull):
            raise RuntimeError(f"not for this end: {command}")
        _say(_pull_until_stopped(high if command.high else low, owner, pool, command, commands))


def _pull_until_stopped(
    channel: Channel,
    owner: OwnerGreeting,
    pool: BufferPool,
    command: Pull,
    commands: Iterator[Command],
) -> PullRun:
    pulls = _Pulls(channel, owner, pool, command.span_bytes)
    with ThreadPoolExecutor(1) as executor:
        running = executor.submit(pulls.run)
        try:
            pulls.flowing.wait(_DEADLINE_S)
            _say(None)
            if not isinstance(next(commands, None), Stop):
                raise RuntimeError("expected to be stopped")
        finally:
            pulls.stopped.set()
        running.result()
    return PullRun(command.span_bytes, pulls.done_s)


class _Pulls:
    """Keeps `_PULLS_OUT` pulls under way until `stopped`, each into a slot of its own."""

    def __init__(
        self, channel: Channel, owner: OwnerGreeting, pool: BufferPool, span_bytes: int
    ) -> None:
        self.done_s: list[float] = []
        self.flowing = threading.Event()
        self.stopped = threading.Event()
        self._channel = channel
        self._owner = owner
        self._pool = pool
        self._span_bytes = span_bytes

    def run(self) -> None:
        try:
            out = deque((slot, self._pull(slot)) for slot in range(_PULLS_OUT))
            while out:
                slot, pulled = out.popleft()
                pulled.result(_DEADLINE_S)
                self.done_s.append(time.monotonic())
                self.flowing.set()
                if not self.stopped.is_set():
                    out.append((slot, self._pull(slot)))
        finally:
            self.flowing.set()

    def _pull(self, slot: int) -> Future[int]:
        span = RemoteSpan(self._owner.slots[slot], 0, self._span_bytes)
        into = self._pool.view(slot)[: self._span_bytes]
        return self._channel.pull(_PULL, self._owner.stamp, [span], [into], deadline_s=_DEADLINE_S)


def _become_real_time() -> bool:
    """Before any thread starts: they inherit it."""
    try:
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    except OSError:
        return False
    return True


def _precede_other_programs() -> None:
    """So that the rate of KV depends less on what else the machine does."""
    with suppress(OSError):
        os.nice(-10)


def _connect(place: tuple[str, int], wanted: bytes) -> socket.socket:
    sock = socket.socket()
    try:
        mark_socket(sock, DEFAULT_PLAN.marks(TrafficClass.EXECUTION))
        _prepare(sock)
        sock.connect(place)
        sock.sendall(wanted)
    except BaseException:
        sock.close()
        raise
    return sock


def _prepare(sock: socket.socket) -> None:
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.settimeout(_DEADLINE_S)


def _receive(sock: socket.socket, into: bytearray) -> bool:
    """Fill `into`; False when the peer closed."""
    view = memoryview(into)
    while view:
        count = sock.recv_into(view)
        if not count:
            return False
        view = view[count:]
    return True


def _commands() -> Iterator[Command]:
    for line in sys.stdin.buffer:
        yield msgspec.json.decode(line, type=Command)


def _say(answer: msgspec.Struct | None) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(answer) + b"\n")
    sys.stdout.buffer.flush()


def main() -> None:
    start = msgspec.json.decode(sys.stdin.buffer.readline(), type=Start)
    with ExitStack() as stack:
        match start:
            case StartEcho():
                _serve_echo(start, stack)
            case StartPing():
                _serve_ping(start, stack)
            case StartOwner():
                _serve_owner(start, stack)
            case StartPull():
                _serve_pull(start, stack)


if __name__ == "__main__":
    main()
