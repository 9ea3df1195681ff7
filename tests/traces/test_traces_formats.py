"""What the lines of each format mean."""

from __future__ import annotations

import gzip

import msgspec
import pytest

from dualpath.base.errors import ConfigError
from dualpath.traces import (
    AppendPrompt,
    BlockPrompt,
    Session,
    TextPrompt,
    Turn,
    open_trace,
    read_arrivals,
)


@pytest.fixture
def trace_of(tmp_path):
    """The trace of a file with these lines, given as text or as JSON values."""

    def load(*lines, name="trace.jsonl", **options):
        texts = [
            line if isinstance(line, str) else msgspec.json.encode(line).decode() for line in lines
        ]
        path = tmp_path / name
        path.write_text("\n".join(texts) + "\n")
        return open_trace(path, **options)

    return load


# Mooncake


def test_a_mooncake_line_is_a_session_with_its_whole_prompt(trace_of):
    trace = trace_of(
        {"timestamp": 5000, "input_length": 1200, "output_length": 7, "hash_ids": [0, 1, 9]},
        {"timestamp": 6500, "input_length": 512, "output_length": 0, "hash_ids": [0]},
    )
    assert trace.format == "mooncake"
    assert trace.sessions == (
        Session("line 1", (Turn(BlockPrompt("", 512, ((0, 2), (9, 1)), 1200), 7),), 0.0),
        Session("line 2", (Turn(BlockPrompt("", 512, ((0, 1),), 512), 1),), 1.5),
    )


def test_ids_beyond_the_prompt_are_left_out(trace_of):
    trace = trace_of(
        {"input_length": 17, "output_length": 1, "hash_ids": [4, 5, 6, 7]}, block_tokens=16
    )
    assert trace.sessions[0].turns[0].prompt == BlockPrompt("", 16, ((4, 2),), 17)


def test_mooncake_sessions_have_turns(trace_of):
    trace = trace_of(
        {"session_id": "a", "timestamp": 1000, "input_length": 300, "output_length": 40},
        {"session_id": "b", "timestamp": 3000, "input_length": 10, "output_length": 1, "delay": 9},
        {"session_id": "a", "delay": 250, "input_length": 150, "output_length": 20},
        {"session_id": "b", "timestamp": 3500, "input_length": 11, "output_length": 1},
        {"session_id": "b", "text_input": "hello", "output_length": 2},
    )
    assert trace.sessions == (
        Session("a", (Turn(AppendPrompt(300), 40), Turn(AppendPrompt(150), 20, 0.25)), 0.0),
        Session(
            "b",
            (
                Turn(AppendPrompt(10), 1),
                Turn(AppendPrompt(11), 1, 0.5),
                Turn(TextPrompt("hello"), 2),
            ),
            2.0,
        ),
    )


def test_mooncake_without_times_has_no_starts(trace_of):
    assert trace_of({"input_length": 5, "output_length": 1}).sessions[0].start_s is None


# Coding agents

SESSION = {
    "id": "s",
    "block_size": 64,
    "hash_id_scope": "local",
    "requests": [
        {"t": 0, "type": "n", "in": 200, "out": 5, "think_time": 0.0, "hr": [[1, 3]]},
        {"t": 9, "type": "s", "in": 330, "out": 0, "think_time": 2.5, "hr": [[1, 3], [7, 2]]},
    ],
}
ONE = {"in": 70, "out": 3, "hr": [[4, 1]]}


def test_a_coding_agent_session(trace_of):
    trace = trace_of(SESSION)
    assert trace.format == "coding-agent"
    assert trace.sessions == (
        Session(
            "s",
            (
                Turn(BlockPrompt("s", 64, ((1, 3),), 200), 5, 0.0),
                Turn(BlockPrompt("s", 64, ((1, 3), (7, 2)), 330), 1, 2.5),
            ),
        ),
    )


@pytest.mark.parametrize(
    ("scope", "main", "sub"),
    [("local", "s", "s"), ("global", "", ""), (None, "s", "s/x"), ("per_context", "s", "s/x")],
)
def test_where_an_id_means_the_same(trace_of, scope, main, sub):
    requests = [ONE, {"type": "subagent", "agent_id": "x", "requests": [ONE]}]
    trace = trace_of({"id": "s", "hash_id_scope": scope, "requests": requests})
    assert [turn.prompt.scope for turn in trace.sessions[0].turns] == [main, sub]


def test_subagents_are_played_in_their_place(trace_of):
    def request(tokens, t, think_s):
        return {"in": tokens, "out": 1, "t": t, "think_time": think_s, "hr": []}

    def subagent(t, *requests):
        return {"type": "subagent", "t": t, "requests": list(requests)}

    requests = [
        request(1, 0, 0),
        subagent(10, request(2, 0, 0), request(3, 4, 1.5)),
        subagent(12, request(4, 0, 0)),
        # It waited for the sub-agents; 8 s is the time since the last of them started.
        request(5, 20, 19),
        request(6, 30, 3),
    ]
    turns = trace_of({"id": "s", "requests": requests}).sessions[0].turns
    assert [(turn.prompt.tokens, turn.delay_s) for turn in turns] == [
        (1, 0),
        (2, 0),
        (3, 1.5),
        (4, 0),
        (5, 8),
        (6, 3),
    ]


