"""The whole command over real sockets, against a server without a model."""

from __future__ import annotations

import json

from dualpath.bench.replay.null_answers import NullConfig
from dualpath.bench.replay.null_server import NullServer
from dualpath.bench.replay.records import read_record
from dualpath.cli import main


def replay(server, *flags):
    return main.main(
        ["bench", "replay", "--base-url", server.base_url, "--trace", "smoke", "--json", *flags]
    )


def test_offline(tmp_path, capsys):
    output = tmp_path / "out.json"
    with NullServer(NullConfig(ttft_s=0.02, tpot_s=0.002)) as server:
        assert replay(server, "--agents", "6,12", "--output", str(output), "--no-delays") == 0
    figures = json.loads(capsys.readouterr().out)["figures"]
    # 21 turns; the second time also six copies, each with a first round before its turns.
    assert figures["requests"] == {"6": 21, "12": 21 + 21 + 6}
    assert figures["sessions_finished"] == {"6": 6, "12": 12}
    assert figures["errors"] == {"6": {}, "12": {}}
    assert min(figures["ttft_s_mean"].values()) >= 0.02
    runs = read_record(output).runs
    for run in runs:
        for request in run.requests:
            assert request.scheduled_s <= request.sent_s <= request.first_s <= request.last_s
            assert request.last_s <= request.end_s <= run.duration_s
            assert request.output_tokens > 0 and request.prompt_tokens > 0


def test_online_overload_and_errors_by_kind(tmp_path, capsys):
    output = tmp_path / "out.json"
    config = NullConfig(ttft_s=0.05, tpot_s=0.002, capacity=1, error_share=0.25)
    with NullServer(config) as server:
        flags = ("--mode", "online", "--aps", "40", "--max-sessions", "30", "--no-delays")
        assert replay(server, *flags, "--output", str(output)) == 0
    figures = json.loads(capsys.readouterr().out)["figures"]
    (kind,) = figures["errors"]
    assert kind == "http 503"
    assert 0 < figures["error_rate"] < 1
    assert figures["turns_not_run"] > 0
    (run,) = read_record(output).runs
    # One at a time of some 70 requests, 50 ms each, that come within 1 s: the queue shows in the TTFT.
    assert len(run.sessions) == 30
    assert figures["ttft_s_p90"] > 0.5
    failed = {request.session for request in run.requests if request.error}
    assert len(failed) == figures["sessions_failed"] == figures["errors"]["http 503"]
    for number in failed:
        *before, last = [each for each in run.requests if each.session == number]
        assert last.error and not any(each.error for each in before)


def test_chat(capsys):
    with NullServer(NullConfig(ttft_s=0.01, tpot_s=0.002)) as server:
        assert replay(server, "--api", "chat", "--no-delays") == 0
    figures = json.loads(capsys.readouterr().out)["figures"]
    assert figures["requests"] == 21
    assert figures["errors"] == {}
