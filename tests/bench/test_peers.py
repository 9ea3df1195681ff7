"""Other people's load generators: what their result files say, how they are called, how runs are compared."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from msgspec.structs import replace

from dualpath.base.errors import ConfigError
from dualpath.bench.peers import (
    Agreement,
    AgreementOptions,
    Aiperf,
    LoadFigures,
    PeerFailed,
    VllmBench,
    agreement,
    measure_agreement,
    read_aiperf,
    read_vllm,
)
from dualpath.bench.peers.figures import differences, figures_of_run, median_figures
from dualpath.bench.peers.server_side import MetricsUnreadable, ServerSide, from_looks
from dualpath.bench.peers.tools import PeerTask, shown_command
from dualpath.bench.replay.records import RequestRecord, Run

DATA = Path(__file__).parent / "data" / "peers"
"""Of runs of the same three requests, each tool's own file without what names a machine."""

FIGURES = LoadFigures(
    ttft_mean_s=0.5,
    ttft_p50_s=0.5,
    tpot_mean_s=0.05,
    tpot_p50_s=0.05,
    e2e_mean_s=1.25,
    e2e_p50_s=1.25,
    jct_s=10.0,
    requests=6,
    failed=0,
    prompt_tokens=6 * 256,
    output_tokens=6 * 16,
)


def task_in(directory: Path) -> PeerTask:
    return PeerTask(
        base_url="http://127.0.0.1:8123/v1",
        model="smollm2",
        tokenizer=directory / "tokenizer",
        trace=directory / "trace.jsonl",
        requests=6,
        output_tokens=16,
        seed=3,
        directory=directory / "out",
    )


def test_aiperf_results_are_read() -> None:
    figures = read_aiperf((DATA / "aiperf-0.13.0.json").read_bytes())
    assert figures == LoadFigures(
        ttft_mean_s=pytest.approx(0.65704155),
        ttft_p50_s=pytest.approx(0.652738324),
        tpot_mean_s=pytest.approx(0.0549024239),
        tpot_p50_s=pytest.approx(0.0543767783),
        e2e_mean_s=pytest.approx(1.480577909),
        e2e_p50_s=pytest.approx(1.471529095),
        jct_s=6.508824576,
        requests=3,
        failed=0,
        prompt_tokens=768,
        output_tokens=48,
    )


def test_vllm_results_are_read() -> None:
    figures = read_vllm((DATA / "vllm-0.32.0.json").read_bytes())
    assert figures == LoadFigures(
        ttft_mean_s=pytest.approx(0.660806015),
        ttft_p50_s=pytest.approx(0.658840113),
        tpot_mean_s=pytest.approx(0.0573616501),
        tpot_p50_s=pytest.approx(0.0568654002),
        e2e_mean_s=pytest.approx(1.5212307657),
        e2e_p50_s=pytest.approx(1.512911485),
        jct_s=pytest.approx(6.513845391),
        requests=3,
        failed=0,
        prompt_tokens=768,
        output_tokens=48,
    )


@pytest.mark.parametrize("read", [read_aiperf, read_vllm])
@pytest.mark.parametrize("content", [b"", b"[]", b"{}", b'{"duration": "long"}'])
def test_what_is_no_result_is_refused(read: Callable[[bytes], LoadFigures], content: bytes) -> None:
    with pytest.raises(ConfigError, match=r"this is not .*(aiperf|vllm)"):
        read(content)