def test_ids_may_be_listed_one_by_one_and_times_be_starts(trace_of):
    requests = [
        {"t": 1.0, "in": 256, "out": 1, "hash_ids": [3, 4, 8, 9]},
        {"t": 4.0, "in": 256, "out": 1, "hash_ids": [3, 4, 8, 9]},
    ]
    (session,) = trace_of({"block_size": 64, "requests": requests}).sessions
    assert session.id == "line 1"
    assert [turn.prompt.blocks for turn in session.turns] == [((3, 2), (8, 2))] * 2
    assert [turn.delay_s for turn in session.turns] == [0.0, 3.0]


def test_a_directory_of_whole_json_files(tmp_path):
    for name in ("b", "a"):
        text = msgspec.json.format(msgspec.json.encode({**SESSION, "id": name}), indent=2)
        (tmp_path / f"{name}.json").write_bytes(text)
    trace = open_trace(tmp_path)
    assert [(each.id, len(each.turns)) for each in trace.sessions] == [("a", 2), ("b", 2)]


# Trajectories


def test_trajectories_bare_and_with_names(trace_of):
    trace = trace_of([[30, 5, 0], [4, 6, 1.5]], {"id": "named", "turns": [[7, 8, 9]]}, "")
    assert trace.format == "trajectories"
    assert trace.sessions == (
        Session("line 1", (Turn(AppendPrompt(30), 5), Turn(AppendPrompt(4), 6, 1.5))),
        Session("named", (Turn(AppendPrompt(7), 8, 9.0),)),
    )


def test_files_of_a_directory_are_told_apart(tmp_path):
    for name in ("a.jsonl", "b.jsonl"):
        (tmp_path / name).write_text("[[1, 1, 0]]\n")
    assert [each.id for each in open_trace(tmp_path).sessions] == [
        "a.jsonl line 1",
        "b.jsonl line 1",
    ]


# Full text


def test_full_text_sessions(trace_of):
    trace = trace_of(
        {"timestamp": 7_000_000, "input": "one", "output": "12345", "session_id": "x"},
        {"timestamp": 7_500_000, "input": "other", "output": "", "session_id": "y"},
        {"timestamp": 9_000_000, "input": "one two", "output": "1234", "session_id": "x"},
        {"timestamp": 8_000_000, "input": "one two 3", "output": "1", "session_id": "x"},
    )
    assert trace.format == "full-text"
    assert trace.sessions == (
        Session(
            "x",
            (
                Turn(TextPrompt("one"), 2),
                Turn(TextPrompt("one two"), 1, 2.0),
                Turn(TextPrompt("one two 3"), 1, 0.0),
            ),
            0.0,
        ),
        Session("y", (Turn(TextPrompt("other"), 1),), 0.5),
    )


def test_a_directory_of_full_text_sessions(tmp_path):
    (tmp_path / "b.jsonl").write_text('{"input": "hi", "output": "x"}\n{"input": "hi\\u2028you"}\n')
    (tmp_path / "a.jsonl").write_text('{"input": "first"}\n')
    (tmp_path / "README").write_text("not a session")
    sessions = open_trace(tmp_path).sessions
    assert [(each.id, [turn.prompt.text for turn in each.turns]) for each in sessions] == [
        ("a", ["first"]),
        ("b", ["hi", "hi\u2028you"]),
    ]


# Azure

AZURE = (
    "TIMESTAMP,ContextTokens,GeneratedTokens",
    "2023-11-16 18:15:46.6805900,374,44",
    "2023-11-16 18:15:50.1805900,396,0",
)


def test_azure_requests_and_their_arrivals(trace_of, tmp_path):
    trace = trace_of(*AZURE, name="a.csv")
    assert trace.format == "azure"
    assert trace.sessions == (
        Session("line 2", (Turn(AppendPrompt(374), 44),), 0.0),
        Session("line 3", (Turn(AppendPrompt(396), 1),), pytest.approx(3.5)),
    )
    assert read_arrivals(tmp_path / "a.csv") == pytest.approx((0.0, 3.5))


def test_arrivals_need_no_more_than_times(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("x,TIMESTAMP\n1,2024-05-10 00:00:01+00:00\n2,2024-05-10 00:00:00.25+00:00\n")
    assert read_arrivals(path) == pytest.approx((0.0, 0.75))


# All


def test_packed_blank_lines_and_a_byte_order_mark(tmp_path):
    path = tmp_path / "t.jsonl.gz"
    path.write_bytes(gzip.compress(b"\xef\xbb\xbf[[1, 2, 3]]\n\n   \r\n[[4, 5, 6]]\r\n"))
    assert [each.id for each in open_trace(str(path)).sessions] == ["line 1", "line 4"]


def test_the_format_can_be_said(trace_of):
    line = {"input": "text", "turns": [[1, 1, 0]]}
    assert trace_of(line).format == "trajectories"
    assert trace_of(line, trace_format="full-text").format == "full-text"


def test_a_path_is_never_a_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "smoke").mkdir()
    with pytest.raises(ConfigError, match=r"^smoke has no \.jsonl"):
        open_trace((tmp_path / "smoke").relative_to(tmp_path))
    assert len(open_trace("smoke").sessions) == 6
