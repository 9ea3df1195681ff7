"""The peers of an engine: channels opened on first use, messages kept in order.

Belongs to the actor of one engine process; knows channels and peer messages, no request states.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress

import msgspec

from dualpath.base.errors import PeerLost
from dualpath.base.ids import EngineId
from dualpath.serve.messages import PeerMessage, encode_peer_message
from dualpath.transfer.contract import Channel, Endpoint, EndpointEvents

__all__ = ["PeerLinks"]

_CONNECT_DEADLINE_S = 5.0
_CONNECT_THREADS = 4
"""A peer that hangs must not keep others from being connected."""

Use = Callable[[Channel | None], None]


class PeerLinks:
    """Channels to the engines of the other role.

    `post` runs a callable on the actor. `on_message` and `on_lost` run there too. `notify` sends a message
    on a channel.
    """

    def __init__(
        self,
        open_endpoint: Callable[[EndpointEvents], Endpoint],
        *,
        notify: Callable[[Channel, bytes], None],
        post: Callable[[Callable[[], None]], None],
        on_message: Callable[[EngineId, PeerMessage], None],
        on_lost: Callable[[EngineId, str], None],
    ) -> None:
        self._notify = notify
        self._post = post
        self._on_message = on_message
        self._on_lost = on_lost
        self._connecting = ThreadPoolExecutor(_CONNECT_THREADS, thread_name_prefix="peer-connect")
        self._channels: dict[EngineId, Channel] = {}
        self._waiting: dict[EngineId, deque[Use]] = {}
        self._decoder: msgspec.msgpack.Decoder[PeerMessage] = msgspec.msgpack.Decoder(PeerMessage)
        self.endpoint = open_endpoint(EndpointEvents(self._notified, self._peer_lost))

    def send(self, peer: EngineId, address: str, message: PeerMessage) -> None:
        """In order for one peer. A peer that is lost is reported by `on_lost`, not here."""
        body = encode_peer_message(message)

        def deliver(channel: Channel | None) -> None:
            if channel is None:
                return
            # The loss of the peer is an event of its own.
            with suppress(PeerLost):
                self._notify(channel, body)

        self.with_channel(peer, address, deliver)

    def with_channel(self, peer: EngineId, address: str, use: Use) -> None:
        """Calls `use` with the channel, now or once it is open; with None when the peer is lost.

        Uses of one peer run in the order of the calls.
        """
        channel = self._channels.get(peer)
        if channel is not None:
            use(channel)
        elif peer in self._waiting:
            self._waiting[peer].append(use)
        else:
            self._waiting[peer] = deque([use])
            future = self._connecting.submit(
                self.endpoint.connect, address, peer, deadline_s=_CONNECT_DEADLINE_S
            )
            future.add_done_callback(lambda done: self._post(lambda: self._connected(peer, done)))

    def close(self) -> None:
        self._connecting.shutdown(wait=False, cancel_futures=True)
        self.endpoint.close()

    def _connected(self, peer: EngineId, done: Future[Channel]) -> None:
        waiting = self._waiting.pop(peer, deque())
        if done.cancelled():
            return
        error = done.exception()
        channel = None if error is not None else done.result()
        if channel is not None:
            self._channels[peer] = channel
        for use in waiting:
            use(channel)
        if error is not None:
            self._lost(peer, f"cannot connect to {peer}: {error}")

    def _lost(self, peer: EngineId, reason: str) -> None:
        self._channels.pop(peer, None)
        self._on_lost(peer, reason)

    def _notified(self, peer: EngineId, body: bytes) -> None:
        message = self._decoder.decode(body)
        self._post(lambda: self._on_message(peer, message))

    def _peer_lost(self, peer: EngineId, reason: str) -> None:
        self._post(lambda: self._lost(peer, reason))
