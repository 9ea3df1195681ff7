"""The trie of stored blocks, against a naive model."""

from __future__ import annotations

import heapq
import random
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from dualpath.base.errors import InvariantViolation
from dualpath.base.ids import BlockKey, RequestId
from dualpath.kv import BlockIdentity, RemovedBlock, TrieIndex, block_chain, root_key

ROOT = root_key(bytes(32), "")


def chain_of(*tokens: int) -> list[BlockIdentity]:
    """Blocks of one token each."""
    return block_chain(ROOT, tokens, 1)


def insert_all(
    index: TrieIndex, chain: list[BlockIdentity], used_s: float = 0.0, size: int = 10
) -> None:
    for identity in chain:
        index.insert(identity.key, identity.parent, size, used_s)


def keys_of(blocks: list[RemovedBlock] | list[BlockIdentity]) -> list[BlockKey]:
    return [block.key for block in blocks]


def test_match_is_the_stored_prefix() -> None:
    index = TrieIndex()
    insert_all(index, chain_of(1, 2, 3))
    assert index.match(chain_of(1, 2, 3, 4)) == 3
    assert index.match(chain_of(1, 2)) == 2
    assert index.match(chain_of(1, 9, 3)) == 1
    assert index.match(chain_of(9)) == 0
    assert index.match([]) == 0
    assert index.match(block_chain(root_key(bytes(32), "other tenant"), [1, 2], 1)) == 0
    assert (index.n_blocks, index.total_bytes) == (3, 30)


def test_orphans_are_no_hits_until_the_parent_appears() -> None:
    index = TrieIndex()
    chain = chain_of(1, 2, 3, 4)
    insert_all(index, [chain[3], chain[2], chain[0]])
    assert index.match(chain) == 1
    assert index.n_unreachable == 2
    index.check()
    insert_all(index, [chain[1]])
    assert index.match(chain) == 4
    assert index.n_unreachable == 0
    index.check()


def test_an_orphan_is_no_hit_for_a_chain_that_starts_there() -> None:
    index = TrieIndex()
    chain = chain_of(1, 2, 3)
    insert_all(index, chain[1:])
    assert index.match(chain[1:]) == 0


def test_remove_takes_the_descendants_along() -> None:
    index = TrieIndex()
    chain, branch = chain_of(1, 2, 3), chain_of(1, 2, 8, 9)
    insert_all(index, chain)
    insert_all(index, branch)
    index.pin(RequestId("r"), keys_of(chain))
    removed = keys_of(index.remove(chain[1].key))
    assert removed[0] == chain[1].key
    assert set(removed) == {chain[1].key, chain[2].key, branch[2].key, branch[3].key}
    assert index.match(chain) == 1
    assert index.remove(chain[1].key) == []
    index.unpin(RequestId("r"))
    index.check()


def test_a_removed_orphan_is_forgotten() -> None:
    index = TrieIndex()
    chain = chain_of(1, 2, 3)
    insert_all(index, chain[1:])
    index.remove(chain[1].key)
    insert_all(index, chain[:1])
    assert (index.n_blocks, index.n_unreachable) == (1, 0)
    index.check()


def test_eviction_takes_leaves_least_recently_used_first() -> None:
    index = TrieIndex()
    old, new = chain_of(1, 2), chain_of(1, 3)
    insert_all(index, old, used_s=1.0)
    insert_all(index, new[1:], used_s=2.0)
    assert keys_of(index.evict(1)) == [old[1].key]
    assert keys_of(index.evict(1)) == [new[1].key]
    assert keys_of(index.evict(1)) == [old[0].key]
    assert index.evict(1) == []


def test_touching_changes_the_order() -> None:
    index = TrieIndex()
    first, second = chain_of(1), chain_of(2)
    insert_all(index, first, used_s=1.0)
    insert_all(index, second, used_s=2.0)
    index.touch(keys_of(first), 3.0)
    index.touch(keys_of(second), 1.5)
    assert keys_of(index.evict(20)) == [second[0].key, first[0].key]


def test_eviction_stops_when_enough_is_freed() -> None:
    index = TrieIndex()
    insert_all(index, chain_of(1, 2, 3, 4), size=10)
    assert sum(block.stored_bytes for block in index.evict(15)) == 20
    assert index.total_bytes == 20
    assert index.evict(0) == []


