"""What an agent answers when another server speaks to it. All of it runs on the agent's thread.

It knows no sockets, and no vLLM. A peer that runs another model or layout is given nothing.
"""

from __future__ import annotations

import logging
import time

from dualpath.base.errors import PeerLost
from dualpath.base.ids import EngineId
from dualpath.kv import block_chain, root_key
from dualpath.vllm.agent_parts import AgentParts
from dualpath.vllm.agent_stats import AgentStats
from dualpath.vllm.held_prompts import HeldPrompts, Offer
from dualpath.vllm.params import KvPeer
from dualpath.vllm.peer_links import peer_of
from dualpath.vllm.peer_messages import (
    FetchPrompt,
    PromptOffer,
    PromptReceived,
    ReadForPeer,
    ReadForPeerDone,
    decode_message,
)
from dualpath.vllm.stager import Stager
from dualpath.vllm.staging import Staging

__all__ = ["PeerAnswers"]

log = logging.getLogger(__name__)


class PeerAnswers:
    """Of one agent. `prompts` is what its prefills left for peers; `stager.kept` what it read for them."""

    def __init__(
        self, parts: AgentParts, stager: Stager, prompts: HeldPrompts, stats: AgentStats
    ) -> None:
        self._parts = parts
        self._stager = stager
        self._prompts = prompts
        self._stats = stats

    def heard(self, engine: EngineId, data: bytes) -> None:
        """A message came. What is none is logged and forgotten."""
        try:
            message = decode_message(data)
            peer = peer_of(engine)
        except (PeerLost, ValueError) as error:
            log.warning("%s sent what is no message: %s", engine, error)
            return
        match message:
            case ReadForPeer():
                self._read(peer, message)
            case ReadForPeerDone():
                self._stager.read_for_peer_done(engine, message)
            case FetchPrompt():
                self._offer(peer, message)
            case PromptOffer():
                self._stager.prompt_offered(engine, message)
            case PromptReceived():
                self._prompts.drop(message.name)

    def _read(self, peer: KvPeer, message: ReadForPeer) -> None:
        """The PE asks us to read. What we read stays for our own part of this request."""
        parts = self._parts
        size = parts.layout.block_tokens
        root = root_key(parts.fingerprint, message.salt)
        chain = block_chain(root, message.token_ids, size)
        stop = min(message.stop_block, len(chain))

        def done(staging: Staging) -> None:
            offers = staging.held.offers(staging.first_block)
            self._stats.read_for_peer_blocks += len(offers)
            kept = self._stager.kept
            kept.begin(message.name)
            kept.absorb(message.name, staging.held, staging.whole_tokens)
            kept.keep_until(message.name, time.monotonic() + parts.lease_s)
            self._stager.tell(peer, ReadForPeerDone(message.name, message.serial, offers))

        if message.fingerprint != parts.fingerprint or message.first_block >= stop:
            self._stager.tell(peer, ReadForPeerDone(message.name, message.serial, ()))
            return
        staging = Staging(
            owner=f"{message.name.request} of {peer}",
            serial=message.serial,
            name=None,
            pair=None,
            chain=chain[:stop],
            first_block=message.first_block,
            wanted_stop=stop,
            until_s=time.monotonic() + parts.stage_deadline_s,
            block_tokens=size,
            done=done,
            probes=False,
        )
        self._stager.begin(staging, message.salt, message.tokens)

    def _offer(self, peer: KvPeer, message: FetchPrompt) -> None:
        """The DE asks for a prompt's KV."""
        offer = Offer()
        if message.fingerprint == self._parts.fingerprint:
            offer = self._prompts.offer(message.name, message.first_block)
        self._stager.tell(
            peer, PromptOffer(message.name, message.serial, offer.tokens, offer.blocks)
        )