def test_our_runs_have_the_same_figures() -> None:
    def record(sent_s: float, tokens: int) -> RequestRecord:
        return RequestRecord(
            session=0,
            turn=0,
            scheduled_s=sent_s,
            sent_s=sent_s,
            first_s=sent_s + 0.5,
            last_s=sent_s + 0.5 + 0.25 * (tokens - 1),
            end_s=sent_s + 0.75 + 0.25 * (tokens - 1),
            prompt_tokens=10,
            output_tokens=tokens,
        )

    failed = RequestRecord(session=3, turn=0, scheduled_s=9.0, sent_s=9.0, error="connect")
    run = Run(mode="online", requests=[record(1.0, 3), record(2.0, 5), record(5.0, 3), failed])
    assert figures_of_run(run) == LoadFigures(
        ttft_mean_s=0.5,
        ttft_p50_s=0.5,
        tpot_mean_s=0.25,
        tpot_p50_s=0.25,
        e2e_mean_s=pytest.approx(3.5 / 3),
        e2e_p50_s=1.0,
        jct_s=5.25,
        requests=3,
        failed=1,
        prompt_tokens=30,
        output_tokens=11,
    )
    with pytest.raises(ConfigError, match="connect"):
        figures_of_run(Run(mode="online", requests=[failed]))


def test_runs_of_one_turn_are_compared_and_the_median_taken() -> None:
    # The machine was twice as slow in each turn, for both alike.
    theirs = [
        {"ttft_mean_s": ttft_s, "tpot_mean_s": 0.05, "e2e_mean_s": 2.0, "jct_s": 10.0}
        for ttft_s in (0.5, 1.0, 2.0)
    ]
    ours = [{**each, "ttft_mean_s": each["ttft_mean_s"] * 1.1, "jct_s": 9.0} for each in theirs]
    assert differences(ours, theirs) == {
        "ttft_mean_s": pytest.approx(0.1),
        "tpot_mean_s": 0.0,
        "e2e_mean_s": 0.0,
        "jct_s": pytest.approx(-0.1),
    }
    runs = [replace(FIGURES, ttft_mean_s=ttft_s) for ttft_s in (0.5, 2.0, 1.0)]
    assert median_figures(runs) == replace(FIGURES, ttft_mean_s=1.0)


METRICS = """\
# HELP dualpath:time_to_first_token_seconds From arrival to the first token.
dualpath:time_to_first_token_seconds_bucket{le="0.001"} 0.0
dualpath:time_to_first_token_seconds_sum TTFT
dualpath:e2e_request_latency_seconds_count COUNT
dualpath:e2e_request_latency_seconds_sum E2E
dualpath:generation_tokens_total TOKENS
"""


def metrics_of(ttft: float, count: int, e2e: float, tokens: int) -> str:
    values = {"TTFT": ttft, "COUNT": count, "E2E": e2e, "TOKENS": tokens}
    text = METRICS
    for name, value in values.items():
        text = text.replace(f" {name}\n", f" {float(value)}\n")
    return text


def test_the_server_tells_what_it_measured_of_one_run() -> None:
    looks = [
        metrics_of(1.0, 2, 5.0, 32),
        metrics_of(2.0, 4, 8.0, 64),
        metrics_of(3.5, 7, 12.0, 112),
        metrics_of(4.0, 7, 12.0, 120),
        metrics_of(4.0, 8, 14.0, 128),
        metrics_of(4.0, 8, 14.0, 128),
    ]
    side = from_looks(looks)
    assert side == ServerSide(
        ttft_mean_s=0.5,
        tpot_mean_s=pytest.approx(6.0 / 90),
        e2e_mean_s=1.5,
        last_e2e_s=2.0,
        requests=6,
    )
    assert side.expected(12.5)["jct_s"] == 14.5
    # Looks that missed the last request alone, and a server that had served nothing before.
    assert from_looks(["", metrics_of(3.0, 6, 9.0, 96)]) == replace(side, last_e2e_s=1.5)
    with pytest.raises(MetricsUnreadable, match="0 requests"):
        from_looks(looks[-2:])


def test_a_server_that_was_slower_in_one_run_makes_no_difference() -> None:
    """Each tool sees 10 ms more than the server; the machine was twice as slow for one of them."""

    def measured(ttft_s: float) -> dict[str, float]:
        figures = replace(FIGURES, ttft_mean_s=ttft_s * 1.01, e2e_mean_s=ttft_s * 3)
        server = ServerSide(
            ttft_mean_s=ttft_s,
            tpot_mean_s=0.05,
            e2e_mean_s=ttft_s * 3,
            last_e2e_s=ttft_s * 3,
            requests=6,
        )
        return agreement.Measured(figures, server).related(12.5)

    found = differences([measured(1.0)], [measured(0.5)])
    assert found["ttft_mean_s"] == pytest.approx(0.0)
    assert found["e2e_mean_s"] == pytest.approx(0.0)


