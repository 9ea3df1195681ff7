"""Whatever a line holds, it is read as the model promises or refused with its place."""

from __future__ import annotations

import copy
import math

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dualpath.base.errors import ConfigError
from dualpath.traces import AppendPrompt, BlockPrompt, coding_agent, full_text, mooncake
from dualpath.traces.lines import Line
from dualpath.traces.trajectories import read as read_trajectories

REQUEST = {"t": 1.5, "type": "n", "in": 90, "out": 4, "think_time": 0.5, "hr": [[1, 1], [5, 1]]}
SUBAGENT = {"type": "subagent", "agent_id": "x", "t": 2, "requests": [REQUEST]}
FORMATS = {
    "mooncake": (
        mooncake.read,
        {
            "timestamp": 3,
            "input_length": 700,
            "output_length": 2,
            "hash_ids": [1, 2],
            "session_id": "a",
            "delay": 5,
        },
    ),
    "coding-agent": (
        coding_agent.read,
        {
            "id": "a",
            "block_size": 64,
            "hash_id_scope": "local",
            "requests": [REQUEST, SUBAGENT, REQUEST],
        },
    ),
    "trajectories": (read_trajectories, {"id": "a", "turns": [[9, 2, 0.5], [3, 4, 1]]}),
    "full-text": (
        full_text.read,
        {"timestamp": 7, "input": "some text", "output": "more", "session_id": "a"},
    ),
}

numbers = (
    st.integers(-2, 3)
    | st.integers()
    | st.sampled_from([2**27, 2**27 + 1, 2**62, 2**63, 2**64])
    | st.floats(allow_nan=False, allow_infinity=False)
)
values = st.none() | st.booleans() | numbers | st.text(max_size=3) | st.just([]) | st.just({})
json_values = values | st.lists(values, max_size=3) | st.lists(st.lists(numbers, max_size=3))


def places(value):
    """Every list and object with each of its indices and fields."""
    entries = value.items() if isinstance(value, dict) else enumerate(value)
    for key, inner in entries:
        yield value, key
        if isinstance(inner, dict | list):
            yield from places(inner)


@st.composite
def changed(draw, line):
    """The line with one to three of its values replaced or removed."""
    line = copy.deepcopy(line)
    for _ in range(draw(st.integers(1, 3))):
        found = list(places(line))
        if not found:
            break
        holder, key = found[draw(st.integers(0, len(found) - 1))]
        if draw(st.booleans()):
            holder[key] = copy.deepcopy(draw(json_values))
        else:
            del holder[key]
    return line


@pytest.mark.parametrize("trace_format", FORMATS)
@given(data=st.data())
def test_a_changed_line_is_read_or_refused(trace_format, data):
    read, good = FORMATS[trace_format]
    lines = [{**good, "id": "first"}, data.draw(changed(good))]
    encoded = [Line("f.jsonl", i, msgspec.json.encode(line)) for i, line in enumerate(lines, 1)]
    sessions, refused = (), ""
    try:
        sessions = read(encoded)
    except ConfigError as error:
        refused = str(error)
    assert sessions or refused.startswith("f.jsonl line 2: ")
    for session in sessions:
        assert session.turns
        assert session.start_s is None or 0 <= session.start_s < math.inf
        for turn in session.turns:
            assert turn.output_tokens >= 1
            assert 0 <= turn.delay_s < math.inf
            match turn.prompt:
                case BlockPrompt() as prompt:
                    covered = sum(count for _, count in prompt.blocks) * prompt.block_tokens
                    assert prompt.tokens >= 1
                    assert covered < prompt.tokens + prompt.block_tokens
                case AppendPrompt(tokens):
                    assert tokens >= 1


@pytest.mark.parametrize("digits", [20, 400, 5000])
def test_numbers_of_many_digits_are_refused(digits):
    line = Line("f.jsonl", 1, b"[[1, " + b"9" * digits + b", 0]]")
    with pytest.raises(ConfigError, match=r"^f.jsonl line 1: "):
        read_trajectories([line])
