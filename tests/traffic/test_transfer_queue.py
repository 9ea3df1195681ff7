"""The order of transfers, and the bounds on what is under way: properties over arbitrary traffic."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dualpath.base.errors import InvariantViolation
from dualpath.base.traffic_class import TrafficClass
from dualpath.traffic import ClassLimits, TransferQueue, Wanted

LIMITS = ClassLimits(
    queued=30,
    transfers=6,
    n_bytes=600,
    peer_transfers=4,
    peer_bytes=300,
    batch_transfers=3,
    batch_bytes=200,
    overtaken=5,
)
KV, EXECUTION, STORAGE = TrafficClass.KV, TrafficClass.EXECUTION, TrafficClass.STORAGE


def queue_of(limits: ClassLimits = LIMITS) -> TransferQueue:
    return TransferQueue(dict.fromkeys(TrafficClass, limits))


def wanted(
    number: int,
    *,
    of: TrafficClass = KV,
    peer: str = "de0",
    group: object = None,
    needed: int = 0,
    n_bytes: int = 10,
) -> Wanted:
    return Wanted(number, of, peer, group or number, needed, n_bytes)  # type: ignore[arg-type]


def numbers(batch: tuple[Wanted, ...]) -> list[int]:
    return [each.number for each in batch]


def test_the_layer_needed_next_leaves_first_then_what_came_first() -> None:
    queue = queue_of()
    for number, layer in enumerate([7, 2, 2, 5]):
        queue.add(wanted(number, needed=layer))
    left = [numbers(queue.next_batch()) for _ in range(4)]
    assert left == [[1], [2], [3], [0]]


def test_the_order_holds_across_peers() -> None:
    queue = queue_of()
    queue.add(wanted(0, peer="de0", needed=3))
    queue.add(wanted(1, peer="de1", needed=1))
    assert [numbers(queue.next_batch()) for _ in range(2)] == [[1], [0]]


def test_high_classes_leave_first() -> None:
    queue = queue_of()
    queue.add(wanted(0, of=KV))
    queue.add(wanted(1, of=STORAGE))
    queue.add(wanted(2, of=EXECUTION, needed=9))
    assert numbers(queue.next_batch()) == [2]


def test_a_full_kv_class_keeps_no_execution_back_and_the_other_way_round() -> None:
    for full, other in ((KV, EXECUTION), (EXECUTION, KV)):
        queue = queue_of()
        for number in range(20):
            queue.add(wanted(number, of=full, peer=f"de{number % 3}"))
        while queue.next_batch():
            pass
        queue.add(wanted(99, of=other))
        assert numbers(queue.next_batch()) == [99]


def test_one_group_leaves_together_up_to_the_bounds_of_a_batch() -> None:
    queue = queue_of()
    for number in range(5):
        queue.add(wanted(number, group="lease 1"))
    queue.add(wanted(5, group="lease 2"))
    assert numbers(queue.next_batch()) == [0, 1, 2]
    assert numbers(queue.next_batch()) == [3]  # Four may be under way with one peer.
    assert numbers(queue.next_batch()) == []


def test_batches_are_bounded_in_bytes() -> None:
    queue = queue_of()
    for number in range(3):
        queue.add(wanted(number, group="lease", n_bytes=90))
    assert numbers(queue.next_batch()) == [0, 1]


def test_a_transfer_larger_than_every_bound_leaves_alone() -> None:
    queue = queue_of()
    queue.add(wanted(0, n_bytes=10_000))
    queue.add(wanted(1, n_bytes=1))
    big = queue.next_batch()
    assert numbers(big) == [0]
    assert queue.next_batch() == ()
    queue.ended(big)
    assert numbers(queue.next_batch()) == [1]


def test_a_large_one_is_not_passed_for_ever_by_small_ones_of_its_peer() -> None:
    queue = queue_of()
    first = wanted(0)
    queue.add(first)
    assert queue.next_batch() == (first,)
    queue.add(wanted(1, n_bytes=10_000))
    queue.add(wanted(2))
    assert queue.next_batch() == ()
    queue.ended([first])
    assert numbers(queue.next_batch()) == [1]


def test_a_full_queue_refuses_and_says_so() -> None:
    queue = queue_of()
    assert all(queue.add(wanted(number)) for number in range(LIMITS.queued))
    assert not queue.add(wanted(99))
    assert queue.add(wanted(100, of=EXECUTION))
    assert queue.n_waiting == LIMITS.queued + 1


def test_what_is_withdrawn_does_not_leave() -> None:
    queue = queue_of()
    first, second = wanted(0), wanted(1)
    queue.add(first)
    queue.add(second)
    queue.withdraw(first)
    assert queue.next_batch() == (second,)
    assert queue.next_batch() == ()


def test_the_oldest_is_overtaken_a_bounded_number_of_times() -> None:
    """However many come that are needed earlier."""
    queue = queue_of()
    queue.add(wanted(0, needed=50))
    for number in range(1, LIMITS.overtaken + 10):
        queue.add(wanted(number, needed=1))
        batch = queue.next_batch()
        queue.ended(batch)
        if numbers(batch) == [0]:
            assert number == LIMITS.overtaken + 1
            return
    pytest.fail("the oldest transfer never left")


def test_to_end_twice_is_a_bug() -> None:
    queue = queue_of()
    queue.add(wanted(0))
    queue.add(wanted(1))
    batch = queue.next_batch()
    queue.next_batch()
    queue.ended(batch)
    queue.ended(batch)
    with pytest.raises((InvariantViolation, KeyError)):
        queue.ended(batch)


@dataclass
class Model:
    """What a queue must keep to, tracked beside it."""

    queue: TransferQueue
    waiting: dict[int, Wanted] = field(default_factory=dict)
    under_way: dict[int, Wanted] = field(default_factory=dict)
    left: list[int] = field(default_factory=list)

    def add(self, each: Wanted) -> None:
        room = sum(w.traffic_class is each.traffic_class for w in self.waiting.values())
        assert self.queue.add(each) == (room < LIMITS.queued)
        if room < LIMITS.queued:
            self.waiting[each.number] = each

    def withdraw(self, pick: int) -> None:
        if self.waiting:
            each = self.waiting.pop(sorted(self.waiting)[pick % len(self.waiting)])
            self.queue.withdraw(each)

    def take(self) -> bool:
        batch = self.queue.next_batch()
        for each in batch:
            assert self.waiting.pop(each.number) is each
            self.under_way[each.number] = each
            self.left.append(each.number)
        if batch:
            first = batch[0]
            assert len(batch) <= LIMITS.batch_transfers
            assert len(batch) == 1 or sum(each.n_bytes for each in batch) <= LIMITS.batch_bytes
            assert {(e.traffic_class, e.peer, e.group) for e in batch} == {
                (first.traffic_class, first.peer, first.group)
            }
        self.check()
        return bool(batch)

    def end(self, pick: int) -> None:
        if self.under_way:
            each = self.under_way.pop(sorted(self.under_way)[pick % len(self.under_way)])
            self.queue.ended([each])

    def check(self) -> None:
        for traffic_class in TrafficClass:
            mine = [e for e in self.under_way.values() if e.traffic_class is traffic_class]
            self._bounded(mine, LIMITS.transfers, LIMITS.n_bytes)
            assert self.queue.under_way_bytes(traffic_class) == sum(e.n_bytes for e in mine)
            for peer in {each.peer for each in mine}:
                with_peer = [each for each in mine if each.peer == peer]
                self._bounded(with_peer, LIMITS.peer_transfers, LIMITS.peer_bytes)

    @staticmethod
    def _bounded(under_way: list[Wanted], transfers: int, n_bytes: int) -> None:
        assert len(under_way) <= transfers
        assert len(under_way) <= 1 or sum(each.n_bytes for each in under_way) <= n_bytes


ADD = st.tuples(
    st.just("add"),
    st.sampled_from([KV, EXECUTION, STORAGE]),
    st.sampled_from(["de0", "de1", "de2"]),
    st.sampled_from(["a", "b", "c"]),
    st.integers(0, 4),
    st.integers(0, 400),
)
STEPS = st.lists(
    st.one_of(
        ADD,
        ADD,
        st.tuples(st.just("take")),
        st.tuples(st.just("end"), st.integers(0, 100)),
        st.tuples(st.just("withdraw"), st.integers(0, 100)),
    ),
    max_size=120,
)


@given(STEPS)
def test_each_transfer_leaves_once_within_all_bounds(steps: list[tuple[object, ...]]) -> None:
    model = Model(queue_of())
    withdrawn_or_refused = 0
    asked = 0
    for step in steps:
        match step:
            case ("add", of, peer, group, needed, n_bytes):
                each = Wanted(asked, of, peer, group, needed, n_bytes)  # type: ignore[arg-type]
                before = len(model.waiting)
                model.add(each)
                withdrawn_or_refused += len(model.waiting) == before
                asked += 1
            case ("take",):
                model.take()
            case ("end", int(pick)):
                model.end(pick)
            case ("withdraw", int(pick)):
                withdrawn_or_refused += bool(model.waiting)
                model.withdraw(pick)
    while model.waiting or model.under_way:  # Whatever was added comes to its end.
        moved = model.take()
        if not moved:
            assert model.under_way, "something waits though nothing is under way"
            model.end(0)
    assert len(model.left) == len(set(model.left)) == asked - withdrawn_or_refused
    assert model.queue.idle


@given(st.lists(st.tuples(st.integers(0, 9), st.sampled_from(["a", "b"])), max_size=25))
def test_with_one_under_way_at_a_time_the_order_is_that_of_need(
    asked: list[tuple[int, str]],
) -> None:
    queue = queue_of(ClassLimits(transfers=1, peer_transfers=1, batch_transfers=1))
    for number, (needed, peer) in enumerate(asked):
        queue.add(wanted(number, needed=needed, peer=peer))
    left = []
    while batch := queue.next_batch():
        left += numbers(batch)
        queue.ended(batch)
    assert left == sorted(range(len(asked)), key=lambda number: (asked[number][0], number))
