from __future__ import annotations

import hashlib
import subprocess
import sys
from dataclasses import replace as changed
from pathlib import Path

import msgspec
import numpy as np
import pytest
from kernel_kit import CLUSTER, DECODE, POLICY, PREFILL, cluster, many, work
from msgspec.structs import replace

from dualpath.base.errors import ConfigError, InvariantViolation
from dualpath.policy.config import ReadPlanKind, SchedulerKind
from dualpath.policy.events import Assign, Event, GroupFetched, Instruction, RequestArrived
from dualpath.policy.scheduler import Scheduler
from dualpath.sim.outcome import Outcome
from dualpath.sim.simulation import Simulation

LARGER = cluster(prefill_nodes=2, decode_nodes=4, decode_instance_nodes=2)
WORK = many(30, 6, seed=1)


def run(seed: int = 1, fetch_s: float = CLUSTER.fetch_s) -> tuple[bytes, Outcome]:
    """The log as JSON lines, and the outcome."""
    lines: list[bytes] = []

    def log(event: Event, instructions: list[Instruction]) -> None:
        lines.append(msgspec.json.encode((event, instructions)))

    one = changed(LARGER, fetch_s=fetch_s)
    outcome = Simulation(one, POLICY, many(30, 6, seed), log=log).run()
    return b"\n".join(lines), outcome


@pytest.mark.parametrize("fetch_s", [0.0, 0.02])
def test_the_same_run_has_the_same_log(fetch_s: float) -> None:
    log, outcome = run(fetch_s=fetch_s)
    again, other = run(fetch_s=fetch_s)
    assert log == again
    assert outcome.records.tobytes() == other.records.tobytes()
    assert outcome.snic_bytes.tobytes() == other.snic_bytes.tobytes()
    assert run(seed=2, fetch_s=fetch_s)[0] != log


def test_another_process_has_the_same_log() -> None:
    code = (
        "import hashlib, test_simulation\n"
        "log, outcome = test_simulation.run()\n"
        "print(hashlib.sha256(log + outcome.records.tobytes()).hexdigest())"
    )
    for seed in ("1", "2"):
        environment = {"PYTHONPATH": ":".join(sys.path), "PYTHONHASHSEED": seed}
        ran = subprocess.run(
            [sys.executable, "-c", code],
            cwd=Path(__file__).parent,
            env=environment,
            capture_output=True,
            text=True,
            check=True,
        )
        log, outcome = run()
        assert ran.stdout.strip() == hashlib.sha256(log + outcome.records.tobytes()).hexdigest()


def test_a_run_keeps_its_golden_figures() -> None:
    """After a wanted change of the model, look at the new ones and write them here."""
    _, outcome = run()
    ttft_s = outcome.records.first_token_s - outcome.records.arrived_s
    figures = outcome.jct_s, float(ttft_s.mean()), outcome.snic_utilization()
    assert figures == pytest.approx(
        (9.965839630003499, 0.6996321608697902, 0.5813191410276893), rel=1e-9
    )


