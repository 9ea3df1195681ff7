"""Who gets what: prefill classes, decode groups and engines, accounting of what is under way, baselines."""

from __future__ import annotations

import pytest
from policy_kit import (
    BIG,
    Checked,
    aborted,
    arrived,
    failed,
    fetched,
    finished,
    joined,
    lost,
    placements,
    prefilled,
    read,
    report,
)

from dualpath.policy import Assign, ReadPlan, ReadPlanKind, SchedulerKind

PREFILL_PAIR = (joined("p0"), joined("p1"))


def prefill_of(play: Checked, *events: object) -> list[str]:
    """Prefill engines chosen for the waiting requests, in order of assignment."""
    out = play(*events)  # type: ignore[arg-type]
    return [each.prefill for each in out if isinstance(each, Assign)]


def ready_decode(*requests: str, prompt: int = 200, **changes: object) -> Checked:
    """Prefill engines p0, p1; the requests have their decode engine d0, and wait for prefill."""
    play = Checked(*PREFILL_PAIR, joined("d0"), **changes)
    play(*[arrived(each, prompt=prompt, hit=64) for each in requests], fetched("D"))
    return play


# Prefill


def test_prefill_takes_the_engine_with_the_fewest_tokens() -> None:
    play = ready_decode("a")
    out = prefill_of(play, fetched("P", report("p0", tokens=301), report("p1", tokens=300)))
    assert out == ["p1"]


def test_prefill_adds_the_tokens_of_each_request_as_it_goes() -> None:
    play = ready_decode("a", "b", "c", "d")
    out = prefill_of(play, fetched("P", report("p0", tokens=0), report("p1", tokens=300)))
    assert out == ["p0", "p0", "p1", "p0"]  # 0/300, 200/300, 400/300, 400/500


def test_equal_tokens_go_to_the_lower_id() -> None:
    play = ready_decode("a", "b", "c")
    assert prefill_of(play, fetched("P")) == ["p0", "p1", "p0"]


@pytest.mark.parametrize(("tokens", "expected"), [(1000, ["p0"]), (1001, [])])
def test_an_engine_above_beta_gets_nothing(tokens: int, expected: list[str]) -> None:
    play = ready_decode("a", beta_tokens=1000)
    reports = (report("p0", tokens=tokens), report("p1", tokens=5000))
    assert prefill_of(play, fetched("P", *reports)) == expected
    assert play.scheduler.waiting().prefill == 1 - len(expected)


def test_an_idle_engine_takes_a_request_longer_than_beta() -> None:
    play = ready_decode("a", "b", prompt=5000, beta_tokens=0)
    assert prefill_of(play, fetched("P")) == ["p0", "p1"]


def two_nodes(p0_queue: int, p1_queue: int, p0_tokens: int, p1_tokens: int) -> list[str]:
    """A prefill group over two nodes; alpha 10,000, beta 1,000."""
    play = Checked(
        joined("p0", node="n0"), joined("p1", node="n1"), joined("d0"), alpha_tokens=10_000
    )
    play(arrived("a"), fetched("D"))
    reports = (
        report("p0", tokens=p0_tokens, queue=p0_queue),
        report("p1", tokens=p1_tokens, queue=p1_queue),
    )
    return prefill_of(play, fetched("P", *reports))


@pytest.mark.parametrize(
    ("p0", "p1", "expected"),
    [
        ((10_000, 900), (10_001, 0), ["p0"]),  # Short queue before fewer tokens.
        ((10_001, 900), (10_002, 800), ["p1"]),  # Both long: fewer tokens.
        ((5, 900), (10_000, 800), ["p1"]),  # Both short: fewer tokens, not the shorter queue.
        ((0, 1001), (10_001, 900), ["p1"]),  # Overloaded, though its queue is short.
        ((0, 1001), (0, 1001), []),
    ],
)
def test_prefill_classes(p0: tuple[int, int], p1: tuple[int, int], expected: list[str]) -> None:
    assert two_nodes(p0[0], p1[0], p0[1], p1[1]) == expected


def test_planned_reads_lengthen_the_queue_for_the_next_choice() -> None:
    play = Checked(
        joined("p0", node="n0"),
        joined("p1", node="n1"),
        joined("d0"),
        alpha_tokens=100,
        read_plan=ReadPlanKind.PE,
    )
    play(*map(arrived, "abc"), fetched("D"))
    reports = (report("p0", queue=0), report("p1", tokens=900, queue=0))
    # After a, node n0 has 128 tokens to read, above alpha: b goes to the busier p1; then both are above.
    assert prefill_of(play, fetched("P", *reports)) == ["p0", "p1", "p0"]


