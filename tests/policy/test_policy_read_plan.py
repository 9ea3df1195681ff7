"""Read plans: each hit token is read once, by the side that the rule says."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st
from policy_kit import Checked, arrived, fetched, joined, read, report

from dualpath.base.ids import NodeId, Role, Side
from dualpath.policy import Assign, PolicyConfig, ReadPlan, ReadPlanKind, plan_reads
from dualpath.policy.cluster import NodeState
from dualpath.policy.membership import Membership
from dualpath.policy.planning import PlannedByQueues
from dualpath.policy.read_plan import side_that_read_less, split_tokens


def plan(
    kind: ReadPlanKind,
    hit: int,
    pe_queue: int = 0,
    de_queue: int = 0,
    *,
    rates: tuple[int, int] = (1, 1),
    nodes: tuple[int, int] = (1, 1),
    unread: int | None = None,
    block: int = 64,
    tie: Side = Side.PE,
    turn: Side = Side.PE,
) -> tuple[int, int]:
    made = plan_reads(
        kind,
        hit,
        pe_queue_tokens=pe_queue,
        de_queue_tokens=de_queue,
        pe_read_rate=rates[0],
        de_read_rate=rates[1],
        pe_nodes=nodes[0],
        de_nodes=nodes[1],
        unread_tokens=pe_queue + de_queue if unread is None else unread,
        block_tokens=block,
        tie=tie,
        turn=turn,
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
    ("rates", "expected"),
    [
        ((1, 1), (320, 320)),
        ((3, 1), (448, 192)),  # 480 : 160 would be 7.5 blocks of the PE side: the DE side's tie.
        ((4, 1), (512, 128)),
        ((1, 1000), (0, 640)),
    ],
)
def test_an_idle_steady_split_ends_on_both_sides_together(
    rates: tuple[int, int], expected: tuple[int, int]
) -> None:
    for nodes, turn in product(((1, 1), (2, 4), (48, 96)), Side):
        got = plan(ReadPlanKind.STEADY, 640, rates=rates, nodes=nodes, tie=Side.DE, turn=turn)
        assert got == expected


def shares(hit: int, unread: int, nodes: tuple[int, int], rates: tuple[int, int]) -> list[int]:
    """Of the PE side, when it is its turn and when it is not; as much is unread on each side's node."""
    queues = [unread * rate // sum(rates) for rate in rates]
    return [
        plan(
            ReadPlanKind.STEADY,
            hit,
            *queues,
            unread=unread,
            nodes=nodes,
            rates=rates,
            block=1,
            turn=turn,
        )[0]
        for turn in (Side.PE, Side.DE)
    ]


@pytest.mark.parametrize(
    ("nodes", "rates", "larger", "smaller"),
    [
        ((1, 1), (1, 1), 320, 320),
        ((1, 4), (1, 1), 256, 0),  # 1 : 4 on average.
        ((2, 4), (1, 1), 427, 0),
        ((3, 2), (1, 1), 512, 256),
        ((1, 4), (2, 1), 427, 0),  # 2 : 4.
    ],
)
def test_a_loaded_steady_split_is_as_what_all_nodes_of_a_role_read(
    nodes: tuple[int, int], rates: tuple[int, int], larger: int, smaller: int
) -> None:
    assert shares(640, 3 * 10**9, nodes, rates) == [larger, smaller]


def test_shares_go_from_one_node_a_side_to_all_of_them() -> None:
    def pe(hits: int) -> float:
        return sum(shares(1200, hits * 1200, (2, 4), (1, 1))) / 2

    assert [pe(hits) for hits in (0, 1, 2, 3, 100)] == [600, 600, 480, 400, 400]


def test_shares_in_turn_let_a_burst_end_earlier() -> None:
    """Two of three nodes are prefill nodes: their node of the burst has twice as much to read."""

    def mean_end(turns: Sequence[Side]) -> float:
        parts = [
            plan(ReadPlanKind.STEADY, 600, 10**5, 10**5, nodes=(2, 1), block=1, turn=turn)
            for turn in turns
        ]
        sides = [_ends(side) for side in zip(*parts, strict=True)]
        return sum(map(max, zip(*sides, strict=True))) / len(turns)

    in_turn = [Side.PE, Side.DE] * 30
    assert mean_end(in_turn) == pytest.approx(60 * 300)
    assert mean_end([Side.PE] * 60) == 60 * 600


def _ends(parts: Sequence[int]) -> list[float]:
    """When each part is read by a NIC that serves all at once, a token a second."""
    return [float(sum(min(each, other) for other in parts)) for each in parts]


def test_a_steady_split_evens_out_queues() -> None:
    # 480 more on the PE side would; a fortieth of it at once.
    assert plan(ReadPlanKind.STEADY, 640, 0, 960, block=1) == (332, 308)
    assert plan(ReadPlanKind.STEADY, 640, 960, 0, block=1) == (308, 332)
    # 720 more, which the PE side reads in 240 s, the DE side in 720 s.
    assert plan(ReadPlanKind.STEADY, 640, 0, 960, rates=(3, 1), block=1) == (498, 142)
    assert plan(ReadPlanKind.STEADY, 640, 10**6, 0) == (0, 640)
    assert plan(ReadPlanKind.STEADY, 640, 0, 10**6) == (640, 0)


@given(
    requests=st.integers(200, 400),
    hit=st.integers(100, 10_000),
    counts=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    slow=st.integers(1, 4),
)
def test_nodes_that_are_asked_in_turn_have_queues_of_about_equal_time(
    requests: int, hit: int, counts: tuple[int, int], slow: int
) -> None:
    """Also when nobody reads; `slow`: how much slower the nodes of the DE side are."""
    pe_queues, de_queues = [0] * counts[0], [0] * counts[1]
    turns = [[Side.PE] * counts[1] for _ in range(counts[0])]
    for number in range(requests):
        i, j = number % counts[0], number // counts[0] % counts[1]
        pe, de = plan(
            ReadPlanKind.STEADY,
            hit,
            pe_queues[i],
            de_queues[j],
            rates=(slow, 1),
            nodes=counts,
            block=1,
            turn=turns[i][j],
        )
        turns[i][j] = Side.DE if turns[i][j] is Side.PE else Side.PE
        pe_queues[i] += pe
        de_queues[j] += de
    times = [each / slow for each in pe_queues] + [float(each) for each in de_queues]
    assert max(times) <= 1.25 * min(times) + 2 * hit


@given(
    hit=st.integers(0, 10_000),
    queues=st.tuples(st.integers(0, 10**6), st.integers(0, 10**6)),
    nodes=st.tuples(st.integers(1, 50), st.integers(1, 50)),
    rates=st.tuples(st.integers(1, 50), st.integers(1, 50)),
)
def test_sides_may_be_swapped(
    hit: int,
    queues: tuple[int, int],
    nodes: tuple[int, int],
    rates: tuple[int, int],
) -> None:
    pe, de = plan(ReadPlanKind.STEADY, hit, *queues, nodes=nodes, rates=rates, block=1)
    swapped = plan(
        ReadPlanKind.STEADY,
        hit,
        *reversed(queues),
        nodes=(nodes[1], nodes[0]),
        rates=(rates[1], rates[0]),
        block=1,
        tie=Side.DE,
        turn=Side.DE,
    )
    assert swapped == (de, pe)


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
    assert plan(ReadPlanKind.STEADY, 64, tie=Side.PE) == (64, 0)
    assert plan(ReadPlanKind.STEADY, 64, tie=Side.DE) == (0, 64)
    assert plan(ReadPlanKind.STEADY, 64, 1, 0, tie=Side.PE) == (0, 64)
    assert plan(ReadPlanKind.STEADY, 64, 0, 1, tie=Side.DE) == (64, 0)


@given(
    blocks=st.integers(0, 5_000),
    block=st.sampled_from([1, 16, 64, 256]),
    queues=st.tuples(st.integers(0, 10**8), st.integers(0, 10**8)),
    rates=st.tuples(st.integers(1, 10**7), st.integers(1, 10**7)),
    nodes=st.tuples(st.integers(1, 1000), st.integers(1, 1000)),
    kind=st.sampled_from(list(ReadPlanKind)),
    tie=st.sampled_from(list(Side)),
    turn=st.sampled_from(list(Side)),
)
def test_a_plan_covers_the_hit_once_in_whole_blocks(
    blocks: int,
    block: int,
    queues: tuple[int, int],
    rates: tuple[int, int],
    nodes: tuple[int, int],
    kind: ReadPlanKind,
    tie: Side,
    turn: Side,
) -> None:
    hit = blocks * block
    pe, de = plan(kind, hit, *queues, rates=rates, nodes=nodes, block=block, tie=tie, turn=turn)
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
        joined("p0"), joined("d0"), read_plan=ReadPlanKind.STEADY, pe_read_rate=1, de_read_rate=3
    )
    play(arrived("a", prompt=1000, hit=512), fetched("P"))
    assert plans(play, fetched("D")) == [ReadPlan(128, 384)]


