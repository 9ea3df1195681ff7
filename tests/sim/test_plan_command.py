from __future__ import annotations

import json
import subprocess
import sys

import pytest

import dualpath
from dualpath.base.errors import ConfigError
from dualpath.cli import main
from dualpath.sim.model_config import WeightFormat, load_model
from dualpath.sim.plan.load import AtRate, Capacity, Offline
from dualpath.sim.plan.question import question_of
from dualpath.sim.plan.settings import PlanSettings

SMALL = (
    "plan", "--model", "qwen2.5-32b", "--gpu", "h100", "--nodes", "2", "--trace", "smoke", "--workers", "1",
)  # fmt: skip


def run(*arguments: str) -> int:
    return main.main([*arguments])


def settings(**changes: object) -> PlanSettings:
    values = {"model": "qwen2.5-32b", "gpu": "h100", "nodes": 2, "trace": "smoke"} | changes
    return PlanSettings(**values)  # type: ignore[arg-type]


def test_help_teaches(capsys):
    assert run("plan", "--help") == 0
    text = capsys.readouterr().out
    assert text.count("\n  dualpath plan ") == 2
    for flag in ("--model", "--slo", "--snic", "--timeline", "--json", "--workers"):
        assert flag in text


@pytest.mark.parametrize("arguments", [["--help"], ["plan", "--help"]])
def test_help_needs_no_numba(arguments):
    code = (
        "import sys; sys.modules['numba'] = None\n"
        "from dualpath.cli.main import main\n"
        f"sys.exit(main({arguments!r}))"
    )
    assert (
        subprocess.run(
            [sys.executable, "-c", code], stdout=subprocess.DEVNULL, check=False
        ).returncode
        == 0
    )


def test_without_numba_it_says_how_to_install_it():
    code = (
        "import sys; sys.modules['numba'] = None\n"
        "from dualpath.cli.main import main\n"
        f"sys.exit(main({list(SMALL)!r}))"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    assert ended.returncode == 2
    assert "pip install 'dualpath[sim]'" in ended.stderr and "Traceback" not in ended.stderr


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"nodes": 1}, "--nodes: expected a whole number >= 2, got 1"),
        ({"gpu": None}, "expected one of them, got none"),
        ({"hardware": "x.toml"}, "expected one of them, got both"),
        ({"agents": 5, "rate": 1.0}, "--agents and --rate: expected one kind of load, got 2"),
        ({"arrivals": "azure-conversation"}, "--arrivals: expected with --rate or --slo"),
        ({"horizon_s": 5.0}, "--horizon-s: expected with --rate or --slo"),
        ({"slo": "ttft"}, "--slo: expected METRIC=TIME"),
        ({"slo": "ttft=4h"}, "--slo: 'ttft=4h' needs a unit"),
        ({"snic": "400"}, "--snic: expected a rate such as"),
        ({"workers": 0}, "--workers: expected a whole number >= 1, got 0"),
    ],
)
def test_settings_that_cannot_be(changes, words):
    with pytest.raises(ConfigError) as raised:
        settings(**changes)
    assert words in str(raised.value)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model": "gpt-99"}, "model 'gpt-99': expected one of"),
        ({"gpu": "h999"}, "hardware 'h999': expected one of"),
        ({"trace": "nothing.jsonl"}, "trace 'nothing.jsonl': there is no such file"),
        ({"trace": "paper:65k"}, "length: expected one of 32k, 48k, 64k, got '65k'"),
    ],
)
def test_questions_that_cannot_be(changes, words):
    with pytest.raises(ConfigError) as raised:
        question_of(settings(**changes))
    assert words in str(raised.value)


def test_rules_and_overrides():
    question = question_of(settings(agents=7, block_tokens=32, snic="200gbit", snics=2))
    assert question.goal == Offline(7) and question.block_tokens == 32
    assert question.hardware.node.snic_bytes_s == 50e9
    assert question.hardware_sources["node.snic_bytes_s"] == "given as a flag"
    assert question_of(settings()).hardware.node.snic_bytes_s == 50e9
    twice = question_of(settings(snics=2))
    assert twice.hardware.node.snic_bytes_s == 2 * 50e9
    assert twice.hardware_sources["node.snic_bytes_s"] == "given as a flag"
    node = question_of(settings(cnic="100gbit", memory=64 << 30)).hardware.node
    assert (node.cnic_bytes_s, node.memory_bytes, node.snic_bytes_s) == (12.5e9, 64 << 30, 50e9)
    assert question_of(settings()).goal == Offline(512)
    fp8 = question_of(settings(weights="fp8"))
    assert fp8.model == load_model("qwen2.5-32b", weights=WeightFormat.FP8)
    assert fp8.setup()["mlp_weight_bytes"] == 1.0
    assert question_of(settings(rate=0.5, horizon_s=100.0)).goal == AtRate(0.5, 100.0)
    goal = question_of(settings(slo="ttft=1,tpot=50ms")).goal
    assert isinstance(goal, Capacity)
    assert goal.limits_s == {"ttft": 1.0, "tpot": 0.05} and goal.horizon_s > 0
    assert question_of(settings(slo="ttft=1")).assumptions.quota_s == pytest.approx(0.1)
    assert question.sessions.work.delay_s.any()
    assert not question_of(settings(delays=False)).sessions.work.delay_s.any()


