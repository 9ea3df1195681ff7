"""`dualpath sim run` and `dualpath sim reproduce` as they are called."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from interrupt_kit import interrupting
from reproduction_kit import by_system

from dualpath.cli.main import main
from dualpath.sim.simulation import Simulation

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
    monkeypatch.setattr("dualpath.sim.sweep.play", by_system)
    a_page(tmp_path)
    arguments = ["all", "--workers", "1", "--output", str(tmp_path), "--json"]
    assert main(["sim", "reproduce", *arguments]) == 0
    captured = capsys.readouterr()
    assert (tmp_path / "reproduction.json").read_text() == captured.out
    assert "## Values that were fitted" in (tmp_path / "reproduction.md").read_text()
    assert (tmp_path / "reproduction" / "fig12.csv").exists()
    assert "with reproduction.md and reproduction.json" in captured.err


def interrupted_sweep(monkeypatch, after):
    """Runs of `sim reproduce` are not played; Ctrl-C in the one after so many."""
    monkeypatch.setattr("dualpath.sim.sweep.play", interrupting(by_system, after=after))


def a_page(directory):
    for name in ("reproduction.md", "reproduction.json"):
        (directory / name).write_text("of all experiments")


def pages(directory):
    return [each.read_text() for each in sorted(directory.iterdir()) if each.is_file()]


def test_one_experiment_writes_its_own_files_only(tmp_path, capsys):
    assert main(["sim", "reproduce", "table1", "--output", str(tmp_path)]) == 0
    assert [each.name for each in tmp_path.iterdir()] == ["reproduction"]
    err = capsys.readouterr().err
    assert (
        "of table1. Not written: reproduction.md and reproduction.json, which need all runs" in err
    )
    assert "earlier" not in err


def test_one_experiment_leaves_the_page_of_all(tmp_path, capsys):
    a_page(tmp_path)
    assert main(["sim", "reproduce", "table1", "--output", str(tmp_path)]) == 0
    assert pages(tmp_path) == ["of all experiments"] * 2
    assert (tmp_path / "reproduction" / "table1.json").exists()
    assert "those that are there are of an earlier run" in capsys.readouterr().err


def test_reproduce_interrupted_says_what_is_missing(tmp_path, capsys, monkeypatch):
    a_page(tmp_path)
    interrupted_sweep(monkeypatch, after=3)
    arguments = ["table1", "fig12", "fig13", "--workers", "1", "--output", str(tmp_path)]
    assert main(["sim", "reproduce", *arguments]) == 130
    captured = capsys.readouterr()
    assert "Qwen2.5-32B FP16, 16K cached" in captured.out
    last = captured.out.splitlines()[-1]
    assert last.startswith("interrupted; missing: fig12 (3 of 4 runs ended), fig13 (")
    assert pages(tmp_path) == ["of all experiments"] * 2
    assert (tmp_path / "reproduction" / "table1.json").exists()
    assert not (tmp_path / "reproduction" / "fig12.json").exists()


def test_reproduce_interrupted_says_so_in_json(capsys, monkeypatch):
    interrupted_sweep(monkeypatch, after=0)
    assert main(["sim", "reproduce", "fig12", "--workers", "1", "--json"]) == 130
    setup = json.loads(capsys.readouterr().out)["setup"]
    assert setup["interrupted"] is True
    assert setup["missing"] == {"fig12": {"ended": 0, "runs": 4}}
    assert setup["experiments"] == []


def test_reproduce_interrupted_in_the_sensitivity_keeps_the_page(tmp_path, capsys, monkeypatch):
    a_page(tmp_path)
    interrupted_sweep(monkeypatch, after=5)
    arguments = ["table1", "--sensitivity", "--workers", "1", "--output", str(tmp_path)]
    assert main(["sim", "reproduce", *arguments]) == 130
    assert "missing: sensitivity (5 of " in capsys.readouterr().out
    assert pages(tmp_path) == ["of all experiments"] * 2


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


def interrupted_fetch(monkeypatch, at):
    """Ctrl-C when a run's leaders fetch for the time `at`."""
    monkeypatch.setattr(Simulation, "_fetch", interrupting(Simulation._fetch, after=at - 1))


@pytest.mark.parametrize(("load", "at"), [(["--agents", "40"], 20), (["--rate", "1"], 2000)])
def test_run_interrupted_has_figures_of_what_ended(load, at, capsys, monkeypatch):
    interrupted_fetch(monkeypatch, at)
    assert main([*TINY, *load, "--json"]) == 130
    result = json.loads(capsys.readouterr().out)
    figures = result["figures"]
    assert result["setup"]["interrupted"] is True
    assert not {"jct_s", "halves_differ"} & figures.keys()
    assert 0 < figures["unfinished_agents"] < figures["agents"]
    assert figures["requests"] > 0
    assert 0 < figures["ttft"]["p50_s"] < figures["until_s"]
    assert 0 < figures["request"]["p99_s"] <= figures["until_s"]


def test_run_interrupted_before_a_request_ended_has_no_times(capsys, monkeypatch):
    interrupted_fetch(monkeypatch, at=3)
    assert main([*TINY, "--agents", "40", "--json"]) == 130
    figures = json.loads(capsys.readouterr().out)["figures"]
    assert figures["requests"] == 0
    assert figures["unfinished_agents"] == 40
    assert not {"jct_s", "ttft", "ttst", "tpot", "request", "parts_s"} & figures.keys()


@pytest.mark.parametrize(("at", "has_times"), [(3, False), (20, True)])
def test_run_interrupted_prints_no_job_completion_time(at, has_times, capsys, monkeypatch):
    interrupted_fetch(monkeypatch, at)
    assert main([*TINY, "--agents", "40"]) == 130
    lines = [each.rstrip() for each in capsys.readouterr().out.splitlines()]
    assert not any("job completion time" in each for each in lines)
    assert lines[-1].startswith("interrupted at ")
    assert lines[-1].endswith(" of 40 agents had ended")
    assert ("Seconds, of the requests that had ended" in lines) == has_times


def test_a_service_has_no_job_completion_time(capsys):
    assert main([*TINY, "--rate", "1", "--until", "30", "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)["figures"]
    assert "jct_s" not in figures
    assert figures["until_s"] == 30


def test_a_run_to_the_end_says_that_it_was(capsys):
    assert main([*TINY, "--agents", "3", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["setup"]["interrupted"] is False


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
