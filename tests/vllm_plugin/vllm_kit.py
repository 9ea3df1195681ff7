"""What the tests of the plug-in share: small blocks with known bytes, and agents with real sockets."""

from __future__ import annotations

import hashlib
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

from dualpath.base.ids import PAGE_BYTES
from dualpath.kv import BufferPool, TrieIndex
from dualpath.store import Catalog, Store
from dualpath.testing import MemoryDevice, MemoryStore, wait_until
from dualpath.vllm.agent import KvAgent
from dualpath.vllm.agent_parts import AgentParts
from dualpath.vllm.block_format import BlockFacts, block_fingerprint, opaque_layout
from dualpath.vllm.orders import SaveOrder, Staged, StageOrder
from dualpath.vllm.params import KvPeer, PairParams
from dualpath.vllm.settings import TransferKind

SIZE = 4
"""Tokens of a block."""
FACTS = BlockFacts(
    model="m",
    revision="",
    vllm_version="0.32",
    backend="b",
    kv_spec="s",
    layers=(("l0", (SIZE, 8), "f"), ("l1", (SIZE, 8), "f")),
    block_tokens=SIZE,
    block_bytes=(PAGE_BYTES // 2, PAGE_BYTES // 2),
    rank=0,
    ranks=1,
)
LAYOUT = opaque_layout(FACTS)
PEER = KvPeer("127.0.0.1", 9)


def tokens_of(seed: int, n_tokens: int) -> tuple[int, ...]:
    return tuple(1000 * seed + n for n in range(n_tokens))


def kv_of(tokens: tuple[int, ...], block: int) -> bytes:
    """The bytes of a block: they depend on all tokens up to its end, as KV does."""
    digest = hashlib.sha256(repr(tokens[: (block + 1) * SIZE]).encode()).digest()
    return digest * (LAYOUT.full_block_bytes // len(digest))


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


@dataclass
class Rig:
    """An agent with a pool and a catalog of its own; it saves and checks as a worker would."""

    agent: KvAgent
    pool: BufferPool
    catalog: Catalog
    peer: KvPeer
    """Of the server, as routers know it: of its rank 0."""
    reports: list[Staged] = field(default_factory=list)
    serials: int = 0

    def staged(
        self,
        request: str,
        tokens: tuple[int, ...],
        *,
        first_token: int = 0,
        salt: str = "",
        pair: PairParams | None = None,
    ) -> Staged:
        """Order a staging and wait for its end."""
        self.serials += 1
        order = StageOrder(request, self.serials, tokens, first_token, salt, pair)
        self.agent.stage(order)

        def ended() -> bool:
            self.reports += self.agent.take_reports()
            return any(each.serial == order.serial for each in self.reports)

        wait_until(ended, f"staging of {request}")
        return next(each for each in self.reports if each.serial == order.serial)

    def holds(self, request: str, serial: int, tokens: tuple[int, ...], blocks: range) -> bool:
        """Whether the staged slots have the right bytes."""
        with self.agent.staged_slots(request, serial) as slots:
            assert slots is not None
            return all(
                bytes(self.pool.view(slots[block])[: LAYOUT.full_block_bytes])
                == kv_of(tokens, block)
                for block in blocks
            )

    def save(
        self,
        request: str,
        tokens: tuple[int, ...],
        *,
        first_block: int = 0,
        known_tokens: int = 0,
        persist: bool = True,
        pair: PairParams | None = None,
        salt: str = "",
    ) -> None:
        """As after a step that computed these tokens from `first_block` on."""
        n_blocks = -(-len(tokens) // SIZE) - first_block
        lease = self.agent.lease_for_save(request, n_blocks)
        assert lease is not None
        for index in range(n_blocks):
            lease.view(index)[: LAYOUT.full_block_bytes] = kv_of(tokens, first_block + index)
        order = SaveOrder(
            request,
            first_block,
            tuple(range(n_blocks)),
            known_tokens,
            tokens[known_tokens:],
            salt,
            len(tokens),
            persist,
            pair,
        )
        self.agent.saved(order, lease)

    def wait_free(self) -> None:
        """No slot has an owner, and the pool is whole."""
        wait_until(lambda: self.pool.n_free == self.pool.geometry.n_slots, "all slots free")
        self.pool.check()


@contextmanager
def rig(
    device: MemoryDevice,
    *,
    n_slots: int = 32,
    store: Store | None = None,
    lease_s: float = 60.0,
    stage_deadline_s: float = 30.0,
    facts: BlockFacts = FACTS,
    secret: bytes = b"",
    rank: int = 0,
    transfer: TransferKind = "tcp",
) -> Iterator[Rig]:
    with ExitStack() as stack:
        pool = BufferPool(n_slots, LAYOUT.slot_bytes)
        stack.callback(pool.close)
        fingerprint = block_fingerprint(facts)
        store = store or MemoryStore(device, fingerprint, LAYOUT)
        stack.callback(store.close)
        catalog = Catalog(store, TrieIndex(), 1 << 30)
        catalog.load()
        port = free_port()
        agent = KvAgent(
            AgentParts(
                layout=LAYOUT,
                fingerprint=fingerprint,
                pool=pool,
                store=store,
                catalog=catalog,
                peer=KvPeer("127.0.0.1", port),
                transfer=transfer,
                rank=rank,
                secret=secret,
                stage_deadline_s=stage_deadline_s,
                lease_s=lease_s,
            )
        )
        stack.callback(agent.close)
        yield Rig(agent, pool, catalog, KvPeer("127.0.0.1", port - rank))
