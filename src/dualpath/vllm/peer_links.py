"""Channels to the KV endpoints of other servers: dialled on threads of their own, found again, given up.

Whoever asks for a channel is called back when it stands, or with what went wrong, on the agent's thread:
`post` gets the callback. It knows no messages. Invariant: every callback comes exactly once, by the
dialling deadline."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from dualpath.base.errors import TransferError
from dualpath.base.ids import EngineId
from dualpath.transfer import Channel, Endpoint, port_address
from dualpath.vllm.params import KvPeer
from dualpath.vllm.settings import TransferKind

__all__ = ["PeerLinks", "engine_of", "peer_of"]

_DIAL_S = 5.0
_DIALLERS = 4


def engine_of(peer: KvPeer) -> EngineId:
    """How an endpoint names itself in greetings."""
    return EngineId(str(peer))


def peer_of(engine: EngineId) -> KvPeer:
    """Where an engine of that name listens. Raises ValueError for a name that `engine_of` never gives."""
    host, _, port = engine.rpartition(":")
    return KvPeer(host, int(port))


class PeerLinks:
    """Of one endpoint, which stays the caller's. All methods but `close` are the agent's thread's."""

    def __init__(
        self,
        endpoint: Endpoint,
        kind: TransferKind,
        notify: Callable[[Channel, bytes], None],
        post: Callable[[Callable[[], None]], None],
    ) -> None:
        self._endpoint = endpoint
        self._kind = kind
        self._notify = notify
        self._post = post
        self._channels: dict[KvPeer, Channel] = {}
        self._waiting: dict[KvPeer, list[Callable[[Channel | TransferError], None]]] = {}
        self._diallers = ThreadPoolExecutor(_DIALLERS, thread_name_prefix="dualpath-dial")

    def reach(self, peer: KvPeer, then: Callable[[Channel | TransferError], None]) -> None:
        """Call `then` with the channel to `peer`: at once when there is one."""
        channel = self._channels.get(peer)
        if channel is not None:
            then(channel)
            return
        waiting = self._waiting.setdefault(peer, [])
        waiting.append(then)
        if len(waiting) == 1:
            dialled = self._diallers.submit(self._dial, peer)
            dialled.add_done_callback(lambda done: self._post(lambda: self._dialled(peer, done)))

    def send(self, peer: KvPeer, message: bytes, failed: Callable[[TransferError], None]) -> None:
        """Send it when there is a channel; `failed` is called when there is none, or it breaks."""

        def reached(channel: Channel | TransferError) -> None:
            try:
                if isinstance(channel, TransferError):
                    raise channel
                self._notify(channel, message)
            except TransferError as error:
                failed(error)

        self.reach(peer, reached)

    def lost(self, engine: EngineId) -> None:
        """A life of this engine ended: the next `reach` dials anew."""
        for peer in [each for each in self._channels if engine_of(each) == engine]:
            del self._channels[peer]

    def close(self) -> None:
        """Start no more; those under way end by their deadline. Idempotent."""
        self._diallers.shutdown(wait=False, cancel_futures=True)

    def _dial(self, peer: KvPeer) -> Channel:
        return self._endpoint.connect(
            port_address(self._kind, peer.host, peer.port), engine_of(peer), deadline_s=_DIAL_S
        )

    def _dialled(self, peer: KvPeer, done: Future[Channel]) -> None:
        result: Channel | TransferError
        try:
            result = done.result()
            self._channels[peer] = result
        except TransferError as error:
            result = error
        for then in self._waiting.pop(peer, []):
            then(result)