def test_prefill_is_first_come_first_served_over_groups() -> None:
    play = Checked(joined("p0", buffer=128), joined("p1", "Q"), joined("d0"))
    play(arrived("long", prompt=500), arrived("short", prompt=100, hit=64), fetched("D"))
    assert prefill_of(play, fetched("P")) == []  # The head does not fit p0, and is not overtaken.
    assert prefill_of(play, fetched("Q")) == ["p1", "p1"]


def test_assignments_under_way_are_added_to_the_report() -> None:
    play = ready_decode("a", "b", beta_tokens=10_000)
    assert prefill_of(play, fetched("P", report("p0"), report("p1", tokens=500))) == ["p0", "p0"]
    play(arrived("c"), fetched("D"))
    # p0 has seen one of its two assignments of 200 tokens: 150 + 200 > 340.
    reports = (report("p0", seen=1, requests=1, tokens=150), report("p1", tokens=340))
    assert prefill_of(play, fetched("P", *reports)) == ["p1"]
    play(arrived("d"), fetched("D"))
    reports = (report("p0", seen=2, requests=1, tokens=200), report("p1", seen=1, tokens=340))
    assert prefill_of(play, fetched("P", *reports)) == ["p0"]


def test_a_request_placed_but_not_assigned_counts_too() -> None:
    play = Checked(*PREFILL_PAIR, joined("d0"))
    play(arrived("a"), fetched("P"))  # p0 is chosen; no decode engine yet.
    play(arrived("b"), fetched("P"))
    assert placements(play(fetched("D"))) == ["a:p0:d0", "b:p1:d0"]


@pytest.mark.parametrize("ending", [finished("a"), aborted("a"), prefilled("a")])
def test_an_ended_prefill_that_was_never_reported_counts_no_more(ending: object) -> None:
    play = ready_decode("a")
    play(fetched("P"), read("a", "de", 64), ending)  # type: ignore[arg-type]
    play(arrived("b"), fetched("D"))
    reports = (report("p0"), report("p1", tokens=1))
    assert prefill_of(play, fetched("P", *reports))[-1] == "p0"


# Decode, phase 1: groups


def decode_groups(*requests: int, loads: tuple[int, int]) -> list[str]:
    """Groups D and E of one engine each with these tokens reported; where the prompts go."""
    play = Checked(joined("p0"), joined("d0", "D"), joined("d9", "E"), beta_tokens=BIG)
    play(fetched("D", report("d0", tokens=loads[0])), fetched("E", report("d9", tokens=loads[1])))
    names = [f"r{index}" for index in range(len(requests))]
    play(*[arrived(n, prompt=p, hit=0) for n, p in zip(names, requests, strict=True)])
    play(fetched("P"))
    out = play(
        fetched("D", report("d0", tokens=loads[0])), fetched("E", report("d9", tokens=loads[1]))
    )
    where = {
        each.request: {"d0": "D", "d9": "E"}[each.decode]
        for each in out
        if isinstance(each, Assign)
    }
    return [where[each] for each in names]  # type: ignore[index]


def test_phase_1_takes_the_group_with_the_fewest_tokens_and_counts_its_queue() -> None:
    assert decode_groups(200, 200, 200, 200, loads=(0, 300)) == ["D", "D", "E", "D"]
    assert decode_groups(200, 200, 200, loads=(5, 4)) == ["E", "D", "E"]


def test_phase_1_equal_groups_go_to_the_lower_id() -> None:
    assert decode_groups(200, 200, 200, loads=(0, 0)) == ["D", "E", "D"]


def test_phase_1_drains_the_queue_for_all_groups_on_any_fetch() -> None:
    play = Checked(joined("p0"), joined("d0", "D"), joined("d9", "E"))
    play(*map(arrived, "abcd"))
    assert play.scheduler.waiting().decode_global == 4
    play(fetched("E"))
    waiting = play.scheduler.waiting()
    assert waiting.decode_global == 0
    assert waiting.decode_private == {"D": 2, "E": 0}
    assert waiting.decode == 2


def test_phase_1_sees_a_group_whose_tokens_fell() -> None:
    play = Checked(joined("p0"), joined("d0", "D"), joined("d9", "E"), beta_tokens=BIG)
    play(
        fetched("P"), fetched("D", report("d0", tokens=900)), fetched("E", report("d9", tokens=500))
    )
    play(fetched("D", report("d0", tokens=100)))
    play(arrived("a"), fetched("P"))
    assert placements(play(fetched("D", report("d0", tokens=100)))) == ["a:p0:d0"]


