from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from dualpath.base.errors import ConfigError
from dualpath.bench.demo import (
    DemoOptions,
    clear_store,
    default_store,
    default_turns,
    fit_to_window,
    spread_turns,
    stored_blocks,
)
from dualpath.cli import main
from dualpath.traces import AppendPrompt, Session, TextPrompt, Turn


def options(**more):
    return DemoOptions(model="tiny", store=Path("s"), log=Path("l"), **more)


def test_each_model_has_a_store_of_its_own(monkeypatch):
    monkeypatch.setenv("DUALPATH_CACHE_DIR", "/c")
    assert default_store("smollm2") == Path("/c/demo/smollm2")
    assert default_store("../owner/name") == Path("/c/demo/.._owner_name")


def test_models_with_a_token_a_byte_replay_fewer_turns():
    assert default_turns("smollm2") is None
    assert default_turns("tiny-mla") == 16


def test_runs_are_counted_for_the_progress():
    turn = Turn(TextPrompt("x"), 1)
    sessions = [Session("a", (turn,) * 5), Session("b", (turn,))]
    assert options(compared=2).total_runs(sessions) == 5 + 1 + 2 * (2 + 1)
    assert options(turns=2, compared=2).total_runs(sessions) == 2 + 1 + 2 * (2 + 1)


def test_a_session_without_its_text_is_an_error():
    session = Session("a", (Turn(TextPrompt("x"), 1), Turn(AppendPrompt(4), 1)))
    assert options(turns=1).chosen_turns(session) == ("x",)
    with pytest.raises(ConfigError, match="session a has no full text"):
        options().chosen_turns(session)


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


def test_clearing_removes_what_a_store_made_and_nothing_else(tmp_path):
    (tmp_path / "ab12" / "cd").mkdir(parents=True)
    (tmp_path / "ab12" / "model.json").write_text("{}")
    (tmp_path / "ab12" / "cd" / "block.kv").write_text("")
    (tmp_path / "photos").mkdir()
    (tmp_path / "notes.txt").write_text("mine")
    assert stored_blocks(tmp_path) == 1
    clear_store(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["notes.txt", "photos"]
    assert stored_blocks(tmp_path) == 0


def test_there_may_be_no_store_yet(tmp_path):
    clear_store(tmp_path / "none")
    assert stored_blocks(tmp_path / "none") == 0


@pytest.mark.parametrize("flag", ["--gen", "--turns", "--compare"])
def test_counts_must_be_positive(flag, capsys):
    assert main.main(["demo", "tiny", flag, "0"]) == 2
    assert f"{flag}: expected a whole number >= 1, got 0" in capsys.readouterr().err


@pytest.mark.slow
def test_the_demonstration_runs_end_to_end_and_finds_its_kv_again(tmp_path):
    words = " ".join(str(number) for number in range(400))
    for name in ("one", "two"):
        prompts = [f"Session {name}. {words[:size]}" for size in (500, 1200, 900)]
        lines = [json.dumps({"input": prompt}) for prompt in prompts]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
    environment = {**os.environ, "DUALPATH_CACHE_DIR": str(tmp_path / "cache")}
    command = [sys.executable, "-m", "dualpath", "demo", "tiny", "--gen", "5", "--compare", "2"]
    command += ["--sessions", str(tmp_path)]

    def run():
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=240, check=False
        )
        assert done.returncode == 0, done.stderr
        lines = done.stdout.splitlines()
        assert lines[0].startswith("Q: ")
        return json.loads(lines[-1])

    first, second = run(), run()
    assert first["bench"] == "demo"
    assert first["setup"]["stored_blocks"] == 0
    figures = first["figures"]
    assert figures["tokens_equal"] is True
    assert (figures["sessions"], figures["turns"], figures["compared_turns"]) == (2, 6, 4)
    assert figures["prompt_tokens"] == 2 * (500 + 1200 + 900 + 3 * len("Session one. "))
    # The first turns find nothing; how much the others do depends on what was written by then.
    assert figures["cached_tokens"] <= 2 * (512 + 896)
    assert second["setup"]["stored_blocks"] > 0
    figures = second["figures"]
    assert figures["tokens_equal"] is True
    assert figures["cached_tokens"] == 2 * (512 + 1152 + 896)
    assert min(figures["pe_share"], figures["de_share"]) > 0.2
    assert figures["pe_share"] + figures["de_share"] == pytest.approx(1)


def test_sessions_must_be_a_directory(tmp_path, capsys):
    assert main.main(["demo", "tiny", "--sessions", str(tmp_path / "none")]) == 2
    assert "none is no directory" in capsys.readouterr().err


def test_a_missing_client_package_is_a_clear_error(monkeypatch):
    from dualpath.bench import openai_client

    monkeypatch.setattr(openai_client.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'dualpath\[demo\]'"):
        openai_client.connect("http://127.0.0.1:1/v1")