def test_unreachable_blocks_go_first() -> None:
    index = TrieIndex()
    reachable, orphan = chain_of(1), chain_of(7, 8, 9)[1:]
    insert_all(index, reachable, used_s=1.0)
    insert_all(index, orphan, used_s=99.0)
    assert keys_of(index.evict(30)) == [orphan[1].key, orphan[0].key, reachable[0].key]
    assert index.n_unreachable == 0


def test_pinned_prefix_is_not_evicted() -> None:
    index = TrieIndex()
    chain = chain_of(1, 2, 3, 4)
    insert_all(index, chain)
    index.pin(RequestId("a"), keys_of(chain[:2]))
    index.pin(RequestId("b"), keys_of(chain[:3]))
    assert keys_of(index.evict(1000)) == [chain[3].key]
    assert not index.has_evictable
    index.unpin(RequestId("b"))
    index.unpin(RequestId("b"))
    assert keys_of(index.evict(1000)) == [chain[2].key]
    index.pin(RequestId("a"), keys_of(chain[:1]))
    assert keys_of(index.evict(1000)) == [chain[1].key]
    index.unpin(RequestId("a"))
    assert keys_of(index.evict(1000)) == [chain[0].key]
    index.check()


def test_pinning_an_absent_block_changes_nothing() -> None:
    index = TrieIndex()
    chain = chain_of(1, 2)
    insert_all(index, chain[:1])
    with pytest.raises(ValueError, match="request r pins block"):
        index.pin(RequestId("r"), keys_of(chain))
    assert index.n_pinned_requests == 0
    index.check()


def test_a_pin_on_a_removed_block_does_not_bind_its_successor() -> None:
    index = TrieIndex()
    chain = chain_of(1)
    insert_all(index, chain)
    index.pin(RequestId("r"), keys_of(chain))
    index.remove(chain[0].key)
    insert_all(index, chain)
    assert index.has_evictable
    index.unpin(RequestId("r"))
    index.check()


def test_reinsert_refreshes() -> None:
    index = TrieIndex()
    (identity,) = chain_of(1)
    index.insert(identity.key, identity.parent, 10, 5.0)
    index.insert(identity.key, identity.parent, 30, 1.0)
    assert (index.n_blocks, index.total_bytes) == (1, 30)
    with pytest.raises(ValueError, match="has parent"):
        index.insert(identity.key, BlockKey(bytes([9]) * 32), 10, 5.0)


def test_check_finds_corruption() -> None:
    for spoil, message in [
        (lambda index, node: setattr(index, "_total_bytes", 1), "is not the sum"),
        (lambda index, node: setattr(node, "pins", 2), "has 2 pins"),
        (lambda index, node: setattr(node, "reachable", False), "reachable=False"),
        (lambda index, node: node.children.update({node.key: node}), "is no child"),
        (lambda index, node: index._heap.clear() or setattr(node, "queued", False), "not queued"),
    ]:
        index = TrieIndex()
        insert_all(index, chain_of(1))
        index.check()
        spoil(index, index._nodes[chain_of(1)[0].key])
        with pytest.raises(InvariantViolation, match=message):
            index.check()


def test_touching_does_not_grow_the_heap() -> None:
    index = TrieIndex()
    chains = [chain_of(n, 100) for n in range(20)]
    for chain in chains:
        insert_all(index, chain)
    for turn in range(200):
        chain = chains[turn % 20]
        index.touch(keys_of(chain), float(turn))
        index.pin(RequestId("r"), keys_of(chain))
        index.remove(chain[1].key)
        insert_all(index, chain[1:])
    assert len(index._heap) <= 2 * index.n_blocks + 66
    index.check()