def test_commands_replay_the_trace_with_exact_lengths(tmp_path: Path) -> None:
    task = task_in(tmp_path)
    aiperf = Aiperf().command(task)
    assert aiperf[:2] == ["aiperf", "profile"]
    assert aiperf[aiperf.index("--url") + 1] == "http://127.0.0.1:8123"
    assert aiperf[aiperf.index("--random-seed") + 1] == "3"
    assert "min_tokens:16" in aiperf
    vllm = VllmBench("python3").command(task)
    assert vllm[:5] == ["python3", "-m", "vllm.entrypoints.cli.main", "bench", "serve"]
    assert json.loads(vllm[vllm.index("--extra-body") + 1]) == {"min_tokens": 16}
    for tool in (Aiperf(), VllmBench("/somewhere/python3")):
        shown = shown_command(tool, task)
        assert str(tmp_path) not in shown
        assert "somewhere" not in shown
        assert '--tokenizer "$(dualpath model smollm2)"' in shown
        assert "trace.jsonl" in shown


def test_the_trace_has_requests_that_share_nothing() -> None:
    lines = [json.loads(line) for line in agreement.trace_lines(AgreementOptions(requests=3))]
    assert [line["timestamp"] for line in lines] == [0, 2500, 5000]
    assert [line["hash_ids"] for line in lines] == [[1], [2], [3]]
    assert {line["output_length"] for line in lines} == {16}


def program(directory: Path, code: str) -> str:
    path = directory / "tool"
    path.write_text(f"#!{sys.executable}\n{code}")
    path.chmod(0o755)
    return str(path)


def test_a_tool_writes_what_is_read(tmp_path: Path) -> None:
    result = (DATA / "aiperf-0.13.0.json").as_posix()
    code = (
        "import os, shutil, sys\n"
        "assert 'HF_HUB_OFFLINE' not in os.environ\n"
        "out = sys.argv[sys.argv.index('--artifact-dir') + 1]\n"
        f"shutil.copy({result!r}, out + '/profile_export_aiperf.json')\n"
    )
    task = task_in(tmp_path)
    task.directory.mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HUB_OFFLINE", "1")
        figures = Aiperf((program(tmp_path, code),)).run(task)
    assert figures.requests == 3


def test_a_tool_that_fails_or_is_not_there_is_told(tmp_path: Path) -> None:
    task = task_in(tmp_path)
    failing = Aiperf((program(tmp_path, "raise SystemExit('no such endpoint')"),))
    with pytest.raises(PeerFailed, match="exit code 1:\n  no such endpoint"):
        failing.run(task)
    with pytest.raises(ConfigError, match="/nowhere/aiperf cannot be run"):
        Aiperf(("/nowhere/aiperf",)).version()


def test_work_that_is_not_the_same_is_not_compared(tmp_path: Path) -> None:
    task = task_in(tmp_path)
    agreement.check_same_work("aiperf", FIGURES, task)
    agreement.check_same_work("aiperf", replace(FIGURES, prompt_tokens=6 * 256 + 7), task)
    for wrong in (
        replace(FIGURES, requests=5),
        replace(FIGURES, failed=1),
        replace(FIGURES, output_tokens=95),
        replace(FIGURES, prompt_tokens=6 * 200),
    ):
        with pytest.raises(PeerFailed, match=r"aiperf: .*expected"):
            agreement.check_same_work("aiperf", wrong, task)


def test_without_any_tool_there_is_no_figure(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("DUALPATH_CACHE_DIR", str(tmp_path))
    done = measure_agreement(lambda _: None, AgreementOptions(install=False))
    assert done == Agreement(error=None)
