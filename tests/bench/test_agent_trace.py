from __future__ import annotations

import pytest

from dualpath.base.errors import ConfigError
from dualpath.bench.agent_trace import fit_to_window, load_sessions, spread_turns


def test_the_package_brings_three_sessions_in_full_text():
    sessions = load_sessions()
    assert [(each.name[:8], len(each.prompts)) for each in sessions] == [
        ("0d858f59", 30),
        ("2e9e99a5", 13),
        ("6f1a88fc", 30),
    ]
    assert all(p.startswith("<pr_description>") for each in sessions for p in each.prompts)
    assert [sum(map(len, each.prompts)) for each in sessions] == [490_432, 121_726, 679_922]


def test_sessions_of_another_directory(tmp_path):
    (tmp_path / "b.jsonl").write_text('{"input": "hi", "output": "x"}\n{"input": "hi\\u2028you"}\n')
    (tmp_path / "a.jsonl").write_text('{"input": "first"}\n')
    (tmp_path / "README").write_text("not a session")
    assert [(each.name, each.prompts) for each in load_sessions(tmp_path)] == [
        ("a", ("first",)),
        ("b", ("hi", "hi\u2028you")),
    ]


def test_a_broken_line_is_named(tmp_path):
    (tmp_path / "s.jsonl").write_text('{"input": "a"}\n{"prompt": "b"}\n')
    with pytest.raises(ConfigError, match=r"s\.jsonl line 2 is no recorded turn"):
        load_sessions(tmp_path)


def test_a_directory_without_sessions_is_an_error(tmp_path):
    with pytest.raises(ConfigError, match=r"no \.jsonl files"):
        load_sessions(tmp_path)


def test_a_prompt_that_fits_is_sent_as_it_is():
    assert fit_to_window("abc", [1, 2, 3], 3) == "abc"


def test_a_longer_one_keeps_its_start():
    assert fit_to_window("abcd", [1, 2, 3, 4], 3) == [1, 2, 3]


def test_a_window_without_room_is_an_error():
    with pytest.raises(ConfigError, match="no room"):
        fit_to_window("a", [1], 0)


@pytest.mark.parametrize(
    ("turns", "chosen", "expected"),
    [
        (30, 1, (0,)),
        (30, 3, (0, 10, 20)),
        (13, 2, (0, 6)),
        (3, 5, (0, 1, 2)),
        (1, 4, (0,)),
    ],
)
def test_compared_turns_are_spread_from_the_first_on(turns, chosen, expected):
    assert spread_turns(turns, chosen) == expected
