"""Which side reads how much of a request's stored KV. Pure integer arithmetic.

The PE side reads the tokens `[0, x)`, the DE side `[x, hit)`.

- `pe`, `de`: x = hit, x = 0.
- `shorter` (the paper): all on the side whose node has the shorter read queue, as last reported.
- `split` (ours; the paper leaves it as future work): both sides end together. With read queues q and
  read rates r, (q_pe + x) / r_pe = (q_de + hit - x) / r_de gives
  x = (r_pe (q_de + hit) - r_de q_pe) / (r_pe + r_de), cut to [0, hit] and rounded to whole blocks.
- `steady` (ours): both sides, so that all nodes of a cluster are equally busy; the formula below.

`steady`. Let a side's node read r tokens a second and be one of n of its role. A storage NIC serves its reads
together: a part takes longer by all that is read beside it, and a request waits for the slower of its parts.

- When nothing else is read, both parts end together if x : hit - x = w_pe : w_de with w = r.
- When much is, what counts is that all NICs are equally busy. Each request is read by one node of each role,
  so the roles' shares must be as what all of their nodes read: w = n r.
- In between, so many of a role's nodes read at once as there are requests that are read, this one with
  them: w = r m with m = min(n, 1 + u / hit), where u is what all nodes of the cluster still have to read.
- Requests come in bursts, whatever a group's fetch finds waiting, and a burst's parts on one storage NIC end
  together. If all had the same share, all would wait for the busier side. So shares of two nodes are larger
  and smaller in turn, by w_pe + v and w_pe - v, with v = |m_pe - m_de| min(r_pe, r_de), at most w_pe and
  w_de. The sides read as much as before, but every other request has its larger part on the side that is
  less busy, and ends early. With equal rates, a burst of k takes k hit / 2r on average, instead of the
  busier side's time. A request that is read alone gains nothing by it: v grows with the shorter of the two
  nodes' queues, up to BURST such requests.
- Nodes of a role are not equally busy, and one may be slow. If the PE side read d more, with
  (q_pe + d) / r_pe = (q_de - d) / r_de, both would be even; each request adds d / STEADY to x. All of d at
  once is worse: the parts of a burst's requests would differ widely for a difference that ends with the
  burst. But it must not shrink beside long queues, as a factor on the weights would: where fetches give one
  node more requests than another, it has to make up for them for ever.

So x = hit (w_pe +- v) / (w_pe + w_de) + (r_pe q_de - r_de q_pe) / (r_pe + r_de) / STEADY, cut to [0, hit]
and rounded to whole blocks. Here q, as in u, is what a node was given to read and has not said to have read,
which is known of all nodes at the same instant. Reports are of different instants: what was read in between
would be taken for a difference.

Ties, equal queues or half a block, go to `tie`: the side whose node has read less so far, then the
lower node id. (Always taking the PE side leaves the storage NICs less balanced.)
"""

from __future__ import annotations

from typing import Final

from dualpath.base.ids import Side
from dualpath.policy.cluster import NodeState
from dualpath.policy.config import ReadPlanKind
from dualpath.policy.events import ReadPlan

__all__ = ["BURST", "STEADY", "plan_reads", "side_that_read_less", "split_tokens", "steady_tokens"]

STEADY: Final = 40
"""By simulation: with less, bursts make reads slower; with more, a slow node is left too much."""

BURST: Final = 8
"""By simulation: with less, reads become slower where few wait; with 16, where many do."""

_PE: Final = Side.PE
_DE: Final = Side.DE
_PLAN_PE: Final = ReadPlanKind.PE
_PLAN_DE: Final = ReadPlanKind.DE
_PLAN_SHORTER: Final = ReadPlanKind.SHORTER
_PLAN_SPLIT: Final = ReadPlanKind.SPLIT


