"""Mutual authentication of two endpoints over a fresh socket, before any frame of theirs counts.

    dialling side                                        accepting side
    Hello(engine, peer, life, nonce, traffic)   --->
                                                <---     Challenge(life, geometry, nonce, mac)
    Proof(mac)                                  --->

Both MACs are HMAC-SHA256 under the shared secret over everything said so far and the role of who
made it, so neither can be replayed or reflected. Each side counts the connection as made when it
has checked the other's MAC. It proves who speaks when a connection opens; it does not encrypt.
Messages before the proof are small, typed, and bounded by one deadline.
"""

from __future__ import annotations

import hmac
import secrets
import socket
import struct
import time
from dataclasses import dataclass
from typing import Annotated, TypeVar

import msgspec

from dualpath.base.errors import DeadlineExceeded, PeerLost
from dualpath.base.ids import EngineId, KiB
from dualpath.base.traffic_class import TrafficClass
from dualpath.kv.pool import PoolGeometry

__all__ = [
    "Challenge",
    "Dialled",
    "Hello",
    "Life",
    "Proof",
    "Refusal",
    "answer_hello",
    "await_hello",
    "await_proof",
    "dial_hello",
    "receive_greeting",
    "send_greeting",
    "send_proof",
]

_PROTOCOL = 2
_MAX_GREETING_BYTES = 4 * KiB
_LENGTH = struct.Struct("<I")
_NONCE_BYTES = 32

_Name = Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
_Nonce = Annotated[bytes, msgspec.Meta(min_length=_NONCE_BYTES, max_length=_NONCE_BYTES)]


class Life(msgspec.Struct, frozen=True, array_like=True):
    """One unbroken relation of an endpoint to a peer.

    `incarnation` is new with every endpoint; `epoch` grows whenever it gave this peer up. So either
    side sees that the other restarted, or dropped and forgot it.
    """

    incarnation: Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]
    epoch: int


class Hello(msgspec.Struct, frozen=True, array_like=True, tag="hello"):
    """`peer` is whom the dialling side wants to reach; `traffic`, what the connection is for."""

    protocol: int
    engine: _Name
    peer: _Name
    life: Life
    nonce: _Nonce
    traffic: TrafficClass


class Challenge(msgspec.Struct, frozen=True, array_like=True, tag="challenge"):
    life: Life
    geometry: PoolGeometry
    nonce: _Nonce
    mac: bytes


class Refusal(msgspec.Struct, frozen=True, array_like=True, tag="refusal"):
    reason: str


class Proof(msgspec.Struct, frozen=True, array_like=True, tag="proof"):
    mac: bytes


@dataclass(frozen=True, slots=True)
class Dialled:
    """What the dialling side learnt, and the proof it still has to send to be counted."""

    life: Life
    geometry: PoolGeometry
    mac: bytes


def dial_hello(
    sock: socket.socket,
    engine: EngineId,
    peer: EngineId,
    life: Life,
    secret: bytes,
    deadline_s: float,
    traffic: TrafficClass = TrafficClass.CONTROL,
) -> Dialled:
    """Greet the accepting side and check its MAC. Raises PeerLost or DeadlineExceeded.

    The other side counts the connection as made only after `send_proof`.
    """
    nonce = secrets.token_bytes(_NONCE_BYTES)
    hello = Hello(
        protocol=_PROTOCOL, engine=engine, peer=peer, life=life, nonce=nonce, traffic=traffic
    )
    send_greeting(sock, hello, deadline_s)
    challenge = receive_greeting(sock, _challenge_decoder, deadline_s)
    if isinstance(challenge, Refusal):
        raise PeerLost(f"{peer} refused the connection: {challenge.reason}")
    expected = _mac(secret, "accepting", hello, challenge.life, challenge.geometry, challenge.nonce)
    if not hmac.compare_digest(challenge.mac, expected):
        raise PeerLost(f"{peer} could not prove that it knows the shared secret")
    mac = _mac(secret, "dialling", hello, challenge.life, challenge.geometry, challenge.nonce)
    return Dialled(life=challenge.life, geometry=challenge.geometry, mac=mac)


def send_proof(sock: socket.socket, dialled: Dialled, deadline_s: float) -> None:
    """Show our MAC. Raises PeerLost or DeadlineExceeded."""
    send_greeting(sock, Proof(mac=dialled.mac), deadline_s)


