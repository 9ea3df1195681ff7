"""The trie of stored blocks: which prefix of a prompt is in the store, and what to evict next.

A node is one stored block; its path from the root is a token prefix. The index does no I/O, reads no
clock and takes no lock: `dualpath.store.Catalog` owns one and is its only user in production.

Reachability
    A block is *reachable* when its ancestors, up to the tenant's root key, are all present. Only
    reachable blocks are hits. A scan may find a block before its parent, or without one (an
    *orphan*): it waits unreachable, becomes reachable when the parent comes, and is evicted first.
    No block ever turns unreachable: `remove` takes its descendants along, `evict` takes leaves.

Eviction order
    Unpinned leaves, unreachable ones first, then the least recently used, then the oldest. The heap
    holds at most one entry a node, with the rank the node had when it was queued. Ranks only grow, so an
    entry whose node has a newer rank is queued again when it comes up: touching costs nothing.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from dualpath.base.errors import InvariantViolation
from dualpath.base.ids import BlockKey, RequestId
from dualpath.kv.chain import BlockIdentity, is_root

__all__ = ["RemovedBlock", "TrieIndex"]


class RemovedBlock(NamedTuple):
    """A block that the index does not know any more; the store still has it."""

    key: BlockKey
    stored_bytes: int


class _Rank(NamedTuple):
    """Order of eviction: smaller goes first."""

    reachable: bool
    used_s: float
    serial: int


class _Node:
    __slots__ = (
        "alive",
        "children",
        "key",
        "parent",
        "pins",
        "queued",
        "reachable",
        "serial",
        "stored_bytes",
        "used_s",
    )

    def __init__(
        self, key: BlockKey, parent: BlockKey, stored_bytes: int, used_s: float, serial: int
    ) -> None:
        self.key = key
        self.parent = parent
        self.stored_bytes = stored_bytes
        self.used_s = used_s
        self.serial = serial
        self.children: dict[BlockKey, _Node] = {}
        self.pins = 0
        self.reachable = False
        self.queued = False
        self.alive = True

    @property
    def rank(self) -> _Rank:
        return _Rank(self.reachable, self.used_s, self.serial)

    @property
    def evictable(self) -> bool:
        return self.alive and not self.children and self.pins == 0


class TrieIndex:
    """Stored blocks by key. Not thread-safe. Every time is the caller's clock, in seconds."""

    def __init__(self) -> None:
        self._nodes: dict[BlockKey, _Node] = {}
        self._orphans: dict[BlockKey, dict[BlockKey, _Node]] = {}
        """By the absent parent's key."""
        self._pins: dict[RequestId, list[_Node]] = {}
        self._heap: list[tuple[_Rank, _Node]] = []
        self._serial = 0
        self._total_bytes = 0
        self._n_unreachable = 0

    @property
    def n_blocks(self) -> int:
        return len(self._nodes)

    @property
    def n_unreachable(self) -> int:
        """Blocks that cannot be hit, because an ancestor is absent."""
        return self._n_unreachable

    @property
    def n_pinned_requests(self) -> int:
        return len(self._pins)

    @property
    def total_bytes(self) -> int:
        return self._total_bytes

    def __contains__(self, key: object) -> bool:
        return key in self._nodes

    def keys(self) -> Iterator[BlockKey]:
        """Every block's key, the unreachable ones included, in order of insertion."""
        return iter(self._nodes)

    def insert(self, key: BlockKey, parent: BlockKey, stored_bytes: int, used_s: float) -> None:
        """Add a stored block, or refresh the size and time of use of one that is there.

        Raises ValueError when the key is known under another parent.
        """
        known = self._nodes.get(key)
        if known is not None:
            if known.parent != parent:
                raise ValueError(
                    f"block {key.hex()} has parent {known.parent.hex()}, not {parent.hex()}"
                )
            self._total_bytes += stored_bytes - known.stored_bytes
            known.stored_bytes = stored_bytes
            known.used_s = max(known.used_s, used_s)
            return
        self._serial += 1
        node = _Node(key, parent, stored_bytes, used_s, self._serial)
        self._nodes[key] = node
        self._total_bytes += stored_bytes
        self._n_unreachable += 1
        node.children = self._orphans.pop(key, {})
        above = self._nodes.get(parent)
        if above is not None:
            above.children[key] = node
        elif not is_root(parent):
            self._orphans.setdefault(parent, {})[key] = node
        if is_root(parent) or (above is not None and above.reachable):
            self._reach(node)
        self._enqueue(node)

    def match(self, chain: Sequence[BlockIdentity]) -> int:
        """How many leading blocks of `chain` are present and reachable."""
        for count, identity in enumerate(chain):
            node = self._nodes.get(identity.key)
            if node is None or not node.reachable or node.parent != identity.parent:
                return count
        return len(chain)

    def touch(self, keys: Sequence[BlockKey], used_s: float) -> None:
        """Note a use. Absent keys are passed over; a time before the last known use changes nothing."""
        for key in keys:
            node = self._nodes.get(key)
            if node is not None:
                node.used_s = max(node.used_s, used_s)

    def pin(self, request: RequestId, keys: Sequence[BlockKey]) -> None:
        """Keep these blocks from eviction until `unpin`; replaces what the request had pinned.

        Raises ValueError, changing nothing, when one is absent. Pins do not hold off `remove`.
        """
        nodes: list[_Node] = []
        for key in keys:
            node = self._nodes.get(key)
            if node is None:
                raise ValueError(f"request {request} pins block {key.hex()}, which is not stored")
            nodes.append(node)
        for node in nodes:
            node.pins += 1
        self.unpin(request)
        if nodes:
            self._pins[request] = nodes

    def unpin(self, request: RequestId) -> None:
        """Drop the request's pins, if any. Idempotent."""
        for node in self._pins.pop(request, ()):
            node.pins -= 1
            self._enqueue(node)

    def remove(self, key: BlockKey) -> list[RemovedBlock]:
        """Take out a block and its descendants, pinned or not; returns what was taken out.

        Parents come before their children. An absent key gives an empty list.
        """
        top = self._nodes.get(key)
        if top is None:
            return []
        self._detach(top)
        removed = [top]
        for node in removed:  # grows while it is walked: breadth first
            removed.extend(node.children.values())
        for node in removed:
            self._forget(node)
        return [RemovedBlock(node.key, node.stored_bytes) for node in removed]

    @property
    def has_evictable(self) -> bool:
        """Whether `evict` would find anything."""
        while self._heap and not self._heap[0][1].evictable:
            heapq.heappop(self._heap)[1].queued = False
        return bool(self._heap)

    def evict(self, bytes_to_free: int) -> list[RemovedBlock]:
        """Take out the blocks to evict until `bytes_to_free` are freed, or nothing is evictable.

        Returns them in order: the caller deletes the blocks from the store. O(log n) a block.
        """
        evicted: list[RemovedBlock] = []
        freed_bytes = 0
        while freed_bytes < bytes_to_free and self._heap:
            rank, node = heapq.heappop(self._heap)
            node.queued = False
            if not node.evictable:
                continue
            if node.rank != rank:
                self._enqueue(node)
                continue
            self._detach(node)
            self._forget(node)
            evicted.append(RemovedBlock(node.key, node.stored_bytes))
            freed_bytes += node.stored_bytes
        return evicted

    def check(self) -> None:
        """Integrity of links, totals, pins and the heap. Raises InvariantViolation. O(blocks)."""
        for node in self._nodes.values():
            self._check_links(node)
            if node.evictable and not node.queued:
                raise InvariantViolation(f"index: evictable block {node.key.hex()} is not queued")
        if sum(node.stored_bytes for node in self._nodes.values()) != self._total_bytes:
            raise InvariantViolation(f"index: total of {self._total_bytes} bytes is not the sum")
        if sum(not node.reachable for node in self._nodes.values()) != self._n_unreachable:
            raise InvariantViolation(f"index: {self._n_unreachable} unreachable is not the count")
        pins: dict[int, int] = {}
        for nodes in self._pins.values():
            for node in nodes:
                pins[id(node)] = pins.get(id(node), 0) + 1
        for node in self._nodes.values():
            if node.pins != pins.get(id(node), 0):
                raise InvariantViolation(f"index: block {node.key.hex()} has {node.pins} pins")
        queued = [node for _, node in self._heap if node.queued]
        if len({id(node) for node in queued}) != len(self._heap):
            raise InvariantViolation("index: a block is queued twice for eviction")

    def _check_links(self, node: _Node) -> None:
        above = self._nodes.get(node.parent)
        if above is not None:
            siblings, reachable = above.children, above.reachable
        else:
            siblings, reachable = self._orphans.get(node.parent, {}), False
        if is_root(node.parent):
            reachable = True
        elif siblings.get(node.key) is not node:
            raise InvariantViolation(f"index: block {node.key.hex()} is not among its siblings")
        if node.reachable != reachable:
            raise InvariantViolation(f"index: block {node.key.hex()} reachable={node.reachable}")
        for key, child in node.children.items():
            if self._nodes.get(key) is not child or child.parent != node.key:
                raise InvariantViolation(
                    f"index: block {key.hex()} is no child of {node.key.hex()}"
                )

    def _reach(self, node: _Node) -> None:
        """Mark a node and its descendants reachable; once in a node's life."""
        pending = [node]
        while pending:
            node = pending.pop()
            node.reachable = True
            self._n_unreachable -= 1
            pending.extend(child for child in node.children.values() if not child.reachable)

    def _detach(self, node: _Node) -> None:
        above = self._nodes.get(node.parent)
        if above is not None:
            above.children.pop(node.key, None)
            self._enqueue(above)
        elif not is_root(node.parent):
            siblings = self._orphans[node.parent]
            del siblings[node.key]
            if not siblings:
                del self._orphans[node.parent]

    def _forget(self, node: _Node) -> None:
        node.alive = False
        del self._nodes[node.key]
        self._total_bytes -= node.stored_bytes
        self._n_unreachable -= not node.reachable

    def _enqueue(self, node: _Node) -> None:
        if node.queued or not node.evictable:
            return
        if len(self._heap) > 2 * len(self._nodes) + 64:
            self._drop_stale_entries()
        node.queued = True
        heapq.heappush(self._heap, (node.rank, node))

    def _drop_stale_entries(self) -> None:
        for _, node in self._heap:
            node.queued = node.evictable
        self._heap = [entry for entry in self._heap if entry[1].queued]
        heapq.heapify(self._heap)
