"""The life of one request: events in, exact instructions out."""

from __future__ import annotations

import pytest
from policy_kit import (
    Checked,
    aborted,
    arrived,
    cluster_1p1d,
    failed,
    fetched,
    finished,
    joined,
    lost,
    prefilled,
    read,
    report,
)

from dualpath.base.errors import InvariantViolation
from dualpath.policy import (
    Assign,
    Interrupted,
    Phase,
    ReadPlan,
    ReadPlanKind,
    Reject,
    RejectReason,
    Release,
    SchedulerKind,
    StartPrefill,
)

BOTH = (fetched("P"), fetched("D"))


def assign(request: str, attempt: int = 0, pe: int = 128, de: int = 0) -> Assign:
    return Assign(request, attempt, "p0", "d0", ReadPlan(pe, de))  # type: ignore[arg-type]


def start(request: str, attempt: int = 0) -> StartPrefill:
    return StartPrefill(request, attempt, "p0")  # type: ignore[arg-type]


def release(request: str, *engines: str, attempt: int = 0) -> Release:
    return Release(request, attempt, engines)  # type: ignore[arg-type]


@pytest.mark.parametrize("order", [("P", "D"), ("D", "P")])
def test_a_request_is_assigned_when_both_roles_have_fetched(order: tuple[str, str]) -> None:
    play = cluster_1p1d(read_plan=ReadPlanKind.PE)
    assert play(arrived("a")) == []
    assert play(fetched(order[0])) == []
    assert play(fetched(order[1])) == [assign("a")]


def test_prefill_starts_when_all_reads_of_both_sides_are_complete() -> None:
    play = cluster_1p1d(read_plan=ReadPlanKind.SPLIT)
    assert play(arrived("a", prompt=400, hit=384), *BOTH) == [assign("a", pe=192, de=192)]
    assert play(read("a", "pe", 128), read("a", "de", 192)) == []
    assert play(read("a", "pe", 64)) == [start("a")]


def test_nothing_to_read_starts_prefill_at_once() -> None:
    play = cluster_1p1d()
    assert play(arrived("a", hit=0), *BOTH) == [assign("a", pe=0, de=0), start("a")]


def test_oracle_bypasses_reads() -> None:
    play = cluster_1p1d(scheduler=SchedulerKind.ORACLE)
    plan = ReadPlan(128, 0, bypass=True)
    assert play(arrived("a"), *BOTH) == [Assign("a", 0, "p0", "d0", plan), start("a")]  # type: ignore[arg-type]


def test_a_finished_request_leaves_nothing() -> None:
    play = cluster_1p1d()
    play(arrived("a"), *BOTH, read("a", "de", 128))
    assert play(prefilled("a"), finished("a"), finished("a")) == []
    stats = play.scheduler.stats()
    assert sum(stats.phases.values()) == 0
    assert stats.totals == {
        "arrived": 1,
        "assigned": 1,
        "finished": 1,
        "aborted": 0,
        "rejected": 0,
        "failed_attempts": 0,
        "interrupted": 0,
    }


def test_finish_before_prefill_done_still_releases_the_prefill_engine() -> None:
    play = cluster_1p1d()
    play(arrived("a", hit=0), *BOTH)
    assert play(finished("a")) == [release("a", "p0")]
    assert play(prefilled("a")) == []


def at_phase(phase: Phase, play: Checked) -> None:
    """Bring request `a` (128 hit tokens, plan pe) into a phase."""
    play(arrived("a"))
    if phase is Phase.WAITING:
        return
    play(*BOTH)
    if phase is Phase.READING:
        return
    if phase is Phase.INTERRUPTED:
        play(lost("p0"))
        return
    play(read("a", "pe", 128))
    if phase is Phase.DECODING:
        play(prefilled("a"))


RELEASED_ON_ABORT = {
    Phase.WAITING: [],
    Phase.READING: [release("a", "p0", "d0")],
    Phase.PREFILLING: [release("a", "p0", "d0")],
    Phase.DECODING: [release("a", "d0")],
    Phase.INTERRUPTED: [],
}


@pytest.mark.parametrize("phase", list(RELEASED_ON_ABORT))
def test_abort_releases_the_engines_that_have_it_once(phase: Phase) -> None:
    play = cluster_1p1d(read_plan=ReadPlanKind.PE)
    at_phase(phase, play)
    assert play.scheduler.stats().phases[phase] == 1
    assert play(aborted("a")) == RELEASED_ON_ABORT[phase]
    assert play(aborted("a")) == []
    assert sum(play.scheduler.stats().phases.values()) == 0
    waiting = play.scheduler.waiting()
    assert (waiting.prefill, waiting.decode) == (0, 0)


@pytest.mark.parametrize("first", ["P", "D"])
def test_abort_of_a_half_placed_request_is_not_told_to_anyone(first: str) -> None:
    play = cluster_1p1d()
    play(arrived("a"), fetched(first))
    assert play(aborted("a")) == []
    assert play(arrived("b"), *BOTH)[0] == assign("b", pe=0, de=128)


