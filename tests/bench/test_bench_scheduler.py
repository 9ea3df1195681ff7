"""`dualpath bench scheduler` on a small cluster: every request ends, and the figures are there."""

from __future__ import annotations

import argparse

from dualpath.bench import scheduler
from dualpath.policy import SchedulerKind


def test_a_small_run_gives_all_figures() -> None:
    parser = argparse.ArgumentParser()
    scheduler.add_arguments(parser)
    args = parser.parse_args(
        [
            "--prefill-groups",
            "2",
            "--decode-groups",
            "3",
            "--group-engines",
            "2",
            "--requests",
            "60",
            "--repeats",
            "1",
        ]
    )
    lines: list[str] = []
    result = scheduler.run(args, lines.append)
    kinds = {each.value for each in SchedulerKind}
    figures = result.figures
    assert set(figures) == {
        "requests_per_s",
        "requests_per_s_runs",
        "requests_per_s_sparse",
        "wall_requests_per_s",
        "p50_handle_us",
        "p99_handle_us",
        "max_handle_us",
        "mean_us_by_event",
        "requests_per_s_by_scheduler",
        "node_reads_max_over_mean",
        "prefill_tokens_max_over_mean",
    }
    by_scheduler = figures["requests_per_s_by_scheduler"]
    assert isinstance(by_scheduler, dict)
    assert set(by_scheduler) == kinds
    assert by_scheduler["dualpath"] == figures["requests_per_s"]
    balance = figures["node_reads_max_over_mean"]
    assert isinstance(balance, dict)
    assert set(balance) == kinds - {"oracle"}
    # Three of the five nodes never read.
    assert balance["basic"] >= 2.5
    assert result.setup["engines"] == 10
    assert result.setup["groups"] == 5
    assert len(lines) == 6