def await_hello(sock: socket.socket, engine: EngineId, deadline_s: float) -> Hello:
    """The dialling side's greeting, refused when it means another engine. Raises PeerLost."""
    hello = receive_greeting(sock, _hello_decoder, deadline_s)
    reason = None
    if hello.protocol != _PROTOCOL:
        reason = f"protocol {hello.protocol} is not {_PROTOCOL}: run one version on all engines"
    elif hello.peer != engine:
        reason = f"this is {engine}, not {hello.peer}"
    if reason is not None:
        send_greeting(sock, Refusal(reason=reason), deadline_s)
        raise PeerLost(f"refused {hello.engine}: {reason}")
    return hello


def answer_hello(
    sock: socket.socket,
    hello: Hello,
    life: Life,
    geometry: PoolGeometry,
    secret: bytes,
    deadline_s: float,
) -> bytes:
    """Prove knowledge of the secret; returns the MAC that the other side has to show."""
    nonce = secrets.token_bytes(_NONCE_BYTES)
    mac = _mac(secret, "accepting", hello, life, geometry, nonce)
    send_greeting(sock, Challenge(life=life, geometry=geometry, nonce=nonce, mac=mac), deadline_s)
    return _mac(secret, "dialling", hello, life, geometry, nonce)


def await_proof(sock: socket.socket, expected: bytes, deadline_s: float) -> None:
    """Check the dialling side's MAC. Raises PeerLost."""
    proof = receive_greeting(sock, _proof_decoder, deadline_s)
    if not hmac.compare_digest(proof.mac, expected):
        raise PeerLost("it could not prove that it knows the shared secret")


_hello_decoder = msgspec.msgpack.Decoder(Hello)
_challenge_decoder = msgspec.msgpack.Decoder(Challenge | Refusal)
_proof_decoder = msgspec.msgpack.Decoder(Proof)

_Greeting = TypeVar("_Greeting")


def _mac(
    secret: bytes, role: str, hello: Hello, life: Life, geometry: PoolGeometry, nonce: bytes
) -> bytes:
    said = msgspec.msgpack.encode((role, hello, life, geometry, nonce))
    # HMAC itself takes an empty key; then anyone passes, which only loopback endpoints allow.
    return hmac.digest(secret, said, "sha256")


def send_greeting(sock: socket.socket, greeting: msgspec.Struct, deadline_s: float) -> None:
    """Send one message before any frame. Raises PeerLost or DeadlineExceeded."""
    body = msgspec.msgpack.encode(greeting)
    _arm(sock, deadline_s)
    try:
        sock.sendall(_LENGTH.pack(len(body)) + body)
    except TimeoutError:
        raise DeadlineExceeded("no room to send a greeting in time") from None
    except OSError as error:
        raise PeerLost(f"the connection broke while greeting: {error}") from None


def receive_greeting(
    sock: socket.socket,
    decoder: msgspec.msgpack.Decoder[_Greeting],
    deadline_s: float,
    *,
    max_bytes: int = _MAX_GREETING_BYTES,
) -> _Greeting:
    """What `send_greeting` sends, and no byte more. Raises PeerLost or DeadlineExceeded."""
    (size,) = _LENGTH.unpack(_receive_exactly(sock, _LENGTH.size, deadline_s))
    if size > max_bytes:
        raise PeerLost(f"a greeting of {size} bytes: not a dualpath endpoint")
    body = _receive_exactly(sock, size, deadline_s)
    try:
        return decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise PeerLost(f"a malformed greeting: {error}") from None


def _receive_exactly(sock: socket.socket, size: int, deadline_s: float) -> bytes:
    """Never takes more from the socket than asked: what follows belongs to someone else."""
    received = bytearray()
    while len(received) < size:
        _arm(sock, deadline_s)
        try:
            part = sock.recv(size - len(received))
        except TimeoutError:
            raise DeadlineExceeded("no greeting in time") from None
        except OSError as error:
            raise PeerLost(f"the connection broke while greeting: {error}") from None
        if not part:
            raise PeerLost("the connection was closed while greeting")
        received += part
    return bytes(received)


def _arm(sock: socket.socket, deadline_s: float) -> None:
    left_s = deadline_s - time.monotonic()
    if left_s <= 0:
        raise DeadlineExceeded("no greeting in time")
    sock.settimeout(left_s)