def test_abort_and_events_of_an_unknown_request_mean_nothing() -> None:
    play = cluster_1p1d()
    assert play(aborted("x"), finished("x"), prefilled("x"), failed("x"), read("x", "pe", 64)) == []


@pytest.mark.parametrize("phase", [Phase.READING, Phase.PREFILLING, Phase.DECODING])
def test_a_failed_attempt_is_released_and_attempted_again(phase: Phase) -> None:
    play = cluster_1p1d(read_plan=ReadPlanKind.PE)
    at_phase(phase, play)
    assert play(failed("a", prompt=230, hit=64, new=70)) == RELEASED_ON_ABORT[phase]
    assert play(*BOTH) == [assign("a", attempt=1, pe=64)]
    # What the old attempt's engines still say means nothing.
    assert play(read("a", "pe", 64), prefilled("a"), failed("a")) == []
    assert play(read("a", "pe", 64, attempt=1)) == [start("a", attempt=1)]
    play(prefilled("a", attempt=0))
    assert play.scheduler.stats().phases[Phase.PREFILLING] == 1
    play(prefilled("a", attempt=1))
    assert play.scheduler.stats().phases[Phase.DECODING] == 1


def test_a_failure_of_an_attempt_that_was_not_assigned_means_nothing() -> None:
    play = cluster_1p1d(read_plan=ReadPlanKind.PE)
    play(arrived("a"))
    assert play(failed("a", hit=0)) == []
    assert play(*BOTH) == [assign("a")]


def test_failed_attempts_queue_in_order_of_arrival_ahead_of_the_rest() -> None:
    play = Checked(joined("p0"), joined("d0"), beta_tokens=10_000, read_plan=ReadPlanKind.PE)
    play(*map(arrived, "abc"), *BOTH, arrived("d"))
    play(failed("c"), failed("a"), failed("b"))
    again = [each.request for each in play(*BOTH) if isinstance(each, Assign)]
    assert again == ["a", "b", "c", "d"]


def test_a_request_that_always_fails_is_rejected_in_the_end() -> None:
    play = cluster_1p1d(max_attempts=2, read_plan=ReadPlanKind.PE)
    play(arrived("a"), *BOTH)
    play(failed("a"), *BOTH)
    assert play(failed("a", attempt=1)) == [
        release("a", "p0", "d0", attempt=1),
        Reject("a", RejectReason.TOO_MANY_ATTEMPTS),  # type: ignore[arg-type]
    ]
    assert sum(play.scheduler.stats().phases.values()) == 0


def test_a_grown_prompt_that_fits_nowhere_is_rejected() -> None:
    play = Checked(joined("p0", buffer=256), joined("d0", buffer=256))
    play(arrived("a", prompt=250), *BOTH)
    assert play(failed("a", prompt=257)) == [
        release("a", "p0", "d0"),
        Reject("a", RejectReason.TOO_LONG),  # type: ignore[arg-type]
    ]


def interrupted(request: str, attempt: int = 0) -> Interrupted:
    return Interrupted(request, attempt)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("phase", "engine", "expected"),
    [
        (Phase.READING, "p0", [release("a", "d0"), interrupted("a")]),
        (Phase.READING, "d0", [release("a", "p0"), interrupted("a")]),
        (Phase.PREFILLING, "p0", [release("a", "d0"), interrupted("a")]),
        (Phase.PREFILLING, "d0", [release("a", "p0"), interrupted("a")]),
        (Phase.DECODING, "p0", []),
        (Phase.DECODING, "d0", [interrupted("a")]),
    ],
)
def test_a_lost_engine_interrupts_its_requests(
    phase: Phase, engine: str, expected: list[object]
) -> None:
    play = cluster_1p1d(read_plan=ReadPlanKind.PE)
    at_phase(phase, play)
    assert play(lost(engine)) == expected
    assert play(lost(engine)) == []
    play(joined(engine))
    if not expected:
        return
    assert play(*BOTH) == []
    assert play(failed("a", prompt=210, hit=192, new=90)) == []
    assert play(*BOTH) == [assign("a", attempt=1, pe=192)]


def test_both_engines_lost_interrupts_once() -> None:
    play = cluster_1p1d()
    play(arrived("a"), *BOTH)
    assert play(lost("d0"), lost("p0")) == [release("a", "p0"), interrupted("a")]
    assert play(failed("a")) == []
    assert play.scheduler.waiting().prefill == 1


def test_an_interrupted_request_may_turn_out_finished() -> None:
    play = cluster_1p1d(read_plan=ReadPlanKind.PE)
    at_phase(Phase.DECODING, play)
    play(lost("d0"))
    assert play(finished("a")) == []
    assert sum(play.scheduler.stats().phases.values()) == 0


