"""The other end of `dualpath bench transfer`: a process that owns a filled pool and serves pulls.

It opens one endpoint of each kind asked for, prints where they are, and ends with its standard input.
"""

from __future__ import annotations

import sys
from contextlib import ExitStack, closing
from typing import get_args

import msgspec
import numpy as np

from dualpath.base.ids import EngineId
from dualpath.kv.pool import BufferPool
from dualpath.transfer import EndpointEvents, EndpointKind, open_endpoint

__all__ = ["OWNER", "SECRET", "OwnerGreeting", "fill_value"]

OWNER = EngineId("owner")
SECRET = bytes(range(32))


class OwnerGreeting(msgspec.Struct, frozen=True):
    """`addresses` by kind; `slots` in the order of the lease."""

    addresses: dict[str, str]
    stamp: int
    slots: list[int]


def fill_value(slot: int) -> int:
    """The byte that slot is full of: tells slots apart, and is never 0."""
    return 1 + slot % 255


def main(kinds: list[EndpointKind], n_slots: int, slot_bytes: int, connections: int) -> None:
    """Serve until standard input ends."""
    events = EndpointEvents(lambda peer, message: None, lambda peer, reason: None)
    with ExitStack() as stack:
        pool = stack.enter_context(closing(BufferPool(n_slots, slot_bytes, name="bench-owner")))
        lease = pool.try_lease("bench", n_slots)
        assert lease is not None
        for slot in lease.slots:
            np.frombuffer(pool.view(slot), dtype=np.uint8)[:] = fill_value(slot)
        addresses: dict[str, str] = {}
        for kind in kinds:
            endpoint = open_endpoint(kind, OWNER, pool, SECRET, events, connections=connections)
            stack.enter_context(closing(endpoint))
            addresses[kind] = endpoint.address
        greeting = OwnerGreeting(addresses, lease.stamp, list(lease.slots))
        print(msgspec.json.encode(greeting).decode(), flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    known = get_args(EndpointKind)
    main(
        [kind for kind in known if kind in sys.argv[1].split(",")],
        int(sys.argv[2]),
        int(sys.argv[3]),
        int(sys.argv[4]),
    )
