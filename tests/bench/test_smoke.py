"""The replay as users start it: server, offline and online runs, records, report."""

from __future__ import annotations

import json
from contextlib import nullcontext

import pytest

from dualpath.bench import smoke
from dualpath.bench.harness import BenchResult
from dualpath.bench.replay.records import ReplayRecord, Run, read_record
from dualpath.cli import main
from dualpath.traces import open_trace


@pytest.mark.slow
def test_smoke(tmp_path, capsys):
    assert main.main(["bench", "smoke", "--json", "--directory", str(tmp_path)]) == 0
    result = json.loads(capsys.readouterr().out)
    sessions = open_trace("smoke").sessions
    two_agents = sum(len(session.turns) for session in sessions[:2])
    all_agents = sum(len(session.turns) for session in sessions)
    # On each of two servers: offline with 2 and 6 agents, online 6 agents at two rates.
    assert result["figures"]["requests"] == 2 * (two_agents + 3 * all_agents)
    assert result["figures"]["failed_requests"] == 0
    assert 0 < result["figures"]["hit_rate"] < 1
    assert (tmp_path / "report.html").stat().st_size == result["figures"]["report_bytes"]
    for path in ("split", "pe"):
        for mode in ("offline", "online"):
            record = read_record(tmp_path / f"{path}-{mode}.json")
            assert [run.mode for run in record.runs] == [mode, mode]
            assert all(run.ended == "complete" for run in record.runs)
            # The server tells what each part took, and what its storage NICs read.
            requests = [each for run in record.runs for each in run.requests]
            assert all(each.timings for each in requests)
            samples = [each for run in record.runs for each in run.samples]
            assert any("snic_read_bytes" in name for each in samples for name in each.metrics)


def test_ctrl_c_ends_all_of_it_with_a_report(tmp_path, capsys, monkeypatch):
    class NoServer(nullcontext):
        base_url = "http://127.0.0.1:1/v1"

        def __enter__(self):
            return self

    def interrupted(args, progress):
        played.append(args.output.name)
        run = Run(mode=args.mode, agents=2, ended="interrupted")
        ReplayRecord(label=args.label, figures={}, setup={}, runs=[run]).write(args.output)
        return BenchResult("replay", {}, {}, interrupted=True)

    played = []
    monkeypatch.setattr(smoke, "ServeProcess", lambda *_: NoServer())
    monkeypatch.setattr(smoke.replay_command, "run", interrupted)
    assert main.main(["bench", "smoke", "--json", "--directory", str(tmp_path)]) == 130
    assert played == ["split-offline.json"]
    assert json.loads(capsys.readouterr().out)["figures"]["requests"] == 0
    assert (tmp_path / "report.html").is_file()