def test_prefill_and_decode_engines_may_share_a_node() -> None:
    play = Checked(joined("p0", node="host"), joined("d0", node="host"))
    play(arrived("a"), fetched("P"))
    assert plans(play, fetched("D")) == [ReadPlan(128, 0)]


def test_a_steady_split_counts_the_nodes_of_each_role() -> None:
    joins = [joined("p0"), *(joined(f"d{i}", f"D{i}", node=f"n{i // 2}") for i in range(4))]
    play = Checked(*joins, read_plan=ReadPlanKind.STEADY, beta_tokens=10**9, block_tokens=1)
    names = [f"r{i}" for i in range(300)]
    play(*[arrived(each, prompt=1001, hit=1000) for each in names], fetched("P"))
    told = play(*[fetched(f"D{i}") for i in range(4)])
    made = [each for each in told if isinstance(each, Assign)]
    assert len(made) == len(names)
    share = sum(each.plan.pe_tokens for each in made) / (1000 * len(made))
    assert share == pytest.approx(1 / 3, abs=0.03)


def test_shares_in_turn_come_with_the_queues() -> None:
    def apart(queued: int) -> int:
        larger, smaller = (
            plan(
                ReadPlanKind.STEADY,
                800,
                queued,
                queued,
                nodes=(1, 2),
                unread=9999,
                block=1,
                turn=turn,
            )
            for turn in (Side.PE, Side.DE)
        )
        return larger[0] - smaller[0]

    assert [apart(queued) for queued in (0, 800, 8 * 800, 10**9)] == [0, 67, 533, 533]


def test_each_pair_of_nodes_takes_turns_by_itself() -> None:
    """DE nodes are asked in turn, too: none of them always gets the larger part."""
    config = PolicyConfig(read_plan=ReadPlanKind.STEADY, block_tokens=1)
    members = Membership()
    members.role_nodes.update({Role.PREFILL: 1, Role.DECODE: 2})
    members.unread_tokens = 10**6
    planner = PlannedByQueues(config, members, ReadPlanKind.STEADY)
    pe, one, two = (NodeState(NodeId(name)) for name in ("pe", "one", "two"))
    pe.unread_tokens = one.unread_tokens = two.unread_tokens = 10**5
    made = [planner.plan(600, pe, de).pe_tokens for de in (one, two) * 4]
    assert made == [400, 400, 0, 0] * 2
