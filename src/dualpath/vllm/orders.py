"""What the connector's scheduler side orders, once a step, and what each worker reports back.

Plain frozen data: it crosses from vLLM's scheduler process to its workers by vLLM's own means. Tokens are
counted from the start of the request, blocks are vLLM's. `serial` counts the stagings of one request, so
that what belongs to an earlier one is told apart."""

from __future__ import annotations

from dataclasses import dataclass

from dualpath.kv import BlockIdentity
from dualpath.vllm.params import PairParams

__all__ = ["LoadOrder", "SaveOrder", "StageOrder", "Staged", "StepOrders", "WorkerReport"]


@dataclass(frozen=True, slots=True)
class StageOrder:
    """Get the KV behind `first_token` of these tokens into DRAM, as far as it exists.

    `first_token` is a multiple of the block size. All of `tokens` may be asked of the peer, of the store
    only whole blocks."""

    request: str
    serial: int
    tokens: tuple[int, ...]
    first_token: int
    salt: str
    pair: PairParams | None


@dataclass(frozen=True, slots=True)
class LoadOrder:
    """Copy the staged KV of the tokens `[first_token, stop_token)` into the device's blocks.

    `block_ids` are those of the blocks from `first_token`'s on, in order.
    """

    request: str
    serial: int
    first_token: int
    stop_token: int
    block_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SaveOrder:
    """Copy blocks out of the device: into the store if complete, and for the peer of a prefill.

    `tokens` follow those that the worker knows of this request already; `known_tokens` is how many these
    are. The blocks hold tokens up to `stop_token`. `persist`: the complete ones go into the store. `pair`:
    all are for the peer of this prefill. `late`: the request has ended, copy before the blocks are written
    again, and say so."""

    request: str
    first_block: int
    block_ids: tuple[int, ...]
    known_tokens: int
    tokens: tuple[int, ...]
    salt: str
    stop_token: int
    persist: bool
    pair: PairParams | None
    late: bool = False


@dataclass(frozen=True, slots=True)
class StepOrders:
    """All orders of one step. `releases`: staged KV that is not needed; `ended`, `aborted`: requests that
    are over."""

    stages: tuple[StageOrder, ...] = ()
    loads: tuple[LoadOrder, ...] = ()
    saves: tuple[SaveOrder, ...] = ()
    releases: tuple[str, ...] = ()
    ended: tuple[str, ...] = ()
    aborted: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Staged:
    """A staging ended: KV of `[first_token, tokens)` is in DRAM, none if `tokens` <= `first_token`.

    `own_tokens` of them were read by this side. `stored_tokens`: so many are in the store, or will be.
    """

    request: str
    serial: int
    tokens: int
    own_tokens: int = 0
    stored_tokens: int = 0


@dataclass(frozen=True, slots=True)
class WorkerReport:
    """What one step of one worker, or of all of them, has to say. One `Staged` a rank is waited for."""

    staged: tuple[Staged, ...] = ()
    stored: tuple[BlockIdentity, ...] = ()
    """Blocks that became durable; each rank's own keys."""

    def merged(self, other: WorkerReport) -> WorkerReport:
        """Both; of what is stored the first's, since all ranks store the same tokens."""
        return WorkerReport(self.staged + other.staged, self.stored)