@pytest.mark.parametrize(("first", "engine"), [("P", "p0"), ("D", "d0")])
def test_a_placed_request_of_a_lost_engine_waits_on_in_the_same_attempt(
    first: str, engine: str
) -> None:
    play = cluster_1p1d(read_plan=ReadPlanKind.PE)
    play(arrived("a"), fetched(first))
    assert play(lost(engine)) == []
    assert play(joined(engine)) == []
    assert play(*BOTH) == [assign("a")]


def test_requests_wait_for_an_engine_to_join() -> None:
    play = Checked(arrived("a"))
    assert play(fetched("P"), fetched("D")) == []
    play(joined("p0"), joined("d0"))
    assert play(*BOTH) == [assign("a", pe=0, de=128)]


def no_engine(request: str) -> Reject:
    return Reject(request, RejectReason.NO_ENGINE)  # type: ignore[arg-type]


def test_requests_are_rejected_without_engines_if_so_configured() -> None:
    play = cluster_1p1d(reject_without_engines=True)
    play(arrived("a"), fetched("D"), arrived("b"), arrived("c"), *BOTH)
    play(arrived("d"), arrived("e"), fetched("P"))
    # a, b, c are assigned; d and e hold a prefill engine and wait for a decode engine.
    assert play(lost("d0"))[-2:] == [no_engine("d"), no_engine("e")]
    assert play(failed("a")) == [no_engine("a")]
    assert play(arrived("f")) == [no_engine("f")]


def too_long(request: str) -> Reject:
    return Reject(request, RejectReason.TOO_LONG)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("limits", "prompt", "new", "fits"),
    [
        ({"d_hbm": 300}, 200, 100, True),
        ({"d_hbm": 300}, 200, 101, False),
        ({"d_buffer": 256}, 256, 1, True),
        ({"d_buffer": 256}, 257, 1, False),
        ({"d_buffer": 255}, 193, 1, False),  # Rounded up to blocks: 256.
        ({"p_buffer": 256}, 256, 1, True),
        ({"p_buffer": 256}, 257, 1, False),
        ({"p_hbm": 0}, 500, 1, True),
    ],
)
def test_what_no_engine_can_hold_is_rejected(
    limits: dict[str, int], prompt: int, new: int, fits: bool
) -> None:
    play = Checked(
        joined("p0", hbm=limits.get("p_hbm", 10**6), buffer=limits.get("p_buffer", 10**6)),
        joined("d0", hbm=limits.get("d_hbm", 10**6), buffer=limits.get("d_buffer", 10**6)),
    )
    expected = [] if fits else [too_long("a")]
    assert play(arrived("a", prompt=prompt, hit=64, new=new)) == expected


def test_hbm_and_buffer_must_be_of_the_same_engine() -> None:
    play = Checked(
        joined("p0"), joined("d0", hbm=1000, buffer=64), joined("d1", hbm=100, buffer=1024)
    )
    assert play(arrived("a", prompt=500, hit=64)) == [too_long("a")]


def test_a_waiting_request_is_rejected_when_the_first_engine_cannot_hold_it() -> None:
    play = Checked(arrived("a", prompt=1000), arrived("b"))
    assert play(joined("p0", buffer=512)) == [too_long("a")]
    play(joined("d0"))
    assert play(*BOTH) == [assign("b", pe=0, de=128)]


def test_a_waiting_request_is_rejected_when_the_only_engine_for_it_is_lost() -> None:
    play = Checked(joined("p0"), joined("d0", hbm=400), joined("d1", "E", hbm=10_000))
    play(arrived("a", prompt=1000), arrived("b"))
    assert play(lost("d1")) == [too_long("a")]
    assert play(*BOTH) == [assign("b", pe=0, de=128)]


@pytest.mark.parametrize(
    "event",
    [
        arrived("a"),
        arrived("b", prompt=128, hit=128),
        arrived("b", hit=100),
        arrived("b", hit=-64),
        arrived("b", new=-1),
        joined("p0"),
        joined("d9", "P"),
        fetched("P", report("p0", seen=1)),
    ],
)
def test_events_that_no_driver_may_send_stop_the_scheduler(event: object) -> None:
    play = cluster_1p1d()
    play(arrived("a"))
    with pytest.raises(InvariantViolation):
        play(event)  # type: ignore[arg-type]


@pytest.mark.parametrize("tokens", [129, -64])
def test_more_read_than_planned_stops_the_scheduler(tokens: int) -> None:
    play = cluster_1p1d(read_plan=ReadPlanKind.PE)
    play(arrived("a"), *BOTH)
    with pytest.raises(InvariantViolation, match="request a attempt 0"):
        play(read("a", "pe", tokens))


def test_seen_may_not_go_back() -> None:
    play = cluster_1p1d()
    play(arrived("a"), *BOTH, fetched("P", report("p0", seen=1)))
    with pytest.raises(InvariantViolation, match="p0"):
        play(fetched("P", report("p0", seen=0)))
