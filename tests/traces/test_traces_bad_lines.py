"""A bad line is named: file, line, field, what was expected and what came."""

from __future__ import annotations

import re

import msgspec
import pytest

from dualpath.base.errors import ConfigError
from dualpath.traces import open_trace, read_arrivals

GOOD = {
    "mooncake": '{"timestamp": 0, "input_length": 9, "output_length": 1, "hash_ids": [0]}',
    "coding-agent": '{"id": "a", "requests": [{"in": 1, "out": 1, "hr": [[1, 1]]}]}',
    "trajectories": "[[1, 1, 0]]",
    "full-text": '{"input": "x", "output": "y"}',
    "azure": "TIMESTAMP,ContextTokens,GeneratedTokens",
}


def mooncake(**change):
    return {"timestamp": 5, "input_length": 9, "output_length": 1, "hash_ids": [0], **change}


def agent(**change):
    return {"id": "b", "requests": [{"in": 9, "out": 1, "hr": [[1, 2]], **change}]}


@pytest.mark.parametrize(
    ("trace_format", "line", "reason"),
    [
        ("mooncake", '{"input_length": 9', "Input data was truncated"),
        ("mooncake", '{"input_length": NaN, "output_length": 1}', "JSON is malformed"),
        ("mooncake", '{"timestamp": 1e999, "output_length": 1}', "timestamp: Number out of range"),
        ("mooncake", "[1, 2]", "Expected object, got array"),
        ("mooncake", b'{"session_id": "\xff"}', "Invalid UTF-8"),
        ("mooncake", {"input_length": 9}, "missing required field output_length"),
        ("mooncake", {"output_length": 9}, "input_length or text_input, got neither"),
        ("mooncake", mooncake(input_length="9"), "input_length: Expected int | null, got str"),
        ("mooncake", mooncake(input_length=1.5), "input_length: Expected int | null, got float"),
        ("mooncake", mooncake(input_length=-9), "input_length: expected a whole number of 1"),
        ("mooncake", mooncake(input_length=2**40), "got 1099511627776"),
        ("mooncake", mooncake(output_length=-1), "output_length: expected a whole number of 0"),
        ("mooncake", mooncake(timestamp=-1), "timestamp: expected a number >= 0, got -1"),
        ("mooncake", mooncake(hash_ids=[3, -4]), "hash_ids[1]: expected an id of 0"),
        ("mooncake", mooncake(hash_ids=[2**63]), "got 9223372036854775808"),
        ("mooncake", mooncake(hash_ids=["a"]), "hash_ids[0]: Expected int, got str"),
        ("mooncake", {"text_input": "", "output_length": 1}, "text_input: expected text"),
        ("coding-agent", {"id": "b"}, "missing required field requests"),
        ("coding-agent", {"id": "b", "requests": []}, "requests: expected at least one"),
        ("coding-agent", agent(**{"in": None}), "requests[0].in: expected a whole number"),
        ("coding-agent", agent(out=-2), "requests[0].out: expected a whole number of 0 to"),
        ("coding-agent", agent(hr=[[1, 2, 3]]), "Expected array of length 2"),
        ("coding-agent", agent(hr=[1, 2]), "Expected array, got int"),
        ("coding-agent", agent(hr=[[1, 0]]), "requests[0].hr[0] count: expected a whole number"),
        ("coding-agent", agent(hr=[[1, 1], [-1, 2]]), "requests[0].hr[1]: expected an id of 0"),
        ("coding-agent", agent(hr=None), "got neither hr nor hash_ids"),
        ("coding-agent", agent(think_time=-0.5), "requests[0].think_time: expected a number >= 0"),
        ("coding-agent", agent(type="subagent"), "requests[0].requests: expected a list"),
        ("coding-agent", {**agent(), "id": "a"}, "id: expected one that no session before has"),
        ("coding-agent", {**agent(), "hash_id_scope": "x"}, "hash_id_scope: expected 'local'"),
        ("coding-agent", {**agent(), "block_size": 0}, "block_size: expected a whole number"),
        (
            "coding-agent",
            {"requests": [{"requests": [{"in": 0, "out": 1, "hr": []}]}]},
            "requests[0].requests[0].in: expected a whole number of 1 to",
        ),
        (
            "coding-agent",
            '{"requests":[' * 5000 + "]}" * 5000,
            "nested too deep",
        ),
        (
            "trajectories",
            {"id": "line 1", "turns": [[1, 1, 0]]},
            "id: expected one that no session before has, got 'line 1' again",
        ),
        ("trajectories", [], "turns: expected at least one, got none"),
        ("trajectories", [[1, 2]], "Expected array of length 3"),
        ("trajectories", [[1, 2, "x"]], "Expected float, got str"),
        ("trajectories", [[1, 2, 3], [0, 2, 3]], "turns[1] append: expected a whole number of 1"),
        ("trajectories", [[1, 0, 3]], "turns[0] gen: expected a whole number of 1 to"),
        ("trajectories", [[1, 1, -3]], "turns[0] think_s: expected a number >= 0, got -3"),
        ("trajectories", '"x"', "Expected object | array, got str"),
        ("full-text", {"prompt": "b"}, "missing required field input"),
        ("full-text", {"input": ""}, "input: expected text, got an empty string"),
        ("full-text", {"input": "b", "timestamp": "now"}, "timestamp: Expected float | null"),
        ("azure", "yesterday,1,2", "TIMESTAMP: expected a time such as"),
        ("azure", "2023-11-16 18:15:46.68,1", "expected 3 cells, got 2"),
        ("azure", "2023-11-16 18:15:46.68,x,2", "ContextTokens: expected a whole number, got 'x'"),
        ("azure", "2023-11-16 18:15:46.68,0,2", "ContextTokens: expected a whole number of 1 to"),
        ("azure", "2023-11-16 18:15:46.68,1,-2", "GeneratedTokens: expected a whole number of 0"),
    ],
)
def test_a_bad_line_is_named(tmp_path, trace_format, line, reason):
    if isinstance(line, str):
        line = line.encode()
    data = line if isinstance(line, bytes) else msgspec.json.encode(line)
    path = tmp_path / "bad.jsonl"
    path.write_bytes(GOOD[trace_format].encode() + b"\n\n" + data + b"\n")
    with pytest.raises(ConfigError, match=rf"^{path} line 3: .*{re.escape(reason)}"):
        open_trace(path)


