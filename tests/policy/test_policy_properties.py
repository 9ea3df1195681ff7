"""Properties of whole runs: fairness, order independence, replay, memory that does not grow."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from policy_driver import BLOCK, Driver, request_name, traces

from dualpath.base.ids import Side
from dualpath.policy import (
    Assign,
    EngineReport,
    GroupFetched,
    Instruction,
    PolicyConfig,
    ReadPlanKind,
    Scheduler,
    SchedulerKind,
)

KINDS = list(SchedulerKind)


def driver(
    kind: SchedulerKind = SchedulerKind.DUALPATH,
    plan: ReadPlanKind = ReadPlanKind.SPLIT,
    *,
    hbm: int = 4_000,
    beta: int = 1_500,
) -> Driver:
    config = PolicyConfig(
        scheduler=kind,
        read_plan=plan,
        block_tokens=BLOCK,
        alpha_tokens=2_000,
        beta_tokens=beta,
        seed=7,
    )
    made = Driver(config)
    made.join_all(2, 3, 3, hbm=hbm, buffer=4_096)
    return made


def arrive(made: Driver, number: int, prompt: int, hit_share: float = 0.9, new: int = 50) -> None:
    hit = int(hit_share * (prompt - 1)) // BLOCK * BLOCK
    made.play(made.cluster.arrive(request_name(number), prompt, hit, new))


@settings(max_examples=25)
@given(
    prompts=st.lists(st.integers(1, 3_000), min_size=1, max_size=60),
    kind=st.sampled_from(KINDS),
    plan=st.sampled_from(list(ReadPlanKind)),
)
def test_every_request_is_assigned_once_and_ends(
    prompts: list[int], kind: SchedulerKind, plan: ReadPlanKind
) -> None:
    made = driver(kind, plan)
    for number, prompt in enumerate(prompts):
        arrive(made, number, prompt)
    made.settle()
    assigned = [x.request for _, out in made.log for x in out if isinstance(x, Assign)]
    assert sorted(assigned) == sorted(map(request_name, range(len(prompts))))
    assert made.scheduler.stats().totals["finished"] == len(prompts)


@pytest.mark.parametrize("kind", KINDS)
def test_a_long_request_is_not_starved_by_a_stream_of_short_ones(kind: SchedulerKind) -> None:
    """Memory for the long one is never free at once, unless its turn is kept."""
    made = driver(kind, hbm=3_100)
    number = 0
    for _ in range(30):
        arrive(made, number, 300)
        number += 1
    long_one = number
    arrive(made, long_one, 3_000)
    for _ in range(60):
        for _ in range(12):
            number += 1
            arrive(made, number, 300)
        made.advance()
        if request_name(long_one) not in made.cluster.requests:
            break
    else:
        pytest.fail(f"request {long_one} still waits")
    made.settle()


def shuffled(event: GroupFetched, order: random.Random) -> GroupFetched:
    reports: list[EngineReport] = list(event.reports)
    order.shuffle(reports)
    return GroupFetched(event.group, tuple(reports), event.read_queue_tokens, event.now_s)


def random_run(seed: int, kind: SchedulerKind, plan: ReadPlanKind, rounds: int = 40) -> Driver:
    """A seeded run with every kind of event, ended before it settles."""
    draw = random.Random(seed)
    made = driver(kind, plan)
    number = 0
    for _ in range(rounds):
        for _ in range(draw.randrange(6)):
            prompt = 5_000 if draw.random() < 0.05 else draw.randrange(1, 3_000)
            arrive(made, number, prompt, draw.random(), draw.randrange(200))
            number += 1
        for engine in sorted(made.cluster.engines):
            if draw.random() < 0.7:
                made.cluster.deliver(engine)
        for group in sorted(made.cluster.groups):
            if draw.random() < 0.6:
                made.fetch(group)
        for request in made.of_phase("reading"):
            side = Side.PE if request.unread_tokens[Side.PE] else Side.DE
            if draw.random() < 0.8:
                tokens = draw.randrange(1, request.unread_tokens[side] + 1)
                made.play(made.cluster.read(request.id, side, tokens))
        for phase, chance in (("reading", 0.02), ("prefilling", 0.05), ("decoding", 0.05)):
            for request in made.of_phase(phase):
                if draw.random() < chance:
                    made.play(made.cluster.fail(request.id, 0, 0))
        for request in made.of_phase("prefilling"):
            if draw.random() < 0.6:
                made.play(made.cluster.finish_prefill(request.id))
        for request in made.of_phase("decoding"):
            if draw.random() < 0.4:
                made.play(made.cluster.finish(request.id))
        for request in list(made.cluster.requests.values()):
            if draw.random() < 0.02:
                made.play(made.cluster.abort(request.id))
        for request in made.of_phase("interrupted"):
            made.play(made.cluster.fail(request.id, 0, 0))
        if draw.random() < 0.15:
            model = made.cluster.engines[draw.choice(sorted(made.cluster.engines))]
            made.play(made.cluster.lose(model.id))
            group, rank = model.id[1:].split(".")
            made.join(model.role, int(group), int(rank), hbm=4_000, buffer=4_096)
    return made


@pytest.mark.parametrize("kind", KINDS)
def test_the_order_of_reports_means_nothing(kind: SchedulerKind) -> None:
    for seed in range(3):
        recorded = random_run(seed, kind, ReadPlanKind.SHORTER)
        assert len(recorded.log) > 300
        order = random.Random(seed)
        again = Scheduler(recorded.config)
        for event, expected in recorded.log:
            if isinstance(event, GroupFetched):
                event = shuffled(event, order)
            assert again.handle(event) == expected


def test_the_order_in_which_engines_join_means_nothing() -> None:
    recorded = driver()
    for number in range(40):
        arrive(recorded, number, 100 + 37 * number)
    recorded.settle()
    joins = len(recorded.cluster.engines)
    events = [event for event, _ in recorded.log]
    order = list(range(joins))
    random.Random(3).shuffle(order)
    again = Scheduler(recorded.config)
    for index in order:
        again.handle(events[index])
    for event, expected in recorded.log[joins:]:
        assert again.handle(event) == expected


@pytest.mark.parametrize("kind", KINDS)
def test_random_runs_settle_and_leave_nothing(kind: SchedulerKind) -> None:
    for seed in range(4):
        for plan in ReadPlanKind if kind is SchedulerKind.DUALPATH else [ReadPlanKind.SPLIT]:
            random_run(seed, kind, plan).settle()


def test_memory_does_not_grow_with_requests_that_have_ended() -> None:
    made = driver()
    number = 0

    def wave() -> int:
        nonlocal number
        for _ in range(60):
            arrive(made, number, 100 + number * 97 % 2_000)
            number += 1
        made.settle()
        made.log.clear()
        return sum(size for _, size in traces(made.scheduler)) + len(
            made.scheduler._placement._groups  # type: ignore[attr-defined]
        )

    sizes = [wave() for _ in range(12)]
    # The group index alone keeps entries, and is rebuilt at 4 per group + 16.
    assert max(sizes) <= 4 * 3 + 17


def test_instructions_are_the_same_for_the_same_seed_and_differ_for_another() -> None:
    def run(seed: int) -> list[list[Instruction]]:
        config = PolicyConfig(scheduler=SchedulerKind.RANDOM, seed=seed)
        made = Driver(config)
        made.join_all(2, 2, 4, hbm=10**6, buffer=10**6)
        for number in range(30):
            arrive(made, number, 1_000)
        made.settle()
        return [out for _, out in made.log]

    assert run(1) == run(1)
    assert run(1) != run(2)
