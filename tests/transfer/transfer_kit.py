"""Engines for the tests of single transports."""

from __future__ import annotations

import json
import socket
from dataclasses import dataclass, field

from dualpath.base.ids import EngineId, RequestId
from dualpath.kv import BufferPool
from dualpath.testing import Results
from dualpath.testing.channel_peer import pattern
from dualpath.transfer import Endpoint, EndpointEvents, RemoteSpan, TransferName
from dualpath.transfer.spans import pack_spans, span_array

SECRET = bytes(range(16))
NAME = TransferName(RequestId("r"), 1, 0)
LATER_S = 30.0


@dataclass
class Heard:
    messages: Results[bytes] = field(default_factory=Results)
    losses: Results[str] = field(default_factory=Results)

    @property
    def events(self) -> EndpointEvents:
        return EndpointEvents(
            lambda peer, message: self.messages(message), lambda peer, reason: self.losses(reason)
        )


def packed(spans: list[RemoteSpan]) -> bytes:
    """As a request carries them."""
    return pack_spans(span_array(spans))


def filled_pool(n_slots: int, slot_bytes: int, seed: int) -> tuple[BufferPool, int]:
    """A pool, all leased, its slots in lease order filled by `pattern(seed + i)`; and the stamp."""
    pool = BufferPool(n_slots, slot_bytes)
    lease = pool.try_lease("test", n_slots)
    assert lease is not None
    for index in range(n_slots):
        lease.view(index)[:] = pattern(seed + index, slot_bytes)
    return pool, lease.stamp


def pull_slot(endpoint: Endpoint, owner: Endpoint, name: str, stamp: int, slot: int) -> bytes:
    """The whole slot, over a new or existing channel."""
    channel = endpoint.connect(owner.address, EngineId(name), deadline_s=LATER_S)
    size = owner._pool.geometry.slot_bytes  # type: ignore[attr-defined]
    into = bytearray(size)
    spans = [RemoteSpan(slot, 0, size)]
    channel.pull(NAME, stamp, spans, [memoryview(into)], deadline_s=LATER_S).result(LATER_S)
    return bytes(into)


def location(endpoint: Endpoint, kind: str) -> str:
    return str(json.loads(endpoint.address)["locations"][kind])


def dial_raw(endpoint: Endpoint) -> socket.socket:
    """A socket to the endpoint's TCP port, that knows nothing of the protocol."""
    host, _, port = location(endpoint, "tcp").rpartition(":")
    return socket.create_connection((host, int(port)), LATER_S)
