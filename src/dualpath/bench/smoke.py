"""`dualpath bench smoke`: the whole of the replay in a minute, on this machine, with nothing to prepare.

Serves the built-in model `tiny` twice, once with stored KV read by both sides and once by the prefill side
alone, replays the trace `smoke` offline and online against each, and writes the records, and one report of
both. It shows that everything works together; a model this small says nothing about speed.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

from dualpath.base.errors import ConfigError
from dualpath.bench import replay_command
from dualpath.bench.harness import BenchResult, Figure, Progress
from dualpath.bench.replay.records import ReplayRecord, read_record
from dualpath.bench.server import ServeProcess

__all__ = ["HELP", "NAME", "add_arguments", "run"]

NAME = "smoke"
HELP = "replays a small trace against `dualpath serve tiny`, offline and online, with a report"

_MODEL = "tiny"
_READ_PATHS = ("split", "pe")
_LOADS = {
    "offline": ("--mode", "offline", "--agents", "2,6"),
    "online": (
        "--mode",
        "online",
        "--aps",
        "1,2",
        "--max-sessions",
        "6",
        "--slo",
        "ttft=4s,tpot=50ms",
    ),
}
_REPORT = "report.html"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--directory",
        type=Path,
        default=Path("dualpath-smoke"),
        metavar="DIR",
        help="where records and the report go; made if absent (%(default)s)",
    )


def run(args: argparse.Namespace, progress: Progress) -> BenchResult:
    """Figures: `requests`, `failed_requests` (0 in a sound system), `hit_rate`, `report_bytes`, `seconds`."""
    directory: Path = args.directory
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--directory: {directory} cannot be made: {error.strerror}") from error
    started_s = time.monotonic()
    measured: dict[str, list[ReplayRecord]] = {}
    interrupted = False
    for path in _READ_PATHS:
        measured[path], interrupted = _measure(path, directory, progress)
        if interrupted:
            break
    records = [record for each in measured.values() for record in each]
    report = directory / _REPORT
    _write_report(report, [_merged(path, each) for path, each in measured.items()])
    progress(f"report: {report}")
    requests = [each for record in records for played in record.runs for each in played.requests]
    hits = [each for each in requests if each.cached_tokens >= 0]
    prompt_tokens = sum(each.prompt_tokens for each in hits)
    figures: dict[str, Figure] = {
        "requests": len(requests),
        "failed_requests": sum(each.error != "" or each.end_s is None for each in requests),
        "hit_rate": sum(each.cached_tokens for each in hits) / prompt_tokens
        if prompt_tokens
        else 0.0,
        "jct_s": {each.label: each.figures["jct_s"] for each in records if "jct_s" in each.figures},
        "ttft_s_mean": {
            each.label: each.figures["ttft_s_mean"]
            for each in records
            if "ttft_s_mean" in each.figures
        },
        "report_bytes": report.stat().st_size,
        "seconds": round(time.monotonic() - started_s, 1),
    }
    setup: dict[str, Figure] = {
        "model": _MODEL,
        "engines": "1P1D",
        "read_paths": list(_READ_PATHS),
        "report": str(report),
    }
    return BenchResult(NAME, figures, setup, interrupted)


def _measure(
    read_path: str, directory: Path, progress: Progress
) -> tuple[list[ReplayRecord], bool]:
    """One record for each of the loads, all against one server with an empty store; and whether Ctrl-C
    ended them early."""
    records: list[ReplayRecord] = []
    interrupted = False
    with tempfile.TemporaryDirectory(prefix="dualpath-smoke-") as store:
        arguments = [_MODEL, "--read-path", read_path, "--store", store, "--threads", "1"]
        progress(f"serving {_MODEL} with --read-path {read_path}")
        with ServeProcess(arguments, directory / f"{read_path}-server.log") as server:
            for mode, load in _LOADS.items():
                output = directory / f"{read_path}-{mode}.json"
                parser = argparse.ArgumentParser()
                replay_command.add_arguments(parser)
                replay = [
                    *("--base-url", server.base_url),
                    *("--trace", "smoke", *load),
                    *("--label", f"{read_path} {mode}", "--output", str(output)),
                ]
                interrupted = replay_command.run(parser.parse_args(replay), progress).interrupted
                records.append(read_record(output))
                if interrupted:
                    break
    return records, interrupted


def _merged(label: str, records: list[ReplayRecord]) -> ReplayRecord:
    """One column of the report: all loads of one server."""
    setup = {key: value for record in reversed(records) for key, value in record.setup.items()}
    runs = [each for record in records for each in record.runs]
    return ReplayRecord(
        label=label, figures={}, setup={**setup, "mode": "offline and online"}, runs=runs
    )


def _write_report(path: Path, records: list[ReplayRecord]) -> None:
    from dualpath.bench.report import write_report

    write_report(path, records, title=f"Smoke test: {_MODEL}, {' and '.join(_READ_PATHS)}")
