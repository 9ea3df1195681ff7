"""Which side reads how much of a request's stored KV. Pure integer arithmetic.

The PE side reads the tokens `[0, x)`, the DE side `[x, hit)`.

- `pe`, `de`: x = hit, x = 0.
- `shorter` (the paper): all on the side whose node has the shorter read queue.
- `split` (ours; the paper leaves it as future work): both sides end together. With read queues q and
  read rates r, (q_pe + x) / r_pe = (q_de + hit - x) / r_de gives
  x = (r_pe (q_de + hit) - r_de q_pe) / (r_pe + r_de), cut to [0, hit] and rounded to whole blocks.

Ties, equal queues or half a block, go to `tie`: the side whose node has read less so far, then the
lower node id. (Always taking the PE side leaves the storage NICs less balanced.)
"""

from __future__ import annotations

from dualpath.base.ids import Side
from dualpath.policy.cluster import NodeState
from dualpath.policy.config import ReadPlanKind
from dualpath.policy.events import ReadPlan

__all__ = ["plan_reads", "side_that_read_less", "split_tokens"]

_PE = Side.PE
_DE = Side.DE
_PLAN_PE = ReadPlanKind.PE
_PLAN_DE = ReadPlanKind.DE
_PLAN_SHORTER = ReadPlanKind.SHORTER


def plan_reads(
    kind: ReadPlanKind,
    hit_tokens: int,
    *,
    pe_queue_tokens: int,
    de_queue_tokens: int,
    pe_read_rate: int,
    de_read_rate: int,
    block_tokens: int,
    tie: Side,
) -> ReadPlan:
    """The plan for `hit_tokens`, a multiple of `block_tokens`. Rates in tokens a second."""
    if kind is _PLAN_PE:
        pe_tokens = hit_tokens
    elif kind is _PLAN_DE:
        pe_tokens = 0
    elif kind is _PLAN_SHORTER:
        if pe_queue_tokens == de_queue_tokens:
            pe_tokens = hit_tokens if tie is _PE else 0
        else:
            pe_tokens = hit_tokens if pe_queue_tokens < de_queue_tokens else 0
    else:
        pe_tokens = split_tokens(
            hit_tokens,
            pe_queue_tokens,
            de_queue_tokens,
            pe_read_rate,
            de_read_rate,
            block_tokens,
            tie,
        )
    return ReadPlan(pe_tokens, hit_tokens - pe_tokens)


def split_tokens(
    hit_tokens: int,
    pe_queue_tokens: int,
    de_queue_tokens: int,
    pe_read_rate: int,
    de_read_rate: int,
    block_tokens: int,
    tie: Side,
) -> int:
    """x of the module's formula: tokens that the PE side reads, a multiple of `block_tokens`."""
    share = pe_read_rate * (de_queue_tokens + hit_tokens) - de_read_rate * pe_queue_tokens
    if share <= 0:
        return 0
    whole = (pe_read_rate + de_read_rate) * block_tokens
    blocks, rest = divmod(share, whole)
    if 2 * rest > whole or (2 * rest == whole and tie is _PE):
        blocks += 1
    return min(blocks * block_tokens, hit_tokens)


def side_that_read_less(pe_node: NodeState, de_node: NodeState) -> Side:
    """The side for ties: fewer tokens read so far, then the lower node id."""
    if pe_node.done_tokens != de_node.done_tokens:
        return _PE if pe_node.done_tokens < de_node.done_tokens else _DE
    return _PE if pe_node.id <= de_node.id else _DE