def test_a_turn_before_the_one_before_is_named(tmp_path):
    path = tmp_path / "t.jsonl"
    lines = [mooncake(session_id="a", timestamp=t) for t in (5000, 7000, 6000)]
    path.write_bytes(b"\n".join(map(msgspec.json.encode, lines)))
    with pytest.raises(ConfigError, match=r"t.jsonl line 3: timestamp: expected at least 7000"):
        open_trace(path)


def test_a_line_is_not_read_beyond_the_limit(tmp_path):
    path = tmp_path / "long.jsonl"
    path.write_text("[[1, 1, 0]]\n[" + "[1, 1, 0]," * 20 + "[1, 1, 0]]\n")
    with pytest.raises(ConfigError, match=r"long.jsonl line 2: expected at most 100 bytes"):
        open_trace(path, max_line_bytes=100)
    assert open_trace(path, max_line_bytes=300).turns == 22


@pytest.mark.parametrize("line", ['{"prompt": 1, "x": 2}', "{}"])
def test_an_unknown_format_names_its_fields(tmp_path, line):
    path = tmp_path / "t.jsonl"
    path.write_text(line)
    with pytest.raises(ConfigError, match=r"t.jsonl line 1: expected a trace with one of the"):
        open_trace(path)


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("t.jsonl", b"", "is empty"),
        ("t.jsonl", b"\n \n", "is empty"),
        ("t.csv", b"TIMESTAMP,ContextTokens,GeneratedTokens\n", "has no requests"),
        ("t.csv", b"TIMESTAMP,ContextTokens\n", "line 1: GeneratedTokens: expected a column"),
        ("t.jsonl.gz", b"no gzip", "cannot be read: Not a gzipped file"),
        ("t.json", b'{"id": "a", "requests": [', "truncated"),
    ],
)
def test_a_bad_file_is_named(tmp_path, name, content, reason):
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=rf"^{path}.*{reason}"):
        open_trace(path)


def test_arrivals_of_a_bad_file(tmp_path):
    path = tmp_path / "t.csv"
    path.write_text("TIMESTAMP\n")
    with pytest.raises(ConfigError, match="has no arrivals"):
        read_arrivals(path)


@pytest.mark.parametrize("name", ["nowhere.jsonl", "coding_agent", "generate:64k"])
def test_what_is_not_there_is_told_with_what_is(name):
    with pytest.raises(ConfigError, match=r"no such file or directory.*coding-agent.*generated:"):
        open_trace(name)


def test_a_directory_without_sessions_is_an_error(tmp_path):
    with pytest.raises(ConfigError, match=r"no \.jsonl or \.json files"):
        open_trace(tmp_path)


def test_an_unknown_format_name_is_an_error(tmp_path):
    with pytest.raises(ConfigError, match="trace format: expected one of mooncake"):
        open_trace(tmp_path, trace_format="parquet")