def test_phase_1_passes_over_groups_that_could_never_hold_the_request() -> None:
    play = Checked(joined("p0"), joined("d0", "D", hbm=250), joined("d9", "E"), beta_tokens=BIG)
    play(fetched("E", report("d9", tokens=5000)))
    play(arrived("a"), arrived("b", prompt=100, hit=0), fetched("P"))
    assert placements(play(fetched("D", report("d0", free=250)))) == ["b:p0:d0"]
    assert placements(play(fetched("E"))) == ["a:p0:d9"]


def test_a_private_queue_moves_on_when_its_group_is_lost() -> None:
    play = Checked(joined("p0"), joined("d0", "D"), joined("d9", "E"))
    play(*map(arrived, "abcd"), fetched("E"), fetched("P"), lost("d0"))
    assert play.scheduler.waiting().decode_global == 2
    assert placements(play(fetched("E"))) == ["a:p0:d9", "c:p0:d9"]


# Decode, phase 2: engines of a group


def decode_of(requests: list[tuple[int, int]], *reports: object, **changes: object) -> list[str]:
    """Engines chosen in group D for requests of (prompt, new) tokens, all with a prefill engine."""
    engines = [each.engine for each in reports]  # type: ignore[attr-defined]
    play = Checked(joined("p0"), *[joined(each) for each in engines], beta_tokens=BIG, **changes)
    names = [f"r{index}" for index in range(len(requests))]
    play(*[arrived(n, prompt=p, hit=0, new=g) for n, (p, g) in zip(names, requests, strict=True)])
    play(fetched("P"))
    out = play(fetched("D", *reports))  # type: ignore[arg-type]
    return [f"{each.decode}" for each in out if isinstance(each, Assign)]


def test_phase_2_takes_the_fewest_requests_among_those_within_z() -> None:
    # Z = 1.05 * (200 + 500 + 400) / 2 = 577.5: d0 would have 700, d1 600: none is within, fewest tokens.
    reports = (
        report("d0", requests=1, tokens=500),
        report("d1", requests=9, tokens=400),
    )
    assert decode_of([(200, 0)], *reports) == ["d1"]
    # Z = 1.05 * (200 + 500 + 400 + 2000) / 3 = 1085: d0 and d1 are within; d0 has fewer requests.
    assert decode_of([(200, 0)], *reports, report("d2", requests=0, tokens=2000)) == ["d0"]


@pytest.mark.parametrize(
    ("z_factor", "expected"),
    [(1.0, "d1"), (1.5, "d0")],
)
def test_z_factor_decides_what_counts_as_balanced(z_factor: float, expected: str) -> None:
    # Z = z_factor * (200 + 600 + 400) / 2 = 600 or 900. With 800 or 600 tokens after the choice.
    reports = (report("d0", requests=1, tokens=600), report("d1", requests=2, tokens=400))
    assert decode_of([(200, 0)], *reports, z_factor=z_factor) == [expected]


def test_exactly_z_is_within() -> None:
    # Z = 1.0 * (200 + 100 + 200 + 700) / 3 = 400 = 200 + 200: d1 is within, and has fewer requests than d0.
    reports = (
        report("d0", requests=5, tokens=100),
        report("d1", requests=0, tokens=200),
        report("d2", requests=0, tokens=700),
    )
    assert decode_of([(200, 0)], *reports, z_factor=1.0) == ["d1"]


def test_phase_2_ties() -> None:
    # Within Z and equal requests: fewer tokens; all equal: the lower id.
    reports = (report("d0", requests=1, tokens=20), report("d1", requests=1, tokens=10))
    assert decode_of([(200, 0), (200, 0)], *reports, z_factor=2.0) == ["d1", "d0"]
    assert decode_of([(200, 0)], report("d0"), report("d1"), z_factor=2.0) == ["d0"]


def test_phase_2_needs_device_memory_for_prompt_and_new_tokens() -> None:
    reports = (report("d0", free=299), report("d1", tokens=5000, free=300))
    assert decode_of([(200, 100)], *reports) == ["d1"]
    assert decode_of([(200, 101)], *reports) == []


def test_phase_2_stops_at_the_first_request_without_memory() -> None:
    # Both fit the group's total of 600, but the first fits no engine: the second does not overtake it.
    reports = (report("d0", free=300), report("d1", free=300))
    assert decode_of([(301, 0), (100, 0)], *reports) == []
    assert decode_of([(300, 0), (301, 0), (10, 0)], *reports) == ["d0"]


