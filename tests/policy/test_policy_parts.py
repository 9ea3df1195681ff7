"""The parts below the scheduler: queues, transitions, group index, number stream, configuration."""

from __future__ import annotations

import ast
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from policy_kit import joined

import dualpath.policy
from dualpath.base.errors import ConfigError, InvariantViolation
from dualpath.base.ids import EngineId, GroupId, NodeId, RequestId, Role
from dualpath.policy import (
    Event,
    Instruction,
    PolicyConfig,
    ReadPlanKind,
    Reject,
    RejectReason,
    SchedulerKind,
)
from dualpath.policy.cluster import EngineState, GroupState, NodeState
from dualpath.policy.decode_choice import LeastLoadedGroups
from dualpath.policy.requests import (
    TRANSITIONS,
    ArrivalQueue,
    Phase,
    RequestState,
    Trigger,
    state_diagram,
)
from dualpath.policy.splitmix import SplitMix64


def request(arrival: int, tokens: int = 100) -> RequestState:
    return RequestState(RequestId(f"r{arrival}"), arrival, 0, tokens, 0, tokens, tokens)


@given(st.lists(st.integers(0, 30), max_size=60))
def test_an_arrival_queue_is_in_order_of_arrival(moves: list[int]) -> None:
    """Each number puts that request in if it is out, and out if it is in."""
    queue = ArrivalQueue()
    model: dict[int, RequestState] = {}
    for arrival in moves:
        if arrival in model:
            queue.remove(model.pop(arrival))
        else:
            model[arrival] = request(arrival)
            queue.push(model[arrival])
        expected = [model[each] for each in sorted(model)]
        assert list(queue) == expected
        assert queue.head() is (expected[0] if expected else None)
        assert len(queue) == len(expected)
        assert all(each in queue for each in expected)
    assert request(3) not in queue  # Another object of the same arrival: an older attempt.


def test_removing_what_is_not_queued_fails() -> None:
    with pytest.raises(KeyError):
        ArrivalQueue().remove(request(1))


def test_transitions_lead_from_waiting_to_every_phase_and_end() -> None:
    reached = {Phase.WAITING}
    for _ in Phase:
        reached |= {after for (before, _), after in TRANSITIONS.items() if before in reached}
    assert reached == set(Phase)
    assert {before for before, _ in TRANSITIONS} == set(Phase) - {Phase.ENDED}
    assert {trigger for _, trigger in TRANSITIONS} == set(Trigger)


def test_a_trigger_that_means_nothing_changes_nothing() -> None:
    state = request(0)
    assert state.move(Trigger.PREFILL_DONE) is False
    assert state.phase is Phase.WAITING
    assert state.move(Trigger.ASSIGNED) is True
    assert state.phase is Phase.READING


def test_the_diagram_in_the_documentation_is_the_table() -> None:
    page = Path(__file__).parents[2] / "docs" / "policy.md"
    assert f"```mermaid\n{state_diagram()}\n```" in page.read_text(encoding="utf-8")


@given(
    st.lists(
        st.tuples(st.integers(0, 4), st.integers(-500, 500), st.booleans()), min_size=1, max_size=80
    )
)
def test_the_group_index_always_finds_the_least(changes: list[tuple[int, int, bool]]) -> None:
    groups: dict[GroupId, GroupState] = {}
    index = LeastLoadedGroups(groups)
    small = {3, 4}
    for number, change, drop in changes:
        name = GroupId(f"g{number}")
        if name not in groups:
            group = GroupState(name, Role.DECODE)
            node = NodeState(NodeId(name))
            size = 50 if number in small else 1000
            group.add(EngineState(EngineId(f"e{number}"), group, node, size, size))
            groups[name] = group
            index.touch(group)
        group = groups[name]
        group.tokens = max(0, group.tokens + change)
        if change < 0:
            index.touch(group)
        if drop:
            del groups[name]
        index.check()
        assert len(index) <= 4 * 5 + 17
        for tokens in (10, 100):
            fitting = [each for each in groups.values() if tokens <= each.engines[0].hbm_tokens]
            least = min(fitting, key=lambda each: (each.tokens, each.id), default=None)
            assert index.least(request(0, tokens)) is least
        index.check()


def test_the_group_index_knows_when_it_is_wrong() -> None:
    group = GroupState(GroupId("g"), Role.DECODE)
    group.tokens = 5
    index = LeastLoadedGroups({group.id: group})
    with pytest.raises(InvariantViolation, match="group g"):
        index.check()
    index.touch(group)
    index.check()
    group.tokens = 4
    with pytest.raises(InvariantViolation, match="group g"):
        index.check()


def test_splitmix64_gives_the_published_stream() -> None:
    numbers = SplitMix64(1234567)
    # First outputs for this seed, as the reference implementation prints them.
    assert [numbers.next_u64() for _ in range(3)] == [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
    ]


def test_splitmix64_below_covers_its_range_evenly() -> None:
    numbers = SplitMix64(0)
    counts = [0] * 5
    for _ in range(5_000):
        counts[numbers.below(5)] += 1
    assert min(counts) > 900
    assert max(counts) < 1_100


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("z_factor", 0.9),
        ("quota_s", 0.0),
        ("block_tokens", 0),
        ("max_attempts", 0),
        ("scheduler", "fastest"),
        ("read_plan", "both"),
        ("max_batch_tokens", 63),
        ("beta_tokens", -1),
    ],
)
def test_a_configuration_out_of_range_says_what_to_change(field: str, value: object) -> None:
    with pytest.raises(ConfigError, match="--" + field.replace("_", "-")):
        PolicyConfig(**{field: value})  # type: ignore[arg-type]


def test_default_configuration() -> None:
    config = PolicyConfig()
    assert config.scheduler is SchedulerKind.DUALPATH
    assert config.read_plan is ReadPlanKind.SPLIT
    assert (config.z_factor, config.quota_s, config.block_tokens) == (1.05, 0.3, 64)


def test_thresholds_follow_the_papers_rule() -> None:
    config = PolicyConfig().with_profile(node_read_tokens_per_s=1_000.4, engine_tokens_per_s=50.0)
    assert (config.alpha_tokens, config.beta_tokens) == (3_001, 250)


FORBIDDEN = {"asyncio", "os", "random", "secrets", "socket", "threading", "time", "torch", "zmq"}


def test_the_policy_imports_no_clock_randomness_or_io() -> None:
    for path in Path(dualpath.policy.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = []
            if isinstance(node, ast.Import):
                names = [each.name for each in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            roots = {each.split(".")[0] for each in names}
            assert not roots & FORBIDDEN, path.name


def test_events_and_instructions_are_tagged_and_round_trip() -> None:
    event = joined("p0", node="n0")
    assert msgspec.json.decode(msgspec.json.encode(event), type=Event) == event
    reject = Reject(RequestId("a"), RejectReason.TOO_LONG)
    assert msgspec.json.encode(reject) == b'{"type":"Reject","request":"a","reason":"too_long"}'
    assert msgspec.json.decode(msgspec.json.encode(reject), type=Instruction) == reject


def test_all_is_what_the_package_offers() -> None:
    assert sorted(dualpath.policy.__all__) == list(dualpath.policy.__all__)
    assert all(hasattr(dualpath.policy, name) for name in dualpath.policy.__all__)