def test_sessions_end_before_they_are_too_long():
    question = question_of(settings(trace="coding-agent", max_context=40_000))
    assert 30_000 < question.setup()["longest_tokens"] <= 40_000
    with pytest.raises(ConfigError, match="--max-context leaves longer ones out"):
        question_of(settings(trace="coding-agent"))


def test_a_large_model_needs_instances_of_several_nodes():
    question = question_of(settings(model="deepseek-v3.2", nodes=6))
    assert question.prefill_instance.least >= 2
    assert question_of(settings()).prefill_instance.least == 1


def test_json_is_one_object_on_the_last_line(capsys):
    pytest.importorskip("numba")
    assert run(*SMALL, "--agents", "12", "--json", "--no-delays") == 0
    captured = capsys.readouterr()
    (line,) = captured.out.splitlines()
    body = json.loads(line)
    assert body["goal"] == {"type": "offline", "agents": 12}
    assert {each["system"] for each in body["figures"]} == {"basic", "dual", "split", "oracle"}
    assert body["best"]["split"]["prefill_nodes"] == 1
    assert body["advice"]["serve"][:2] == ["--prefill", "8"]
    assert [each["extra"] for each in body["what_if"]] == [
        "storage NIC", "prefill nodes", "decode nodes",
    ]  # fmt: skip
    assert body["setup"]["model"] == "Qwen2.5-32B" and body["premises"]
    assert "[7/7]" in captured.err
    assert body["verdict"]["recommended"]["system"] in ("basic", "dual", "split")


def test_a_plan_can_be_asked_for_again(capsys, monkeypatch):
    pytest.importorskip("numba")
    arguments = [*SMALL, "--agents", "4", "--max-context", "800", "--no-delays", "--json"]
    monkeypatch.setattr(sys, "argv", ["dualpath", *arguments])
    assert run(*arguments) == 0
    setup = json.loads(capsys.readouterr().out)["setup"]
    assert setup["command"] == " ".join(["dualpath", *arguments])
    assert setup["dualpath"] == dualpath.__version__
    assert {"python", "machine", "cores"} <= setup.keys()
    kept = {name: setup[name] for name in ("trace", "max_context", "delays", "splits", "seed")}
    assert kept == {"trace": "smoke", "max_context": 800, "delays": False, "splits": 9, "seed": 0}


def test_the_trace_is_named_as_it_was_given():
    setup = question_of(settings(trace="paper:32k")).setup()
    assert setup["trace"] == "paper:32k" and setup["max_context"] is None
    assert setup["delays"] is True


def test_a_timeline_that_cannot_be_is_named(capsys, tmp_path):
    pytest.importorskip("numba")
    path = tmp_path / "best.json"
    limits = ("--slo", "ttft=0.001", "--horizon-s", "20")
    assert run(*SMALL, *limits, "--json", "--timeline", f"{path}") == 0
    captured = capsys.readouterr()
    assert f"timeline: {path} was not written: there is no best run" in captured.err
    assert not path.exists()
    body = json.loads(captured.out)
    assert body["verdict"]["slo_met"] is False and body["advice"] is None and body["what_if"] == []


def test_table_page_and_timeline(capsys, tmp_path):
    pytest.importorskip("numba")
    pytest.importorskip("plotly")
    files = ("--output", f"{tmp_path / 'plan'}", "--timeline", f"{tmp_path / 'best.json'}")
    assert run(*SMALL, "--agents", "12", "--no-delays", *files) == 0
    captured = capsys.readouterr()
    for words in (
        "1P1D *",
        "Free of bottlenecks but storage",
        "dualpath serve MODEL",
        "what one more",
    ):
        assert words in captured.out
    page = (tmp_path / "plan" / "plan.html").read_text()
    assert "What was taken for granted" in page
    plan = json.loads((tmp_path / "plan" / "plan.json").read_text())
    assert plan["best"]["system"] in ("dual", "split")
    assert json.loads((tmp_path / "best.json").read_text())["traceEvents"]


def test_files_that_cannot_be_written(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert run(*SMALL, "--output", f"{tmp_path / 'file'}") == 2
    assert "--output: expected a directory, got the file" in capsys.readouterr().err
    assert run(*SMALL, "--timeline", f"{tmp_path / 'no' / 'best.json'}") == 2
    assert "--timeline: expected a file in a directory that exists" in capsys.readouterr().err