@pytest.mark.parametrize("kind", SchedulerKind)
@pytest.mark.parametrize("fetch_s", [0.0, 0.02])
def test_the_policy_stays_valid(
    kind: SchedulerKind, fetch_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    handle, handled = Scheduler.handle, 0

    def checked(self: Scheduler, event: Event) -> list[Instruction]:
        nonlocal handled
        instructions = handle(self, event)
        handled += 1
        if not isinstance(event, GroupFetched) or instructions:
            self.validate()
        return instructions

    monkeypatch.setattr(Scheduler, "handle", checked)
    one = changed(LARGER, fetch_s=fetch_s, decode_hbm_tokens=500)
    outcome = Simulation(one, replace(POLICY, scheduler=kind), many(10, 4, seed=5)).run()
    assert outcome.unfinished_agents == 0
    assert handled > 4 * 40


def test_ctrl_c_gives_what_there_is() -> None:
    events = 0

    def log(event: Event, instructions: list[Instruction]) -> None:
        nonlocal events
        events += 1
        if events == 400:
            raise KeyboardInterrupt

    outcome = Simulation(LARGER, POLICY, WORK, log=log).run()
    assert outcome.was_interrupted
    assert 0 < outcome.unfinished_agents <= 30
    assert 0 < (outcome.records.finished_s > 0).sum() < WORK.requests


@pytest.mark.parametrize("fetch_s", [0.0, 0.02])
def test_a_run_can_end_early(fetch_s: float) -> None:
    whole = Simulation(changed(LARGER, fetch_s=fetch_s), POLICY, WORK).run()
    until_s = whole.jct_s / 2
    part = Simulation(changed(LARGER, fetch_s=fetch_s), POLICY, WORK).run(until_s)
    assert not part.was_interrupted
    assert part.end_s == until_s
    assert part.unfinished_agents > 0
    assert len(part.records) == (whole.records.arrived_s <= until_s).sum()
    ended = whole.records.finished_s <= until_s
    assert (part.records.finished_s > 0).sum() == ended.sum()
    assert part.records.finished_s.max() <= until_s
    # What happened so far does not depend on what comes.
    first = slice(0, 20)
    assert part.records.prefill[first].tolist() == whole.records.prefill[first].tolist()


@pytest.mark.parametrize("fetch_s", [0.0, 0.02])
def test_a_run_can_go_on(fetch_s: float) -> None:
    one = changed(LARGER, fetch_s=fetch_s)
    whole = Simulation(one, POLICY, WORK).run()
    parted = Simulation(one, POLICY, WORK)
    for until_s in (0.0, 1.3, 1.31, whole.jct_s / 2):
        assert parted.run(until_s).end_s == until_s
    assert parted.run().records.tobytes() == whole.records.tobytes()


def test_progress_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dualpath.sim.simulation._CHECK_FETCHES", 50)
    told: list[tuple[float, int]] = []
    Simulation(LARGER, POLICY, WORK).run(progress=lambda now_s, ended: told.append((now_s, ended)))
    assert len(told) > 5
    assert told == sorted(told)
    assert 0 <= told[0][1] <= told[-1][1] <= 30


def test_groups_fetch_in_turn() -> None:
    fetched: list[GroupFetched] = []
    arrived: list[float] = []

    def log(event: Event, instructions: list[Instruction]) -> None:
        if isinstance(event, GroupFetched):
            fetched.append(event)
        elif isinstance(event, RequestArrived):
            arrived.append(event.now_s)

    starts_s = [1.0, 50.0]
    Simulation(LARGER, POLICY, work([(9, 2, 0.0)], [(9, 2, 0.0)], starts_s=starts_s), log=log).run()
    # Each once a round, those of a role evenly spread; no round while nobody is there.
    assert [each.group for each in fetched[:6]] == ["p0", "d0", "d1", "p1", "d2", "d3"]
    for role, count in (("p", 2), ("d", 4)):
        times = np.array([each.now_s for each in fetched if each.group.startswith(role)])
        gaps = np.diff(times)
        assert gaps[gaps < 1] == pytest.approx(CLUSTER.fetch_s / count)
        assert (gaps > 1).sum() == 1
        assert times[0] == pytest.approx(1.0, abs=1.01 * CLUSTER.fetch_s)
    assert arrived == starts_s


def test_groups_of_a_role_get_as_many_requests() -> None:
    """However many groups the other role has, and also when prefill takes all that waits."""
    everything = replace(POLICY, beta_tokens=1 << 40)
    for decode_nodes in (1, 2, 3):
        uneven = cluster(prefill_nodes=2, decode_nodes=decode_nodes)
        records = Simulation(uneven, everything, many(80, 10, seed=1)).run().records
        later = records[records.turn > 1]
        on_the_first = (later.prefill < uneven.gpus).mean()
        assert on_the_first == pytest.approx(0.5, abs=0.1), decode_nodes


def test_engines_report_what_they_have() -> None:
    """The last figures that are seen are those of an idle engine; before, they add up."""
    assigned: dict[str, int] = {}
    last: dict[str, tuple[int, int]] = {}

    def log(event: Event, instructions: list[Instruction]) -> None:
        if isinstance(event, GroupFetched):
            for report in event.reports:
                # All that was assigned before this fetch has reached the engine.
                assert report.seen == assigned.get(report.engine, 0)
                last[report.engine] = report.requests, report.tokens
        for each in instructions:
            if isinstance(each, Assign):
                for engine in (each.prefill, each.decode):
                    assigned[engine] = assigned.get(engine, 0) + 1

    Simulation(LARGER, POLICY, WORK, log=log).run()
    assert sum(assigned.values()) == 2 * WORK.requests
    assert max(requests for requests, _ in last.values()) <= 1


def test_dual_path_beats_basic_where_storage_is_slow() -> None:
    slow = changed(LARGER, snic_bytes_s=100_000.0)
    jct_s = {
        plan: Simulation(slow, replace(POLICY, read_plan=plan), WORK).run().jct_s
        for plan in (ReadPlanKind.PE, ReadPlanKind.SHORTER, ReadPlanKind.SPLIT)
    }
    oracle = Simulation(slow, replace(POLICY, scheduler=SchedulerKind.ORACLE), WORK).run().jct_s
    assert jct_s[ReadPlanKind.SHORTER] < 0.7 * jct_s[ReadPlanKind.PE]
    assert oracle < jct_s[ReadPlanKind.SPLIT] < 0.7 * jct_s[ReadPlanKind.PE]


def test_figures_of_an_outcome() -> None:
    _, outcome = run()
    assert 0 < outcome.snic_utilization() < 1
    assert outcome.snic_balance() >= 1
    assert outcome.attention_max_mean >= 1
    assert 0 < outcome.prefill_busy_share <= 1
    assert 0 < outcome.decode_busy_share <= 1
    assert outcome.read_bytes.sum() == pytest.approx(outcome.snic_bytes.sum())
    assert outcome.end_s == outcome.jct_s == outcome.records.finished_s.max()


def test_a_request_that_no_engine_holds_is_refused_at_once() -> None:
    with pytest.raises(ConfigError, match=r"at most 300 tokens.*got one of 301"):
        Simulation(cluster(decode_hbm_tokens=300), POLICY, work([(299, 2, 0.0)]))
    asked = work([(299, 1, 0.0)], first_round_tokens=10)
    with pytest.raises(ConfigError, match="got one of 310"):
        Simulation(cluster(decode_hbm_tokens=300), POLICY, asked)
    Simulation(cluster(decode_hbm_tokens=300), POLICY, work([(299, 1, 0.0)]))


def test_a_run_that_stands_still_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Scheduler, "handle", lambda self, event: [])
    with pytest.raises(InvariantViolation, match=r"stands still at .* with 30 requests"):
        Simulation(LARGER, POLICY, WORK).run()