def test_z_counts_only_requests_that_fit_the_groups_memory() -> None:
    # R is the first request alone, as 300 + 900 > 1000: Z = 1.0 * (300 + 0 + 500) / 2 = 400, d0 is within.
    reports = (
        report("d0", requests=7, tokens=0, free=500),
        report("d1", requests=0, tokens=500, free=500),
    )
    assert decode_of([(300, 0), (900, 0)], *reports, z_factor=1.0) == ["d0"]
    # Were both counted, Z = 850 would admit d1, which has fewer requests.
    reports = (
        report("d0", requests=7, tokens=0, free=800),
        report("d1", requests=0, tokens=500, free=800),
    )
    assert decode_of([(300, 0), (900, 0)], *reports, z_factor=1.0)[0] == "d1"


def test_memory_under_way_is_not_promised_twice() -> None:
    play = Checked(joined("p0"), joined("d0", hbm=500), beta_tokens=BIG)
    free = report("d0", free=500)
    play(arrived("a"), arrived("b"), fetched("P"))
    assert placements(play(fetched("D", free))) == ["a:p0:d0"]
    assert placements(play(fetched("D", free))) == []  # Not seen yet: 300 of 500 are taken.
    seen = report("d0", seen=1, requests=1, tokens=200, free=200)
    assert placements(play(fetched("D", seen))) == []
    assert (
        placements(play(finished("a"), fetched("D", seen))) == []
    )  # It is free when reported free.
    assert placements(play(fetched("D", report("d0", seen=1, free=500)))) == ["b:p0:d0"]


def test_requests_under_way_count_too() -> None:
    play = Checked(joined("p0"), joined("d0"), joined("d1"), beta_tokens=BIG, z_factor=3.0)
    idle = fetched("D", report("d0", requests=0), report("d1", requests=1))
    play(*[arrived(each, prompt=100, hit=0) for each in "abc"], fetched("P"))
    assert placements(play(idle)) == ["a:p0:d0", "b:p0:d1", "c:p0:d0"]
    # d0 has not seen its two, d1 has seen its one: 2 requests against 1.
    play(arrived("d", prompt=100, hit=0), fetched("P"))
    reports = (report("d0", requests=0), report("d1", seen=1, requests=1, tokens=100))
    assert placements(play(fetched("D", *reports))) == ["d:p0:d1"]


# Requests that come back


def test_an_older_request_takes_back_memory_that_a_younger_one_only_waits_with() -> None:
    play = Checked(joined("p0"), joined("d0", hbm=300), beta_tokens=100, read_plan=ReadPlanKind.PE)
    full, empty = report("d0", seen=1, free=0), report("d0", seen=1, free=300)
    play(arrived("a"), arrived("b"), fetched("P"))
    assert placements(play(fetched("D"))) == ["a:p0:d0"]
    # The prefill engine is lost. b gets the decode engine, and waits for a prefill engine; so does a.
    play(lost("p0"), fetched("D", empty))
    assert play.scheduler.waiting().decode == 0
    play(joined("p0"), failed("a"))
    # a takes the prefill engine, which is above beta then: b can have neither it nor go on.
    assert placements(play(fetched("P"), fetched("D", full))) == []
    assert placements(play(fetched("D", empty))) == ["a:p0:d0"]
    play(read("a", "pe", 128, 1), prefilled("a", 1), finished("a"))
    done = (fetched("P", report("p0", seen=1)), fetched("D", report("d0", seen=2, free=300)))
    assert placements(play(*done)) == ["b:p0:d0"]


def test_an_older_request_takes_back_a_prefill_engine_that_a_younger_one_only_waits_with() -> None:
    play = Checked(joined("p0"), joined("d0", hbm=300), beta_tokens=100, read_plan=ReadPlanKind.PE)
    play(arrived("a"), arrived("b"), fetched("P"), fetched("D"))
    # The decode engine is lost: a is interrupted, and b takes the prefill engine. Then a comes back.
    play(lost("d0"), fetched("P", report("p0", seen=1)))
    assert play.scheduler.waiting().prefill == 0
    play(joined("d0", hbm=300), failed("a"))
    assert placements(play(fetched("D"))) == []
    assert placements(play(fetched("P", report("p0", seen=1)))) == ["a:p0:d0"]
    assert play.scheduler.waiting().prefill == 1


def test_a_request_whose_prefill_engine_was_lost_may_take_back_another() -> None:
    """Each request is one too many for an engine: 200 tokens, beta 100, memory for one."""
    play = Checked(
        joined("p0", "P"),
        joined("p1", "Q"),
        joined("p2", "R"),
        joined("d0", hbm=300),
        beta_tokens=100,
        read_plan=ReadPlanKind.PE,
    )
    play(*map(arrived, "abc"), fetched("P"), fetched("Q"), fetched("R"))
    play(lost("p0"), fetched("D"))
    # a has the decode engine and needs a prefill engine; b and c have those and need the decode engine.
    assert placements(play(fetched("Q"))) == ["a:p1:d0"]
    # b, put back by a, may do the same to c.
    play(lost("p1"), aborted("a"), fetched("D", report("d0", seen=1, free=300)))
    assert placements(play(fetched("R"))) == ["b:p2:d0"]


