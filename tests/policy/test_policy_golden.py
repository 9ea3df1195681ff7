"""Replay of recorded event logs: the same instructions, byte for byte.

A log is one JSON line an event, beside it one JSON line of instructions for each. After a wanted change of
behaviour, record anew and read the difference before committing it:

    python tests/policy/test_policy_golden.py
"""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from dualpath.policy import Event, Instruction, PolicyConfig, ReadPlanKind, Scheduler, SchedulerKind

GOLDEN = Path(__file__).parent / "golden"

CASES: dict[str, PolicyConfig] = {
    **{
        f"dualpath-{plan}": PolicyConfig(
            read_plan=plan, alpha_tokens=2_000, beta_tokens=1_500, seed=7
        )
        for plan in ReadPlanKind
    },
    **{
        kind.value: PolicyConfig(scheduler=kind, alpha_tokens=2_000, beta_tokens=1_500, seed=7)
        for kind in SchedulerKind
        if kind is not SchedulerKind.DUALPATH
    },
}


def events_of(case: str) -> list[Event]:
    lines = (GOLDEN / f"{case}.events.jsonl").read_bytes().splitlines()
    decoder: msgspec.json.Decoder[Event] = msgspec.json.Decoder(Event)
    return [decoder.decode(each) for each in lines]


def replay(case: str, events: list[Event]) -> list[bytes]:
    scheduler = Scheduler(CASES[case])
    return [msgspec.json.encode(scheduler.handle(each)) for each in events]


@pytest.mark.parametrize("case", CASES)
def test_a_recorded_log_gives_the_recorded_instructions(case: str) -> None:
    events = events_of(case)
    expected = (GOLDEN / f"{case}.instructions.jsonl").read_bytes().splitlines()
    got = replay(case, events)
    for number, (event, ours, theirs) in enumerate(zip(events, got, expected, strict=True)):
        assert ours == theirs, f"line {number + 1}: {event}"


def test_the_logs_hold_every_kind_of_event_and_instruction() -> None:
    events = {type(each) for case in CASES for each in events_of(case)}
    assert events == set(Event.__args__)
    decoder = msgspec.json.Decoder(list[Instruction])
    instructions = {
        type(each)
        for case in CASES
        for line in (GOLDEN / f"{case}.instructions.jsonl").read_bytes().splitlines()
        for each in decoder.decode(line)
    }
    assert instructions == set(Instruction.__args__)


def record() -> None:
    """Write the logs of seeded runs, in which everything happens."""
    from test_policy_properties import random_run

    GOLDEN.mkdir(exist_ok=True)
    for number, (case, config) in enumerate(CASES.items()):
        run = random_run(100 + number, config.scheduler, config.read_plan, rounds=15)
        events = [event for event, _ in run.log]
        lines = [msgspec.json.encode(each) for each in events]
        (GOLDEN / f"{case}.events.jsonl").write_bytes(b"\n".join(lines) + b"\n")
        instructions = b"\n".join(replay(case, events)) + b"\n"
        (GOLDEN / f"{case}.instructions.jsonl").write_bytes(instructions)
        print(f"{case}: {len(events)} events")


if __name__ == "__main__":
    record()