def test_eviction_looks_at_few_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Heap operations a block stay constant, whatever the size: O(log n) each."""
    rng = random.Random(5)
    index = TrieIndex()
    for number in range(200):
        insert_all(index, chain_of(number, *range(9)), used_s=rng.random())
        index.touch(keys_of(chain_of(number, *range(9))), rng.random())
    pops = 0
    heappop = heapq.heappop

    def counted(heap: list[object]) -> object:
        nonlocal pops
        pops += 1
        return heappop(heap)

    monkeypatch.setattr("dualpath.kv.index.heapq.heappop", counted)
    assert len(index.evict(10 * 2000)) == 2000
    assert pops <= 2 * 2000


@dataclass
class Entry:
    parent: BlockKey
    size: int
    used_s: float
    serial: int


class IndexMachine(RuleBasedStateMachine):
    """Against dictionaries searched from one end to the other."""

    chains = st.lists(st.integers(0, 2), min_size=1, max_size=5)

    def __init__(self) -> None:
        super().__init__()
        self.index = TrieIndex()
        self.entries: dict[BlockKey, Entry] = {}
        self.pins: dict[str, set[int]] = {}
        self.serial = 0

    def reachable(self, key: BlockKey) -> bool:
        while key in self.entries:
            key = self.entries[key].parent
        return key == ROOT

    @rule(tokens=chains, used_s=st.integers(0, 9), size=st.integers(1, 5))
    def insert(self, tokens: list[int], used_s: int, size: int) -> None:
        identity = chain_of(*tokens)[-1]
        self.index.insert(identity.key, identity.parent, size, used_s)
        known = self.entries.get(identity.key)
        if known is None:
            self.serial += 1
            self.entries[identity.key] = Entry(identity.parent, size, used_s, self.serial)
        else:
            known.size, known.used_s = size, max(known.used_s, used_s)

    @rule(tokens=chains)
    def match(self, tokens: list[int]) -> None:
        chain = chain_of(*tokens)
        expected = 0
        while expected < len(chain) and chain[expected].key in self.entries:
            expected += 1
        assert self.index.match(chain) == expected

    @rule(tokens=chains, used_s=st.integers(0, 9))
    def touch(self, tokens: list[int], used_s: int) -> None:
        keys = keys_of(chain_of(*tokens))
        self.index.touch(keys, used_s)
        for key in keys:
            if key in self.entries:
                self.entries[key].used_s = max(self.entries[key].used_s, used_s)

    @rule(tokens=chains, request=st.sampled_from("abc"))
    def pin(self, tokens: list[int], request: str) -> None:
        chain = chain_of(*tokens)
        keys = keys_of(chain[: self.index.match(chain)])
        self.index.pin(RequestId(request), keys)
        self.pins[request] = {self.entries[key].serial for key in keys}

    @rule(request=st.sampled_from("abc"))
    def unpin(self, request: str) -> None:
        self.index.unpin(RequestId(request))
        self.pins.pop(request, None)

    @rule(tokens=chains)
    def remove(self, tokens: list[int]) -> None:
        key = chain_of(*tokens)[-1].key
        expected: set[BlockKey] = set()
        for each in self.entries:
            above = each
            while above in self.entries and above != key:
                above = self.entries[above].parent
            if above == key and key in self.entries:
                expected.add(each)
        removed = self.index.remove(key)
        assert set(keys_of(removed)) == expected
        assert len(removed) == len(expected)
        for block in removed:
            assert self.entries.pop(block.key).size == block.stored_bytes

    @rule(bytes_to_free=st.integers(0, 12))
    def evict(self, bytes_to_free: int) -> None:
        pinned = set().union(*self.pins.values())
        expected: list[BlockKey] = []
        freed = 0
        while freed < bytes_to_free:
            parents = {entry.parent for entry in self.entries.values()}
            leaves = [
                (self.reachable(key), entry.used_s, entry.serial, key)
                for key, entry in self.entries.items()
                if key not in parents and entry.serial not in pinned
            ]
            if not leaves:
                break
            key = min(leaves)[-1]
            freed += self.entries.pop(key).size
            expected.append(key)
        assert keys_of(self.index.evict(bytes_to_free)) == expected

    @invariant()
    def agrees(self) -> None:
        self.index.check()
        assert set(self.index.keys()) == self.entries.keys()
        assert self.index.total_bytes == sum(entry.size for entry in self.entries.values())
        unreachable = sum(not self.reachable(key) for key in self.entries)
        assert self.index.n_unreachable == unreachable


TestIndexMachine = IndexMachine.TestCase
TestIndexMachine.settings = settings(max_examples=60, stateful_step_count=30)


@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=6)), st.randoms())
def test_order_of_a_scan_does_not_matter(tokens: list[list[int]], rng: random.Random) -> None:
    blocks = {each.key: each for ids in tokens for each in chain_of(*ids)}
    order = list(blocks.values())
    rng.shuffle(order)
    index = TrieIndex()
    insert_all(index, order)
    index.check()
    assert index.n_unreachable == 0
    assert all(index.match(chain_of(*ids)) == len(ids) for ids in tokens)