def test_a_request_whose_decode_group_was_lost_may_take_back_memory_in_another() -> None:
    play = Checked(
        joined("p0"), joined("d0", "D", hbm=300), joined("d1", "E", hbm=300), beta_tokens=100
    )
    play(arrived("a"), arrived("b"), fetched("E"), fetched("P"), lost("d0"))
    # a has the prefill engine, and lost its queue; b has d1, and needs the prefill engine.
    assert placements(play(fetched("E"))) == ["a:p0:d1"]


# Baselines


def four_engines(kind: SchedulerKind, **changes: object) -> Checked:
    return Checked(
        joined("p0", "P"),
        joined("p1", "Q"),
        joined("d0", "D"),
        joined("d1", "E"),
        scheduler=kind,
        **changes,
    )


def test_round_robin_takes_engines_in_turn_and_alternates_sides() -> None:
    play = four_engines(SchedulerKind.ROUND_ROBIN)
    play(*map(arrived, "abcde"), fetched("P", report("p0", tokens=9999)))
    out = play(fetched("D", report("d0", tokens=9999)))
    assert placements(out) == ["a:p0:d0", "b:p1:d1", "c:p0:d0", "d:p1:d1", "e:p0:d0"]
    plans = [each.plan for each in out if isinstance(each, Assign)]
    pe, de = ReadPlan(128, 0), ReadPlan(0, 128)
    assert plans == [pe, de, pe, de, pe]


def test_round_robin_passes_over_a_full_decode_engine() -> None:
    play = four_engines(SchedulerKind.ROUND_ROBIN)
    play(*map(arrived, "abc"), fetched("P"), fetched("E", report("d1", free=599)))
    play(arrived("d"), arrived("e"), fetched("P"))
    out = play(fetched("D", report("d0", seen=2, free=0)))
    # d1 has seen nothing: 599 - 300 (b) = 299 is too little for d; d0 is full.
    assert placements(out) == []
    out = play(fetched("E", report("d1", seen=1, free=600)))
    assert placements(out) == ["d:p1:d1", "e:p0:d1"]


def test_random_is_seeded_and_uses_every_engine_and_side() -> None:
    def choices(seed: int) -> list[tuple[str, ReadPlan]]:
        play = four_engines(SchedulerKind.RANDOM, seed=seed)
        play(*[arrived(f"r{index}") for index in range(60)], fetched("P"))
        out = [each for each in play(fetched("D")) if isinstance(each, Assign)]
        return [(f"{each.prefill}{each.decode}", each.plan) for each in out]

    assert choices(1) == choices(1)
    assert choices(1) != choices(2)
    assert len(choices(1)) == 60
    sides = {ReadPlan(128, 0), ReadPlan(0, 128)}
    pairs = {"p0d0", "p0d1", "p1d0", "p1d1"}
    assert set(choices(1)) == {(pair, side) for pair in pairs for side in sides}


def test_random_finds_the_one_engine_with_memory() -> None:
    engines = [joined(f"d{index:02}", hbm=400) for index in range(40)]
    play = Checked(joined("p0"), *engines, scheduler=SchedulerKind.RANDOM)
    full = [report(f"d{index:02}", free=400 if index == 23 else 0) for index in range(40)]
    play(arrived("a"), arrived("b"), fetched("P"))
    assert placements(play(fetched("D", *full))) == ["a:p0:d23"]


@pytest.mark.parametrize("kind", [SchedulerKind.BASIC, SchedulerKind.ORACLE])
def test_basic_and_oracle_choose_engines_as_dualpath_does(kind: SchedulerKind) -> None:
    def run(scheduler: SchedulerKind) -> list[Assign]:
        play = four_engines(scheduler, read_plan=ReadPlanKind.SPLIT)
        play(*map(arrived, "abcd"), fetched("P", report("p0", tokens=50)), fetched("Q"))
        out = play(fetched("D"), fetched("E"))
        return [each for each in out if isinstance(each, Assign)]

    assert len(run(kind)) == 4
    assert placements(run(kind)) == placements(run(SchedulerKind.DUALPATH))  # type: ignore[arg-type]
    expected = ReadPlan(128, 0, bypass=kind is SchedulerKind.ORACLE)
    assert {each.plan for each in run(kind)} == {expected}