def test_a_cluster_takes_no_instruction_that_it_cannot_carry_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    handle = Scheduler.handle

    def reject(self: Scheduler, event: Event) -> list[Instruction]:
        instructions = handle(self, event)
        if isinstance(event, RequestArrived):
            return handle(self, replace(event, request="0.9", prompt_tokens=10**9))
        return instructions

    monkeypatch.setattr(Scheduler, "handle", reject)
    with pytest.raises(InvariantViolation, match="cannot do Reject"):
        Simulation(LARGER, POLICY, WORK).run()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("prefill_nodes", 0),
        ("decode_instance_nodes", 3),
        ("gpus", 0),
        ("snic_bytes_s", 0.0),
        ("snic_bytes_s", float("inf")),
        ("cnic_bytes_s", float("nan")),
        ("memory_bytes_s", float("nan")),
        ("read_latency_s", -1.0),
        ("front_end_s", float("inf")),
        ("fetch_s", float("nan")),
        ("decode_hbm_tokens", 0),
        ("prefill", replace(PREFILL, base_s=-1.0)),
        ("decode", replace(DECODE, sequence_s=float("nan"))),
    ],
)
def test_a_cluster_of_nonsense_is_refused(field: str, value: object) -> None:
    with pytest.raises(ConfigError):
        cluster(**{field: value})


def test_a_window_has_a_length() -> None:
    with pytest.raises(ConfigError, match="window_s"):
        Simulation(CLUSTER, POLICY, WORK, window_s=0.0)
