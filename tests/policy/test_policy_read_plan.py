"""Read plans: each hit token is read once, by the side that the rule says."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st
from policy_kit import Checked, arrived, fetched, joined, read, report

from dualpath.base.ids import NodeId, Side
from dualpath.policy import Assign, ReadPlan, ReadPlanKind, plan_reads
from dualpath.policy.cluster import NodeState
from dualpath.policy.read_plan import side_that_read_less, split_tokens


def plan(
    kind: ReadPlanKind,
    hit: int,
    pe_queue: int = 0,
    de_queue: int = 0,
    *,
    rates: tuple[int, int] = (1, 1),
    block: int = 64,
    tie: Side = Side.PE,
) -> tuple[int, int]:
    made = plan_reads(
        kind,
        hit,
        pe_queue_tokens=pe_queue,
        de_queue_tokens=de_queue,
        pe_read_rate=rates[0],
        de_read_rate=rates[1],
        block_tokens=block,
        tie=tie,
    )
    assert not made.bypass
    return made.pe_tokens, made.de_tokens


def test_one_side_plans() -> None:
    assert plan(ReadPlanKind.PE, 640, 10**6, 0) == (640, 0)
    assert plan(ReadPlanKind.DE, 640, 0, 10**6) == (0, 640)


def test_shorter_reads_on_the_side_with_the_shorter_queue() -> None:
    assert plan(ReadPlanKind.SHORTER, 640, 99, 100) == (640, 0)
    assert plan(ReadPlanKind.SHORTER, 640, 100, 99) == (0, 640)
    assert plan(ReadPlanKind.SHORTER, 640, 100, 100, tie=Side.PE) == (640, 0)
    assert plan(ReadPlanKind.SHORTER, 640, 100, 100, tie=Side.DE) == (0, 640)


@pytest.mark.parametrize(
    ("hit", "queues", "rates", "expected"),
    [
        (640, (0, 0), (1, 1), (320, 320)),
        (640, (128, 0), (1, 1), (256, 384)),  # 128 + 256 = 384.
        (640, (0, 640), (1, 1), (640, 0)),  # PE ends when DE would begin.
        (640, (10_000, 0), (1, 1), (0, 640)),
        (640, (0, 10_000), (1, 1), (640, 0)),
        (640, (0, 0), (3, 1), (448, 192)),  # 480 : 160, rounded to 7 or 8 blocks: a tie (7.5).
        (640, (0, 0), (4, 1), (512, 128)),
        (640, (1_000, 1_000), (4, 1), (640, 0)),  # x = 1312: cut to the hit.
        (0, (5, 0), (1, 1), (0, 0)),
    ],
)
def test_split_ends_on_both_sides_together(
    hit: int, queues: tuple[int, int], rates: tuple[int, int], expected: tuple[int, int]
) -> None:
    assert plan(ReadPlanKind.SPLIT, hit, *queues, rates=rates, tie=Side.DE) == expected


def test_half_a_block_goes_to_the_tie_side() -> None:
    assert plan(ReadPlanKind.SPLIT, 64, tie=Side.PE) == (64, 0)
    assert plan(ReadPlanKind.SPLIT, 64, tie=Side.DE) == (0, 64)
    assert plan(ReadPlanKind.SPLIT, 64, 1, 0, tie=Side.PE) == (0, 64)
    assert plan(ReadPlanKind.SPLIT, 64, 0, 1, tie=Side.DE) == (64, 0)


@given(
    blocks=st.integers(0, 5_000),
    block=st.sampled_from([1, 16, 64, 256]),
    queues=st.tuples(st.integers(0, 10**8), st.integers(0, 10**8)),
    rates=st.tuples(st.integers(1, 10**7), st.integers(1, 10**7)),
    kind=st.sampled_from(list(ReadPlanKind)),
    tie=st.sampled_from(list(Side)),
)
def test_a_plan_covers_the_hit_once_in_whole_blocks(
    blocks: int,
    block: int,
    queues: tuple[int, int],
    rates: tuple[int, int],
    kind: ReadPlanKind,
    tie: Side,
) -> None:
    hit = blocks * block
    pe, de = plan(kind, hit, *queues, rates=rates, block=block, tie=tie)
    assert pe >= 0
    assert de >= 0
    assert pe + de == hit
    assert pe % block == 0


@given(
    blocks=st.integers(1, 200),
    queues=st.tuples(st.integers(0, 10_000), st.integers(0, 10_000)),
    rates=st.tuples(st.integers(1, 50), st.integers(1, 50)),
)
def test_no_other_split_in_blocks_ends_earlier_by_more_than_a_blocks_time(
    blocks: int, queues: tuple[int, int], rates: tuple[int, int]
) -> None:
    def end(pe_blocks: int) -> Fraction:
        pe = Fraction(queues[0] + pe_blocks * 64, rates[0]) if pe_blocks else Fraction(0)
        de = (
            Fraction(queues[1] + (blocks - pe_blocks) * 64, rates[1])
            if pe_blocks < blocks
            else Fraction(0)
        )
        return max(pe, de)

    chosen = split_tokens(blocks * 64, *queues, *rates, 64, Side.PE) // 64
    best = min(end(each) for each in range(blocks + 1))
    assert end(chosen) - best <= Fraction(32, min(rates))


def test_ties_go_to_the_node_that_read_less_then_to_the_lower_id() -> None:
    pe, de = NodeState(NodeId("n1")), NodeState(NodeId("n0"))
    assert side_that_read_less(pe, de) is Side.DE
    de.id = NodeId("n2")
    assert side_that_read_less(pe, de) is Side.PE
    pe.done_tokens = 1
    assert side_that_read_less(pe, de) is Side.DE
    de.done_tokens = 2
    assert side_that_read_less(pe, de) is Side.PE


def plans(play: Checked, *events: object) -> list[ReadPlan]:
    return [each.plan for each in play(*events) if isinstance(each, Assign)]  # type: ignore[arg-type]


def test_planned_reads_that_no_engine_has_seen_lengthen_the_queues() -> None:
    play = Checked(joined("p0"), joined("d0"), beta_tokens=10**6)
    names = ["a", "b", "c"]
    play(*[arrived(each) for each in names], fetched("P", queue=100))
    # Queues 100 and 0, then 100 and 128, then 228 and 128.
    assert plans(play, fetched("D", queue=0)) == [
        ReadPlan(0, 128),
        ReadPlan(128, 0),
        ReadPlan(0, 128),
    ]


def test_a_reported_queue_replaces_what_was_seen_and_keeps_what_was_not() -> None:
    play = Checked(joined("p0"), joined("d0"), beta_tokens=10**6)
    play(arrived("a"), arrived("b"), fetched("P", queue=1000))
    assert plans(play, fetched("D")) == [ReadPlan(0, 128), ReadPlan(0, 128)]
    # d0 saw a, and has read it by now; b is under way: its queue is 0 + 128, that of P is now 127.
    play(arrived("c"), fetched("P", queue=127))
    assert plans(play, fetched("D", report("d0", seen=1), queue=0)) == [ReadPlan(128, 0)]
    play(arrived("d"), fetched("P", report("p0", seen=3), queue=129))
    assert plans(play, fetched("D", report("d0", seen=1), queue=0)) == [ReadPlan(0, 128)]


def test_equal_queues_are_decided_by_what_each_node_has_read() -> None:
    play = Checked(joined("p0"), joined("d0"), beta_tokens=10**6)
    seen = 0

    def next_plan(request: str) -> ReadPlan:
        nonlocal seen
        play(arrived(request), fetched("P", report("p0", seen=seen)))
        (made,) = plans(play, fetched("D", report("d0", seen=seen)))
        seen += 1
        return made

    assert next_plan("a") == ReadPlan(0, 128)  # Nothing read yet: node D before node P.
    play(
        read("a", "de", 128), fetched("P", report("p0", seen=1)), fetched("D", report("d0", seen=1))
    )
    assert next_plan("b") == ReadPlan(128, 0)
    play(
        read("b", "pe", 128), fetched("P", report("p0", seen=2)), fetched("D", report("d0", seen=2))
    )
    assert next_plan("c") == ReadPlan(0, 128)


def test_split_uses_the_configured_rates() -> None:
    play = Checked(
        joined("p0"), joined("d0"), read_plan=ReadPlanKind.SPLIT, pe_read_rate=1, de_read_rate=3
    )
    play(arrived("a", prompt=1000, hit=512), fetched("P"))
    assert plans(play, fetched("D")) == [ReadPlan(128, 384)]


def test_prefill_and_decode_engines_may_share_a_node() -> None:
    play = Checked(joined("p0", node="host"), joined("d0", node="host"))
    play(arrived("a"), fetched("P"))
    assert plans(play, fetched("D")) == [ReadPlan(128, 0)]
