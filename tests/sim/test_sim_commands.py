"""`dualpath sim run` and `dualpath sim reproduce` as they are called."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from dualpath.cli.main import main

TINY = ["sim", "run", "--model", "ds-27b", "--trace", "generated:2k"]


def test_reproduce_prints_a_line_of_json(capsys):
    assert main(["sim", "reproduce", "table1", "--json"]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    result = json.loads(line)
    assert result["bench"] == "sim-reproduce"
    assert result["figures"]["table1_gqa_error"] <= 0.01
    assert result["figures"]["values"]["table1.qwen2.5-32b.16k"]["role"] == "computed"
    assert result["setup"]["experiments"] == ["table1"]
    assert "core_error" not in result["figures"]


def test_reproduce_prints_a_table(capsys):
    assert main(["sim", "reproduce", "table1"]) == 0
    out = capsys.readouterr().out
    assert "Qwen2.5-32B FP16, 16K cached" in out
    assert "table1_mla_error 0.1" in out


def test_reproduce_writes_files(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("dualpath.sim.reproduction_files._played", lambda settings: {})
    assert main(["sim", "reproduce", "table1", "--output", str(tmp_path), "--json"]) == 0
    out = capsys.readouterr().out
    assert (tmp_path / "reproduction.json").read_text() == out
    assert "Not run." in (tmp_path / "reproduction.md").read_text()
    assert (tmp_path / "reproduction" / "table1.csv").exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["fig99"], "fig99"),
        (["--workers", "0"], "--workers"),
        (["--seed", "-1"], "--seed"),
        (["table1", "--output", __file__], "--output"),
    ],
)
def test_reproduce_names_what_is_wrong(arguments, words, capsys):
    assert main(["sim", "reproduce", *arguments]) == 2
    assert words in capsys.readouterr().err


def test_run_of_a_batch(capsys):
    assert main([*TINY, "--agents", "3", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["bench"] == "sim-run"
    assert result["figures"]["unfinished_agents"] == 0
    assert result["figures"]["jct_s"] > 0
    assert result["setup"]["system"] == "split"


def test_run_with_other_weights(capsys):
    assert main([*TINY, "--agents", "3", "--json"]) == 0
    as_it_is = json.loads(capsys.readouterr().out)
    assert main([*TINY, "--agents", "3", "--json", "--weights", "bf16"]) == 0
    wider = json.loads(capsys.readouterr().out)
    assert wider["setup"]["weights"] == "bf16"
    assert wider["figures"]["tpot"]["mean_s"] > as_it_is["figures"]["tpot"]["mean_s"]


def test_run_of_a_model_of_its_users(tmp_path, capsys):
    config = {"model_type": "mamba"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    run = ["sim", "run", "--model", str(tmp_path), "--trace", "smoke", "--agents", "1"]
    assert main(run) == 2
    assert "one of deepseek_v3, deepseek_v32, glm4_moe" in capsys.readouterr().err


def test_run_of_a_service_as_a_table_with_a_timeline(tmp_path, capsys):
    timeline = tmp_path / "run.json"
    arguments = ["--rate", "0.5", "--until", "30", "--timeline", str(timeline)]
    assert main([*TINY, *arguments]) == 0
    out = capsys.readouterr().out
    assert "TTFT" in out
    assert "job completion time" not in out
    assert json.loads(timeline.read_text())["traceEvents"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "--agents N, --rate R: expected one of them, got neither"),
        (["--agents", "1", "--rate", "1"], "got both"),
        (["--agents", "0"], "--agents"),
        (["--agents", "1", "--decode", "0"], "--decode"),
        (["--agents", "1", "--until", "5"], "--until"),
        (["--rate", "inf"], "--rate"),
        (["--agents", "1", "--timeline", "/no/such/dir/x.json"], "--timeline"),
        (["--agents", "1", "--gpu", "abacus"], "abacus"),
        (["--agents", "1", "--decode", "3", "--decode-instance", "2"], "decode nodes"),
    ],
)
def test_run_names_what_is_wrong(arguments, words, capsys):
    assert main([*TINY, *arguments]) == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize("name", ["run", "reproduce"])
def test_help_needs_no_numba(name):
    code = (
        "import sys; sys.modules['numba'] = None\n"
        "from dualpath.cli.main import main\n"
        f"sys.exit(main(['sim', '{name}', '--help']))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "examples:" in done.stdout
