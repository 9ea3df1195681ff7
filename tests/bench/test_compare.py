"""`dualpath bench compare`: ratios, warnings, errors that name the file."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import msgspec
import pytest
from report_kit import BASIC, DUALPATH, make_record

from dualpath.base.errors import ConfigError
from dualpath.bench.compare import compare
from dualpath.bench.replay.records import ReplayRecord, Run, SessionRecord
from dualpath.bench.replay.records import RequestRecord as Request
from dualpath.cli.main import main


def run_of(mode: str, load: float, ttft_s: float = 1.0, duration_s: float = 10.0) -> Run:
    first_s = ttft_s
    one = Request(
        session=0,
        turn=0,
        scheduled_s=0.0,
        sent_s=0.0,
        first_s=first_s,
        last_s=first_s + 1.0,
        end_s=first_s + 1.0,
        output_tokens=11,
    )
    agents, rate = (int(load), None) if mode == "offline" else (None, load)
    return Run(mode=mode, agents=agents, rate_aps=rate, duration_s=duration_s, requests=[one])


def record(label: str, *runs: Run, max_aps: float | None = None, seed: int = 1) -> ReplayRecord:
    figures = {} if max_aps is None else {"max_aps": max_aps}
    return ReplayRecord(label=label, figures=figures, setup={"seed": seed}, runs=list(runs))


A = record(
    "a",
    run_of("offline", 4, duration_s=30.0),
    run_of("offline", 8, duration_s=50.0),
    run_of("online", 0.5, ttft_s=2.0),
    max_aps=0.4,
)
B = record(
    "b",
    run_of("offline", 8, duration_s=25.0),
    run_of("offline", 16, duration_s=60.0),
    run_of("online", 0.5, ttft_s=0.5),
    max_aps=1.0,
    seed=2,
)


def test_figures_and_ratios() -> None:
    figures = compare([A, B])
    assert figures["jct_speedup"] == {"b": {"8": 2.0}}
    assert figures["ttft_ratio"] == {"b": {"0.5": 0.25}}
    assert figures["tpot_ratio"] == {"b": {"0.5": 1.0}}
    assert figures["max_aps"] == {"a": 0.4, "b": 1.0}
    assert figures["max_aps_ratio"] == {"b": 2.5}
    assert figures["warnings"] == ["Not the same seed: a: 1, b: 2."]
    by_load = figures["by_load"]
    assert list(by_load) == [
        "4 agents at once",
        "8 agents at once",
        "16 agents at once",
        "0.5 agents/s",
    ]
    assert by_load["8 agents at once"]["jct_s"] == {"a": 50.0, "b": 25.0}
    assert by_load["16 agents at once"]["jct_s"] == {"b": 60.0}
    assert by_load["0.5 agents/s"]["ttft_s_mean"] == {"a": 2.0, "b": 0.5}
    assert "jct_s" not in by_load["0.5 agents/s"]


def test_a_run_with_failures_is_doubtful() -> None:
    failed = run_of("offline", 4, duration_s=1.0)
    request = msgspec.structs.replace(failed.requests[0], error="timeout", end_s=None)
    failed = msgspec.structs.replace(
        failed,
        requests=[*failed.requests, request],
        sessions=[SessionRecord(id="s", turns=3, scheduled_s=0.0)],
    )
    warnings = compare([A, record("b", failed)])["warnings"]
    assert warnings == [
        "b, 4 agents at once: 1 of 2 requests failed. Their agents did no more, so JCT and latencies are of "
        "less work."
    ]


def test_agents_are_told_apart_however_many() -> None:
    runs = [run_of("offline", 12345), run_of("offline", 12346)]
    assert compare([record("a", *runs), record("b", *runs)])["jct_speedup"] == {
        "b": {"12345": 1.0, "12346": 1.0}
    }


def test_no_ratio_to_what_was_not_measured() -> None:
    figures = compare([record("a", run_of("offline", 4)), record("b", run_of("offline", 8))])
    assert set(figures) == {"by_load", "warnings"}


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    A.write(tmp_path / "a.json")
    B.write(tmp_path / "b.json")
    return [str(tmp_path / "a.json"), str(tmp_path / "b.json")]


def test_json_is_one_line(files: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "compare", *files, "--json", "--labels", "old,new"]) == 0
    out = capsys.readouterr().out
    result = json.loads(out)
    assert out.count("\n") == 1 and result["bench"] == "compare"
    assert result["figures"]["jct_speedup"] == {"new": {"8": 2.0}}
    assert result["setup"]["labels"] == ["old", "new"]
    assert result["setup"]["files"] == {"old": "a.json", "new": "b.json"}


def test_people_get_a_table_and_the_warnings(
    files: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    assert main(["bench", "compare", *files]) == 0
    lines = [
        " ".join(line.replace("│", " ").split()) for line in capsys.readouterr().out.splitlines()
    ]
    assert "warning: Not the same seed: a: 1, b: 2." in lines
    assert "Highest sustained rate, agents/s 0.4 1 2.50× better" in lines
    assert lines.count("8 agents at once") == 1
    assert "JCT, s 50 25 0.50× better" in lines
    assert "JCT, s – 60" in lines
    assert "TPOT, mean, ms 100 100 1.00× same" in lines


def test_a_report_of_all(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, system in (("a", BASIC), ("b", DUALPATH)):
        make_record(system, rates=(0.2,), agents=(4,), sessions=4).write(tmp_path / f"{name}.json")
    out = tmp_path / "out.html"
    arguments = [
        "bench",
        "compare",
        f"{tmp_path}/a.json",
        f"{tmp_path}/b.json",
        "--report",
        str(out),
    ]
    assert main([*arguments, "--title", "Two systems"]) == 0
    html = out.read_text(encoding="utf-8")
    assert "<h1>Two systems</h1>" in html and "Basic" in html and "DualPath" in html
    assert f"report: {out}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "a.json cannot be read: No such file"),
        ("{", "a.json is no result of `dualpath bench replay --output`"),
        ('{"label": 3}', "a.json is no result of .*Expected `str`, got `int` - at `\\$.label`"),
        (
            '{"format":"x/9","label":"a","figures":{},"setup":{},"runs":[]}',
            "a.json has format 'x/9'",
        ),
    ],
)
def test_errors_name_the_file(
    files: list[str], content: str | None, message: str, tmp_path: Path
) -> None:
    path = Path(files[0])
    path.unlink()
    if content is not None:
        path.write_text(content, encoding="utf-8")
    with pytest.raises(ConfigError, match=message):
        _run(files)


def test_wrong_arguments(files: list[str], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="two or more result files"):
        _run(files[:1])
    with pytest.raises(ConfigError, match="--labels: expected 2 names, got 'a'"):
        _run([*files, "--labels", "a"])
    with pytest.raises(ConfigError, match=r"--report: .* cannot be written: No such file"):
        _run([*files, "--report", str(tmp_path / "missing" / "r.html")])


def _run(arguments: list[str]) -> None:
    from dualpath.bench import compare as module

    parser = argparse.ArgumentParser()
    module.add_arguments(parser)
    module.run(parser.parse_args(arguments), lambda line: None)