def plan_reads(
    kind: ReadPlanKind,
    hit_tokens: int,
    *,
    pe_queue_tokens: int,
    de_queue_tokens: int,
    pe_read_rate: int,
    de_read_rate: int,
    pe_nodes: int,
    de_nodes: int,
    unread_tokens: int,
    block_tokens: int,
    tie: Side,
    turn: Side,
) -> ReadPlan:
    """The plan for `hit_tokens`, a multiple of `block_tokens`. Rates in tokens a second, of a node.

    `turn`: the side whose turn it is to get the larger share of `steady`."""
    if kind is _PLAN_PE:
        pe_tokens = hit_tokens
    elif kind is _PLAN_DE:
        pe_tokens = 0
    elif kind is _PLAN_SHORTER:
        if pe_queue_tokens == de_queue_tokens:
            pe_tokens = hit_tokens if tie is _PE else 0
        else:
            pe_tokens = hit_tokens if pe_queue_tokens < de_queue_tokens else 0
    elif kind is _PLAN_SPLIT:
        pe_tokens = split_tokens(
            hit_tokens,
            pe_queue_tokens,
            de_queue_tokens,
            pe_read_rate,
            de_read_rate,
            block_tokens,
            tie,
        )
    else:
        pe_tokens = steady_tokens(
            hit_tokens,
            pe_queue_tokens,
            de_queue_tokens,
            pe_read_rate,
            de_read_rate,
            pe_nodes,
            de_nodes,
            unread_tokens,
            block_tokens,
            tie,
            turn,
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
    """x of `split`: tokens that the PE side reads, a multiple of `block_tokens`."""
    share = pe_read_rate * (de_queue_tokens + hit_tokens) - de_read_rate * pe_queue_tokens
    return _whole_blocks(share, pe_read_rate + de_read_rate, hit_tokens, block_tokens, tie)


def steady_tokens(
    hit_tokens: int,
    pe_queue_tokens: int,
    de_queue_tokens: int,
    pe_read_rate: int,
    de_read_rate: int,
    pe_nodes: int,
    de_nodes: int,
    unread_tokens: int,
    block_tokens: int,
    tie: Side,
    turn: Side,
) -> int:
    """x of `steady`: tokens that the PE side reads, a multiple of `block_tokens`.

    Rates and numbers of nodes are 1 or more, the rest 0 or more.
    """
    reading = hit_tokens + unread_tokens
    pe_reading = min(pe_nodes * hit_tokens, reading)
    de_reading = min(de_nodes * hit_tokens, reading)
    pe_weight, de_weight = pe_read_rate * pe_reading, de_read_rate * de_reading
    weights = pe_weight + de_weight
    burst = BURST * hit_tokens
    apart = abs(pe_reading - de_reading) * min(pe_read_rate, de_read_rate)
    apart *= min(pe_queue_tokens, de_queue_tokens, burst)
    apart = min(apart, burst * pe_weight, burst * de_weight)
    uneven = pe_read_rate * de_queue_tokens - de_read_rate * pe_queue_tokens
    rates = STEADY * (pe_read_rate + de_read_rate)
    share = (burst * pe_weight + (apart if turn is _PE else -apart)) * rates
    share += BURST * uneven * weights
    return _whole_blocks(share, BURST * weights * rates, hit_tokens, block_tokens, tie)


def _whole_blocks(share: int, parts: int, hit_tokens: int, block_tokens: int, tie: Side) -> int:
    """`share / parts` tokens, rounded to blocks and cut to [0, hit]."""
    if share <= 0:
        return 0
    whole = parts * block_tokens
    blocks, rest = divmod(share, whole)
    if 2 * rest > whole or (2 * rest == whole and tie is _PE):
        blocks += 1
    return min(blocks * block_tokens, hit_tokens)


def side_that_read_less(pe_node: NodeState, de_node: NodeState) -> Side:
    """The side for ties: fewer tokens read so far, then the lower node id."""
    if pe_node.done_tokens != de_node.done_tokens:
        return _PE if pe_node.done_tokens < de_node.done_tokens else _DE
    return _PE if pe_node.id <= de_node.id else _DE
