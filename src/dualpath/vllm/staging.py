"""Getting the KV of a prompt into DRAM: which blocks are read here, which by the peer, and when it is done.

A `Staging` is the state of one; the arithmetic here is pure. Blocks are counted from the start of the
prompt.

What is believed to be stored (by this server's catalog, or the router) is read at once; behind it the store
is probed, in steps that double, because another server may have written more than anybody here knows. What
could be read is what was stored: no separate question is asked, so no answer can be out of date (cases 1,
3, 6)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from dualpath.kv import BlockIdentity
from dualpath.vllm.held_blocks import HeldBlocks
from dualpath.vllm.params import KvPeer, PairParams
from dualpath.vllm.peer_messages import PairName

__all__ = ["ReadSplit", "Staging", "next_probe", "split_reads"]

_MAX_PROBE_BLOCKS = 64


@dataclass(frozen=True, slots=True)
class ReadSplit:
    """`own` is read by this side, `peers` by the other: two runs of blocks, one after the other."""

    own: range
    peers: range


def split_reads(
    first_block: int, stop_block: int, pair: PairParams | None, block_tokens: int
) -> ReadSplit:
    """Share `[first_block, stop_block)` as the router's plan shares the prefix: the PE side reads its
    start.

    The plan is for `hit_tokens`; of a prefix that is longer or shorter each side reads the same part.
    Rounded to whole blocks. Without a plan this side reads all."""
    if pair is None or pair.role != "prefill" or pair.hit_tokens == 0:
        return ReadSplit(range(first_block, stop_block), range(stop_block, stop_block))
    if stop_block * block_tokens == pair.hit_tokens:
        middle = pair.pe_tokens // block_tokens
    else:
        middle = round(stop_block * pair.pe_tokens / pair.hit_tokens)
    middle = min(max(middle, first_block), stop_block)
    return ReadSplit(range(first_block, middle), range(middle, stop_block))


def next_probe(stop_block: int, limit_block: int, last_probe: int) -> range:
    """The blocks to try after all before `stop_block` were there; empty at `limit_block`."""
    n = min(max(1, 2 * last_probe), _MAX_PROBE_BLOCKS, limit_block - stop_block)
    return range(stop_block, stop_block + max(0, n))


@dataclass(slots=True, eq=False)
class Staging:
    """One staging under way. `done` is called once, when it ended in whatever way.

    `chain`: the blocks that the store may be asked for. `wanted_stop`: up to here blocks are believed to
    exist. `until_s`: on the monotonic clock."""

    owner: str
    serial: int
    name: PairName | None
    pair: PairParams | None
    chain: list[BlockIdentity]
    first_block: int
    wanted_stop: int
    until_s: float
    block_tokens: int
    done: Callable[[Staging], None]
    held: HeldBlocks = field(default_factory=HeldBlocks)
    parts_left: int = 0
    """Reads, pulls and answers that are still to come."""
    probes: bool = True
    last_probe: int = 0
    tried_stop: int = 0
    """Blocks were looked for up to here."""
    known_stop: int = 0
    """Up to here our own catalog says that blocks are stored."""
    own_blocks: int = 0
    peer_asked: bool = False
    """The prompt's KV is to come from the PE."""
    peer_tokens: int = 0
    """The PE held the prompt's KV up to here."""
    ended: bool = False

    @property
    def peer(self) -> KvPeer | None:
        return self.pair.peer if self.pair is not None else None

    @property
    def filled_stop(self) -> int:
        return self.held.filled_stop(self.first_block)

    @property
    def staged_tokens(self) -> int:
        """KV is there up to this token; of a block that is not full, only what the peer had."""
        end = max(self.peer_tokens, len(self.chain) * self.block_tokens)
        return min(self.filled_stop * self.block_tokens, end)

    @property
    def whole_tokens(self) -> int:
        """Those of the staged tokens that fill blocks."""
        return self.staged_tokens // self.block_tokens * self.block_tokens

    @property
    def has_prompt(self) -> bool:
        """Whether all that the PE had is here."""
        return 0 < self.peer_tokens <= self.filled_stop * self.block_tokens

    @property
    def lacks_peers_part(self) -> bool:
        """Whether the PE was asked and did not give all: what the store has is the next best."""
        return self.peer_asked and not self.has_prompt

    @property
    def wants_more(self) -> bool:
        """Whether blocks may exist behind those that are there."""
        return self.probes and self.tried_stop <= self.filled_stop < len(self.chain)
