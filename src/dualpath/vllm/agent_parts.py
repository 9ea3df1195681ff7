"""What an agent works with, and how long it waits."""

from __future__ import annotations

from dataclasses import dataclass

from dualpath.kv import BufferPool, Fingerprint, KVLayout
from dualpath.store import Catalog, Store
from dualpath.vllm.params import KvPeer
from dualpath.vllm.settings import TransferKind

__all__ = ["AgentParts"]


@dataclass(frozen=True, slots=True)
class AgentParts:
    """What an agent works with. The agent closes none of it.

    `peer`: where its KV endpoint listens and what it is called; None without one. `host` is what it binds
    to, `transfer` how KV moves. `rank`: the worker's among the tensor-parallel ones; it talks to the same
    rank of other servers."""

    layout: KVLayout
    fingerprint: Fingerprint
    pool: BufferPool
    store: Store | None
    catalog: Catalog | None
    peer: KvPeer | None = None
    transfer: TransferKind = "tcp"
    rank: int = 0
    host: str = "127.0.0.1"
    secret: bytes = b""
    stage_deadline_s: float = 30.0
    write_deadline_s: float = 60.0
    lease_s: float = 60.0
